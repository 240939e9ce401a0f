"""The table of errors, the envelopes, and what is logged of a bug."""

import logging

import pytest

from gateway.http.errors import (
    TABLE,
    MethodNotAllowed,
    RequestTimeout,
    envelope,
    error_headers,
    openai_envelope,
    status_of,
    unexpected,
)
from gateway.http.shapes.errors import ErrorEnvelope, OpenAIErrorEnvelope
from grid.errors import (
    ERRORS,
    ContextOverflow,
    DeadlineExceeded,
    Forbidden,
    GridError,
    IdempotencyReused,
    NoEligibleUnit,
    NotFound,
    Saturated,
    TooLarge,
    Unauthorised,
    UnitLost,
)

STATUSES = {
    "invalid_request": 400,
    "context_overflow": 400,
    "not_found": 404,
    "request_too_large": 413,
    "unauthorised": 401,
    "forbidden": 403,
    "conflict": 409,
    "idempotency_key_reused": 422,
    "rejected": 503,
    "no_eligible_unit": 503,
    "saturated": 429,
    "overloaded": 503,
    "interrupted": 503,
    "unit_lost": 503,
    "deadline_exceeded": 504,
    "cancelled": 499,
    "internal_error": 500,
}


def test_every_error_of_the_tree_has_its_status() -> None:
    assert {code: status_of(kind("x"))[0] for code, kind in ERRORS.items()} == STATUSES


def test_a_new_kind_takes_the_status_of_its_nearest_base() -> None:
    class NewRefusal(Saturated):
        code = "new_refusal"

    assert status_of(NewRefusal("x")) == TABLE[Saturated]


def test_a_late_body_is_the_callers_and_may_come_again() -> None:
    error = RequestTimeout("late", param="body")
    assert status_of(error)[0] == 408
    assert envelope(error, "req_1")["error"]["code"] == "request_timeout"
    assert error.retryable
    assert dict(error_headers(error))[b"connection"] == b"close"


def test_details_stand_by_themselves_and_hide_no_field() -> None:
    error = ContextOverflow("too long", param="input", prompt_tokens=9, type="x", retryable=True)
    shown = envelope(error, "req_1")
    assert shown["error"]["details"]["prompt_tokens"] == 9
    assert shown["error"]["type"] == "invalid_request_error"
    assert shown["error"]["retryable"] is False
    assert shown["request_id"] == "req_1"
    ErrorEnvelope.model_validate(shown)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFound("x", param="model"), ("invalid_request_error", "model", "model_not_found")),
        (NotFound("x", param="pipeline_id"), ("invalid_request_error", "pipeline_id", "not_found")),
        (Unauthorised("x"), ("authentication_error", None, "unauthorised")),
        (Saturated("x"), ("rate_limit_error", None, "saturated")),
        (Forbidden("x"), ("permission_error", None, "forbidden")),
    ],
)
def test_openai_clients_find_the_fields_that_they_read(
    error: GridError, expected: tuple[str, str | None, str]
) -> None:
    shown = openai_envelope(error, "req_1")
    OpenAIErrorEnvelope.model_validate(shown)
    assert (shown["error"]["type"], shown["error"]["param"], shown["error"]["code"]) == expected


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Saturated("x"), b"1"),
        (Saturated("x", retry_after_s=0.2), b"1"),
        (Saturated("x", retry_after_s=2.1), b"3"),
        (NoEligibleUnit("x", retry_after_s=5), b"5"),
    ],
)
def test_retry_after_is_in_whole_seconds_and_never_zero(error: GridError, seconds: bytes) -> None:
    assert dict(error_headers(error))[b"retry-after"] == seconds


@pytest.mark.parametrize("error", [NoEligibleUnit("x"), UnitLost("x"), DeadlineExceeded("x"), NotFound("x")])
def test_no_retry_after_where_nobody_can_say_when(error: GridError) -> None:
    assert b"retry-after" not in dict(error_headers(error))


def test_headers_that_belong_to_single_errors() -> None:
    assert dict(error_headers(Unauthorised("x")))[b"www-authenticate"] == b"Bearer"
    assert dict(error_headers(TooLarge("x", body_bytes=10**9)))[b"connection"] == b"close"
    assert error_headers(TooLarge("x", body_bytes=10**7)) == []
    assert dict(error_headers(MethodNotAllowed("x", allowed=["GET", "POST"])))[b"allow"] == b"GET, POST"
    assert error_headers(IdempotencyReused("x")) == []


def test_a_bug_is_logged_by_its_place_and_never_by_its_words(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("the prompt was: my secret")

    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="secret") as raised:
        fails()
    told = unexpected(raised.value, "req_7")
    assert "req_7" in caplog.text
    assert "ValueError" in caplog.text
    assert "in fails" in caplog.text
    assert "my secret" not in caplog.text.replace('raise ValueError("the prompt was: my secret")', "")
    assert "secret" not in told.message
