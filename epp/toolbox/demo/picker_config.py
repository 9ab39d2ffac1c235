"""The picker's configuration: the repository's ready `config/standalone.yaml`, with this run's paths filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import epp
from epp.toolbox.processes import PartFailed

_PICKER = "max-score-picker"
READY_CONFIG = Path(epp.__file__).parent.parent / "config" / "standalone.yaml"


def picker_config(ready: str, endpoints: Path, tokenizer: Path, picked: int = 1) -> str:
    """`ready` is the YAML of a configuration that finds endpoints in a file and tokenizes locally. `picked` endpoints
    are named for each request: all but the first for the case that those before do not answer. Pure."""
    config: dict[str, Any] = yaml.safe_load(ready)
    _parameters(config, "file-discovery")["path"] = str(endpoints)
    _parameters(config, "token-producer")["tokenizerPath"] = str(tokenizer)
    if picked > 1:
        config["plugins"].append({"type": _PICKER, "parameters": {"maxNumOfEndpoints": picked}})
        for profile in config["schedulingProfiles"]:
            profile["plugins"].append({"pluginRef": _PICKER})
    return yaml.safe_dump(config, sort_keys=False)


def _parameters(config: dict[str, Any], plugin_type: str) -> dict[str, Any]:
    """Those of the one plugin of that type."""
    [plugin] = (plugin for plugin in config["plugins"] if plugin["type"] == plugin_type)
    parameters: dict[str, Any] = plugin.setdefault("parameters", {})
    return parameters


def write_picker_config(path: Path, endpoints: Path, tokenizer: Path, picked: int = 1) -> None:
    """Raises `PartFailed` where the ready configuration is not beside the package, as in a source checkout it is."""
    try:
        ready = READY_CONFIG.read_text()
    except OSError as error:
        raise PartFailed("picker", f"its ready configuration cannot be read: {error}") from error
    path.write_text(picker_config(ready, endpoints, tokenizer, picked))
