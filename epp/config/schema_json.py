"""`python -m epp.config.schema_json > config/schema.json`: the configuration's JSON Schema, for editors and CI.

Generated from the types that the loader itself uses, each plugin's parameters included, so it cannot disagree with
them. It knows shapes, not meaning: only the loader finds a reference to nowhere.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from epp.config.builtin import BUILT_IN, RENAMED
from epp.config.document import Document
from epp.config.registry import plugin_types

_REF = "#/$defs/{name}"


def schema() -> dict[str, Any]:
    kinds = {**BUILT_IN, **plugin_types()}
    kinds |= {old: kinds[new] for old, new in RENAMED.items() if new in kinds}
    parameters = {kind.parameters for kind in kinds.values()}
    types = [Document, *sorted(parameters, key=lambda t: t.__name__)]
    roots, definitions = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, roots, strict=True))
    definitions["PluginEntry"]["properties"]["type"] = {"enum": sorted(kinds)}
    definitions["PluginEntry"]["required"] = ["type"]
    definitions["PluginEntry"]["allOf"] = [
        _parameters_of(name, by_type[kinds[name].parameters]) for name in sorted(kinds)
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "EndpointPickerConfig",
        **by_type[Document],
        "$defs": definitions,
    }


def _parameters_of(kind: str, reference: dict[str, Any]) -> dict[str, Any]:
    return {
        "if": {"properties": {"type": {"const": kind}}},
        "then": {"properties": {"parameters": {"anyOf": [reference, {"type": "null"}]}}},
    }


def render() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
