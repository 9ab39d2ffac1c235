"""Flags as llm-d's charts and users write them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from epp import cli
from epp.options import Options

Fails = Callable[..., str]

HONOURED, ACCEPTED, REFUSED = "honoured", "accepted", "refused"

LLM_D = [
    # flag, a value other than the default, what becomes of it
    ("grpc-port", "9102", HONOURED),
    ("grpc-health-port", "9103", HONOURED),
    ("metrics-port", "9190", HONOURED),
    ("config-file", "/config/default-plugins.yaml", HONOURED),
    ("config-text", "kind: EndpointPickerConfig", HONOURED),
    ("pool-name", "vllm", HONOURED),
    ("pool-namespace", "prod", ACCEPTED),
    ("pool-group", "inference.networking.k8s.io", ACCEPTED),
    ("endpoint-selector", "app=vllm", REFUSED),
    ("endpoint-target-ports", "8000,8001", REFUSED),
    ("disable-endpoint-subset-filter", "true", HONOURED),
    ("emit-endpoint-scores", "true", HONOURED),
    ("ha-enable-leader-election", "true", ACCEPTED),
    ("drain-timeout", "1m30s", HONOURED),
    ("grpc-max-recv-msg-size", "10MiB", ACCEPTED),
    ("grpc-max-send-msg-size", "25MB", ACCEPTED),
    ("refresh-metrics-interval", "50ms", HONOURED),
    ("refresh-prometheus-metrics-interval", "10s", ACCEPTED),
    ("metrics-staleness-threshold", "5s", HONOURED),
    ("allow-experimental-plugins", "true", ACCEPTED),
    ("enable-grpc-stream-metrics", "true", ACCEPTED),
    ("enable-pprof", "true", ACCEPTED),
    ("tracing", "true", ACCEPTED),
    ("health-checking", "true", ACCEPTED),
    ("secure-serving", "false", HONOURED),
    ("cert-path", "/certs", HONOURED),
    ("enable-cert-reload", "true", HONOURED),
    ("tls-min-version", "VersionTLS13", REFUSED),
    ("tls-cipher-suites", "TLS_AES_128_GCM_SHA256", REFUSED),
    ("metrics-endpoint-auth", "true", ACCEPTED),
    ("metrics-cert-dir", "/certs", REFUSED),
    ("metrics-client-ca-file", "/ca.crt", REFUSED),
    ("v", "4", HONOURED),
    ("zap-encoder", "console", HONOURED),
    ("zap-log-level", "debug", HONOURED),
    ("zap-devel", "true", ACCEPTED),
    ("zap-stacktrace-level", "error", ACCEPTED),
    ("zap-time-encoding", "rfc3339", ACCEPTED),
    ("total-queued-requests-metric", "x", REFUSED),
    ("total-running-requests-metric", "x", REFUSED),
    ("kv-cache-usage-percentage-metric", "x", REFUSED),
    ("lora-info-metric", "x", REFUSED),
    ("cache-info-metric", "x", REFUSED),
]


def flags(becomes: str) -> list[tuple[str, str]]:
    return [(flag, value) for flag, value, what in LLM_D if what == becomes]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """The complaint about these arguments."""

    def fails(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.options(arguments)
        assert caught.value.code == 2
        return capsys.readouterr().err

    return fails


class TestEveryFlagOfLlmD:
    @pytest.mark.parametrize(("flag", "value"), flags(HONOURED))
    def test_is_honoured(self, flag: str, value: str) -> None:
        told = cli.options([f"--{flag}={value}"])
        assert told != Options()
        assert told.without_effect == ()

    @pytest.mark.parametrize(("flag", "value"), flags(ACCEPTED))
    def test_or_accepted_and_named(self, flag: str, value: str) -> None:
        told = cli.options([f"--{flag}={value}"])
        (note,) = told.without_effect
        assert note.startswith(f"--{flag}: ")
        assert told == Options(without_effect=(note,))

    @pytest.mark.parametrize(("flag", "value"), flags(REFUSED))
    def test_or_refused_with_a_reason(self, fails: Fails, flag: str, value: str) -> None:
        complaint = fails(f"--{flag}={value}")
        assert len(complaint.split(f"error: --{flag}: ", 1)[1]) > 20

    @pytest.mark.parametrize("flag", list(cli._FLAGS))
    def test_shows_in_the_help(self, flag: str) -> None:
        assert f"--{flag} " in cli.parser().format_help()

    def test_what_the_gateway_chart_passes(self) -> None:
        arguments = (
            "--pool-name qwen --pool-namespace prod --pool-group inference.networking.k8s.io --zap-encoder json"
            " --config-file /config/default-plugins.yaml --ha-enable-leader-election --grpc-health-port 9003"
            " --v=1 --tracing=false --metrics-endpoint-auth=false"
        )
        told = cli.options(arguments.split())
        assert (told.pool_name, told.config_file, told.verbosity) == ("qwen", "/config/default-plugins.yaml", 1)
        named = [note.partition(":")[0] for note in told.without_effect]
        assert named == ["--pool-namespace", "--pool-group", "--ha-enable-leader-election"]

    @pytest.mark.parametrize(
        "argument",
        [
            "--endpoint-selector=",
            "--tls-min-version=VersionTLS12",
            "--tls-min-version=VersionTLS10",
            "--metrics-cert-dir=",
            "--ha-enable-leader-election=false",
            "--tracing=false",
        ],
    )
    def test_asked_for_nothing_is_no_trouble(self, argument: str) -> None:
        assert cli.options([argument]) == Options()


def test_without_flags_the_defaults() -> None:
    assert cli.options([]) == Options()


class TestForms:
    @pytest.mark.parametrize("arguments", [["--grpc-port=1"], ["--grpc-port", "1"]])
    def test_a_value_after_an_equals_sign_or_a_space(self, arguments: list[str]) -> None:
        assert cli.options(arguments).grpc_port == 1

    def test_the_last_occurrence_wins(self) -> None:
        told = cli.options(["--grpc-port=1", "--secure-serving=false", "--grpc-port", "2", "--secure-serving"])
        assert (told.grpc_port, told.secure_serving) == (2, True)

    @pytest.mark.parametrize("arguments", [["-v=5"], ["-v", "5"], ["-v5"], ["--v=5"], ["--v", "5"]])
    def test_verbosity(self, arguments: list[str]) -> None:
        assert cli.options(arguments).verbosity == 5

    @pytest.mark.parametrize(("text", "verbosity"), [("debug", 4), ("info", 2), ("error", 0), ("panic", 0), ("5", 5)])
    def test_the_zap_level_overrides_it(self, text: str, verbosity: int) -> None:
        assert cli.options([f"--zap-log-level={text}", "-v=1"]).verbosity == verbosity

    def test_endpoints_are_a_comma_list(self) -> None:
        assert cli.options(["--endpoints=10.0.0.7:8000, [fd00::1]:8000,"]).endpoints == (
            "10.0.0.7:8000",
            "[fd00::1]:8000",
        )

    @pytest.mark.parametrize(
        "argument",
        [
            "--grpc-prot=1",
            "--grpc-por=1",
            "stray",
            "--grpc-port=x",
            "--grpc-port=-1",
            "--grpc-port=65536",
            "--grpc-port",
            "--secure-serving=yes",
            "--drain-timeout=30",
            "--max-body-bytes=lots",
            "--observe-streams=1.5",
            "--observe-streams=nan",
            "--decisions=-1",
            "--index-memory-budget=plenty",
            "--index-memory-budget=64Ki",
            "--zap-log-level=loud",
            "--zap-encoder=xml",
            "--tracing=maybe",
        ],
    )
    def test_what_is_wrong_is_named(self, fails: Fails, argument: str) -> None:
        assert argument.partition("=")[0] in fails(argument).rpartition("error: ")[2]

    def test_two_configurations_exclude_each_other(self, fails: Fails) -> None:
        assert "--config-file and --config-text exclude" in fails("--config-file=a", "--config-text=b")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("50ms", 0.05),
        ("1m30s", 90),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("100us", 1e-4),
        ("7ns", 7e-9),
        ("0", 0),
    ],
)
def test_go_durations(text: str, seconds: float) -> None:
    assert cli.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1 s", "1s2", "1d", "１s", "1e3s"])
def test_what_is_no_go_duration(text: str) -> None:
    refused(cli.duration, text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4194304", 4 << 20),
        ("10MiB", 10 << 20),
        ("10Mib", 10 << 20),
        ("25MB", 25_000_000),
        ("25M", 25_000_000),
        ("1k", 1000),
        ("1.5Gi", 3 << 29),
        ("0.1k", 100),
        ("1Ti", 1 << 40),
    ],
)
def test_kubernetes_quantities(text: str, size: int) -> None:
    assert cli.quantity(text) == size


@pytest.mark.parametrize("text", ["", "B", "-1", "1 Mi", "Mi", "1Q", "1ki", "1MM", "inf", "1e400"])
def test_what_is_no_quantity(text: str) -> None:
    refused(cli.quantity, text)


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("16Mi", 16 << 20), ("1.5Gi", 3 << 29)])
def test_the_budget_of_the_index_is_a_size_or_none(text: str, size: int) -> None:
    assert cli.options([f"--index-memory-budget={text}"]).index_memory_budget == size


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_go_booleans(text: str) -> None:
    assert cli.boolean(text) is True


@pytest.mark.parametrize("text", ["0", "f", "F", "FALSE", "false", "False"])
def test_go_booleans_that_say_no(text: str) -> None:
    assert cli.boolean(text) is False


@pytest.mark.parametrize("text", ["", "yes", "on", "2"])
def test_what_is_no_boolean(text: str) -> None:
    refused(cli.boolean, text)


def refused(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is "):
        parse(text)
