"""Every mistake is answered with where it is, what it is and, if there is one, the nearest valid name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epp.config.loader import Configuration

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

Problems = Callable[[str], list[str]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind: EndpointPickerConfig", "apiVersion: required, but missing"),
        ("apiVersion: llm-d.ai/v1\nkind: Pod", "kind: expected one of EndpointPickerConfig, got 'Pod'"),
        ("[]", "the configuration: expected a mapping, got []"),
        (
            "apiVersion: llm-d.ai/v2\nkind: EndpointPickerConfig",
            (
                "apiVersion: expected one of llm-d.ai/v1alpha1, llm-d.ai/v1, "
                "inference.networking.x-k8s.io/v1alpha1, got 'llm-d.ai/v2'; did you mean \"llm-d.ai/v1\"?"
            ),
        ),
    ],
)
def test_the_head_is_checked(problems: Problems, text: str, problem: str) -> None:
    assert problems(text) == [problem]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("pluginz: []", 'pluginz: unknown field; did you mean "plugins"?'),
        ("plugins: {}", "plugins: expected array, got object"),
        ("plugins: [4]", "plugins[0]: expected a mapping, got 4"),
        ("plugins: [{name: a}]", "plugins[0].type: required, but missing"),
        ("plugins: [{type: 3}]", "plugins[0].type: expected str, got int"),
        (
            "plugins: [{type: queue-scorr}]",
            'plugins[0].type: unknown type "queue-scorr"; did you mean "queue-scorer"?',
        ),
        (
            "plugins: [{type: latency-scorer}]",
            'plugins[0].type: "latency-scorer" is known in llm-d, but not available in tierpick yet',
        ),
        (
            "plugins: [{type: queue-scorer}, {type: queue-scorer}]",
            'plugins[1].name: "queue-scorer" is already the name of plugins[0]',
        ),
    ],
)
def test_plugin_entries_are_checked(problems: Problems, body: str, problem: str) -> None:
    assert problems(HEAD + body) == [problem]


@pytest.mark.parametrize(
    ("kind", "parameters", "problem"),
    [
        (
            "approx-prefix-cache-producer",
            "blokSizeTokens: 16",
            '.blokSizeTokens: unknown field; did you mean "blockSizeTokens"?',
        ),
        ("approx-prefix-cache-producer", "blockSizeTokens: '16'", ".blockSizeTokens: expected int, got str"),
        ("approx-prefix-cache-producer", "autoTune: 'true'", ".autoTune: expected bool, got str"),
        ("approx-prefix-cache-producer", "lruCapacityPerServer: 0", ".lruCapacityPerServer: expected int >= 1, got 0"),
        (
            "approx-prefix-cache-producer",
            "blockSizeTokens: 16, blockSize: 32",
            ": blockSize is the deprecated name of blockSizeTokens; they contradict each other",
        ),
        (
            "label-selector-filter",
            "matchExpressions: [{key: a, operator: Inn}]",
            (
                ".matchExpressions[0].operator: expected one of In, NotIn, Exists, DoesNotExist, "
                "got 'Inn'; did you mean \"In\"?"
            ),
        ),
        (
            "prefix-cache-affinity-filter",
            "ttftSource: latencyPredictor",
            ": ttftSource latencyPredictor is not available in tierpick yet",
        ),
        (
            "prefix-cache-scorer",
            "prefixMatchInfoProducerName: gpu",
            '.prefixMatchInfoProducerName: no producer is named "gpu"',
        ),
        ("queue-scorer", "depth: 3", ".depth: unknown field"),
    ],
)
def test_parameters_are_checked(problems: Problems, kind: str, parameters: str, problem: str) -> None:
    body = f"plugins: [{{type: {kind}, parameters: {{{parameters}}}}}]"
    assert problems(HEAD + body) == [f"plugins[0].parameters{problem}"]


def test_a_producer_of_nearly_that_name_is_suggested(problems: Problems) -> None:
    body = "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: gpu}}, %s]"
    where = 'plugins[0].parameters.prefixMatchInfoProducerName: no producer is named "gpu"'
    assert problems(HEAD + body % "{type: approx-prefix-cache-producer, name: gpu2}") == [
        f'{where}; did you mean "gpu2"?'
    ]
    assert problems(HEAD + body % "{type: queue-scorer, name: gpu}") == [where]


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ("flowControll", '[0]: unknown gate "flowControll"; did you mean "flowControl"?'),
        ("flowControl", ": flowControl is not available in tierpick yet"),
        ("flowControl=true", ": flowControl is not available in tierpick yet"),
        ("flowControl=yes", '[0]: expected "flowControl=true" or "flowControl=false", got "flowControl=yes"'),
        ("3", "[0]: expected str, got int"),
    ],
)
def test_feature_gates_are_checked(problems: Problems, gate: str, problem: str) -> None:
    assert problems(HEAD + f"featureGates: [{gate}]") == [f"featureGates{problem}"]


PLUGINS = "plugins: [{type: queue-scorer}, {type: random-picker}, {type: max-score-picker}, {type: openai-parser}]\n"
SOURCE = "plugins: [{type: queue-scorer}, {type: endpoint-notification-source}]\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "dataLayer: {discovery: {pluginRef: file-discovery}}",
            'dataLayer.discovery.pluginRef: no plugin is named "file-discovery"',
        ),
        (
            SOURCE + "dataLayer: {discovery: {pluginRef: queue-scorer}}",
            'dataLayer.discovery.pluginRef: "queue-scorer" is not a discovery plugin',
        ),
        (
            SOURCE + "dataLayer: {sources: [{pluginRef: queue-scorer}]}",
            'dataLayer.sources[0].pluginRef: "queue-scorer" is not a data source',
        ),
        (
            SOURCE + "dataLayer: {sources: [{pluginRef: endpoint-notification-source, "
            "extractors: [{pluginRef: queue-scorer}]}]}",
            'dataLayer.sources[0].extractors[0].pluginRef: "queue-scorer" is not an extractor',
        ),
        (
            "dataLayer: {crossReplicaSyncInterval: 3}",
            "dataLayer.crossReplicaSyncInterval: expected str, got int",
        ),
        (
            "dataLayer: {crossReplicaSyncInterval: 3x}",
            "dataLayer.crossReplicaSyncInterval: expected a duration such as 400ms or 1m30s, got '3x'",
        ),
        (
            "dataLayer: {peerDiscovery: {pluginRef: x}}",
            "dataLayer.peerDiscovery: not available in tierpick yet",
        ),
        (
            "flowControl: {maxBytes: 10Gib}",
            "flowControl.maxBytes: expected a quantity such as 10Gi or 1k, got '10Gib'",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: openai-parsr}]}",
            'requestHandler.parsers[0].pluginRef: no plugin is named "openai-parsr"',
        ),
        (
            "requestHandler: {parsers: [{pluginRef: vllmgrpc-parser}]}",
            (
                'requestHandler.parsers[0].pluginRef: "vllmgrpc-parser" '
                "is known in llm-d, but not available in tierpick yet"
            ),
        ),
        (
            SOURCE + "requestHandler: {parsers: [{pluginRef: queue-scorer}]}",
            'requestHandler.parsers[0].pluginRef: "queue-scorer" is not a parser',
        ),
        (
            "parser: {pluginRef: openai-parser}\nrequestHandler: {parsers: [{pluginRef: passthrough-parser}]}",
            "parser: deprecated, and it contradicts requestHandler.parsers; remove it",
        ),
        (
            "plugins: [{type: metrics-data-source}, {type: metrics-data-source, name: b}]",
            "plugins[1]: tierpick has one metrics-data-source; plugins[0] is one already",
        ),
    ],
)
def test_sections_are_checked(problems: Problems, body: str, problem: str) -> None:
    assert problems(HEAD + body) == [problem]


@pytest.mark.parametrize(
    ("profiles", "problem"),
    [
        (
            "[{name: p, plugins: [{pluginRef: queue-scorerr}]}]",
            '[0].plugins[0].pluginRef: no plugin is named "queue-scorerr"; did you mean "queue-scorer"?',
        ),
        ("[{name: p, plugins: [{}]}]", "[0].plugins[0].pluginRef: required, but missing"),
        ("[{plugins: []}]", "[0].name: required, but missing"),
        ("[{name: p}, {name: p}]", '[1].name: "p" is the name of two profiles'),
        (
            "[{name: p, plugins: [{pluginRef: random-picker}, {pluginRef: max-score-picker}]}]",
            "[0].plugins: more than one picker: random-picker, max-score-picker",
        ),
        (
            "[{name: p, plugins: [{pluginRef: openai-parser}]}]",
            '[0].plugins[0].pluginRef: "openai-parser" is neither a filter, a scorer nor a picker',
        ),
        (
            "[{name: p, plugins: [{pluginRef: queue-scorer}, {pluginRef: queue-scorer}]}]",
            '[0].plugins[1].pluginRef: "queue-scorer" is listed twice',
        ),
    ],
)
def test_profiles_are_checked(problems: Problems, profiles: str, problem: str) -> None:
    assert f"schedulingProfiles{problem}" in problems(HEAD + PLUGINS + f"schedulingProfiles: {profiles}")


@pytest.mark.parametrize("weight", ["-1", ".nan", ".inf", "1e300", "'2'", "true", "[1]"])
def test_weights_are_finite_numbers_not_below_zero(problems: Problems, weight: str) -> None:
    profile = f"schedulingProfiles: [{{name: p, plugins: [{{pluginRef: queue-scorer, weight: {weight}}}]}}]"
    (problem,) = problems(HEAD + PLUGINS + profile)
    assert problem.startswith("schedulingProfiles[0].plugins[0].weight: expected float")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "plugins: [{type: single-profile-handler}, {type: single-profile-handler, name: b}]",
            "plugins: multiple profile handlers found: single-profile-handler, b",
        ),
        (
            "plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: a}, {name: b}]",
            "schedulingProfiles: single-profile-handler runs one profile, and 2 are configured",
        ),
        ("schedulingProfiles: [{name: a}, {name: b}]", "plugins: several profiles need a profile handler"),
    ],
)
def test_there_is_one_fitting_profile_handler(problems: Problems, body: str, problem: str) -> None:
    assert problems(HEAD + body) == [problem]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "plugins: [{type: queue-scorer, name: max-score-picker}]",
            'plugins[0].name: "max-score-picker" is the name of a default plugin; choose another',
        ),
        (
            "plugins: [{type: random-picker, name: single-profile-handler}]",
            'plugins[0].name: "single-profile-handler" is the name of a default plugin; choose another',
        ),
    ],
)
def test_the_names_of_default_plugins_are_not_for_others(problems: Problems, body: str, problem: str) -> None:
    assert problems(HEAD + body) == [problem]


def test_all_mistakes_are_reported_at_once(problems: Problems) -> None:
    found = problems(
        HEAD
        + """
plugins:
- {type: queue-skorer}
- {type: active-request-scorer, parameters: {idleTreshold: 1, maxBusyScore: 2}}
schedulingProfiles:
- {name: a, plugins: [{pluginRef: queue-skorer}, {pluginRef: nobody}]}
"""
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "plugins[0].type",
        "plugins[1].parameters.idleTreshold",
        "plugins[1].parameters.maxBusyScore",
        "schedulingProfiles[0].plugins[1].pluginRef",
    ]


def test_a_bad_configuration_leaves_nothing_behind(loaded: Callable[[str], Configuration], problems: Problems) -> None:
    assert problems(HEAD + "plugins: [{type: queue-scorer}, {type: nonsense}]")
    assert loaded(HEAD + "plugins: [{type: queue-scorer}]")
