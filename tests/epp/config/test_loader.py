from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from epp.config.environment import Environment
from epp.config.loader import Configuration

READY = Path(__file__).parents[3] / "config"
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

Load = Callable[[str], Configuration]


def names(plugins: Any) -> list[str]:
    return [plugin.name for plugin in plugins]


def weights(configuration: Configuration) -> dict[str, float]:
    return {scorer.name: weight for scorer, weight in configuration.profiles[0].scorers}


def test_an_empty_configuration_is_llm_ds_default(loaded: Load) -> None:
    configuration = loaded("")
    assert weights(configuration) == {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}
    assert names(configuration.producers) == ["token-producer", "approx-prefix-cache-producer"]
    assert configuration.profiles[0].name == "default"
    assert configuration.profiles[0].picker.type == "max-score-picker"
    assert configuration.handler.type == "single-profile-handler"
    assert configuration.discovery is None
    assert configuration.data_layer.scrape


def test_without_profiles_everything_usable_is_in_one(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + "plugins: [{type: decode-filter}, {type: queue-scorer}, {type: random-picker}, {type: load-aware-scorer}]"
    )
    (profile,) = configuration.profiles
    assert (names(profile.filters), profile.picker.name) == (["decode-filter"], "random-picker")
    assert weights(configuration) == {"queue-scorer": 1.0, "load-aware-scorer": 1.0}


def test_what_a_plugin_needs_is_created_and_noted(loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: prefix-cache-scorer}]")
    assert names(configuration.producers) == ["token-producer", "approx-prefix-cache-producer"]
    assert "approx-prefix-cache-producer added: prefix-cache-scorer needs it" in configuration.notes
    assert "token-producer added: approx-prefix-cache-producer needs it" in configuration.notes


def test_a_token_producer_by_another_name_serves_as_well(loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: prefix-cache-scorer}, {type: token-producer, name: exact}]")
    assert names(configuration.producers) == ["exact", "approx-prefix-cache-producer"]


def test_a_scorer_may_name_its_producer(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: mine}}
- {type: approx-prefix-cache-producer, name: mine}
"""
    )
    assert names(configuration.producers) == ["token-producer", "mine"]


def test_plugins_find_each_other_once_all_is_loaded(environment: Environment, loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: queue-scorer, name: q}]")
    assert environment.lookup("q") is configuration.plugins["q"]
    assert environment.lookup("r") is None


def test_an_approximate_index_beside_an_unused_precise_one_is_pointed_out(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: precise-prefix-cache-producer, name: exact}
- {type: prefix-cache-scorer}
- {type: no-hit-lru-scorer}
- {type: token-producer}
"""
    )
    approximations = [warning for warning in configuration.warnings if "approximate" in warning]
    assert len(approximations) == 2
    assert approximations[0].startswith('plugins[1]: "prefix-cache-scorer" uses an approximate index although "exact"')


def test_estimated_tokens_for_a_precise_index_are_pointed_out(loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: precise-prefix-cache-producer, name: exact}, {type: queue-scorer}]")
    assert (
        'default token-producer: "token-producer" only estimates tokens, and "exact" can match none of them'
        in configuration.warnings
    )


def test_a_precise_index_that_is_used_needs_no_warning(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: precise-prefix-cache-producer}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- {type: token-producer, parameters: {modelName: m}}
"""
    )
    assert names(configuration.producers) == ["token-producer", "precise-prefix-cache-producer"]
    assert configuration.warnings == ()


def test_the_order_of_plugins_means_nothing(loaded: Load) -> None:
    entries = [
        "{type: max-score-picker}",
        "{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: mine}}",
        "{type: single-profile-handler}",
        "{type: approx-prefix-cache-producer, name: mine}",
        "{type: queue-scorer}",
    ]
    profile = (
        "\nschedulingProfiles: [{name: p, plugins: [{pluginRef: max-score-picker}, "
        "{pluginRef: queue-scorer, weight: 2}, {pluginRef: prefix-cache-scorer}]}]"
    )
    for ordered in (entries, entries[::-1], entries[2:] + entries[:2]):
        configuration = loaded(HEAD + "plugins:\n- " + "\n- ".join(ordered) + profile)
        assert weights(configuration) == {"queue-scorer": 2.0, "prefix-cache-scorer": 1.0}
        assert names(configuration.producers) == ["token-producer", "mine"]
        assert configuration.profiles[0].picker is configuration.plugins["max-score-picker"]


def test_the_legacy_group_loads_with_a_warning(loaded: Load) -> None:
    text = "apiVersion: {}\nkind: EndpointPickerConfig\nplugins: [{{type: queue-scorer}}]"
    assert loaded(text.format("llm-d.ai/v1")).warnings == ()
    (warning,) = loaded(text.format("inference.networking.x-k8s.io/v1alpha1")).warnings
    assert warning.startswith("apiVersion: inference.networking.x-k8s.io/v1alpha1 is deprecated")


def test_null_counts_as_absent(loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: queue-scorer, name: , parameters: }]\nschedulingProfiles:\n")
    assert weights(configuration) == {"queue-scorer": 1.0}


def test_deprecated_type_names_work_with_a_warning(loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: tokenizer}, {type: prefix-cache-scorer}]")
    assert names(configuration.producers) == ["tokenizer", "approx-prefix-cache-producer"]
    assert "plugins[0].type: tokenizer is deprecated; use token-producer" in configuration.warnings


def test_feature_gates_that_change_nothing_are_accepted(loaded: Load) -> None:
    loaded(HEAD + "featureGates: [flowControl=false, haPopulateNonLeaderDatastore, haPopulateNonLeaderDatastore=false]")


def test_a_flow_control_section_without_its_gate_only_warns(loaded: Load) -> None:
    configuration = loaded(
        HEAD + "flowControl: {maxBytes: 10Gi, defaultRequestTTL: 60s, priorityBands: [{priority: 1}]}"
    )
    assert "flowControl: has no effect: the flowControl feature gate is off" in configuration.warnings


def test_metrics_source_parameters_reach_the_data_layer(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: metrics-data-source, parameters: {scheme: https, path: /m, port: 9000, interval: 1m0.5s, caCertPath: /ca}}
- {type: core-metrics-extractor}
dataLayer:
  injectDefaults: false
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
"""
    )
    metrics = configuration.data_layer.metrics
    assert (metrics.scheme, metrics.path, metrics.port, metrics.interval_seconds) == ("https", "/m", 9000, 60.5)
    assert configuration.data_layer.scrape
    assert "plugins[0].parameters.caCertPath: has no effect in tierpick" in configuration.warnings


def test_where_engines_list_their_models_can_be_said(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: models-data-source, parameters: {scheme: https, path: /v2/models, insecureSkipVerify: false}}
- {type: models-data-extractor}
dataLayer: {sources: [{pluginRef: models-data-source, extractors: [{pluginRef: models-data-extractor}]}]}
"""
    )
    models = configuration.data_layer.models
    assert (models.scheme, models.path, models.insecure_skip_verify) == ("https", "/v2/models", False)
    assert not configuration.warnings


def test_nothing_is_scraped_if_told_so(loaded: Load) -> None:
    assert not loaded(HEAD + "dataLayer: {injectDefaults: false}").data_layer.scrape


def test_a_parser_needs_no_entry_among_the_plugins(loaded: Load) -> None:
    loaded(HEAD + "requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: passthrough-parser}]}")


def test_an_old_field_alone_is_honoured_with_a_warning(loaded: Load) -> None:
    configuration = loaded(
        HEAD + "parser: {pluginRef: openai-parser}\nsaturationDetector: {pluginRef: utilization-detector}"
    )
    assert "parser: deprecated; use requestHandler.parsers" in configuration.warnings
    assert "saturationDetector: deprecated; use flowControl.saturationDetector" in configuration.warnings


def test_file_discovery_is_found(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: file-discovery, parameters: {path: /etc/epp/endpoints.yaml, watchFile: true}}
- {type: queue-scorer}
- {type: prefix-cache-scorer}
dataLayer: {discovery: {pluginRef: file-discovery}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: prefix-cache-scorer}]}]
"""
    )
    assert configuration.discovery is configuration.plugins["file-discovery"]


def test_idle_plugins_are_pointed_out(loaded: Load) -> None:
    configuration = loaded(
        HEAD
        + """
plugins:
- {type: file-discovery, parameters: {path: x}}
- {type: random-picker}
schedulingProfiles: [{name: default, plugins: [{pluginRef: random-picker, weight: 2}]}]
"""
    )
    assert 'plugins[0]: "file-discovery" does nothing: dataLayer.discovery does not name it' in configuration.warnings
    assert (
        'schedulingProfiles[0].plugins[0].weight: "random-picker" is not a scorer; the weight has no effect'
        in configuration.warnings
    )
