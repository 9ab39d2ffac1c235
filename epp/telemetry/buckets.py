"""Histogram bounds of llm-d's metric families; dashboards built on them depend on every value.

(32778 among the token bounds is llm-d's.)
"""

from __future__ import annotations

LATENCY = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120),
    *(180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
TIME_TO_FIRST_TOKEN = LATENCY[: LATENCY.index(120) + 1]
RESPONSE_BYTES = (*(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536),)
TOKENS = (*RESPONSE_BYTES, 131072, 262144, 524288, 1048576)
OUTPUT_TOKENS = RESPONSE_BYTES[: RESPONSE_BYTES.index(8192) + 1]
REQUEST_BYTES = tuple(2**n for n in range(6, 31))
NORMALIZED_TIME_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TIME_PER_TOKEN = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
INTER_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)
SCHEDULER = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
REQUEST_PROCESSING = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
RESPONSE_PROCESSING = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
HIT_RATIO = tuple(n / 10 for n in range(11))
HIT_BYTES = (0, *(2**n for n in range(4, 17)))
PROMETHEUS_DEFAULT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
