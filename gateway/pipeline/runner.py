"""Drives a plan: the earlier steps, each as soon as what it uses is there, then the one that answers.

The hot path; thin on purpose. A run is one async generator. A pipeline with up to one step before its answer
needs no task of its own; steps that run at the same time are tasks of the run, and end with it. Closing the
generator, or cancelling whoever waits for it, means that the client left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.knowledge.embedder import Places
from gateway.knowledge.retrieval import RetrievalRequest, RetrievalResult
from gateway.observe.story import CELLS_OWN, RunStory, Story
from gateway.pipeline.context import Context, Found, all_retrieved, with_outputs
from gateway.pipeline.delivery import Before, Delivery, Links
from gateway.pipeline.events import (
    NOTHING_USED,
    Chunk,
    Finished,
    RunEvent,
    RunFailed,
    Started,
    StepDone,
    StepPlacement,
    StepTiming,
)
from gateway.pipeline.farewell import Farewells
from gateway.pipeline.frontier import Frontier
from gateway.pipeline.plan import GenerationPlan, Plan, RetrievalPlan, StepPlan, prompt_estimate
from gateway.pipeline.watch import Watch
from grid.errors import DeadlineExceeded, GridError, InternalError
from grid.words import FinishReason


class Searches(Protocol):
    """What is needed of `gateway.knowledge.retrieval.Retrieval`."""

    async def search(self, request: RetrievalRequest) -> RetrievalResult: ...


class Runner:
    def __init__(self, *, placement: Places, links: Links, retrieval: Searches) -> None:
        self._placement = placement
        self._links = links
        self._retrieval = retrieval
        self._farewells = Farewells()
        self.watch = Watch()

    async def run(self, plan: Plan, story: Story | None = None) -> AsyncGenerator[list[RunEvent], None]:
        """Yield the events of one run, as `events.py` orders them; at once all that are there, at least one.

        What happens is written into `story`. Raises a GridError while the answer was not accepted yet; later
        failures are the last event.
        """
        noted = story.run(plan.model) if story is not None else RunStory()
        earlier = _Earlier(
            plan, self._placement, self._links, self._retrieval, self._farewells, self.watch, noted
        )
        delivery: Delivery | None = None
        try:
            if plan.earlier:
                await earlier.run()
            answer = plan.generation
            if answer is None:
                events = earlier.retrieved_only()
                noted.hear(events[-1])
                yield events
                return
            delivery = earlier.delivery(answer, earlier.told())
            while events := await delivery.events():
                noted.hear(events[-1])
                yield events
        except GridError as error:
            noted.fail(error)
            raise
        finally:
            if delivery is not None:
                delivery.leave()

    async def documents(self, plan: Plan) -> tuple[str, ...]:
        """Carry out the steps before the answer, and return what they offer to its prompt, best first. For
        plans that only retrieve before they answer; raises as `run` does."""
        assert not any(isinstance(step, GenerationPlan) for step in plan.earlier)
        earlier = _Earlier(
            plan, self._placement, self._links, self._retrieval, self._farewells, self.watch, RunStory()
        )
        await earlier.run()
        return earlier.told().context.texts


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one step left behind."""

    made: Found | StepDone
    placement: StepPlacement | None = None
    timing: StepTiming | None = None
    warning: str = ""
    held: frozenset[tuple[str, str]] = frozenset()
    """Documents that a generation's prompt held, by source and id."""


class _Earlier:
    """The steps before the answer, and what they made."""

    def __init__(
        self,
        plan: Plan,
        placement: Places,
        links: Links,
        retrieval: Searches,
        farewells: Farewells,
        watch: Watch,
        noted: RunStory,
    ) -> None:
        self._plan = plan
        self._farewells = farewells
        self._watch = watch
        self._noted = noted
        self._placement = placement
        self._links = links
        self._retrieval = retrieval
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + plan.time_limit_s
        self._outcomes: dict[str, _Outcome] = {}

    async def run(self) -> None:
        """Carry out all of them. The first that fails ends those that run beside it."""
        steps = {step.step_id: step for step in self._plan.earlier}
        if len(steps) == 1:
            for step in steps.values():
                await self._carry_out(step)
            return
        frontier = Frontier({step_id: step.uses for step_id, step in steps.items()})
        running: dict[asyncio.Task[None], str] = {}
        try:
            while not frontier.is_done:
                for step_id in frontier.begin():
                    running[asyncio.create_task(self._carry_out(steps[step_id]))] = step_id
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    frontier.ended(running.pop(task))
                    await task
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _carry_out(self, step: StepPlan) -> None:
        if isinstance(step, RetrievalPlan):
            self._outcomes[step.step_id] = await self._search(step)
        else:
            self._outcomes[step.step_id] = await self._write(step)

    # --- retrieval ------------------------------------------------------------------------------

    async def _search(self, step: RetrievalPlan) -> _Outcome:
        began_s = time.monotonic()
        left_s = self._deadline_s - began_s
        source_id = step.source.data_source_id
        try:
            if left_s <= 0:
                raise DeadlineExceeded("the request's time is up before its documents were found")
            result = await self._retrieval.search(self._request(step, left_s))
        except GridError as error:
            lasted_ms = (time.monotonic() - began_s) * 1000
            self._noted.step(StepTiming(step.step_id, "retrieval", lasted_ms), error)
            # The caller's own mistakes are never skipped.
            if not step.skip_on_failure or not isinstance(error, CELLS_OWN):
                raise
            warning = f"step {step.step_id!r} failed and was skipped: {error.message}"
            return _Outcome(Found(step.step_id, source_id, ()), warning=warning)
        self._noted.step(result.timing)
        return _Outcome(Found(step.step_id, source_id, result.documents), result.placement, result.timing)

    def _request(self, step: RetrievalPlan, left_s: float) -> RetrievalRequest:
        plan = self._plan
        written = [output.output.strip() for output in self._outputs(step) if output.output.strip()]
        return RetrievalRequest(
            request_id=plan.request_id,
            step_id=step.step_id,
            tenant=plan.tenant,
            source=step.source,
            query=written[-1] if written else step.query,
            top_k=step.top_k,
            filter=step.filter,
            min_score=step.min_score,
            allowed_regions=plan.allowed_regions,
            deadline_s=asyncio.get_running_loop().time() + left_s,
            noted=self._noted,
        )

    # --- generation -----------------------------------------------------------------------------

    async def _write(self, step: GenerationPlan) -> _Outcome:
        """Run a generation to its end, for the steps that use it."""
        context = Context(self._found(), step.uses)
        delivery = self.delivery(step, Before(time.monotonic(), self._deadline_s, context))
        texts: list[str] = []
        try:
            while events := await delivery.events():
                for event in events:
                    if isinstance(event, Chunk):
                        texts.append(event.text)
                    elif isinstance(event, RunFailed):
                        raise event.error
                    elif isinstance(event, Finished):
                        written = StepDone(step.step_id, "".join(texts), event.finish_reason)
                        held = context.packed(delivery.documents_used)
                        return _Outcome(written, event.placement[0], event.timing[0], held=held)
        finally:
            delivery.leave()
        raise InternalError(f"the step {step.step_id!r} ended without saying how")

    def delivery(self, step: GenerationPlan, before: Before) -> Delivery:
        """Return what carries out a generation whose prompt holds what the steps that it uses made."""
        if outputs := self._outputs(step):
            messages = with_outputs(step.messages, outputs)
            placement = step.placement._replace(prompt_tokens=prompt_estimate(messages))
            step = replace(step, messages=messages, placement=placement)
        return Delivery(
            self._plan,
            step,
            before,
            placement=self._placement,
            links=self._links,
            farewells=self._farewells,
            watch=self._watch,
            noted=self._noted,
        )

    def _outputs(self, step: StepPlan) -> list[StepDone]:
        """Return what the generation steps that `step` uses wrote, in the order of the steps."""
        if not step.uses:
            return []
        used = (self._outcomes[step_id].made for step_id in self._plan.step_ids if step_id in step.uses)
        return [made for made in used if isinstance(made, StepDone)]

    # --- all together ---------------------------------------------------------------------------

    def told(self) -> Before:
        """Return what the answer's events tell of these steps."""
        uses = self._plan.steps[-1].uses
        if not self._outcomes:
            return Before(self._started_s, self._deadline_s, Context((), uses))
        outcomes = self._in_order()
        held = frozenset[tuple[str, str]]().union(*(each.held for each in outcomes))
        return Before(
            started_s=self._started_s,
            deadline_s=self._deadline_s,
            context=Context(self._found(), uses, held),
            outputs=tuple(each.made for each in outcomes if isinstance(each.made, StepDone)),
            warnings=tuple(each.warning for each in outcomes if each.warning),
            placement=tuple(each.placement for each in outcomes if each.placement is not None),
            timing=tuple(each.timing for each in outcomes if each.timing is not None),
            usage=sum((each.timing.charged for each in outcomes if each.timing is not None), NOTHING_USED),
        )

    def retrieved_only(self) -> list[RunEvent]:
        """Return the events of a pipeline without a generation step."""
        plan, outcomes = self._plan, self._in_order()
        usage = sum((each.timing.usage for each in outcomes if each.timing is not None), NOTHING_USED)
        started = Started(
            request_id=plan.request_id,
            pipeline_id=plan.pipeline_id,
            revision=plan.revision,
            model=plan.model,
            steps=plan.step_ids,
            warnings=plan.warnings + tuple(each.warning for each in outcomes if each.warning),
            input_tokens=usage.input_tokens,
        )
        total_ms = (time.monotonic() - self._started_s) * 1000
        finished = Finished(
            finish_reason=FinishReason.STOP,
            usage=usage,
            ttft_ms=total_ms,
            total_ms=total_ms,
            timing=tuple(each.timing for each in outcomes if each.timing is not None),
            placement=tuple(each.placement for each in outcomes if each.placement is not None),
            exact=True,
        )
        return [started, *all_retrieved(self._found()), finished]

    def _in_order(self) -> list[_Outcome]:
        """Return what has ended, in the order of the steps and not of their ends."""
        return [self._outcomes[each] for each in self._plan.step_ids if each in self._outcomes]

    def _found(self) -> list[Found]:
        return [each.made for each in self._in_order() if isinstance(each.made, Found)]
