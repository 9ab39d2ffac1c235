"""`epp`: llm-d's flags in, a running picker out.

Flags follow pflag: `--flag=value`, `--flag value`, a bare boolean means true, the last occurrence wins. Flags of llm-d
that have no meaning here are accepted and named at start, so that a chart's arguments need no change; flags that would
change what is served, and that this version cannot honour, are refused.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from epp.options import Options

_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(|[kKMGT]|[KMGT]i)[bB]?", re.ASCII)
_BYTES = {"": 1, **{unit: 1000**i for unit, i in {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}.items()}}
_BYTES |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
SMALLEST_BUDGET = 16 << 20
_ZAP_LEVELS = {"debug": 4, "info": 2, "error": 0, "panic": 0}


def boolean(text: str) -> bool:
    if text.lower() in ("true", "t", "1"):
        return True
    if text.lower() in ("false", "f", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def duration(text: str) -> float:
    """A Go duration ("30s", "1m30s", "50ms", "0") in seconds."""
    parts = _DURATION.findall(text)
    if text != "0" and (not parts or "".join(number + unit for number, unit in parts) != text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30s or 1m30s")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def quantity(text: str) -> int:
    """A Kubernetes quantity of bytes ("64Mi", "1.5G"), with or without a final B."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64Mi")
    return int(Decimal(match[1]) * _BYTES[match[2]])


def budget(text: str) -> int:
    """A quantity that is worth the trouble, or 0 for no bound."""
    size = quantity(text)
    if 0 < size < SMALLEST_BUDGET:
        raise argparse.ArgumentTypeError(f"{text} is less than {SMALLEST_BUDGET >> 20}Mi (0 = no bound)")
    return size


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def port(text: str) -> int:
    number = count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return number


def share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def zap_level(text: str) -> int:
    """zap's level as a `-v`."""
    return _ZAP_LEVELS[text] if text in _ZAP_LEVELS else count(text)


def more_than_tls_1_2(text: str) -> bool:
    """gRPC serves 1.2 and newer, which is at least what the lower minimums ask for."""
    return text not in ("", "VersionTLS10", "VersionTLS11", "VersionTLS12")


Parse = Callable[[str], Any]
Flags = dict[str, tuple[Parse, str]]

_FLAGS: Flags = {
    "grpc-port": (port, "ext_proc listener"),
    "grpc-health-port": (port, "plaintext gRPC health"),
    "metrics-port": (port, "HTTP /metrics and /debug"),
    "bind": (str, "address of the listeners"),
    "config-file": (str, "EndpointPickerConfig YAML"),
    "config-text": (str, "the configuration itself"),
    "endpoints": (addresses, "static endpoints, ip:port,ip:port"),
    "disable-endpoint-subset-filter": (boolean, "ignore the subset hint of the data plane"),
    "emit-endpoint-scores": (boolean, "put every candidate's score into the dynamic metadata"),
    "secure-serving": (boolean, "TLS on the ext_proc listener"),
    "cert-path": (str, "directory with tls.crt and tls.key; without one, self-signed"),
    "enable-cert-reload": (boolean, "follow changes of the certificate files"),
    "drain-timeout": (duration, "how long requests in flight may finish after SIGTERM, such as 30s"),
    "refresh-metrics-interval": (duration, "time between two scrapes of one endpoint, such as 500ms"),
    "metrics-staleness-threshold": (duration, "age at which figures leave the pool gauges"),
    "max-body-bytes": (quantity, "larger request bodies are answered 413, such as 64Mi"),
    "observe-streams": (share, "share of event streams read for delivered cached tokens, 0 to 1"),
    "decisions": (count, "how many decisions /debug/decisions keeps"),
    "index-memory-budget": (budget, "memory for what is known of the engines' caches, such as 2Gi; 0 = no bound"),
    "pool-name": (str, "name of the pool in the metrics"),
}

_ACCEPTED: Flags = {
    "pool-namespace": (str, "there is no Kubernetes discovery in this version"),
    "pool-group": (str, "there is no Kubernetes discovery in this version"),
    "ha-enable-leader-election": (boolean, "every replica serves; none waits to be the leader"),
    "grpc-max-recv-msg-size": (str, "--max-body-bytes is the limit"),
    "grpc-max-send-msg-size": (str, "--max-body-bytes is the limit"),
    "refresh-prometheus-metrics-interval": (duration, "pool gauges are worked out when they are scraped"),
    "allow-experimental-plugins": (boolean, "every plugin there is may be used"),
    "enable-grpc-stream-metrics": (boolean, "not in this version"),
    "enable-pprof": (boolean, "Go's profiles do not exist here"),
    "tracing": (boolean, "not in this version"),
    "health-checking": (boolean, "the ext_proc port always answers health checks"),
    "metrics-endpoint-auth": (boolean, "the metrics port asks for no credentials in this version"),
    "zap-devel": (boolean, "see --zap-encoder and --zap-log-level"),
    "zap-stacktrace-level": (str, "stack traces come with errors that have one"),
    "zap-time-encoding": (str, "times are RFC 3339"),
}

_KUBERNETES = "label selectors need Kubernetes discovery: use the file-discovery plugin or --endpoints"
_METRICS_TLS = "TLS on the metrics port is not available"
_METRIC_NAMES = "removed, in llm-d too: use engineConfigs of core-metrics-extractor"

_REFUSED: Flags = {
    "endpoint-selector": (str, _KUBERNETES),
    "endpoint-target-ports": (str, _KUBERNETES),
    "metrics-cert-dir": (str, _METRICS_TLS),
    "metrics-client-ca-file": (str, _METRICS_TLS),
    "tls-min-version": (more_than_tls_1_2, "gRPC serves TLS 1.2 and newer, and cannot be told otherwise"),
    "tls-cipher-suites": (str, "gRPC chooses the cipher suites"),
    "total-queued-requests-metric": (str, _METRIC_NAMES),
    "total-running-requests-metric": (str, _METRIC_NAMES),
    "kv-cache-usage-percentage-metric": (str, _METRIC_NAMES),
    "lora-info-metric": (str, _METRIC_NAMES),
    "cache-info-metric": (str, _METRIC_NAMES),
}
"""Unless the value asks for nothing."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="epp", description="tierpick's endpoint picker", allow_abbrev=False)
    defaults = Options()
    for flag, (parse, text) in _FLAGS.items():
        _add(result, flag, parse, text, getattr(defaults, _field(flag)))
    result.add_argument("-v", "--v", type=count, default=defaults.verbosity, help="2 info, 4 debug, 5 trace")
    result.add_argument(
        "--zap-log-level", type=zap_level, default=None, help="debug, info, error or a number; overrides -v"
    )
    result.add_argument("--zap-encoder", choices=("json", "console"), default=defaults.log_encoder)
    accepted = result.add_argument_group("accepted, without effect")
    for flag, (parse, text) in _ACCEPTED.items():
        _add(accepted, flag, parse, text)
    for flag, (parse, _) in _REFUSED.items():
        _add(result, flag, parse, argparse.SUPPRESS)
    return result


def _add(to: argparse._ActionsContainer, flag: str, parse: Parse, text: str, default: Any = None) -> None:
    if default not in (None, "", ()):
        text = f"{text} (default: {default})"
    if parse is boolean:
        to.add_argument(f"--{flag}", type=parse, nargs="?", const=True, metavar="BOOL", default=default, help=text)
    else:
        to.add_argument(f"--{flag}", type=parse, metavar=parse.__name__.upper(), default=default, help=text)


def _field(flag: str) -> str:
    return flag.replace("-", "_")


def _given(flags: Flags, arguments: argparse.Namespace) -> Iterator[str]:
    """Each flag that asks for something, and why it gets nothing."""
    for flag, (_, why) in flags.items():
        if getattr(arguments, _field(flag)):
            yield f"--{flag}: {why}"


def options(argv: Sequence[str] | None = None) -> Options:
    """Exits with status 2 and the reason on bad flags."""
    flags = parser()
    arguments = flags.parse_args(argv)
    for refusal in _given(_REFUSED, arguments):
        flags.error(refusal)
    if arguments.config_file and arguments.config_text:
        flags.error("--config-file and --config-text exclude each other")
    return Options(
        **{_field(flag): getattr(arguments, _field(flag)) for flag in _FLAGS},
        verbosity=arguments.v if arguments.zap_log_level is None else arguments.zap_log_level,
        log_encoder=arguments.zap_encoder,
        without_effect=tuple(_given(_ACCEPTED, arguments)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    from epp.app import run  # the parts cost half a second to import: `--help` and bad flags do not wait for them

    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
