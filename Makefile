# Every target sets itself up: .venv is made from the pinned versions in requirements.lock, and .venv-vllm, in which the
# tests' real vLLM runs without a GPU, from those in requirements-vllm.lock.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
ARGS ?=
# Naming it makes its absence a failure.
WITH_VLLM := VLLM_PYTHON=$(CURDIR)/$(VLLM_BIN)/python
# `VLLM_NEXT=1` tries a newer vLLM besides: its Python files, 340 MB to download, over the installed one's libraries.
NEXT_VERSION := 0.33.0
NEXT := .venv-vllm/vllm-$(NEXT_VERSION)
ifdef VLLM_NEXT
override VLLM_NEXT := $(CURDIR)/$(NEXT)
export VLLM_NEXT
NEXT_READY := $(NEXT)/.ready
endif
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-vllm fuzz lint bench proto schema lock clean

demo: $(READY)
	$(BIN)/tierpick demo $(ARGS)

test: $(READY) $(VLLM_READY) $(NEXT_READY)
	$(WITH_VLLM) $(BIN)/pytest --ignore=tests/connector/vllm $(ARGS)
	$(VLLM_BIN)/python -m pytest tests/connector/vllm

# Only what needs a real vLLM, and more of it; prints a line a proof and writes vllm-report.json.
test-vllm: $(READY) $(VLLM_READY) $(NEXT_READY)
	VLLM_LONG=1 $(WITH_VLLM) $(BIN)/pytest tests/vllm $(ARGS)
	$(VLLM_BIN)/python -m pytest tests/connector/vllm

# A million hostile inputs against everything that reads what others send.
# ARGS: --inputs=N, --seconds=S, --seed=X, --target=NAME, --findings=DIR, --atheris=NAME (if it is installed).
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(ARGS)

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
	rm -rf .venv .venv-vllm build *.egg-info bench.json vllm-report.json

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tierpick needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python $(PIP_INSTALL) -r requirements.lock
	$(BIN)/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

$(VLLM_READY): requirements-vllm.lock pyproject.toml
	@$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python $(PIP_INSTALL) --no-deps -r requirements-vllm.lock
	$(VLLM_BIN)/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

$(NEXT)/.ready: $(VLLM_READY) tests/vllm/overlay.py
	$(VLLM_BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(NEXT) vllm==$(NEXT_VERSION)
	$(VLLM_BIN)/python tests/vllm/overlay.py $(NEXT)
	@touch $@
