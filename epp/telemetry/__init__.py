"""Metrics: llm-d's families and ours. `Telemetry` is the whole of it."""

from epp.telemetry.pulled import OCCUPANCY, Reading, Source
from epp.telemetry.requests import RequestMetrics
from epp.telemetry.telemetry import PrefixIndexerMetrics, Telemetry, comparison

__all__ = ["OCCUPANCY", "PrefixIndexerMetrics", "Reading", "RequestMetrics", "Source", "Telemetry", "comparison"]
