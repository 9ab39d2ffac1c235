from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from epp.health import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
NAMES = ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor", "some.gateways.own"]


class Call:
    def __init__(self, health, method):
        self.told = []
        self.ended = self.watched = False
        self.handler = health.methods[method](self)

    def ask(self, service):
        self.handler.received(health_pb2.HealthCheckRequest(service=service).SerializeToString())

    def send(self, message):
        self.told.append(health_pb2.HealthCheckResponse.FromString(message).status)

    def watch(self):
        self.watched = True

    def end(self, *status):
        self.ended = status or True


@pytest.fixture
def health():
    return Health()


def status(health, service):
    call = Call(health, CHECK)
    call.ask(service)
    assert call.ended is True
    [status] = call.told
    return status


@pytest.mark.parametrize("service", NAMES)
def test_every_name_but_one_is_readiness(health, service):
    assert status(health, service) == NOT_SERVING
    health.set_ready(True)
    assert status(health, service) == SERVING
    health.set_ready(False)
    assert status(health, service) == NOT_SERVING


def test_liveness_does_not_wait_for_readiness(health):
    assert status(health, "liveness") == SERVING


@pytest.mark.parametrize("service", NAMES)
def test_who_watches_is_told_of_changes_only_until_it_leaves(health, service):
    call = Call(health, WATCH)
    call.ask(service)
    health.set_ready(False)
    health.set_ready(True)
    health.set_ready(True)
    assert call.told == [NOT_SERVING, SERVING]
    assert call.watched
    assert not call.ended
    call.handler.received(None)
    assert call.ended
    health.set_ready(False)
    assert call.told == [NOT_SERVING, SERVING]


def test_who_watches_liveness_is_told_once(health):
    call = Call(health, WATCH)
    call.ask("liveness")
    health.set_ready(True)
    assert call.told == [SERVING]


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_what_is_no_question_is_an_error(health, method):
    call = Call(health, method)
    call.handler.received(b"\xff")
    assert call.ended[0].name == "INVALID_ARGUMENT"
    assert not call.told


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_who_asks_nothing_is_answered_nothing(health, method):
    call = Call(health, method)
    call.handler.received(None)
    assert call.ended
    assert not call.told
