"""Which vLLM this can run in: said in one sentence, before anything fails half-way."""

from __future__ import annotations

import logging
import re

import vllm

OLDEST, NEWEST = (0, 32), (0, 33)
SUPPORTED = "0.32 and 0.33"
logger = logging.getLogger("vllm.tierpick")


def check(version: str = vllm.__version__) -> None:
    """Raise ImportError in a vLLM that is too old; warn in one that was never tried."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else None
    if release is not None and release < OLDEST:
        raise ImportError(
            f"TieredOffloadingConnector supports vLLM {SUPPORTED}, not {version}: its offloading interfaces "
            "(vllm.v1.kv_offload) are others. Upgrade vLLM, or use its own OffloadingConnector"
        )
    if release is None or release > NEWEST:
        logger.warning(
            "TieredOffloadingConnector was tried with vLLM %s, not with %s: before relying on predictions compare them "
            "with what is delivered",
            SUPPORTED,
            version,
        )


def unusable(error: ImportError) -> str:
    """What to say when vLLM lacks something that is imported."""
    return f"TieredOffloadingConnector supports vLLM {SUPPORTED}; it does not fit {vllm.__version__}: {error}"
