"""gRPC health (grpc.health.v1) by llm-d's and Envoy's service names.

`liveness` is SERVING for as long as the process answers; every other name is the readiness of the picker, because each
gateway asks by a name of its own (`readiness`, `inference-extension`, the ext_proc service, none).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from epp.grpc_core import Accept, Call

LIVENESS = "liveness"
_SERVICE = "/grpc.health.v1.Health"
_SERVING, _NOT_SERVING = int(HealthCheckResponse.SERVING), int(HealthCheckResponse.NOT_SERVING)


class Health:
    """One state for any number of servers."""

    def __init__(self) -> None:
        self.ready = False
        self.methods: Mapping[str, Accept] = {
            f"{_SERVICE}/Check": lambda call: _Question(call, self._check),
            f"{_SERVICE}/Watch": lambda call: _Question(call, self._watch),
        }
        """What a server is to answer."""
        self._watching: dict[Call, tuple[str, int]] = {}
        """With the name asked for and the status told last."""

    def set_ready(self, ready: bool) -> None:
        """Answer accordingly from now on, and tell those who watch."""
        self.ready = ready
        for call, (service, told) in self._watching.items():
            status = self._status(service)
            if status != told:
                self._watching[call] = service, status
                call.send(_response(status))

    def _status(self, service: str) -> int:
        return _SERVING if self.ready or service == LIVENESS else _NOT_SERVING

    def _check(self, call: Call, service: str | None) -> None:
        if service is not None:
            call.send(_response(self._status(service)))
        call.end()

    def _watch(self, call: Call, service: str | None) -> None:
        if service is None:
            self._watching.pop(call, None)
            call.end()
        else:
            self._watching[call] = service, self._status(service)
            call.send(_response(self._status(service)))
            call.watch()


class _Question:
    """A call's message as the name of a service; None is its end."""

    def __init__(self, call: Call, ask: Callable[[Call, str | None], None]) -> None:
        self._call = call
        self._ask = ask

    def received(self, message: bytes | None) -> None:
        try:
            service = None if message is None else HealthCheckRequest.FromString(message).service
        except DecodeError:
            self._call.end(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
        else:
            self._ask(self._call, service)


def _response(status: int) -> bytes:
    return bytes(HealthCheckResponse(status=status).SerializeToString())
