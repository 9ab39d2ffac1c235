"""What a client gets that the picker answers itself: llm-d's codes and text, in an object that SDKs can read."""

from __future__ import annotations

import json

import pytest

from epp.errors import DROPPED_REASON_HEADER, Code, Refusal, bad_request, no_endpoints

STATUSES = {
    "BadRequest": 400,
    "Unauthorized": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "PreconditionFailed": 412,
    "PayloadTooLarge": 413,
    "ResourceExhausted": 429,
    "Internal": 500,
    "ServiceUnavailable": 503,
}


def test_every_code_has_its_status() -> None:
    assert {code.name: code.value for code in Code} == STATUSES


@pytest.mark.parametrize("code", Code)
def test_the_body_is_an_openai_error_with_llm_d_s_text(code: Code) -> None:
    refusal = Refusal(code, 'say "please"\n')
    assert refusal.status == code.value
    assert json.loads(refusal.body) == {
        "error": {
            "message": f'inference error: {code.name} - say "please"\n',
            "type": code.name,
            "param": None,
            "code": code.value,
        }
    }


def test_the_reason_of_a_drop_is_a_header() -> None:
    refusal = no_endpoints()
    assert refusal.status == 503
    assert dict(refusal.headers) == {
        "content-type": "application/json",
        DROPPED_REASON_HEADER: "rejected-no-endpoints",
    }


def test_without_a_reason_there_is_no_such_header() -> None:
    assert bad_request("model: missing").headers == [("content-type", "application/json")]


def test_a_refusal_can_be_raised_and_read() -> None:
    with pytest.raises(Refusal, match="model: missing"):
        raise bad_request("model: missing")
