"""The envelope of errors, in the words of each ecosystem."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.http.shapes.shape import Shape


class ErrorBody(Shape):
    type: str
    code: str
    message: str
    param: str | None
    retryable: bool
    details: dict[str, Any] = Field(description="counts and reasons, such as `prompt_tokens`")


class ErrorEnvelope(Shape):
    """Every error of the grid's own routes."""

    error: ErrorBody
    request_id: str


class OpenAIError(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorEnvelope(Shape):
    """Errors of the OpenAI-compatible routes; the request id is in the `x-request-id` header."""

    error: OpenAIError


class AnthropicError(Shape):
    type: str
    message: str


class AnthropicErrorEnvelope(Shape):
    """Errors of the Anthropic-compatible routes."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str
