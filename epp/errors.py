"""What the picker answers itself instead of routing: one error, one code table.

The code names and the text form `inference error: <Code> - <message>` are llm-d's, so clients and dashboards that
match on them keep working; the body around the text is the OpenAI error object that SDKs can read.
"""

from __future__ import annotations

from enum import Enum

import msgspec

DROPPED_REASON_HEADER = "x-llm-d-request-dropped-reason"


class Code(Enum):
    """llm-d's error codes; the value is the HTTP status."""

    BadRequest = 400
    Unauthorized = 401
    Forbidden = 403
    NotFound = 404
    PreconditionFailed = 412
    PayloadTooLarge = 413
    ResourceExhausted = 429
    Internal = 500
    ServiceUnavailable = 503


class Refusal(Exception):
    """The request is answered by the picker: status, message and, where the request was dropped, why."""

    def __init__(self, code: Code, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason

    @property
    def status(self) -> int:
        return self.code.value

    @property
    def headers(self) -> list[tuple[str, str]]:
        headers = [("content-type", "application/json")]
        if self.reason:
            headers.append((DROPPED_REASON_HEADER, self.reason))
        return headers

    @property
    def body(self) -> bytes:
        text = f"inference error: {self.code.name} - {self.message}"
        return msgspec.json.encode(
            {"error": {"message": text, "type": self.code.name, "param": None, "code": self.status}}
        )


def bad_request(message: str) -> Refusal:
    return Refusal(Code.BadRequest, message)


def no_endpoints() -> Refusal:
    return Refusal(
        Code.ServiceUnavailable,
        "failed to find endpoint candidates for serving the request",
        reason="rejected-no-endpoints",
    )
