"""`kv_connector_extra_config`: our own options under "tierpick", and the defaults we give vLLM's keys.

Every other key is vLLM's and passes through untouched.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from connector.curve import Curve, load_curve

OWN_KEY = "tierpick"
_OWN_SPECS = {
    "CPUOffloadingSpec": "TieredCPUOffloadingSpec",
    "TieringOffloadingSpec": "TieredStorageOffloadingSpec",
}
_OWN_TIERS = {"fs": "ToldFileSystemTier", "obj": "ToldObjectStoreTier"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator can choose.

    Attributes:
        heartbeat_s: while idle, a message at least this often; 0 for none.
        load: send waiting and running requests and the use of the KV cache.
        removal_scan_per_s: how many of the files that were announced are looked for every second, so that their
            deletion by others is noticed; 0 for never.
        storage_chunks: chunks in storage that are kept announced; beyond that the oldest are announced as removed.
        curve_secret_key_file: this engine's CURVE key, as `zmq.auth.create_certificates` writes it; "" for no CURVE.
        curve_client_keys_dir: where the `*.key` files of the pickers are that may connect; "" for all that know the
            engine's public key.
    """

    heartbeat_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    load: bool = True
    removal_scan_per_s: Annotated[float, msgspec.Meta(ge=0)] = 200.0
    storage_chunks: Annotated[int, msgspec.Meta(ge=1)] = 1_000_000
    curve_secret_key_file: str = ""
    curve_client_keys_dir: str = ""

    def curve(self) -> Curve | None:
        """Raises ValueError, naming the file, if one is not what it should be."""
        return load_curve(self.curve_secret_key_file, self.curve_client_keys_dir)


def own_options(extra_config: Mapping[str, Any]) -> Options:
    """Read our options.

    Raises:
        ValueError: for an unknown option, naming the nearest one, or a bad value.
    """
    given = extra_config.get(OWN_KEY, {})
    where = f"kv_connector_extra_config.{OWN_KEY}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: an object is needed, not {given!r}")
    known = Options.__struct_fields__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{where}: unknown option {name!r}; {hint}")
    try:
        return msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def completed(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration vLLM gets: self-describing events, our specs for vLLM's, events of storage tiers on.

    What the operator set is kept; specs and tiers that are not vLLM's own are left alone.
    """
    config = {"self_describing_kv_events": True, **extra_config}
    spec = config.get("spec_name", "CPUOffloadingSpec")
    if spec in _OWN_SPECS:
        config |= {"spec_name": _OWN_SPECS[spec], "spec_module_path": "connector.vllm.specs"}
    tiers = config.get("secondary_tiers")
    if isinstance(tiers, list):  # else vLLM says what is wrong
        config["secondary_tiers"] = [_completed_tier(tier) for tier in tiers]
    return config


def _completed_tier(tier: Any) -> Any:
    if not isinstance(tier, Mapping) or tier.get("type") not in _OWN_TIERS:
        return tier
    own = {"type": _OWN_TIERS[tier["type"]], "module_path": "connector.vllm.storage"}
    return {"enable_kv_events": True, **tier, **own}
