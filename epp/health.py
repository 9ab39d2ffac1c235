"""gRPC health (grpc.health.v1) by llm-d's and Envoy's service names.

`liveness` is SERVING for as long as the process answers; every other name is the readiness of the picker, because each
gateway asks by a name of its own (`readiness`, `inference-extension`, the ext_proc service, none).
"""

from __future__ import annotations

from typing import Any

from grpc import aio
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

LIVENESS = "liveness"
_READINESS = ""


class Health(health_aio.HealthServicer):  # type: ignore[misc]  # untyped
    """One state for any number of servers."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = False

    @property
    def ready(self) -> bool:
        return self._ready

    async def set_ready(self, ready: bool) -> None:
        """Answer accordingly from now on, and tell those who watch. Call it before anybody can ask."""
        self._ready = ready
        await self.set(LIVENESS, HealthCheckResponse.SERVING)
        await self.set(_READINESS, HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING)

    async def Check(self, request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        return await super().Check(_known(request), context)

    async def Watch(self, request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await super().Watch(_known(request), context)

    def add_to(self, server: aio.Server) -> None:
        add_HealthServicer_to_server(self, server)


def _known(request: HealthCheckRequest) -> HealthCheckRequest:
    """The request by one of the two names that have a state."""
    return HealthCheckRequest(service=LIVENESS if request.service == LIVENESS else _READINESS)
