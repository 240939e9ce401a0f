"""The span of a generation step, in OpenTelemetry's names for GenAI."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from gateway.pipeline.plan import GenerationPlan, Plan
from gateway.tracing import PROVIDER, current
from grid.tracing.spans import Attribute, Attributes, Kind, Span
from grid.tracing.tracer import Branch
from grid.words import Decision, Message, Usage

MAX_CONTENT_CHARS = 16 * 1024
"""Of a prompt or an answer that a trace shows: collectors cut or refuse far larger attributes."""


class GenerationEnd(NamedTuple):
    decision: Decision | None
    """Of the last attempt; None where nothing was placed."""
    usage: Usage
    finish_reason: str
    """"" where the generation did not finish."""
    ttft_ms: float
    error: str
    """An error's code; "" where there was none."""
    output: str


class GenerationSpan:
    """The open span of one generation step."""

    __slots__ = ("_branch", "_generation", "_plan", "child", "traceparent")

    def __init__(self, branch: Branch, plan: Plan, generation: GenerationPlan) -> None:
        self.traceparent = branch.traceparent
        self.child = branch.child
        self._branch = branch
        self._plan = plan
        self._generation = generation

    def end(self, began_s: float, ended_s: float, end: GenerationEnd) -> None:
        self._branch.tracer.later(self._spans, began_s, ended_s, end)

    def _spans(self, began_s: float, ended_s: float, end: GenerationEnd) -> list[Span]:
        attributes = self._attributes(end)
        if self._branch.tracer.content:
            attributes += _content(self._generation.messages, end.output)
        name = f"chat {self._generation.placement.model}"
        return [self._branch.span(name, began_s, ended_s, attributes, kind=Kind.CLIENT, error=end.error)]

    def _attributes(self, end: GenerationEnd) -> Attributes:
        generation, sampling = self._generation, self._generation.sampling
        attributes: list[Attribute] = [
            PROVIDER,
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.request.model", generation.placement.model),
            ("gen_ai.request.max_tokens", sampling.max_output_tokens),
            ("gen_ai.request.temperature", sampling.temperature),
            ("gen_ai.request.top_p", sampling.top_p),
            ("gen_ai.response.id", self._plan.request_id),
            ("gen_ai.usage.input_tokens", end.usage.input_tokens),
            ("gen_ai.usage.output_tokens", end.usage.output_tokens),
            ("zerogrid.tenant", self._plan.tenant.tenant_id),
            ("zerogrid.step", generation.step_id),
        ]
        if sampling.seed is not None:
            attributes.append(("gen_ai.request.seed", sampling.seed))
        if self._plan.pipeline_id:
            attributes.append(("zerogrid.pipeline", self._plan.pipeline_id))
        if end.decision is not None:
            attributes.append(("gen_ai.response.model", end.decision.model))
            attributes.append(("zerogrid.unit", end.decision.chosen.unit_id))
        if end.finish_reason:
            attributes.append(("gen_ai.response.finish_reasons", (end.finish_reason,)))
            attributes.append(("zerogrid.ttft_ms", end.ttft_ms))
        if end.error:
            attributes.append(("error.type", end.error))
        return tuple(attributes)


def generation_span(plan: Plan, generation: GenerationPlan) -> GenerationSpan | None:
    """Return the span of a step that begins, under what runs it; None where nothing is traced."""
    above = current()
    return None if above is None else GenerationSpan(above.child(), plan, generation)


def _content(messages: tuple[Message, ...], output: str) -> Attributes:
    """Return prompt and answer, each cut to MAX_CONTENT_CHARS."""
    said = [(message.role, message.text) for message in messages]
    return (
        ("gen_ai.input.messages", _messages(said)),
        ("gen_ai.output.messages", _messages([("assistant", output)])),
    )


def _messages(said: list[tuple[str, str]]) -> str:
    left = MAX_CONTENT_CHARS
    rows = []
    for role, text in said:
        rows.append({"role": role, "parts": [{"type": "text", "content": text[:left]}]})
        left -= min(len(text), left)
    return orjson.dumps(rows).decode()
