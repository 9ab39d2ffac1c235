"""All targets, by the names that the command line knows them by."""

from __future__ import annotations

from tests.fuzz.engine import Targets
from tests.fuzz.targets import answers, dataplane, engines, operators, requests, strangers

TARGETS: Targets = {
    "events": engines.Events,
    "streams": engines.Streams,
    "shared-socket": engines.SharedSocket,
    "ext-proc-messages": dataplane.Messages,
    "ext-proc-exchanges": dataplane.Exchanges,
    "http-requests": requests.Requests,
    "http-answers": answers.Usage,
    "tokens": requests.Texts,
    "metrics-pages": operators.Metrics,
    "model-lists": operators.ModelLists,
    "endpoint-files": operators.EndpointFiles,
    "configurations": operators.Configurations,
    "replay-requests": strangers.Replays,
}
