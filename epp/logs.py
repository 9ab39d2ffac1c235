"""Logs: one JSON object a line (or readable text), llm-d's levels, and a brake against floods.

Code logs with the standard library and puts values into `extra`; prompts, bodies, tokens and credentials never belong
there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

TRACE = 5
_LEVEL_NAMES = {
    logging.CRITICAL: "panic",
    logging.ERROR: "error",
    logging.WARNING: "warn",
    logging.INFO: "info",
    logging.DEBUG: "debug",
    TRACE: "trace",
}


def level(verbosity: int) -> int:
    """llm-d's `-v` as a logging level: 0 errors, 1 warnings, 2 and 3 info, 4 debug, 5 and more trace."""
    steps = (logging.ERROR, logging.WARNING, logging.INFO, logging.INFO, logging.DEBUG, TRACE)
    return steps[max(0, min(verbosity, len(steps) - 1))]


def configure(log_level: int = logging.INFO, encoder: str = "json", stream: TextIO | None = None) -> None:
    """All logging of the process to `stream` (stderr). `encoder` is "json" or "console". May be called again."""
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if encoder == "json" else _Console())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log_level)
    # they log every request and every connection at levels of their own
    for chatty in ("aiohttp.access", "asyncio", "watchfiles"):
        logging.getLogger(chatty).setLevel(max(log_level, logging.WARNING))


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level_name(record: logging.LogRecord) -> str:
    return _LEVEL_NAMES.get(record.levelno, record.levelname.lower())


class _Json(JsonFormatter):
    """zap's field names: level, ts, logger, msg, then the values."""

    def __init__(self) -> None:
        super().__init__("%(message)s")

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        super().add_fields(log_data, record, message_dict)
        values = {key: value for key, value in log_data.items() if key != "message"}
        log_data.clear()
        log_data.update(
            level=_level_name(record), ts=_timestamp(record), logger=record.name, msg=record.getMessage(), **values
        )


class _Console(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        values = " ".join(
            f"{key}={value}" for key, value in vars(record).items() if key not in RESERVED_ATTRS and key != "message"
        )
        return "  ".join(
            part
            for part in (_timestamp(record), _level_name(record).upper(), record.name, record.message, values)
            if part
        )


@dataclass(slots=True)
class _Window:
    opened: float
    suppressed: int = 0


class Brake:
    """Lets one line per `key` through each `interval` seconds and says how many it held back:

        brake.log(logging.WARNING, "no tokens", "requests are routed unscored", reason="timeout")

    Distinct keys are few; past `keys` of them the rest share one.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval: float = 1.0,
        *,
        keys: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._keys = keys
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def log(self, log_level: int, key: str, message: str, **values: object) -> None:
        now = self._clock()
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) >= self._keys:
                key = ""
            window = self._windows.setdefault(key, _Window(now - self._interval))
        if now - window.opened < self._interval:
            window.suppressed += 1
            return
        if window.suppressed:
            values["suppressed"] = window.suppressed
        window.opened, window.suppressed = now, 0
        self._logger.log(log_level, message, extra=values)
