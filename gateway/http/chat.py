"""The body of an OpenAI chat completion: what is honoured, what changes nothing, what is refused by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gateway.http.honoured import Neutral, PartedText, refuse_unhonoured
from gateway.pipeline.contract import (
    MAX_OUTPUT_TOKENS,
    MAX_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    Name,
    Part,
    Stops,
)
from gateway.pipeline.invocation import MAX_MESSAGES, ChatMessage
from gateway.pipeline.refusals import misfit
from grid.errors import InvalidRequest

SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop")
"""Named here as in a generation step."""
NEUTRAL: Neutral = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that the grid can't honour, with the values that ask for nothing beyond what it does anyway."""
NEUTRAL_IN_TURNS: Neutral = {
    "name": ("",),
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
"""The same for a message; an assistant's turn is often sent back just as it was received."""


TOOL_ROLES = ("tool", "function")


class ChatTurn(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: PartedText
    name: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") in TOOL_ROLES:
            raise misfit(
                ("role",),
                "this cell's models call no tools yet, so no message holds what one answered; leave it out",
            )
        return data

    @property
    def message(self) -> ChatMessage:
        """The grid's own turn; a developer speaks as the system."""
        return ChatMessage.model_validate(
            {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        )


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Pads events for clients that fear traffic analysis; changes no text."""


class ChatRequest(Part):
    model: Name
    """A model of the cell, one of its aliases, or a pipeline's id."""
    messages: tuple[ChatTurn, ...] = Field(
        min_length=1, max_length=MAX_MESSAGES, strict=False, fail_fast=True
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    max_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Change nothing about an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None

    # Refused, unless they ask for nothing.
    n: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The generation step's fields that the caller sets itself."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        longest = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return given if longest is None else {**given, "max_output_tokens": longest}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raise InvalidRequest for what the grid can't honour; `param` names the field."""
        refuse_unhonoured(self, NEUTRAL)
        for position, turn in enumerate(self.messages):
            refuse_unhonoured(turn, NEUTRAL_IN_TURNS, f"messages[{position}].")
        if self.messages[-1].role != "user":
            raise InvalidRequest(
                f"messages: the last message must be the user's, not the {self.messages[-1].role}'s",
                param="messages",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed with `stream: true`", param="stream_options")
