from __future__ import annotations

import json
from pathlib import Path

from epp.config.builtin import BUILT_IN, KNOWN_IN_LLM_D
from epp.config.registry import plugin_types
from epp.config.schema_json import render, schema

FILE = Path(__file__).parents[3] / "config" / "schema.json"


def test_the_schema_in_config_is_current() -> None:
    assert FILE.read_text() == render(), "run: python -m epp.config.schema_json > config/schema.json"


def test_every_plugin_type_has_its_parameters() -> None:
    definitions = json.loads(render())["$defs"]
    entry = definitions["PluginEntry"]
    assert set(plugin_types()) | set(BUILT_IN) <= set(entry["properties"]["type"]["enum"])
    branches = {
        branch["if"]["properties"]["type"]["const"]: branch["then"]["properties"]["parameters"]["anyOf"][0]["$ref"]
        for branch in entry["allOf"]
    }
    approx = definitions[branches["approx-prefix-cache-producer"].rpartition("/")[2]]
    assert approx["properties"]["blockSizeTokens"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert approx["additionalProperties"] is False


def test_every_reference_resolves() -> None:
    text, definitions = render(), schema()["$defs"]
    names = {part.partition('"')[0] for part in text.split("#/$defs/")[1:]}
    assert names <= set(definitions)


def test_built_ins_are_types_that_llm_d_has() -> None:
    assert set(BUILT_IN) <= KNOWN_IN_LLM_D
