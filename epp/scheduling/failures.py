"""A plugin that raises is skipped for that request; here that is noted where somebody will see it."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

from epp.scheduling.plugin import Plugin, Scheduling

if TYPE_CHECKING:
    from epp.telemetry import Telemetry

logger = logging.getLogger(__name__)


class Failures:
    """On the request, in the metrics, and in the log once per plugin: a plugin that always fails must not flood it."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._logged: set[str] = set()

    def note(self, scheduling: Scheduling, plugin: Plugin, point: str, error: BaseException) -> None:
        """`point` is llm-d's name of the extension point."""
        # an error's text may quote the prompt: it goes neither into the decision nor into the log
        kind = type(error).__name__
        scheduling.skipped.append(f"{plugin.name}: {kind}")
        self._telemetry.plugin_failed(plugin.name, point)
        if plugin.name not in self._logged:
            self._logged.add(plugin.name)
            where = "".join(traceback.format_tb(error.__traceback__))
            values = {"plugin": plugin.name, "point": point, "error": kind, "traceback": where}
            logger.error("plugin failed and was skipped", extra=values)
