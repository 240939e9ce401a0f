"""The runner with scripted placement, links and retrieval: order of events, ways to leave, settlement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.scripted import (
    ANSWER,
    DOCUMENTS,
    FIND,
    GENERATE,
    TRY_TO_FIND,
    Links,
    Placing,
    Searching,
    Stream,
    planned,
    run,
    until,
)

from gateway.observe.story import Story
from gateway.pipeline import delivery, farewell, watch
from gateway.pipeline.alarm import Alarm
from gateway.pipeline.attempts import MAX_TRIES
from gateway.pipeline.context import Context, Found, all_retrieved
from gateway.pipeline.contract import StreamControl
from gateway.pipeline.events import (
    Chunk,
    Finished,
    Retrieved,
    RunFailed,
    Started,
)
from gateway.pipeline.runner import Runner
from gateway.records import RetrievedDocument
from grid.errors import GridError, InvalidRequest, NoEligibleUnit, Saturated, UnitLost
from grid.wire.messages import Accepted, Cancel, Done, Failed, Refused, Submit, Tokens, WireMessage
from grid.words import Usage


async def test_events_in_order_with_the_documents_that_were_used() -> None:
    placing, links = Placing(), Links([ANSWER])
    started, retrieved, chunk, finished = await run(planned(FIND, GENERATE), placing, links, DOCUMENTS)
    assert isinstance(started, Started)
    assert (started.pipeline_id, started.revision, started.input_tokens) == ("pl-1", 2, 7)
    assert started.steps == ("find", "generation-2")
    assert retrieved == Retrieved("find", DOCUMENTS[:2], dropped=1)
    assert chunk == Chunk(0, "Hello", 2)
    assert isinstance(finished, Finished)
    assert finished.usage == Usage(7, 0, 2, 0.75), "tokens of the prompt and the answer, work of all steps"
    assert [step.step_id for step in finished.placement] == ["find", "generation-2"]
    assert [step.type for step in finished.timing] == ["retrieval", "generation"]
    (submit,) = links.streams[0].sent
    assert isinstance(submit, Submit)
    assert submit.documents == ("text 0", "text 1", "text 2")
    assert submit.tenant_salt == "salt"
    assert placing.settled == [("req_1/generation-2/1", "done", 2)]
    assert links.streams[0].is_closed


async def test_a_pipeline_that_only_retrieves() -> None:
    placing = Placing()
    started, retrieved, finished = await run(planned(FIND), placing, Links(), DOCUMENTS)
    assert isinstance(started, Started)
    assert started.model == ""
    assert retrieved == Retrieved("find", DOCUMENTS, dropped=0)
    assert isinstance(finished, Finished)
    assert finished.usage.input_tokens == 4
    assert placing.asked == []


async def test_a_retrieval_that_fails() -> None:
    with pytest.raises(UnitLost):
        await run(planned(FIND, GENERATE), Placing(), Links([ANSWER]), UnitLost("gone"))
    events = await run(planned(TRY_TO_FIND, GENERATE), Placing(), Links([ANSWER]), UnitLost("gone"))
    started, retrieved = events[:2]
    assert isinstance(started, Started)
    assert started.warnings == ("step 'find' failed and was skipped: gone",)
    assert retrieved == Retrieved("find", (), dropped=0)
    with pytest.raises(InvalidRequest):
        await run(
            planned(TRY_TO_FIND, GENERATE), Placing(), Links([ANSWER]), InvalidRequest("a wrong filter")
        )


async def test_a_full_unit_is_left_out_of_the_next_placement() -> None:
    second = [message._replace(attempt=2) for message in ANSWER]  # type: ignore[call-arg]
    placing, links = Placing(), Links([[Refused(1, "saturated", "full", "", 1.0)]], [second])
    events = await run(planned(GENERATE), placing, links)
    assert isinstance(events[-1], Finished)
    assert [request.exclude_units for request in placing.asked] == [(), ("unit-1",)]
    assert [outcome for _, outcome, _ in placing.settled] == ["refused", "done"]
    assert [stream.is_closed for stream in links.streams] == [True, True]


async def test_a_unit_that_cannot_be_dialled_is_left_out() -> None:
    second = [message._replace(attempt=2) for message in ANSWER]  # type: ignore[call-arg]
    placing = Placing()
    events = await run(planned(GENERATE), placing, Links(UnitLost("refused"), [second]))
    assert isinstance(events[-1], Finished)
    assert [outcome for _, outcome, _ in placing.settled] == ["failed", "done"]


REST: list[WireMessage] = [
    Accepted(1, 2, 7, 0, b"", "f", 0),
    Tokens(1, 2, 2, (3,), ", you"),
    Done(1, 2, "stop", 7, 0, 1, 0.25),
]


@pytest.mark.parametrize(
    "loss",
    [
        UnitLost("gone"),
        Saturated("more bytes than the stream may hold"),
        [Failed(1, 1, "unit_lost", "the engine died", 7, 0, 2, 0.5)],
    ],
)
async def test_an_answer_whose_unit_is_lost_goes_on_elsewhere(loss: list[WireMessage] | GridError) -> None:
    placing, links = Placing(), Links([ANSWER[:2], loss], [REST])
    events = await run(planned(GENERATE), placing, links)
    *_, first, second, finished = events
    assert (first, second) == (Chunk(0, "Hello", 2), Chunk(2, ", you", 1))
    assert isinstance(finished, Finished)
    assert (finished.usage.input_tokens, finished.usage.output_tokens) == (7, 3)
    assert finished.placement[0].moves == 1
    assert placing.settled == [("req_1/generation-1/1", "failed", 2), ("req_1/generation-1/2", "done", 1)]
    assert isinstance(links.streams[0].sent[-1], Cancel)
    again, submit = placing.asked[1], links.streams[1].sent[0]
    assert (again.attempt, again.exclude_units, again.max_output_tokens) == (2, ("unit-1",), 2)
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.emitted_ids, submit.emitted_code_points) == (2, (1, 2), 5)
    assert submit.sampling.max_output_tokens == 2
    assert [stream.is_closed for stream in links.streams] == [True, True]


async def test_what_counts_output_on_one_engine_is_not_continued() -> None:
    placing, links = Placing(), Links([ANSWER[:2], UnitLost("gone")])
    generate = GENERATE.replace("}", ', "presence_penalty": 0.5}')
    events = await run(planned(generate), placing, links)
    assert [type(event) for event in events] == [Started, Chunk, RunFailed]
    failed = events[-1]
    assert isinstance(failed, RunFailed)
    assert (failed.error.code, failed.output_so_far, failed.usage.output_tokens) == ("unit_lost", "Hello", 2)
    assert "presence_penalty" in failed.error.message
    assert placing.settled == [("req_1/generation-1/1", "failed", 2)]
    assert len(placing.asked) == 1


async def test_a_silent_unit_is_raced_by_another() -> None:
    placing, links = Placing(), Links([ANSWER[:2]], [REST])
    events = Runner(placement=placing, links=links, retrieval=Searching()).run(planned(GENERATE))
    first = asyncio.ensure_future(anext(events))
    await until(lambda: links.streams and not links.streams[0]._script)
    assert len(await first) == 2
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: links.streams[0].is_read)
    assert links.streams[0].on_silent is not None
    links.streams[0].on_silent()
    rest = await waiting + [event async for more in events for event in more]
    assert rest[0] == Chunk(2, ", you", 1)
    assert isinstance(rest[-1], Finished)
    assert placing.settled == [("req_1/generation-1/1", "failed", 2), ("req_1/generation-1/2", "done", 1)]
    assert isinstance(links.streams[0].sent[-1], Cancel)


async def test_a_unit_that_never_begins_to_speak_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_TOKEN_S", 0.0)
    monkeypatch.setattr(watch, "STUCK_LEAST_S", 0.01)
    second = [message._replace(attempt=2) for message in ANSWER]  # type: ignore[call-arg]
    placing, links = Placing(), Links([ANSWER[:1]], [second])
    *_, finished = await run(planned(GENERATE), placing, links)
    assert isinstance(finished, Finished)
    assert sorted(placing.settled) == [
        ("req_1/generation-1/1", "failed", 0),
        ("req_1/generation-1/2", "done", 2),
    ]


async def test_a_unit_that_stays_silent_is_raced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STUCK_LEAST_S", 0.01)
    third = [message._replace(attempt=3) for message in REST[::2]]  # type: ignore[call-arg]
    third.insert(1, Tokens(1, 3, 2, (3,), ", you"))
    placing, links = Placing(), Links([ANSWER[:2]], [third])
    plan = replace(planned(GENERATE), time_limit_s=5.0)
    events = Runner(placement=placing, links=links, retrieval=Searching()).run(plan)
    await anext(events)
    placing.answers.append(NoEligibleUnit("none now"))
    rest = [event async for more in events for event in more]
    assert isinstance(rest[-1], Finished)
    assert [request.attempt for request in placing.asked] == [1, 2, 3]


async def test_a_unit_that_speaks_again_ends_the_race() -> None:
    placing, links = Placing(), Links([ANSWER[:2]], [REST[:1]])
    runner = Runner(placement=placing, links=links, retrieval=Searching())
    events = runner.run(planned(GENERATE))
    await anext(events)
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: links.streams[0].is_read)
    stream = links.streams[0]
    assert stream.on_silent is not None
    stream.on_silent()
    await until(lambda: len(links.streams) == 2 and not links.streams[1]._script)
    stream.bring(ANSWER[2:])
    last = await waiting
    assert isinstance(last[-1], Finished)
    assert last[-1].placement[0].moves == 0
    assert sorted(placing.settled) == [
        ("req_1/generation-1/1", "done", 2),
        ("req_1/generation-1/2", "cancelled", 0),
    ]
    assert isinstance(links.streams[1].sent[-1], Cancel)
    assert (runner.watch.budget.spent, runner.watch.budget.refunded) == (1, 0)
    await events.aclose()


async def test_a_unit_that_is_not_reached_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SLOW_DIAL_S", 0.01)
    second = [message._replace(attempt=2) for message in ANSWER]  # type: ignore[call-arg]

    class Unreached(Links):
        async def get(self, host: str, port: int) -> Any:
            if len(placing.asked) == 1:
                await asyncio.Event().wait()
            return await super().get(host, port)

    placing, links = Placing(), Unreached([second])
    runner = Runner(placement=placing, links=links, retrieval=Searching())
    *_, finished = [event async for events in runner.run(planned(GENERATE)) for event in events]
    assert isinstance(finished, Finished)
    assert (runner.watch.budget.spent, runner.watch.budget.refunded) == (1, 1)
    assert sorted(placing.settled) == [
        ("req_1/generation-1/1", "failed", 0),
        ("req_1/generation-1/2", "done", 2),
    ]


async def test_where_every_slow_dial_fails_the_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SLOW_DIAL_S", 0.0)
    monkeypatch.setattr(watch, "HEDGE_BURST", 0.0)

    class Far(Links):
        async def get(self, host: str, port: int) -> Any:
            for _ in range(5):
                await asyncio.sleep(0)
            return await super().get(host, port)

    placing, links = Placing(), Far(*[UnitLost("too far")] * MAX_TRIES)
    with pytest.raises(UnitLost, match="too far"):
        await run(planned(GENERATE), placing, links)
    assert [outcome for _, outcome, _ in placing.settled] == ["failed"] * MAX_TRIES


async def test_a_race_that_nobody_begins_to_run_is_told() -> None:
    placing, links = Placing(), Links([])
    events = Runner(placement=placing, links=links, retrieval=Searching()).run(planned(GENERATE))
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: links.streams and links.streams[0].is_read)
    placing.hold = asyncio.Event()
    placing.answers.append(NoEligibleUnit("no other"))
    assert links.streams[0].on_silent is not None
    links.streams[0].on_silent()
    await until(lambda: len(placing.asked) == 2)
    links.streams[0].bring([Refused(1, "saturated", "full", "", 1.0)])
    await until(lambda: placing.settled)
    placing.hold.set()
    with pytest.raises(Saturated, match="full"):
        await waiting


async def test_a_race_that_finds_no_unit_costs_nothing() -> None:
    placing, links = Placing(), Links([ANSWER[:2]])
    runner = Runner(placement=placing, links=links, retrieval=Searching())
    events = runner.run(planned(GENERATE))
    await anext(events)
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: links.streams[0].is_read)
    placing.answers.append(NoEligibleUnit("no other"))
    assert links.streams[0].on_silent is not None
    links.streams[0].on_silent()
    await until(lambda: not placing.answers)
    links.streams[0].bring(ANSWER[2:])
    assert isinstance((await waiting)[-1], Finished)
    assert (runner.watch.budget.spent, runner.watch.budget.refunded) == (1, 1)
    await events.aclose()


async def test_leaving_while_two_race_frees_both() -> None:
    placing, links = Placing(), Links([ANSWER[:2]], [])
    events = Runner(placement=placing, links=links, retrieval=Searching()).run(planned(GENERATE))
    await anext(events)
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: links.streams[0].is_read)
    assert links.streams[0].on_silent is not None
    links.streams[0].on_silent()
    await until(lambda: len(links.streams) == 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(outcome for _, outcome, _ in placing.settled) == ["cancelled", "cancelled"]
    assert all(isinstance(stream.sent[-1], Cancel) for stream in links.streams)


async def test_no_unit() -> None:
    placing = Placing(NoEligibleUnit("none", ever=False))
    with pytest.raises(NoEligibleUnit):
        await run(planned(GENERATE), placing, Links())
    assert placing.settled == []


# --- leaving --------------------------------------------------------------------------------------


async def leave(placing: Placing, links: Links, reached: Callable[[], object]) -> None:
    """Start a run, cancel its task once `reached`, and wait for it."""
    task = asyncio.create_task(run(planned(GENERATE), placing, links))
    await until(reached)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaving_while_placing_settles_nothing_here() -> None:
    placing = Placing()
    placing.hold = asyncio.Event()
    await leave(placing, Links(), lambda: placing.asked)
    assert placing.settled == [], "the placement client settles decisions that nobody waits for"


async def test_leaving_while_dialling_settles_the_reservation() -> None:
    placing, links = Placing(), Links()
    links.hold = asyncio.Event()
    await leave(placing, links, lambda: placing.asked)
    assert placing.settled == [("req_1/generation-1/1", "cancelled", 0)]


async def test_leaving_before_and_after_acceptance_cancels_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "FIGURES_WAIT_S", 0.0)
    for script, tokens in (([], 0), ([ANSWER[:2]], 2)):
        placing, links = Placing(), Links(script)
        await leave(placing, links, lambda links=links: links.streams and not links.streams[0]._script)
        assert placing.settled == [("req_1/generation-1/1", "cancelled", tokens)]
        assert isinstance(links.streams[0].sent[-1], Cancel)
        await until(lambda links=links: links.streams[0].is_closed)


async def test_what_an_answer_took_is_charged_though_its_client_left() -> None:
    story, last = Story("req_1", 0.0, 0.0), asyncio.Event()
    placing, links = Placing(), Links([ANSWER[:2], [Failed(1, 1, "cancelled", "", 7, 0, 2, 0.5)]])
    runner = Runner(placement=placing, links=links, retrieval=Searching())
    events = runner.run(planned(GENERATE), story)
    await anext(events)
    late: list[float] = []

    def charged(cu_seconds: float) -> None:
        late.append(cu_seconds)
        last.set()

    story.runs[0].late = charged
    await events.aclose()
    assert story.usage == Usage(7, 0, 2, 0.0)
    await asyncio.wait_for(last.wait(), 5)
    assert (late, story.usage) == ([0.5], Usage(7, 0, 2, 0.5))


async def test_closing_the_run_between_events() -> None:
    placing, links = Placing(), Links([ANSWER[:2]])
    runner = Runner(placement=placing, links=links, retrieval=Searching())
    events = runner.run(planned(GENERATE))
    assert isinstance((await anext(events))[0], Started)
    await events.aclose()
    assert placing.settled == [("req_1/generation-1/1", "cancelled", 2)]
    await events.aclose()
    assert len(placing.settled) == 1
    never_started = runner.run(planned(GENERATE))
    await never_started.aclose()
    assert len(placing.asked) == 1


async def test_closing_after_the_last_event_settles_no_second_time() -> None:
    placing, links = Placing(), Links([ANSWER])
    runner = Runner(placement=placing, links=links, retrieval=Searching())
    events = runner.run(planned(GENERATE))
    while not isinstance((await anext(events))[-1], Finished):
        pass
    await events.aclose()
    assert [outcome for _, outcome, _ in placing.settled] == ["done"]


# --- time -----------------------------------------------------------------------------------------


async def test_a_held_token_leaves_when_it_is_due() -> None:
    plan = planned(GENERATE)
    assert plan.generation is not None
    control = StreamControl(min_tokens_per_chunk=100, max_latency_ms=5)
    plan = replace(plan, steps=(replace(plan.generation, stream_control=control),))
    runner = Runner(placement=Placing(), links=Links([ANSWER[:2]]), retrieval=Searching())
    events = runner.run(plan)
    assert [type(event) for event in await anext(events)] == [Started]
    assert await anext(events) == [Chunk(0, "Hello", 2)]
    await events.aclose()


async def test_a_link_that_is_lost_while_a_tail_waits_is_read_no_more() -> None:
    plan = planned(GENERATE)
    assert plan.generation is not None
    control = StreamControl(min_tokens_per_chunk=9, max_latency_ms=20, flush_on_eos=False)
    plan = replace(plan, steps=(replace(plan.generation, stream_control=control),))
    links = Links([ANSWER, UnitLost("gone")])
    *_, chunk, finished = await run(plan, Placing(), links)
    assert chunk == Chunk(0, "Hello", 2)
    assert isinstance(finished, Finished)
    assert links.streams[0].times_lost == 1


async def test_a_run_s_time_is_limited() -> None:
    placing, links = Placing(), Links([ANSWER[:2]])
    events = await run(replace(planned(GENERATE), time_limit_s=0.02), placing, links)
    failed = events[-1]
    assert isinstance(failed, RunFailed)
    assert (failed.error.code, failed.output_so_far) == ("deadline_exceeded", "Hello")
    assert isinstance(links.streams[0].sent[-1], Cancel)
    assert [outcome for _, outcome, _ in placing.settled] == ["cancelled"], (
        "a deadline says nothing of its unit"
    )


async def test_an_alarm_swallows_no_cancel_that_is_not_its_own() -> None:
    alarm, stream = Alarm(), Stream([])
    task = asyncio.create_task(alarm.wait(stream.receive(), time.monotonic() + 60.0))
    await until(lambda: alarm._timer)
    alarm.ring()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await alarm.wait(stream.receive(), 0.0) is None, "and its own it does"
    alarm.cancel()


# --- context --------------------------------------------------------------------------------------


def test_steps_take_turns_and_a_document_is_offered_once() -> None:
    a, b, c = (RetrievedDocument(name, f"text {name}", 0.5) for name in "abc")
    found = [Found("one", "ds-1", (a, b)), Found("two", "ds-1", (b, c)), Found("other", "ds-2", (a,))]
    context = Context(found, {"one", "two"})
    assert context.texts == ("text a", "text b", "text c")
    assert context.retrieved(2) == [
        Retrieved("one", (a, b), 0),
        Retrieved("two", (b,), 1),
        Retrieved("other", (), 1),
    ]
    assert all_retrieved(found)[1] == Retrieved("two", (b, c), 0)
