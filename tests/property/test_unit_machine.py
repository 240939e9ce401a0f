"""Any order of events keeps the unit's invariants. The machine plays gateways and engine at once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fleet import make_card

from grid.engines.base import EngineLoad, Prepared, Step
from grid.errors import InternalError, UnitLost
from grid.units import events as ev
from grid.units.unit import Unit
from grid.wire.messages import Accepted, Done, Failed, Progress, Refused, Submit, Tokens
from grid.words import Sampling, UnitState

ENGINE = EngineLoad(0, 0, 100, 100, 0, 0)
PROMPT = Prepared((1, 2), b"hash", 0)
MAX_RUNNING, MAX_WAITING = 2, 2
CARD = make_card("u", model="m", max_running=MAX_RUNNING, max_waiting=MAX_WAITING)
PEERS = st.integers(0, 1)


class Stream:
    """What one gateway has seen of one stream."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.accepted = False
        self.ended = False
        self.next_index = len(submit.emitted_ids)


class UnitMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit(CARD)
        self.now_s = 0.0
        self.requests = 0
        self.numbers = 0
        self.streams: dict[tuple[int, int], Stream] = {}
        self.preparing: set[int] = set()
        self.generating: set[int] = set()
        self.aborted: set[int] = set()
        self.dropped: set[int] = set()
        self.died = 0

    def feed(self, event: ev.Event) -> None:
        for effect in self.unit.handle(event, self.now_s):
            match effect:
                case ev.Send(peer, message):
                    self.seen(peer, message)
                case ev.Prepare(job):
                    self.preparing.add(job)
                case ev.Generate(job):
                    assert job not in self.generating
                    self.generating.add(job)
                    assert len(self.generating) <= MAX_RUNNING
                case ev.Abort(job):
                    self.preparing.discard(job)
                    if job in self.generating:
                        self.aborted.add(job)
                case ev.Drop(peer):
                    self.dropped.add(peer)
                case ev.Died():
                    self.died += 1
                case _:
                    raise AssertionError(effect)

    def seen(self, peer: int, message: object) -> None:
        stream = self.streams[peer, message.stream]  # type: ignore[attr-defined]
        assert not stream.ended, f"a frame after the end: {message}"
        match message:
            case Refused():
                assert not stream.accepted
                stream.ended = True
            case Accepted():
                assert not stream.accepted
                stream.accepted = True
            case Progress():
                assert stream.accepted
            case Tokens():
                assert stream.accepted
                assert message.first_index == stream.next_index
                stream.next_index += len(message.ids)
            case Done() | Failed():
                assert stream.accepted
                stream.ended = True
                produced = stream.next_index - len(stream.submit.emitted_ids)
                assert message.output_tokens == produced <= stream.submit.sampling.max_output_tokens
            case _:
                raise AssertionError(message)

    def open_streams(self) -> list[tuple[int, int]]:
        return [key for key, stream in self.streams.items() if not stream.ended]

    def new_submit(self, stream: int, budget: int, emitted: int, deadline_ms: float, priority: int) -> Submit:
        self.requests += 1
        request = f"req_{self.requests}"
        ids = tuple(range(emitted))
        return Submit(
            stream, request, 0, f"{request}/0", "m", (), (), Sampling(budget), "", deadline_ms, priority, ids
        )

    @rule(
        peer=PEERS,
        budget=st.integers(0, 4),
        emitted=st.integers(0, 2),
        deadline_ms=st.sampled_from([0.0, 0.0, 1000.0]),
        priority=st.integers(0, 1),
        count=st.integers(1, 3),
        prepared=st.integers(0, 3),
    )
    def submit(
        self,
        peer: int,
        budget: int,
        emitted: int,
        deadline_ms: float,
        priority: int,
        count: int,
        prepared: int,
    ) -> None:
        """A burst: some prompts are ready at once, the others stay in preparation."""
        for _ in range(count):
            self.numbers += 1
            submit = self.new_submit(self.numbers, budget, emitted, deadline_ms, priority)
            self.streams[peer, submit.stream] = Stream(submit)
            self.feed(ev.Submitted(peer, submit))
        for job in sorted(self.preparing)[:prepared]:
            self.preparing.discard(job)
            self.feed(ev.PromptReady(job, PROMPT))

    @precondition(lambda self: self.open_streams())
    @rule(data=st.data(), kind=st.sampled_from(["replay", "reuse", "lose", "drain"]))
    def mishap(self, data: st.DataObject, kind: str) -> None:
        match kind:
            case "replay":
                self.replay(data)
            case "reuse":
                self.reuse_a_stream_number(data)
            case "lose":
                self.lose_peer(data.draw(PEERS))
            case "drain":
                self.drain()

    def replay(self, data: st.DataObject) -> None:
        """The same attempt on a new stream: refused, unless the first was never accepted."""
        known = data.draw(st.sampled_from(sorted(self.streams)))
        first = self.streams[known]
        self.numbers += 1
        again = first.submit._replace(stream=self.numbers)
        self.streams[known[0], self.numbers] = Stream(again)
        self.feed(ev.Submitted(known[0], again))
        if first.accepted or not first.ended:
            assert self.streams[known[0], self.numbers].ended

    def reuse_a_stream_number(self, data: st.DataObject) -> None:
        peer, number = data.draw(st.sampled_from(sorted(self.open_streams())))
        self.feed(ev.Submitted(peer, self.new_submit(number, 1, 0, 0.0, 0)))
        assert peer in self.dropped
        self.lose_peer(peer)

    def lose_peer(self, peer: int) -> None:
        for key, stream in self.streams.items():
            if key[0] == peer:
                stream.ended = True  # nobody reads: any further frame is a fault
        self.feed(ev.PeerLost(peer))
        self.dropped.discard(peer)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open_streams()) or sorted(self.streams)))
        self.feed(ev.CancelAsked(*key))
        assert self.streams[key].ended

    @precondition(lambda self: self.preparing)
    @rule(data=st.data(), fits=st.booleans())
    def prepare(self, data: st.DataObject, fits: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.preparing)))
        self.preparing.discard(job)
        self.feed(ev.PromptReady(job, PROMPT) if fits else ev.Broke(job, InternalError("bad prompt")))

    @precondition(lambda self: self.generating)
    @rule(data=st.data(), tokens=st.integers(0, 3), finish=st.sampled_from([None, None, "stop"]))
    def step(self, data: st.DataObject, tokens: int, finish: str | None) -> None:
        # Aborted jobs may still step: the engine hears of an abort later.
        job = data.draw(st.sampled_from(sorted(self.generating)))
        if finish is not None:
            self.generating.discard(job)
            self.aborted.discard(job)
        self.feed(ev.Stepped(job, Step(tuple(range(tokens)), "t" * tokens, finish, 0, 0.1)))
        if finish is not None:
            self.feed(ev.Released(job))

    @precondition(lambda self: len(self.generating) > 1)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.generating)))
        self.generating.discard(job)
        self.aborted.discard(job)
        self.feed(ev.Broke(job, InternalError("bad step")))
        self.feed(ev.Released(job))

    @precondition(lambda self: self.aborted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.aborted)))
        self.aborted.discard(job)
        self.generating.discard(job)
        self.feed(ev.Released(job))

    @rule(seconds=st.sampled_from([0.01, 0.6, 2.0]))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(ev.Tick())

    def drain(self) -> None:
        """Drain and take up work again; what comes in between is refused."""
        self.feed(ev.SetDraining(True))
        self.numbers += 1
        submit = self.new_submit(self.numbers, 1, 0, 0.0, 0)
        stream = self.streams[0, self.numbers] = Stream(submit)
        self.feed(ev.Submitted(0, submit))
        assert stream.ended
        self.feed(ev.SetDraining(False))

    @precondition(lambda self: self.requests > 25)
    @rule()
    def die(self) -> None:
        self.feed(ev.Broke(0, UnitLost("killed")))
        assert self.died == 1
        assert not self.open_streams()

    @invariant()
    def load_is_what_gateways_see(self) -> None:
        load = self.unit.load(ENGINE)
        open_streams = [stream for stream in self.streams.values() if not stream.ended]
        assert sorted(load.reservations) == sorted(stream.submit.reservation_id for stream in open_streams)
        assert load.running <= MAX_RUNNING
        assert load.waiting <= MAX_WAITING
        assert load.running + load.waiting >= len(open_streams)
        if load.waiting and self.unit.state is not UnitState.FAILED:
            assert load.running == MAX_RUNNING

    @invariant()
    def no_slot_leaks_and_nobody_waits_in_vain(self) -> None:
        if self.unit.state is UnitState.FAILED:
            return
        assert self.unit.in_engine == len(self.generating)
        accepted = [stream for stream in self.streams.values() if stream.accepted and not stream.ended]
        assert len(accepted) <= MAX_WAITING + MAX_RUNNING
        if self.unit.in_engine < MAX_RUNNING:
            assert len(accepted) <= self.unit.in_engine, "an accepted stream waits while a slot is free"

    @invariant()
    def idle_means_idle(self) -> None:
        everything_ended = all(stream.ended for stream in self.streams.values())
        if everything_ended and not self.generating:
            assert self.unit.is_idle


UnitMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestUnit = UnitMachine.TestCase
