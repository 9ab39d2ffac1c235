"""How many requests wait and run, from what a connector is told: the figures vLLM exports as its own metrics.

A request that was preempted, or whose blocks are being loaded, waits, as in `vllm:num_requests_waiting`.
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connector.events import Load


class RequestCounts:
    """Follows requests from arrival to end."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._started: dict[str, Request] = {}
        self._running: set[str] = set()

    def arrived(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step begins: of the requests that ever ran, see which do now."""
        for new in output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is not None:
                self._started[new.req_id] = request
        running = RequestStatus.RUNNING
        self._running = {name for name, request in self._started.items() if request.status is running}

    def finished(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._started.pop(request.request_id, None)
        self._running.discard(request.request_id)

    def load(self, kv_cache: KVCacheManager) -> Load:
        running = len(self._running)
        return Load(waiting=len(self._requests) - running, running=running, kv_usage=kv_cache.usage)
