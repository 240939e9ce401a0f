"""The stream machine under any order of events: one end, one settlement a reservation, and no token lost,
repeated or reordered, whichever units an answer comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.pipeline import stream
from gateway.pipeline.events import Chunk
from gateway.pipeline.session import Order, Phase, Session
from grid.errors import InvalidRequest, NoEligibleUnit, Saturated, UnitLost
from grid.wire.messages import Accepted, Done, Failed, Progress, Refused, Tokens, WireMessage

ALPHABET = "ab "
SELDOM = st.sampled_from([False] * 7 + [True])
"""Ends are drawn seldom, so that most streams get far before one comes."""
PICK = st.integers(0, 1)
"""Which of the attempts that live."""


@dataclass
class Played:
    """An attempt as its unit sees it."""

    number: int
    excluded: tuple[str, ...]
    unit_id: str = ""
    next_index: int = 0
    first_index: int = 0
    accepted: bool = False
    over: bool = False


class SessionMachine(RuleBasedStateMachine):
    """Plays placement, units, client and clock; checks what the session asks for. All units say the same."""

    @initialize(
        stops=st.sampled_from([(), ("ab",), ("aab", "b ")]),
        min_tokens=st.sampled_from([1, 4]),
        latency_s=st.sampled_from([0.0, 0.2]),
        flush=st.booleans(),
        truth=st.lists(st.text(ALPHABET, max_size=3), min_size=1, max_size=24),
        ends_early=st.booleans(),
        is_bound=SELDOM,
    )
    def begin(
        self,
        stops: tuple[str, ...],
        min_tokens: int,
        latency_s: float,
        flush: bool,
        truth: list[str],
        ends_early: bool,
        is_bound: bool,
    ) -> None:
        self.truth, self.stops = truth, stops
        self.budget = len(truth) + (1 if ends_early else 0)
        self.session = Session(
            Order(
                self.budget, stops, min_tokens, latency_s, flush, 60.0, bound_by="bound" if is_bound else ""
            )
        )
        self.is_bound = is_bound
        self.now_s = 0.0
        self.live: dict[int, Played] = {}
        self.given_up: list[Played] = []
        self.reserved: set[str] = set()
        self.settled: list[str] = []
        self.ends: list[Any] = []
        self.begun = 0
        self.said = 0
        """Tokens that the session took."""
        self.text = ""
        self.index = 0
        self.gone = False
        self.feed(stream.Start())

    # --- carrying out ---------------------------------------------------------------------------

    def feed(self, event: stream.Event) -> None:
        was_over = self.session.phase is Phase.ENDED
        effects = self.session.handle(event, self.now_s)
        assert not (was_over and effects), "nothing happens after the end"
        for effect in effects:
            assert not self.ends, "the end comes last"
            if isinstance(effect, Chunk):
                assert self.begun, "nothing is shown before a unit accepted"
                assert effect.index == self.index
                self.index += effect.tokens
                self.text += effect.text
            elif isinstance(effect, stream.Begin):
                self.begun += 1
            elif isinstance(effect, stream.Place):
                assert effect.attempt not in self.live
                assert effect.rest_tokens == self.budget - self.said > 0
                self.live[effect.attempt] = Played(effect.attempt, effect.excluded)
            elif isinstance(effect, stream.SubmitTo):
                assert effect.emitted_ids == tuple(range(self.said))
                assert effect.emitted_code_points == len("".join(self.truth[: self.said]))
                assert effect.rest_tokens == self.budget - self.said
                played = self.live[effect.attempt]
                played.first_index = played.next_index = self.said
            elif isinstance(effect, stream.GiveUp):
                self.given_up.append(self.live.pop(effect.attempt))
            elif isinstance(effect, stream.Settle):
                assert effect.reservation_id in self.reserved
                self.settled.append(effect.reservation_id)
                assert effect.total_ms >= effect.ttft_ms >= 0.0
            elif isinstance(effect, stream.Finish | stream.Fail):
                self.ends.append(effect)
        assert len(self.live) <= 2

    def frames(self, played: Played, *messages: WireMessage) -> None:
        self.feed(stream.Frames(played.number, messages))

    def pick(self, which: int, *, placed: bool = True, accepted: bool | None = None) -> Played | None:
        fit = [
            each
            for each in self.live.values()
            if bool(each.unit_id) is placed
            and not each.over
            and (accepted is None or each.accepted is accepted)
        ]
        return fit[which % len(fit)] if fit and self.session.phase is not Phase.ENDED else None

    # --- placement --------------------------------------------------------------------------------

    @precondition(lambda self: self.pick(0, placed=False))
    @rule(which=PICK)
    def place(self, which: int) -> None:
        played = self.pick(which, placed=False)
        assert played is not None
        played.unit_id = f"unit-{played.number}"
        assert played.unit_id not in played.excluded
        others = {each.unit_id for each in self.live.values() if each is not played and each.unit_id}
        assert others <= set(played.excluded), "two attempts never share a unit"
        self.reserved.add(f"r/{played.number}")
        self.feed(stream.Placed(played.number, f"r/{played.number}", played.unit_id))

    @precondition(lambda self: self.pick(0, placed=False))
    @rule(which=PICK, yes=SELDOM, error=st.sampled_from([NoEligibleUnit("none"), Saturated("full")]))
    def find_no_unit(self, which: int, yes: bool, error: Any) -> None:
        if yes:
            played = self.pick(which, placed=False)
            assert played is not None
            del self.live[played.number]
            self.feed(stream.NotPlaced(played.number, error))
            assert self.ends or self.live or self.begun, "before it began, an answer without a unit ends"

    # --- the units --------------------------------------------------------------------------------

    @precondition(lambda self: self.pick(0, accepted=False))
    @rule(which=PICK)
    def accept(self, which: int) -> None:
        played = self.pick(which, accepted=False)
        assert played is not None
        played.accepted = True
        self.frames(played, Accepted(1, played.number, 7, 0, b"h", "f", 0))

    @precondition(lambda self: self.pick(0, accepted=False))
    @rule(
        which=PICK, yes=SELDOM, error=st.sampled_from([Saturated("full"), InvalidRequest("bad", param="x")])
    )
    def refuse(self, which: int, yes: bool, error: Any) -> None:
        played = self.pick(which, accepted=False)
        assert played is not None
        if yes:
            played.over = True
            self.frames(played, Refused(1, error.code, error.message, error.param))

    @precondition(lambda self: self.pick(0, accepted=True))
    @rule(which=PICK, sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def say(self, which: int, sizes: list[int]) -> None:
        played = self.pick(which, accepted=True)
        assert played is not None
        messages: list[WireMessage] = [Progress(1, played.number, "prefill")]
        for size in sizes:
            ids = tuple(range(played.next_index, min(played.next_index + size, len(self.truth))))
            if ids:
                text = "".join(self.truth[each] for each in ids)
                messages.append(Tokens(1, played.number, played.next_index, ids, text))
                played.next_index += len(ids)
        if self.session.phase is Phase.STREAMING:
            self.said = played.next_index
        self.frames(played, *messages)
        if len(messages) > 1 and self.session.phase is Phase.STREAMING:
            placing = [each for each in self.live.values() if not each.unit_id]
            assert len(self.live) - len(placing) == 1, "whoever has the next token has the answer"

    @precondition(lambda self: self.pick(0, accepted=True))
    @rule(which=PICK)
    def finish(self, which: int) -> None:
        played = self.pick(which, accepted=True)
        assert played is not None
        if played.next_index < len(self.truth):
            return
        played.over = True
        tokens = played.next_index - played.first_index
        reason = "stop" if self.budget > len(self.truth) else "length"
        self.frames(played, Done(1, played.number, reason, 7, 0, tokens, 0.5))

    @precondition(lambda self: self.pick(0, accepted=True))
    @rule(which=PICK, yes=SELDOM, code=st.sampled_from(["unit_lost", "internal_error", "deadline_exceeded"]))
    def fail(self, which: int, yes: bool, code: str) -> None:
        played = self.pick(which, accepted=True)
        assert played is not None
        if yes:
            played.over = True
            self.frames(played, Failed(1, played.number, code, "broke", 7, 0, 0, 0.25))

    @precondition(lambda self: self.pick(0))
    @rule(which=PICK, yes=st.booleans())
    def lose_link(self, which: int, yes: bool) -> None:
        played = self.pick(which)
        assert played is not None
        if yes:
            played.over = True
            self.feed(stream.LinkLost(played.number, UnitLost("gone")))

    @precondition(lambda self: self.pick(0))
    @rule(which=PICK)
    def suspect(self, which: int) -> None:
        played = self.pick(which)
        assert played is not None
        will = self.session.can_hedge(played.number)
        before = len(self.live)
        self.feed(stream.Suspected(played.number))
        assert (len(self.live) > before) is will

    @precondition(lambda self: self.pick(0))
    @rule(which=PICK, yes=SELDOM)
    def drain(self, which: int, yes: bool) -> None:
        played = self.pick(which)
        assert played is not None
        if yes:
            self.feed(stream.Leaving(played.number))

    @precondition(lambda self: self.given_up)
    @rule(data=st.data())
    def late_frame(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.given_up)).number
        dropped, before = self.session.late_frames, self.text
        was_over = self.session.phase is Phase.ENDED
        self.feed(stream.Frames(number, [Tokens(1, number, self.said, (1,), "late")]))
        assert self.text == before
        assert was_over or self.session.late_frames == dropped + 1

    # --- client and clock -------------------------------------------------------------------------

    @rule(yes=SELDOM)
    def client_leaves(self, yes: bool) -> None:
        if not yes:
            return
        self.gone = self.gone or self.session.phase is not Phase.ENDED
        self.feed(stream.ClientGone())
        assert self.session.phase is Phase.ENDED

    @rule(wait_s=st.sampled_from([0.001, 0.1, 0.25, 5.0]))
    def wait(self, wait_s: float) -> None:
        until_s = self.now_s + wait_s
        while self.session.phase is not Phase.ENDED and self.session.due_s <= until_s:
            self.now_s = max(self.now_s, self.session.due_s)
            before_s = self.session.due_s
            self.feed(stream.Tick())
            assert self.session.phase is Phase.ENDED or self.session.due_s > before_s, (
                "a tick that was asked for helps"
            )
        self.now_s = until_s

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def ends_once_and_settles_once(self) -> None:
        if not hasattr(self, "session"):
            return
        assert len(self.settled) == len(set(self.settled)), "a reservation is settled once"
        open_reservations = self.reserved - set(self.settled)
        assert len(self.ends) <= 1
        assert self.begun <= 1
        if self.session.phase is Phase.ENDED:
            assert not open_reservations, "no reservation outlives its stream"
            assert len(self.ends) == (0 if self.gone else 1)
        else:
            placed = {f"r/{each.number}" for each in self.live.values() if each.unit_id}
            # A tail may wait for its latency bound when its unit is through.
            assert open_reservations == placed or (
                self.session.phase is Phase.ENDING and not open_reservations
            )
            assert not self.ends

    @invariant()
    def shows_what_was_said(self) -> None:
        if not hasattr(self, "session"):
            return
        whole = stopped("".join(self.truth[: self.said]), self.stops)
        assert whole.startswith(self.text), "no text lost, repeated, reordered, or past a stop string"
        if self.ends and not self.gone:
            assert self.text == whole, "an end comes after everything that was received"
            end = self.ends[0]
            if isinstance(end, stream.Finish) and not end.stop:
                assert self.said == len(self.truth), "an answer that finishes is whole"

    def teardown(self) -> None:
        """Left alone, every session ends by itself at its deadline."""
        if hasattr(self, "session") and self.session.phase is not Phase.ENDED:
            self.wait(90.0)
            assert self.session.phase is Phase.ENDED
            self.ends_once_and_settles_once()
            self.shows_what_was_said()


def stopped(text: str, stops: tuple[str, ...]) -> str:
    for end in range(1, len(text) + 1):
        matching = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(matching)]
    return text


SessionMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSession = SessionMachine.TestCase
