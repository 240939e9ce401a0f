"""What a plan would do, asked of placement step by step: nothing is run, reserved or charged.

Placement answers with the decision that live traffic would get at this moment, and lists every other unit. A
step that no unit can take is part of the answer, not an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.knowledge.embedder import EmbedOrder, embed_request
from gateway.pipeline.plan import GenerationPlan, Plan, RetrievalPlan, StepPlan, prompt_estimate
from gateway.pipeline.prefix import prompt_prefix, system_prefix
from grid.config import Config
from grid.errors import GridError, NoEligibleUnit, Saturated
from grid.words import Candidate, Decision, PlacementRequest, Rejection

ASK_TIMEOUT_S = 5.0
"""Placement answers within milliseconds, and is back from a restart within this."""
EXPECTED_DOCUMENT_TOKENS = 128
"""Of one retrieved document, before any was looked for: half of what small embedding models read at once."""
EXPECTED_OUTPUT_TOKENS = 256
"""Of an earlier step's answer on its way into a prompt, as placement expects it of any answer."""


class Asks(Protocol):
    """What is needed of `placement.client.PlacementClient`."""

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision: ...


@dataclass(frozen=True, slots=True)
class StepForecast:
    step: StepPlan
    request: PlacementRequest
    """What placement was asked; its prompt includes what other steps are expected to add."""
    decision: Decision | None
    """None: no unit can take the step now."""
    refusal: GridError | None
    rejections: tuple[Rejection, ...]
    rejected_by_code: tuple[tuple[str, int], ...]
    begins_ms: float
    """When all that it uses has ended, since the start of the run."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The chosen unit, then the next best; placement bounds the list."""
        return () if self.decision is None else (self.decision.chosen, *self.decision.next_best)

    @property
    def ends_ms(self) -> float:
        """A search in a vector store takes no time here: nobody can foretell it."""
        return self.begins_ms + (self.decision.chosen.total_ms if self.decision is not None else 0.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    plan: Plan
    steps: tuple[StepForecast, ...]

    @property
    def runnable(self) -> bool:
        """Whether every step would find a unit now."""
        return all(step.decision is not None for step in self.steps)

    @property
    def ttft_ms(self) -> float:
        """Of the step that answers; a pipeline that only retrieves answers with its end."""
        last = self.steps[-1]
        if last.decision is None or self.plan.generation is None:
            return self.total_ms
        return self._answer_begins_ms + last.decision.chosen.ttft_ms

    @property
    def total_ms(self) -> float:
        last = self.steps[-1]
        if last.decision is None or self.plan.generation is None:
            return max(step.ends_ms for step in self.steps)
        return self._answer_begins_ms + last.decision.chosen.total_ms

    @property
    def _answer_begins_ms(self) -> float:
        return max((step.ends_ms for step in self.steps[:-1]), default=0.0)

    @property
    def cu_seconds(self) -> float:
        return sum(step.decision.chosen.cu_seconds for step in self.steps if step.decision is not None)


async def forecast(plan: Plan, placement: Asks) -> Forecast:
    """Ask placement about every step. Raises GridError where it can't be asked."""
    requests = requests_of(plan)
    answers = await asyncio.gather(*(_ask(placement, request) for request in requests))
    steps: list[StepForecast] = []
    ends_ms: dict[str, float] = {}
    for step, request, answer in zip(plan.steps, requests, answers, strict=True):
        begins_ms = max((ends_ms[used] for used in step.uses), default=0.0)
        steps.append(_told(step, request, answer, begins_ms))
        ends_ms[step.step_id] = steps[-1].ends_ms
    return Forecast(plan, tuple(steps))


def doubts(forecast: Forecast, config: Config) -> list[str]:
    """Return a warning for each prompt that seems too long. Only a unit counts tokens, so an estimate refuses
    nothing."""
    contexts = {model.name: model.context_tokens for model in config.models}
    warnings = []
    for told in forecast.steps:
        if told.decision is None or not isinstance(told.step, GenerationPlan):
            continue
        room = contexts.get(told.decision.model, 0) - told.request.max_output_tokens
        prompt = prompt_estimate(told.step.messages)
        if prompt > room > 0:
            warnings.append(
                f"step {told.step.step_id!r}: the prompt has about {prompt} tokens, and "
                f"{told.decision.model} has room for {room} beside max_output_tokens; a call is refused "
                "(context_overflow) if the unit counts as many"
            )
    return warnings


def requests_of(plan: Plan) -> list[PlacementRequest]:
    """Return what placement is asked for each step: as for a live run, without a reservation. Pure."""
    added: dict[str, int] = {}
    requests: list[PlacementRequest] = []
    for step in plan.steps:
        if isinstance(step, RetrievalPlan):
            request = _embedding(plan, step)
            added[step.step_id] = step.top_k * EXPECTED_DOCUMENT_TOKENS
        else:
            others = sum(added[used] for used in step.uses)
            request = _generation(plan, step, others)
            added[step.step_id] = min(step.sampling.max_output_tokens, EXPECTED_OUTPUT_TOKENS)
        requests.append(request._replace(dry_run=True, explain=True))
    return requests


def _embedding(plan: Plan, step: RetrievalPlan) -> PlacementRequest:
    order = EmbedOrder(
        tenant_id=plan.tenant.tenant_id,
        request_id=plan.request_id,
        step_id=step.step_id,
        model=step.source.embedding_model,
        texts=(step.query,),
        allowed_regions=plan.allowed_regions,
        deadline_s=plan.time_limit_s,
    )
    return embed_request(order, 1, (), plan.time_limit_s)


def _generation(plan: Plan, step: GenerationPlan, others: int) -> PlacementRequest:
    asked, salt = step.placement, plan.tenant.salt
    prefix = system_prefix(salt, step.messages) if step.uses else prompt_prefix(salt, step.messages, ())
    return asked._replace(
        prompt_tokens=asked.prompt_tokens + others,
        deadline_ms=plan.time_limit_s * 1000,
        prefix=prefix.hashes,
    )


async def _ask(placement: Asks, request: PlacementRequest) -> Decision | GridError:
    try:
        return await placement.place(request, ASK_TIMEOUT_S)
    except (NoEligibleUnit, Saturated) as refusal:
        if "rejections" not in refusal.details:
            raise  # not a decision: nobody could be asked
        return refusal


def _told(
    step: StepPlan, request: PlacementRequest, answer: Decision | GridError, begins_ms: float
) -> StepForecast:
    if isinstance(answer, Decision):
        return StepForecast(
            step, request, answer, None, answer.rejections, answer.rejected_by_code, begins_ms
        )
    listed: Sequence[Sequence[Any]] = answer.details["rejections"]
    counts: dict[str, int] = answer.details["rejected_by_code"]
    rejections = tuple(Rejection(*each) for each in listed)
    return StepForecast(step, request, None, answer, rejections, tuple(counts.items()), begins_ms)
