from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from epp.health import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Context:
    def __init__(self):
        self.written = asyncio.Queue()

    async def write(self, response):
        self.written.put_nowait(response.status)


@pytest.fixture
async def health():
    health = Health()
    await health.set_ready(False)
    return health


async def status(health, service):
    return (await health.Check(health_pb2.HealthCheckRequest(service=service), Context())).status


NAMES = ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor", "some.gateways.own"]


@pytest.mark.parametrize("service", NAMES)
async def test_every_name_but_one_is_readiness(health, service):
    assert await status(health, service) == NOT_SERVING
    await health.set_ready(True)
    assert await status(health, service) == SERVING
    await health.set_ready(False)
    assert await status(health, service) == NOT_SERVING


async def test_liveness_does_not_wait_for_readiness(health):
    assert await status(health, "liveness") == SERVING


@pytest.mark.parametrize("service", NAMES)
async def test_who_watches_is_told_of_changes_only(health, service):
    context = Context()
    watch = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(service=service), context))
    assert await context.written.get() == NOT_SERVING
    await health.set_ready(False)
    await asyncio.sleep(0)
    await health.set_ready(True)
    assert await context.written.get() == SERVING
    watch.cancel()
    assert context.written.empty()
