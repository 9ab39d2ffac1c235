"""Logs: shape, levels, and the brake."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from epp.logs import TRACE, Brake, configure, level


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    yield
    root.handlers = handlers
    root.setLevel(root_level)


def written(encoder: str = "json", log_level: int = logging.INFO) -> io.StringIO:
    stream = io.StringIO()
    configure(log_level, encoder, stream)
    return stream


@pytest.mark.parametrize(
    ("verbosity", "expected"),
    [(-1, logging.ERROR), (0, logging.ERROR), (1, logging.WARNING), (2, logging.INFO), (3, logging.INFO),
     (4, logging.DEBUG), (5, TRACE), (9, TRACE)],
)  # fmt: skip
def test_verbosity_is_llm_ds(verbosity: int, expected: int) -> None:
    assert level(verbosity) == expected


def test_a_json_line_has_zaps_names_then_the_values() -> None:
    stream = written()
    logging.getLogger("epp.x").warning("went %s", "wrong", extra={"endpoint": "10.0.0.1:8000", "count": 3})
    line = json.loads(stream.getvalue())
    assert list(line)[:4] == ["level", "ts", "logger", "msg"]
    assert line.pop("ts").endswith("Z")
    assert line == {"level": "warn", "logger": "epp.x", "msg": "went wrong", "endpoint": "10.0.0.1:8000", "count": 3}


def test_an_exception_is_part_of_its_one_line() -> None:
    stream = written()
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        logging.getLogger("epp.x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["exc_info"]


def test_text_no_encoding_can_carry_does_not_stop_the_log() -> None:
    stream = written()
    logging.getLogger("epp.x").info("name", extra={"model": "\ud800"})
    assert json.loads(stream.getvalue())["model"] == "\ud800"


def test_a_console_line_is_readable() -> None:
    stream = written("console")
    logging.getLogger("epp.x").info("went well", extra={"endpoint": "10.0.0.1:8000"})
    assert stream.getvalue().rstrip().endswith("INFO  epp.x  went well  endpoint=10.0.0.1:8000")


def test_below_the_level_nothing_is_written_and_chatty_libraries_are_kept_down() -> None:
    stream = written()
    logging.getLogger("epp.x").debug("detail")
    logging.getLogger("aiohttp.access").info("GET /metrics")
    assert stream.getvalue() == ""


def test_configuring_again_replaces_what_was() -> None:
    first, second = written(), written()
    logging.getLogger("epp.x").info("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)


class TestBrake:
    @pytest.fixture
    def seconds(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    def brake(self, seconds: list[float]) -> Brake:
        return Brake(logging.getLogger("epp.flood"), clock=lambda: seconds[0], keys=3)

    def lines(self, caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
        return [(record.getMessage(), getattr(record, "suppressed", None)) for record in caplog.records]

    def test_a_flood_is_one_line_a_second_with_a_count(
        self, brake: Brake, seconds: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(1000):
            brake.log(logging.WARNING, "no tokens", "unscored", reason="timeout")
        seconds[0] += 1.0
        brake.log(logging.WARNING, "no tokens", "unscored", reason="timeout")
        seconds[0] += 1.0
        brake.log(logging.WARNING, "no tokens", "unscored", reason="timeout")
        assert self.lines(caplog) == [("unscored", None), ("unscored", 999), ("unscored", None)]

    def test_different_keys_do_not_hold_each_other_back(self, brake: Brake, caplog: pytest.LogCaptureFixture) -> None:
        brake.log(logging.WARNING, "a", "one")
        brake.log(logging.WARNING, "b", "two")
        assert len(caplog.records) == 2

    def test_ever_new_keys_share_one_brake_and_no_memory(self, brake: Brake, caplog: pytest.LogCaptureFixture) -> None:
        for number in range(1000):
            brake.log(logging.WARNING, f"key {number}", "flood")
        assert len(caplog.records) == 4
        assert len(brake._windows) == 4
