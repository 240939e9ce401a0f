"""The bodies of Anthropic's Messages API: what is honoured, what changes nothing, what is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from gateway.http.honoured import PARTED_SCHEMA, Neutral, PartedText, joined_text, refuse_unhonoured
from gateway.pipeline.contract import (
    MAX_OUTPUT_TOKENS,
    MAX_SAMPLING_TOP_K,
    MAX_STOPS,
    Name,
    Part,
    Stop,
    SystemPrompt,
)
from gateway.pipeline.invocation import MAX_MESSAGES, ChatMessage
from grid.errors import InvalidRequest

MAX_TEMPERATURE = 1.0
"""That API's own bound."""
NEUTRAL: Neutral = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "speed": ("standard",),
}
SAMPLING = {
    "max_tokens": "max_output_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}
"""Fields of a request by their name here, and in a generation step."""


class MessageTurn(Part):
    role: Literal["system", "user", "assistant"]
    """Where a system turn may stand, and whether more than one may, is for the model's template to say."""
    content: PartedText


class Conversation(Part):
    """What a message and a count have in common."""

    model: Name
    """A model of the cell, one of its aliases, or a pipeline's id."""
    messages: tuple[MessageTurn, ...] = Field(
        min_length=1, max_length=MAX_MESSAGES, strict=False, fail_fast=True
    )
    system: Annotated[SystemPrompt, BeforeValidator(joined_text), WithJsonSchema(PARTED_SCHEMA)] = ""

    # Change nothing about an answer.
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None

    # Refused, unless they ask for nothing.
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_config: Any = None
    output_format: Any = None
    speed: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for what the grid can't honour; `param` names the field."""
        refuse_unhonoured(self, NEUTRAL)
        if self.messages[-1].role != "user":
            raise InvalidRequest(
                "messages: the last message must be the user's; this cell's models can't go on with words "
                "that were put into the assistant's mouth",
                param="messages",
            )

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """The grid's own turns; neighbours of one role are one turn, as in that API."""
        turns: list[ChatMessage] = []
        if self.system:
            turns.append(ChatMessage(role="system", content=self.system))
        for turn in self.messages:
            if turns and turns[-1].role == turn.role:
                content = f"{turns.pop().content}\n\n{turn.content}"
            else:
                content = turn.content
            turns.append(ChatMessage(role=turn.role, content=content))
        return tuple(turns)


class MessagesRequest(Conversation):
    max_tokens: int = Field(ge=1, le=MAX_OUTPUT_TOKENS)
    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, le=MAX_SAMPLING_TOP_K)
    stop_sequences: tuple[Stop, ...] | None = Field(None, max_length=MAX_STOPS, strict=False, fail_fast=True)
    stream: bool | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The generation step's fields that the caller sets itself."""
        given = {name: getattr(self, name) for name in SAMPLING}
        return {SAMPLING[name]: value for name, value in given.items() if value is not None}


class CountRequest(Conversation):
    """The body of `count_tokens`."""
