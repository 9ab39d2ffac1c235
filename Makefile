# Every target sets itself up: .venv is made from the pinned versions in requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=

.PHONY: demo test lint bench proto schema lock clean

demo: $(READY)
	$(BIN)/tierpick demo $(ARGS)

test: $(READY)
	$(BIN)/pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m tests.bench $(ARGS)

proto: $(READY)
	$(BIN)/python -m proto.generate

schema: $(READY)
	$(BIN)/python -m epp.config.schema_json > config/schema.json

lock: $(READY)
	$(BIN)/pip freeze --exclude-editable --exclude tierpick > requirements.lock

clean:
	rm -rf .venv build *.egg-info bench.json

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tierpick needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@
