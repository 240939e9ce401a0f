"""Runs of several steps with scripted parts: what begins when, what prompts hold, how a failure ends all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.scripted import (
    ANSWER,
    DOCUMENTS,
    GENERATE,
    Links,
    Placing,
    Searching,
    planned,
    run,
    until,
)

from gateway.knowledge.retrieval import RetrievalRequest, RetrievalResult
from gateway.pipeline import farewell
from gateway.pipeline.context import Context, Found, with_outputs
from gateway.pipeline.events import Finished, Retrieved, RunFailed, Started, StepDone
from gateway.pipeline.runner import Runner
from grid.errors import DeadlineExceeded, InvalidRequest, UnitLost
from grid.wire.messages import Cancel, Failed, Submit, Tokens, WireMessage
from grid.words import Message, Usage


def retrieval(step_id: str, *uses: str) -> str:
    used = ", ".join(f'"{each}"' for each in uses)
    return f'{{"type": "retrieval", "source": "kb", "id": "{step_id}", "uses": [{used}]}}'


def writing(step_id: str, *uses: str) -> str:
    used = ", ".join(f'"{each}"' for each in uses)
    return (
        f'{{"type": "generation", "model": "m", "max_output_tokens": 4, "id": "{step_id}", "uses": [{used}]}}'
    )


LATE: list[WireMessage] = [Failed(1, 1, "deadline_exceeded", "the request's deadline passed")]
"""An end that no other unit can help."""


def said(text: str) -> list[Any]:
    return [ANSWER[0], Tokens(1, 1, 0, (1, 2), text), ANSWER[2]]


class HeldSearches(Searching):
    """Searches that end when they are let; the order of their beginnings and ends is kept."""

    def __init__(self, *steps: str) -> None:
        super().__init__(*[DOCUMENTS[:1]] * len(steps))
        self.may_end = {step: asyncio.Event() for step in steps}
        self.story: list[str] = []

    async def search(self, request: RetrievalRequest) -> RetrievalResult:
        self.story.append(f"begin {request.step_id}")
        try:
            await self.may_end[request.step_id].wait()
        except asyncio.CancelledError:
            self.story.append(f"cancel {request.step_id}")
            raise
        self.story.append(f"end {request.step_id}")
        return await super().search(request)


async def test_steps_that_do_not_use_each_other_run_at_the_same_time() -> None:
    searches = HeldSearches("a", "b", "after-a", "after-both")
    steps = (retrieval("a"), retrieval("b"), retrieval("after-a", "a"), retrieval("after-both", "a", "b"))
    runner = Runner(placement=Placing(), links=Links(), retrieval=searches)
    task = asyncio.create_task(anext(runner.run(planned(*steps))))
    await until(lambda: len(searches.story) == 2)
    assert searches.story == ["begin a", "begin b"]
    searches.may_end["a"].set()
    await until(lambda: "begin after-a" in searches.story)
    assert "begin after-both" not in searches.story
    for each in ("after-a", "b", "after-both"):
        searches.may_end[each].set()
    started, *events = await task
    assert isinstance(started, Started)
    assert [event.step_id for event in events if isinstance(event, Retrieved)] == [
        "a",
        "b",
        "after-a",
        "after-both",
    ], "told in the order of the contract, not of their ends"
    assert searches.story.index("end b") < searches.story.index("begin after-both")


async def test_the_first_failure_ends_what_runs_beside_it() -> None:
    class OneFails(HeldSearches):
        async def search(self, request: RetrievalRequest) -> RetrievalResult:
            if request.step_id == "bad":
                await until(lambda: "begin slow" in self.story)
                raise UnitLost("gone")
            return await super().search(request)

    searches = OneFails("slow", "bad")
    runner = Runner(placement=Placing(), links=Links(), retrieval=searches)
    with pytest.raises(UnitLost):
        await anext(runner.run(planned(retrieval("slow"), retrieval("bad"), GENERATE)))
    assert searches.story == ["begin slow", "cancel slow"]


async def test_a_client_that_leaves_ends_every_step() -> None:
    searches = HeldSearches("a", "b")
    runner = Runner(placement=Placing(), links=Links(), retrieval=searches)
    task = asyncio.create_task(anext(runner.run(planned(retrieval("a"), retrieval("b"), GENERATE))))
    await until(lambda: len(searches.story) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(searches.story[2:]) == ["cancel a", "cancel b"]


async def test_what_an_earlier_step_wrote_is_part_of_the_prompt() -> None:
    placing, links = Placing(), Links([said("a draft")], [said("the answer")])
    events = await run(planned(writing("draft"), writing("final", "draft")), placing, links)
    assert [type(event).__name__ for event in events] == ["Started", "StepDone", "Chunk", "Finished"]
    assert events[1] == StepDone("draft", "a draft", "length")
    first, second = (stream.sent[0] for stream in links.streams)
    assert isinstance(first, Submit)
    assert isinstance(second, Submit)
    assert first.messages == (Message("user", "How?"),)
    assert second.messages == (
        Message("system", "Output of draft:\n\na draft"),
        Message("user", "How?"),
    )
    assert placing.asked[1].prompt_tokens > placing.asked[0].prompt_tokens
    assert [outcome for _, outcome, _ in placing.settled] == ["done", "done"]
    assert len({reservation for reservation, _, _ in placing.settled}) == 2
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage == Usage(14, 0, 4, 1.0), "tokens and work of both"
    assert [timing.step_id for timing in finished.timing] == ["draft", "final"]


async def test_a_search_asks_with_what_a_step_wrote() -> None:
    searches = Searching(DOCUMENTS, DOCUMENTS)
    runner = Runner(
        placement=Placing(), links=Links([said(" better words ")], [said("x")]), retrieval=searches
    )
    steps = (writing("rewrite"), retrieval("find", "rewrite"), retrieval("plain"), writing("final", "find"))
    async for _ in runner.run(planned(*steps)):
        pass
    assert {request.step_id: request.query for request in searches.asked} == {
        "find": "better words",
        "plain": "How?",
    }


async def test_an_earlier_step_that_fails_fails_the_run_with_a_real_status() -> None:
    placing, links = Placing(), Links([ANSWER[:2], LATE])
    with pytest.raises(DeadlineExceeded):
        await run(planned(writing("draft"), writing("final", "draft")), placing, links)
    assert [outcome for _, outcome, _ in placing.settled] == ["cancelled"]


async def test_leaving_in_an_earlier_step_frees_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "FIGURES_WAIT_S", 0.0)
    placing, links = Placing(), Links([ANSWER[:2]])
    plan = planned(writing("draft"), writing("final", "draft"))
    task = asyncio.create_task(run(plan, placing, links))
    await until(lambda: links.streams and not links.streams[0]._script)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(links.streams[0].sent[-1], Cancel)
    await until(lambda: links.streams[0].is_closed)
    assert [outcome for _, outcome, _ in placing.settled] == ["cancelled"]


async def test_what_earlier_steps_cost_is_in_a_failed_answer() -> None:
    placing, links = Placing(), Links([said("a draft")], [ANSWER[:2], LATE])
    events = await run(planned(writing("draft"), writing("final", "draft")), placing, links)
    failed = events[-1]
    assert isinstance(failed, RunFailed)
    assert failed.usage == Usage(14, 0, 4, 0.5)


async def test_the_callers_own_mistake_in_a_parallel_step_is_told() -> None:
    with pytest.raises(InvalidRequest):
        await run(
            planned(retrieval("a"), retrieval("b"), GENERATE),
            Placing(),
            Links(),
            InvalidRequest("a wrong filter"),
            DOCUMENTS,
        )


def test_outputs_stand_in_the_system_message_under_their_names() -> None:
    outputs = [
        StepDone("pro", " good \n", "stop"),
        StepDone("con", "bad", "stop"),
        StepDone("no", " ", "stop"),
    ]
    turns = (Message("system", "Weigh."), Message("user", "?"))
    assert with_outputs(turns, outputs) == (
        Message("system", "Weigh.\n\nOutput of pro:\n\ngood\n\nOutput of con:\n\nbad"),
        Message("user", "?"),
    )
    assert with_outputs(turns, outputs[2:]) == turns
    assert with_outputs(turns[1:], outputs[1:2])[0] == Message("system", "Output of con:\n\nbad")


def test_a_document_that_an_earlier_prompt_held_is_shown() -> None:
    found = [Found("one", "ds-1", DOCUMENTS[:2]), Found("two", "ds-1", DOCUMENTS[2:])]
    earlier = Context(found, {"one"})
    held = earlier.packed(1)
    shown = Context(found, {"two"}, held).retrieved(1)
    assert shown == [Retrieved("one", DOCUMENTS[:1], 1), Retrieved("two", DOCUMENTS[2:], 0)]
