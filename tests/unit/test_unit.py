"""The unit's state machine, event by event."""

from __future__ import annotations

import pytest
from support.fleet import make_card

from grid.engines.base import EngineLoad, Prepared, Step
from grid.errors import ContextOverflow, InternalError, UnitLost
from grid.units import events as ev
from grid.units.unit import CLOSING_TICKS, MAX_EMBED_TEXTS, Unit
from grid.wire.messages import Accepted, Done, Embed, Failed, Progress, Refused, Submit, Tokens, Vectors
from grid.words import Message, Sampling, Task, UnitCard, UnitState

PROMPT = Prepared(prompt_ids=(1, 2, 3), prompt_hash=b"h" * 16, documents_used=1)
IDLE = EngineLoad(0, 0, 1000, 1000, 0, 7)
PEER = 9


def card(**changes: object) -> UnitCard:
    small = {"model": "m", "context_tokens": 100, "max_running": 2, "max_waiting": 1, "cu_factor": 0.5}
    return make_card("unit-m-0", **{**small, **changes})


def submit(stream: int, **changes: object) -> Submit:
    base = Submit(
        stream=stream,
        request_id=f"req_{stream}",
        attempt=0,
        reservation_id=f"req_{stream}/gen/0",
        model="m",
        messages=(Message("user", "hello"),),
        documents=("doc",),
        sampling=Sampling(max_output_tokens=4),
        tenant_salt="salt",
        deadline_ms=0.0,
    )
    return base._replace(**changes)


def embed(stream: int, texts: tuple[str, ...] = ("a", "b"), **changes: object) -> Embed:
    return Embed(stream, f"req_{stream}", f"req_{stream}/emb/0", "m", texts, 0.0)._replace(**changes)


def sent(effects: list[ev.Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, ev.Send)]


def start(unit: Unit, stream: int, now_s: float = 0.0, **changes: object) -> int:
    """Submit and prepare; return the job number."""
    [prepare] = unit.handle(ev.Submitted(PEER, submit(stream, **changes)), now_s)
    assert isinstance(prepare, ev.Prepare)
    unit.handle(ev.PromptReady(prepare.job, PROMPT), now_s)
    return prepare.job


def step(*ids: int, finish: str | None = None, seconds: float = 0.25) -> Step:
    return Step(ids, "x" * len(ids), finish, 2, seconds)


def test_one_stream_from_submit_to_done() -> None:
    unit = Unit(card())
    [prepare] = unit.handle(ev.Submitted(PEER, submit(1)), 0.0)
    assert prepare == ev.Prepare(1, (Message("user", "hello"),), ("doc",), 4)
    accepted, generate = unit.handle(ev.PromptReady(1, PROMPT), 1.0)
    assert accepted == ev.Send(PEER, Accepted(1, 0, 3, 0, b"h" * 16, "f", 1))
    assert isinstance(generate, ev.Generate)
    assert generate.generation.prompt is PROMPT
    assert generate.generation.tenant_salt == "salt"
    assert sent(unit.handle(ev.Stepped(1, step(5)), 2.0)) == [Tokens(1, 0, 0, (5,), "x")]
    last = unit.handle(ev.Stepped(1, step(6, 7, finish="stop")), 4.0)
    assert sent(last) == [
        Tokens(1, 0, 1, (6, 7), "xx"),
        Done(1, 0, "stop", 3, 2, 3, 0.25, queue_ms=0.0, prefill_ms=1000.0, decode_ms=2000.0),
    ]
    assert unit.is_idle
    assert unit.handle(ev.Released(1), 4.1) == []


def test_continuation_counts_from_what_was_emitted() -> None:
    unit = Unit(card())
    again = submit(1, attempt=1, emitted_ids=(5, 6), prompt_hash=b"h" * 16, sampling=Sampling(2))
    [prepare] = unit.handle(ev.Submitted(PEER, again), 0.0)
    assert isinstance(prepare, ev.Prepare)
    assert prepare.max_output_tokens == 4
    unit.handle(ev.PromptReady(1, PROMPT), 0.0)
    assert sent(unit.handle(ev.Stepped(1, step(7)), 0.0)) == [Tokens(1, 1, 2, (7,), "x")]


def test_continuation_with_another_prompt_is_refused() -> None:
    unit = Unit(card())
    unit.handle(ev.Submitted(PEER, submit(1, emitted_ids=(5,), prompt_hash=b"other")), 0.0)
    effects = unit.handle(ev.PromptReady(1, PROMPT), 0.0)
    [refused] = sent(effects)
    assert isinstance(refused, Refused)
    assert refused.code == "conflict"
    assert unit.is_idle


def test_continuation_with_nothing_left_ends_without_the_engine() -> None:
    unit = Unit(card())
    unit.handle(ev.Submitted(PEER, submit(1, emitted_ids=(5, 6), sampling=Sampling(0))), 0.0)
    accepted, done = sent(effects := unit.handle(ev.PromptReady(1, PROMPT), 0.0))
    assert isinstance(accepted, Accepted)
    assert isinstance(done, Done)
    assert (done.finish_reason, done.output_tokens) == ("length", 0)
    assert not any(isinstance(effect, ev.Generate) for effect in effects)
    assert unit.is_idle


def test_budget_of_zero_without_emitted_tokens_is_the_callers_mistake() -> None:
    [refused] = sent(Unit(card()).handle(ev.Submitted(PEER, submit(1, sampling=Sampling(0))), 0.0))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.param) == ("invalid_request", "max_output_tokens")


def test_caps_running_then_waiting_then_overloaded() -> None:
    unit = Unit(card())
    start(unit, 1)
    start(unit, 2)
    unit.handle(ev.Submitted(PEER, submit(3)), 0.0)
    effects = unit.handle(ev.PromptReady(3, PROMPT), 0.0)
    assert sent(effects)[1:] == [Progress(3, 0, "waiting")]
    assert not any(isinstance(effect, ev.Generate) for effect in effects)
    [refused] = sent(unit.handle(ev.Submitted(PEER, submit(4)), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "overloaded"
    assert refused.retry_after_s > 0
    load = unit.load(IDLE)
    assert (load.running, load.waiting, load.prefill_tokens_queued) == (2, 1, 3)
    assert load.reservations == ("req_1/gen/0", "req_2/gen/0", "req_3/gen/0")
    # The end of one starts the one that waits; its wait is in its queue_ms.
    effects = unit.handle(ev.Stepped(1, step(finish="stop")), 3.0)
    assert [e.job for e in effects if isinstance(e, ev.Generate)] == [3]
    [done] = sent(unit.handle(ev.Stepped(3, step(finish="stop")), 5.0))
    assert isinstance(done, Done)
    assert (done.queue_ms, done.prefill_ms, done.decode_ms) == (3000.0, 2000.0, 0.0)


def test_a_lower_priority_number_leaves_the_queue_first() -> None:
    unit = Unit(card(max_running=1, max_waiting=3))
    start(unit, 1)
    start(unit, 2, priority=5)
    start(unit, 3, priority=1)
    start(unit, 4, priority=1)
    order = []
    for job in (1, 3, 4):
        effects = unit.handle(ev.Stepped(job, step(finish="stop")), 0.0)
        order += [effect.job for effect in effects if isinstance(effect, ev.Generate)]
    assert order == [3, 4, 2]


def test_retry_after_follows_the_measured_pace() -> None:
    unit = Unit(card(max_running=1, max_waiting=0))
    job = start(unit, 1, now_s=0.0, sampling=Sampling(10))
    for second in range(1, 10):
        unit.handle(ev.Stepped(job, step(second)), float(second))
    unit.handle(ev.Stepped(job, step(10, finish="length")), 10.0)  # ten tokens, a second each
    job = start(unit, 2, now_s=20.0, sampling=Sampling(100))
    assert unit.retry_after_s(20.0) == pytest.approx(10.0)
    assert unit.retry_after_s(24.0) == pytest.approx(6.0)
    unit.handle(ev.Stepped(job, step(1, 2, 3, 4)), 22.0)  # this one is twice as fast
    assert unit.retry_after_s(22.0) == pytest.approx(3.0)


def test_cancel_ends_the_stream_at_once_and_frees_the_slot_when_the_engine_has() -> None:
    unit = Unit(card(max_running=1))
    start(unit, 1)
    start(unit, 2)
    unit.handle(ev.Stepped(1, step(5)), 1.0)
    effects = unit.handle(ev.CancelAsked(PEER, 1), 1.0)
    assert sent(effects) == [Failed(1, 0, "cancelled", "the caller cancelled the stream", 3, 2, 1, 0.125)]
    assert effects[1:] == [ev.Abort(1)]
    assert unit.load(IDLE).reservations == ("req_2/gen/0",)
    assert unit.handle(ev.Stepped(1, step(6)), 1.005) == []  # no frame after the end
    [generate] = unit.handle(ev.Released(1), 1.01)
    assert isinstance(generate, ev.Generate)
    assert generate.job == 2
    assert unit.counters.cancel_to_free_ms == pytest.approx(10.0)
    assert unit.handle(ev.CancelAsked(PEER, 1), 2.0) == []


def test_cancel_before_acceptance_refuses() -> None:
    unit = Unit(card())
    unit.handle(ev.Submitted(PEER, submit(1)), 0.0)
    effects = unit.handle(ev.CancelAsked(PEER, 1), 0.0)
    [refused] = sent(effects)
    assert isinstance(refused, Refused)
    assert refused.code == "cancelled"
    assert ev.Abort(1) in effects
    assert unit.is_idle
    assert unit.handle(ev.PromptReady(1, PROMPT), 0.0) == []


def test_lost_peer_aborts_its_streams_and_no_others() -> None:
    unit = Unit(card())
    start(unit, 1)
    [prepare] = unit.handle(ev.Submitted(PEER + 1, submit(1, request_id="other")), 0.0)
    assert unit.handle(ev.PeerLost(PEER), 0.0) == [ev.Abort(1)]
    effects = unit.handle(ev.PromptReady(prepare.job, PROMPT), 0.0)
    assert isinstance(sent(effects)[0], Accepted)
    assert unit.load(IDLE).reservations == ("req_1/gen/0",)


def test_duplicates_are_refused_live_and_ended() -> None:
    unit = Unit(card())
    job = start(unit, 1)
    for _ in range(2):
        [refused] = sent(unit.handle(ev.Submitted(PEER, submit(1)._replace(stream=7)), 0.0))
        assert isinstance(refused, Refused)
        assert refused.code == "conflict"
        unit.handle(ev.Stepped(job, step(finish="stop")), 0.0)
    another_step = submit(8, request_id="req_1", reservation_id="req_1/second/0")
    [prepare] = unit.handle(ev.Submitted(PEER, another_step), 0.0)
    assert isinstance(prepare, ev.Prepare)


def test_an_attempt_that_was_never_accepted_may_come_again() -> None:
    unit = Unit(card())
    unit.handle(ev.Submitted(PEER, submit(1)), 0.0)
    overflow = ContextOverflow("too long", prompt_tokens=200, max_output_tokens=4, context_tokens=100)
    [refused] = sent(unit.handle(ev.Broke(1, overflow), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "context_overflow"
    assert refused.details == {"prompt_tokens": 200, "max_output_tokens": 4, "context_tokens": 100}
    [prepare] = unit.handle(ev.Submitted(PEER, submit(1)), 0.0)
    assert isinstance(prepare, ev.Prepare)


def test_a_stream_number_in_use_closes_the_connection() -> None:
    unit = Unit(card())
    start(unit, 1)
    [drop] = unit.handle(ev.Submitted(PEER, submit(1, request_id="other")), 0.0)
    assert isinstance(drop, ev.Drop)
    assert (drop.peer, drop.code) == (PEER, "invalid_request")


@pytest.mark.parametrize("phase", ["preparing", "waiting", "running"])
def test_deadline_in_every_phase(phase: str) -> None:
    unit = Unit(card(max_running=1))
    if phase == "waiting":
        start(unit, 2)
    if phase == "preparing":
        unit.handle(ev.Submitted(PEER, submit(1, deadline_ms=100.0)), 0.0)
    else:
        start(unit, 1, deadline_ms=100.0)
    assert sent(unit.handle(ev.Tick(), 0.099)) == []
    [end] = sent(unit.handle(ev.Tick(), 0.1))
    assert isinstance(end, Refused if phase == "preparing" else Failed)
    assert end.code == "deadline_exceeded"
    assert sent(unit.handle(ev.Tick(), 0.2)) == []


def test_a_deadline_that_had_passed_is_refused() -> None:
    [refused] = sent(Unit(card()).handle(ev.Submitted(PEER, submit(1, deadline_ms=-1.0)), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "deadline_exceeded"


def test_drain_refuses_new_work_and_finishes_the_old() -> None:
    unit = Unit(card())
    job = start(unit, 1)
    unit.handle(ev.SetDraining(True), 0.0)
    [refused] = sent(unit.handle(ev.Submitted(PEER, submit(2)), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "rejected"
    assert unit.load(IDLE).state == UnitState.DRAINING
    assert isinstance(sent(unit.handle(ev.Stepped(job, step(finish="stop")), 0.0))[0], Done)
    unit.handle(ev.SetDraining(False), 0.0)
    assert unit.state is UnitState.READY


def test_engine_death_fails_every_stream_once() -> None:
    unit = Unit(card(max_running=1))
    start(unit, 1)
    start(unit, 2)
    effects = unit.handle(ev.Broke(1, UnitLost("killed")), 0.0)
    codes = [message.code for message in sent(effects) if isinstance(message, Failed)]
    assert codes == ["unit_lost", "unit_lost"]
    assert effects[-1] == ev.Died("killed")
    assert not any(isinstance(effect, ev.Generate) for effect in effects)
    assert unit.load(IDLE).state == UnitState.FAILED
    assert unit.handle(ev.EngineDied("again"), 0.0) == []
    [refused] = sent(unit.handle(ev.Submitted(PEER, submit(3)), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "rejected"


def test_one_generation_that_breaks_fails_alone() -> None:
    unit = Unit(card())
    start(unit, 1)
    start(unit, 2)
    [failed] = sent(unit.handle(ev.Broke(1, InternalError("bad")), 0.0))
    assert isinstance(failed, Failed)
    assert (failed.stream, failed.code) == (1, "internal_error")
    assert unit.in_engine == 1


def test_an_engine_that_stops_without_a_reason_fails_the_stream() -> None:
    unit = Unit(card())
    start(unit, 1)
    [failed] = sent(unit.handle(ev.Released(1), 0.0))
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert unit.is_idle


def test_budget_is_the_units_to_keep() -> None:
    unit = Unit(card())
    job = start(unit, 1, sampling=Sampling(2))
    effects = unit.handle(ev.Stepped(job, step(1, 2)), 0.0)
    tokens, done = sent(effects)
    assert isinstance(tokens, Tokens)
    assert isinstance(done, Done)
    assert done.finish_reason == "length"
    assert effects[-1] == ev.Abort(job)
    other = start(unit, 2, sampling=Sampling(2))
    [failed] = sent(unit.handle(ev.Stepped(other, step(1, 2, 3)), 0.0))
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"


def test_an_engine_that_keeps_an_aborted_slot_is_dead() -> None:
    unit = Unit(card())
    start(unit, 1)
    unit.handle(ev.CancelAsked(PEER, 1), 0.0)
    for _ in range(CLOSING_TICKS):
        assert unit.handle(ev.Tick(), 0.0) == []
    [died] = unit.handle(ev.Tick(), 0.0)
    assert isinstance(died, ev.Died)


@pytest.mark.parametrize(
    ("changes", "request_"),
    [({}, submit(1, model="other")), ({"task": Task.EMBED}, submit(1)), ({}, embed(1))],
)
def test_work_that_the_unit_does_not_do(changes: dict[str, object], request_: Submit | Embed) -> None:
    unit = Unit(card(**changes))
    event = ev.Submitted(PEER, request_) if isinstance(request_, Submit) else ev.EmbedAsked(PEER, request_)
    [refused] = sent(unit.handle(event, 0.0))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.param) == ("invalid_request", "model")


def test_embeddings_share_the_caps_and_the_time() -> None:
    unit = Unit(card(task=Task.EMBED, max_running=2, max_waiting=1))
    [first] = unit.handle(ev.EmbedAsked(PEER, embed(1)), 0.0)
    assert first == ev.Encode(1, ("a", "b"))
    [second] = unit.handle(ev.EmbedAsked(PEER, embed(2)), 2.0)
    assert isinstance(second, ev.Encode)
    assert unit.handle(ev.EmbedAsked(PEER, embed(3)), 2.0) == []
    [refused] = sent(unit.handle(ev.EmbedAsked(PEER, embed(4)), 2.0))
    assert isinstance(refused, Refused)
    assert refused.code == "overloaded"
    # Alone for 2 s, then for 4 s one of two: 4 s of its own, at a factor of 0.5.
    vectors, third = unit.handle(ev.Encoded(1, 3, b"data", 8), 6.0)
    assert vectors == ev.Send(PEER, Vectors(1, 3, b"data", 8, 2.0))
    assert third == ev.Encode(3, ("a", "b"))


def test_an_embedding_that_breaks_is_refused_and_may_come_again() -> None:
    unit = Unit(card(task=Task.EMBED))
    for _ in range(2):
        [encode] = unit.handle(ev.EmbedAsked(PEER, embed(1)), 0.0)
        assert isinstance(encode, ev.Encode)
        [refused] = sent(unit.handle(ev.Broke(encode.job, InternalError("bad")), 0.0))
        assert isinstance(refused, Refused)
        assert refused.code == "internal_error"


@pytest.mark.parametrize("count", [0, MAX_EMBED_TEXTS + 1])
def test_embed_takes_a_bounded_batch(count: int) -> None:
    [refused] = sent(Unit(card(task=Task.EMBED)).handle(ev.EmbedAsked(PEER, embed(1, ("x",) * count)), 0.0))
    assert isinstance(refused, Refused)
    assert refused.param == "texts"


def test_a_quiet_stream_is_told_that_its_engine_steps_and_nothing_when_it_does_not() -> None:
    unit = Unit(card(max_running=1))
    start(unit, 1)
    start(unit, 2)
    unit.handle(ev.Stepped(1, step(5)), 1.0)
    assert sent(unit.handle(ev.Tick(steps=1), 1.2)) == [Progress(2, 0, "waiting")], "it waits since 0.0"
    assert sent(unit.handle(ev.Tick(steps=1), 1.3)) == [Progress(1, 0, "decode")]
    assert sent(unit.handle(ev.Tick(steps=1), 9.0)) == [], "a stuck engine"
    assert sent(unit.handle(ev.Tick(steps=2), 9.1)) == [Progress(1, 0, "decode"), Progress(2, 0, "waiting")]
    assert sent(unit.handle(ev.Tick(steps=3), 9.2)) == [], "not at every tick"


# --- standby --------------------------------------------------------------------------------


def idle_state(unit: Unit) -> int:
    return unit.load(EngineLoad(0, 0, 0, 0, 0, 0)).state


@pytest.mark.parametrize("state", [UnitState.STANDBY, UnitState.ASLEEP])
def test_work_takes_in_a_unit_on_standby(state: UnitState) -> None:
    unit = Unit(card())
    assert unit.handle(ev.SetState(state), 0.0) == []
    assert idle_state(unit) == state
    start(unit, 1)
    assert idle_state(unit) == UnitState.READY


def test_a_refused_request_takes_nobody_in() -> None:
    unit = Unit(card())
    unit.handle(ev.SetState(UnitState.STANDBY), 0.0)
    unit.handle(ev.Submitted(PEER, submit(1, model="another")), 0.0)
    assert idle_state(unit) == UnitState.STANDBY


def test_a_unit_that_drains_or_failed_is_not_put_on_standby() -> None:
    unit = Unit(card())
    unit.handle(ev.SetDraining(True), 0.0)
    unit.handle(ev.SetState(UnitState.STANDBY), 0.0)
    assert idle_state(unit) == UnitState.DRAINING
    unit.handle(ev.EngineDied("x"), 0.0)
    unit.handle(ev.SetState(UnitState.READY), 0.0)
    assert idle_state(unit) == UnitState.FAILED
