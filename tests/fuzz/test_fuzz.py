"""A short run of the fuzzer, all that it ever found, and the fuzzer itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import ext_proc_pb2 as pb
from tests.fuzz import faulty, trial
from tests.fuzz.__main__ import main
from tests.fuzz.catalog import TARGETS
from tests.fuzz.engine import Engine, Runner, Task, make_script, shares
from tests.fuzz.guided import join, split
from tests.fuzz.target import Script, Target
from tests.fuzz.targets import dataplane
from tests.fuzz.trial import Seen, Watch, attempt, minimise

SEED = 1
INPUTS = 300

FOUND: dict[str, tuple[str, Script]] = {
    "a batch at no time": ("events", (b"\x93\xcb\x7f\xf8\0\0\0\0\0\0\x90\0",)),
    "a status of 5000 digits": ("ext-proc-messages", (b"\x1a\x9f'\n\x9c'\n\x99'\n\x07:status\x1a\x8c'" + b"9" * 5004,)),
    "an integer with too many digits to print": (
        "endpoint-files",
        (b"endpoints: [{name: a, address: 1.1.1.1, port: 0x" + b"f" * 4000 + b"}]",),
    ),
    "a timestamp that is none": ("configurations", (b"a: !!timestamp",)),
    "a long row of digits": ("configurations", (b"1" * 100_000 + b"x",)),
    "tool calls that are no list": (
        "http-requests",
        (b"/v1/chat/completions", b'{"model":"m","messages":[{"role":"assistant","tool_calls":7}]}'),
    ),
    "tokens that do not fill blocks, after a placeholder": (
        "events",
        (
            (
                b"\x93\x00\x92\x83\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xaablock_size\x04"
                b"\x84\xa4type\xabBlockStored\xacblock_hashes\x91\x02\xaablock_size\x04\xa9token_ids\x91\x05\x00"
            ),
        ),
    ),
    "no part after a picture": (
        "http-requests",
        (
            b"/v1/chat/completions",
            b'{"model":"m","messages":[{"role":"","content":[{"type":"image_url"}]},{"role":"","content":[[1]]}]}',
        ),
    ),
}  # fmt: skip
"""By what it was."""


@pytest.fixture
def watch() -> Iterator[Watch]:
    """It takes over all logging of the process."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield Watch()
    root.handlers = handlers
    root.setLevel(level)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By worker processes, whatever started the tests."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Target]]:
    targets = {name: factory() for name, factory in TARGETS.items()}
    yield targets
    for target in targets.values():
        target.close()


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found_in_a_short_run(name: str, watch: Watch) -> None:
    with closing(Runner(TARGETS, SEED)) as runner:
        tally = runner.run(Task(name, 0, INPUTS))
    assert tally.findings == []
    assert tally.inputs == INPUTS
    assert 0 < tally.accepted < INPUTS, "the inputs are all alike"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_not_found_again(name: str, made: dict[str, Target], watch: Watch) -> None:
    target, script = FOUND[name]
    assert attempt(target, made[target], script, watch).finding is None


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, database=None)
@given(script=st.lists(st.binary(max_size=300), min_size=1, max_size=6).map(tuple))
def test_any_bytes_are_taken_or_refused(name: str, made: dict[str, Target], script: Script) -> None:
    made[name].run(script)


def test_nothing_of_a_prompt_is_logged(made: dict[str, Target], watch: Watch) -> None:
    """At the highest verbosity, whatever comes in; nor is a token id."""
    logged, written = "", 0
    for name in ("ext-proc-exchanges", "http-requests", "streams"):
        for number in range(200):
            script = make_script(made[name], SEED, name, number)
            made[name].run(script)
            written += any(trial.CANARY.encode() in piece for piece in script)
            logged += watch.take()
    assert written > 200
    assert '"msg"' in logged
    assert trial.CANARY not in logged
    assert str(trial.CANARY_TOKEN) not in logged


def test_labels_are_few_whatever_clients_call_themselves(made: dict[str, Target]) -> None:
    target = made["ext-proc-exchanges"]
    assert isinstance(target, dataplane.Exchanges)
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = 2
    headers = message.request_headers.headers.headers
    headers.add(key=":path", raw_value=b"/v1/completions")
    fairness = headers.add(key="x-llm-d-inference-fairness-id")
    for n in range(3000):
        fairness.raw_value = b"user-%d" % n
        body = pb.ProcessingRequest(request_body={"body": b'{"model":"m%d","prompt":"x"}' % n})
        assert target.run(tuple(dataplane.MESSAGE + m.SerializeToString() for m in (message, body)))


# --- the fuzzer itself


def tried(target: type[Target], watch: Watch) -> Seen:
    return attempt("faulty", target(), (b"some", b"hay needle hay"), watch)


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (faulty.Raises, "KeyError at faulty.py"),
        (faulty.Complains, "logged: picking failed"),
        (faulty.Tells, "prompt in the log"),
        (faulty.Eats, "memory"),
        (faulty.Hangs, "hang"),
    ],
)
def test_a_fault_is_found_and_named(
    target: type[Target], what: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "CPU_SECONDS", 0.1 if what == "hang" else 60.0)
    finding = tried(target, watch).finding
    assert finding is not None
    assert finding.what.startswith(what)


def test_a_sound_target_is_not_blamed(watch: Watch) -> None:
    assert tried(faulty.Sound, watch).finding is None


def test_an_input_is_made_smaller(watch: Watch) -> None:
    finding = attempt("faulty", faulty.Raises(), (b"some", b"x" * 1000 + b"needle" * 3, b"hay"), watch).finding
    assert finding is not None
    assert minimise("faulty", faulty.Raises(), finding, watch) == (b"needle",)


def test_the_same_seed_makes_the_same_inputs(made: dict[str, Target]) -> None:
    for name, target in made.items():
        scripts = [make_script(target, SEED, name, number) for number in range(20)]
        assert scripts == [make_script(target, SEED, name, number) for number in range(20)]
        assert len(set(scripts)) > 10


def test_inputs_are_shared_out_to_the_last() -> None:
    counts = shares(TARGETS, 12_345)
    assert sum(counts.values()) == 12_345
    assert min(counts.values()) > 100


def test_a_worker_that_dies_is_a_finding_and_the_run_goes_on(importable: None) -> None:
    engine = Engine({"sound": faulty.Sound, "dies": faulty.Dies}, seed=SEED, processes=1)
    engine.run({"sound": 20, "dies": 20})
    assert engine.tallies["sound"].inputs == 20
    [finding] = engine.tallies["dies"].findings
    assert finding.what == "the process died"
    assert finding.script[-1] == b"needle"


def test_the_command_prints_how_many_it_tried(capsys: pytest.CaptureFixture[str], importable: None) -> None:
    assert main(["--inputs", "300", "--seed", "3", "--processes", "1", "--target", "model-lists"]) == 0
    assert "300 inputs in" in capsys.readouterr().out


def test_a_script_is_one_row_of_bytes_for_atheris() -> None:
    assert split(join((b"a", b"", b"b"))) == (b"a", b"", b"b")
