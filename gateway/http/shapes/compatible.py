"""Answers of the compatible routes, as the clients of OpenAI and Anthropic expect them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.http.shapes.shape import Shape


class ChatMessageView(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatMessageView
    logprobs: None
    finish_reason: str


class CachedTokens(Shape):
    cached_tokens: int


class ChatUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: ChatUsage


class EmbeddingView(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="text (base64 of little-endian float32) where asked for")


class EmbeddingsUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Shape):
    object: Literal["list"]
    data: list[EmbeddingView]
    model: str
    usage: EmbeddingsUsage


class ModelView(Shape):
    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str = Field(description="of a release that nobody told the grid of: the beginning of 1970")
    owned_by: str
    task: Literal["generate", "embed"]
    alias_of: str | None
    context_tokens: int
    simulated: bool
    units: int = Field(description="ready units that serve it now")


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelView]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class TextBlock(Shape):
    type: Literal["text"]
    text: str


class MessageUsage(Shape):
    input_tokens: int
    output_tokens: int


class MessageAnswer(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int
