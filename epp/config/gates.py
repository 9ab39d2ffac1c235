"""`featureGates`: entries `name`, `name=true` or `name=false`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from epp.config.errors import Findings, did_you_mean

DEFAULTS: Mapping[str, bool] = MappingProxyType({"flowControl": False, "haPopulateNonLeaderDatastore": True})


def feature_gates(entries: Sequence[str], findings: Findings) -> dict[str, bool]:
    """All gates, defaults included. Of two entries for one gate the later counts."""
    gates = dict(DEFAULTS)
    for position, entry in enumerate(entries):
        path = f"featureGates[{position}]"
        name, _, value = entry.partition("=")
        if name not in DEFAULTS:
            findings.error(path, f'unknown gate "{name}"{did_you_mean(name, DEFAULTS)}')
        elif value not in ("true", "false") and "=" in entry:
            findings.error(path, f'expected "{name}=true" or "{name}=false", got "{entry}"')
        else:
            gates[name] = value != "false"
    if gates["flowControl"]:
        findings.error("featureGates", "flowControl is not available in tierpick yet")
    return gates
