"""The span of a generation step, in OpenTelemetry's names for GenAI."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import orjson

from gateway.pipeline.plan import GenerationPlan, Plan
from gateway.tracing import PROVIDER, current
from grid.tracing.spans import Attribute, Attributes, Kind, Span
from grid.tracing.tracer import Branch
from grid.words import Decision, Message, Sampling, Usage

MAX_CONTENT_CHARS = 16 * 1024
"""Of a prompt or an answer that a trace shows: collectors cut or refuse far larger attributes."""


KEPT_SHARED = 1024
"""Pipelines in use, with the units that ran them."""


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
        generation, usage, decision = self._generation, end.usage, end.decision
        shared = Shared(
            generation.placement.model,
            generation.sampling,
            self._plan.tenant.tenant_id,
            generation.step_id,
            self._plan.pipeline_id,
            decision.model if decision is not None else "",
            decision.chosen.unit_id if decision is not None else "",
            end.finish_reason,
            end.error,
        )
        own: Attributes = (
            ("gen_ai.response.id", self._plan.request_id),
            ("gen_ai.usage.input_tokens", usage.input_tokens),
            ("gen_ai.usage.output_tokens", usage.output_tokens),
        )
        if end.finish_reason:
            own += (("zerogrid.ttft_ms", end.ttft_ms),)
        if self._branch.tracer.content:
            own += _content(generation.messages, end.output)
        name = f"chat {shared.model}"
        return [
            self._branch.span(
                name, began_s, ended_s, attributes_of(shared), own=own, kind=Kind.CLIENT, error=end.error
            )
        ]


class Shared(NamedTuple):
    """What many generations have in common."""

    model: str
    sampling: Sampling
    tenant_id: str
    step_id: str
    pipeline_id: str
    placed_model: str
    """"" where nothing was placed, as `unit_id`."""
    unit_id: str
    finish_reason: str
    error: str


@lru_cache(maxsize=KEPT_SHARED)
def attributes_of(shared: Shared) -> Attributes:
    sampling = shared.sampling
    attributes: list[Attribute] = [
        PROVIDER,
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.request.model", shared.model),
        ("gen_ai.request.max_tokens", sampling.max_output_tokens),
        ("gen_ai.request.temperature", sampling.temperature),
        ("gen_ai.request.top_p", sampling.top_p),
        ("zerogrid.tenant", shared.tenant_id),
        ("zerogrid.step", shared.step_id),
    ]
    if sampling.seed is not None:
        attributes.append(("gen_ai.request.seed", sampling.seed))
    if shared.pipeline_id:
        attributes.append(("zerogrid.pipeline", shared.pipeline_id))
    if shared.unit_id:
        attributes.append(("gen_ai.response.model", shared.placed_model))
        attributes.append(("zerogrid.unit", shared.unit_id))
    if shared.finish_reason:
        attributes.append(("gen_ai.response.finish_reasons", (shared.finish_reason,)))
    if shared.error:
        attributes.append(("error.type", shared.error))
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
