"""Drives a plan: retrieval steps in order, then the generation. The hot path; thin on purpose.

A run is one async generator and no task of its own. Closing it, or cancelling whoever waits for it, means
that the client left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from gateway.knowledge.embedder import Places
from gateway.knowledge.retrieval import RetrievalRequest, RetrievalResult
from gateway.pipeline.context import Context, Found, all_retrieved
from gateway.pipeline.delivery import Before, Delivery, Links
from gateway.pipeline.events import Finished, RunEvent, Started, StepPlacement, StepTiming
from gateway.pipeline.plan import Plan, RetrievalPlan
from grid.errors import DeadlineExceeded, GridError, InternalError, Interrupted, Rejected
from grid.words import FinishReason, Usage

SKIPPED = (Rejected, Interrupted, InternalError)
"""Failures of the cell, which `on_failure: skip` passes over; the caller's own mistakes are never skipped."""


class Searches(Protocol):
    """What is needed of `gateway.knowledge.retrieval.Retrieval`."""

    async def search(self, request: RetrievalRequest) -> RetrievalResult: ...


class Runner:
    def __init__(self, *, placement: Places, links: Links, retrieval: Searches) -> None:
        self._placement = placement
        self._links = links
        self._retrieval = retrieval

    async def run(self, plan: Plan) -> AsyncGenerator[list[RunEvent], None]:
        """Yield the events of one run, as `events.py` orders them; at once all that are there, at least one.

        Raises a GridError while nothing was accepted yet; later failures are the last event.
        """
        started_s = time.monotonic()
        deadline_s = started_s + plan.time_limit_s
        search = _Search(plan, self._retrieval, deadline_s)
        if plan.retrievals:
            await search.run()
        if plan.generation is None:
            yield _retrieved_only(plan, search, started_s)
            return
        before = Before(
            started_s=started_s,
            deadline_s=deadline_s,
            context=Context(search.found, plan.generation.uses),
            warnings=tuple(search.warnings),
            placement=tuple(search.placement),
            timing=tuple(search.timing),
            usage=search.usage,
        )
        delivery = Delivery(plan, plan.generation, before, placement=self._placement, links=self._links)
        try:
            while events := await delivery.events():
                yield events
        finally:
            delivery.leave()


class _Search:
    """The retrieval steps of one run, and what they found."""

    def __init__(self, plan: Plan, retrieval: Searches, deadline_s: float) -> None:
        self.found: list[Found] = []
        self.warnings: list[str] = []
        self.placement: list[StepPlacement] = []
        self.timing: list[StepTiming] = []
        self.usage = Usage()
        self._plan = plan
        self._retrieval = retrieval
        self._deadline_s = deadline_s

    async def run(self) -> None:
        for step in self._plan.retrievals:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the request's time is up before its documents were found")
            try:
                result = await self._retrieval.search(self._request(step, left_s))
            except SKIPPED as error:
                if not step.skip_on_failure:
                    raise
                self._skip(step, error)
            else:
                self._take(step, result)

    def _request(self, step: RetrievalPlan, left_s: float) -> RetrievalRequest:
        plan = self._plan
        return RetrievalRequest(
            request_id=plan.request_id,
            step_id=step.step_id,
            tenant=plan.tenant,
            source=step.source,
            query=step.query,
            top_k=step.top_k,
            filter=step.filter,
            min_score=step.min_score,
            allowed_regions=plan.allowed_regions,
            deadline_s=asyncio.get_running_loop().time() + left_s,
        )

    def _take(self, step: RetrievalPlan, result: RetrievalResult) -> None:
        self.found.append(Found(step.step_id, step.source.data_source_id, result.documents))
        self.placement.append(result.placement)
        self.timing.append(result.timing)
        self.usage = self.usage + result.usage

    def _skip(self, step: RetrievalPlan, error: GridError) -> None:
        self.found.append(Found(step.step_id, step.source.data_source_id, ()))
        self.warnings.append(f"step {step.step_id!r} failed and was skipped: {error.message}")


def _retrieved_only(plan: Plan, search: _Search, started_s: float) -> list[RunEvent]:
    """Return the events of a pipeline without a generation step."""
    started = Started(
        request_id=plan.request_id,
        pipeline_id=plan.pipeline_id,
        revision=plan.revision,
        model=plan.model,
        steps=plan.steps,
        warnings=plan.warnings + tuple(search.warnings),
        input_tokens=search.usage.input_tokens,
        cached_tokens=search.usage.cached_tokens,
    )
    total_ms = (time.monotonic() - started_s) * 1000
    finished = Finished(
        finish_reason=FinishReason.STOP,
        usage=search.usage,
        ttft_ms=total_ms,
        total_ms=total_ms,
        timing=tuple(search.timing),
        placement=tuple(search.placement),
        exact=True,
    )
    return [started, *all_retrieved(search.found), finished]
