"""The stream machine under any order of events: one end, one settlement a reservation, no token lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.pipeline import session as se
from gateway.pipeline.events import Chunk
from grid.errors import InvalidRequest, NoEligibleUnit, Saturated, UnitLost
from grid.wire.messages import Accepted, Done, Failed, Progress, Refused, Tokens, Vectors, WireMessage

ALPHABET = "ab "
SELDOM = st.sampled_from([False] * 7 + [True])
"""Ends are drawn seldom, so that most streams get far before one comes."""


class SessionMachine(RuleBasedStateMachine):
    """Plays placement, unit, client and clock; checks what the session asks for."""

    @initialize(
        stops=st.sampled_from([(), ("ab",), ("aab", "b ")]),
        min_tokens=st.sampled_from([1, 4]),
        latency_s=st.sampled_from([0.0, 0.2]),
        flush=st.booleans(),
        budget=st.integers(1, 12),
    )
    def begin(
        self, stops: tuple[str, ...], min_tokens: int, latency_s: float, flush: bool, budget: int
    ) -> None:
        self.session = se.Session(se.Order(budget, stops, min_tokens, latency_s, flush, deadline_s=30.0))
        self.stops, self.budget = stops, budget
        self.now_s = 0.0
        self.reserved: list[str] = []
        self.settled: list[str] = []
        self.ends: list[Any] = []
        self.begun = 0
        self.text = ""
        self.index = 0
        self.sent_text = ""
        """What the current unit has said since it accepted."""
        self.sent_tokens = 0
        self.gone = False
        self.accepted = self.over = False

    # --- carrying out ---------------------------------------------------------------------------

    def feed(self, event: se.Event) -> list[se.Effect]:
        was_over = self.session.phase is se.Phase.ENDED
        effects = self.session.handle(event, self.now_s)
        assert not (was_over and effects), "nothing happens after the end"
        for effect in effects:
            assert not self.ends, "the end comes last"
            if isinstance(effect, Chunk):
                assert self.begun, "nothing is shown before a unit accepted"
                assert effect.index == self.index
                self.index += effect.tokens
                self.text += effect.text
            elif isinstance(effect, se.Begin):
                self.begun += 1
            elif isinstance(effect, se.Settle):
                assert effect.reservation_id in self.reserved
                self.settled.append(effect.reservation_id)
                assert effect.total_ms >= effect.ttft_ms >= 0.0
            elif isinstance(effect, se.Finish | se.Fail):
                self.ends.append(effect)
        return effects

    def frames(self, *messages: WireMessage) -> None:
        self.feed(se.Frames(messages))

    @property
    def attempt(self) -> int:
        return self.session.attempt

    @property
    def phase(self) -> se.Phase:
        return self.session.phase

    # --- placement --------------------------------------------------------------------------------

    @precondition(lambda self: self.phase is se.Phase.PLACING)
    @rule()
    def place(self) -> None:
        unit_id = f"unit-{self.attempt}"
        assert unit_id not in self.session.excluded
        self.reserved.append(f"r/{self.attempt}")
        self.accepted = self.over = False
        self.feed(se.Placed(self.reserved[-1], unit_id))

    @precondition(lambda self: self.phase is se.Phase.PLACING)
    @rule(yes=SELDOM)
    def find_no_unit(self, yes: bool) -> None:
        if not yes:
            return
        self.feed(se.NotPlaced(NoEligibleUnit("none")))
        assert self.ends

    # --- the unit ---------------------------------------------------------------------------------

    def talks(self) -> bool:
        return self.phase in {se.Phase.SUBMITTED, se.Phase.STREAMING, se.Phase.ENDING} and not self.over

    @precondition(lambda self: self.talks() and not self.accepted)
    @rule()
    def accept(self) -> None:
        self.accepted = True
        self.frames(Accepted(1, self.attempt, 7, 0, b"h", "f", 0))

    @precondition(lambda self: self.talks() and not self.accepted)
    @rule(error=st.sampled_from([Saturated("full"), InvalidRequest("bad", param="x")]))
    def refuse(self, error: Any) -> None:
        self.over = True
        self.frames(Refused(1, error.code, error.message, error.param))
        if isinstance(error, InvalidRequest):
            assert self.ends, "a caller's mistake is not tried elsewhere"

    @precondition(lambda self: self.talks() and self.accepted and self.sent_tokens < self.budget)
    @rule(
        pieces=st.lists(st.tuples(st.text(ALPHABET, max_size=3), st.integers(1, 2)), min_size=1, max_size=3)
    )
    def say(self, pieces: list[tuple[str, int]]) -> None:
        messages: list[WireMessage] = [Progress(1, self.attempt, "prefill")]
        for text, tokens in pieces:
            tokens = min(tokens, self.budget - self.sent_tokens)
            if tokens:
                messages.append(Tokens(1, self.attempt, self.sent_tokens, (5,) * tokens, text))
                self.sent_text += text
                self.sent_tokens += tokens
        self.frames(*messages)

    @precondition(lambda self: self.talks() and self.accepted)
    @rule()
    def finish(self) -> None:
        self.over = True
        self.frames(Done(1, self.attempt, "length", 7, 0, self.sent_tokens, 0.5))

    @precondition(lambda self: self.talks() and self.accepted)
    @rule(yes=SELDOM)
    def fail(self, yes: bool) -> None:
        if not yes:
            return
        self.over = True
        self.frames(Failed(1, self.attempt, "internal_error", "broke", 7, 0, self.sent_tokens, 0.25))

    @precondition(lambda self: self.phase is not se.Phase.PLACING and self.phase is not se.Phase.ENDED)
    @rule(yes=SELDOM)
    def lose_link(self, yes: bool) -> None:
        if not yes:
            return
        self.over = True
        self.feed(se.LinkLost(UnitLost("gone")))

    @precondition(lambda self: self.attempt > 1)
    @rule()
    def late_frame(self) -> None:
        dropped = self.session.late_frames
        before = self.text
        if self.phase is not se.Phase.ENDED:
            self.frames(Tokens(1, self.attempt - 1, 0, (1,), "late"))
            assert self.session.late_frames == dropped + 1
        assert self.text == before

    # --- client and clock -------------------------------------------------------------------------

    @rule(yes=SELDOM)
    def client_leaves(self, yes: bool) -> None:
        if not yes:
            return
        self.gone = self.gone or self.phase is not se.Phase.ENDED
        self.feed(se.ClientGone())
        assert self.phase is se.Phase.ENDED

    @rule(wait_s=st.sampled_from([0.001, 0.1, 0.25, 5.0]))
    def wait(self, wait_s: float) -> None:
        until_s = self.now_s + wait_s
        while self.phase is not se.Phase.ENDED and self.session.due_s <= until_s:
            self.now_s = max(self.now_s, self.session.due_s)
            before_s = self.session.due_s
            self.feed(se.Tick())
            assert self.phase is se.Phase.ENDED or self.session.due_s > before_s, (
                "a tick that was asked for helps"
            )
        self.now_s = until_s

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def ends_once_and_settles_once(self) -> None:
        if not hasattr(self, "session"):
            return
        assert len(self.settled) == len(set(self.settled)), "a reservation is settled once"
        open_reservations = set(self.reserved) - set(self.settled)
        assert len(self.ends) <= 1
        assert self.begun <= 1
        if self.phase is se.Phase.ENDED:
            assert not open_reservations, "no reservation outlives its stream"
            assert len(self.ends) == (0 if self.gone else 1)
        else:
            assert len(open_reservations) <= 1
            assert not self.ends

    @invariant()
    def shows_what_was_said(self) -> None:
        if not hasattr(self, "session"):
            return
        whole = stopped(self.sent_text, self.stops)
        assert whole.startswith(self.text), "no text lost, repeated, reordered, or past a stop string"
        if self.ends and not self.gone:
            assert self.text == whole, "an end comes after everything that was received"

    def teardown(self) -> None:
        """Left alone, every session ends by itself at its deadline."""
        if hasattr(self, "session") and self.phase is not se.Phase.ENDED:
            self.wait(60.0)
            assert self.phase is se.Phase.ENDED
            self.ends_once_and_settles_once()
            self.shows_what_was_said()


def stopped(text: str, stops: tuple[str, ...]) -> str:
    for end in range(1, len(text) + 1):
        matching = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(matching)]
    return text


SessionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSession = SessionMachine.TestCase


def streaming(**order: Any) -> se.Session:
    fields: dict[str, Any] = {
        "max_output_tokens": 8,
        "stops": (),
        "min_tokens_per_chunk": 1,
        "max_latency_s": 0.2,
        "flush_on_eos": True,
        "deadline_s": math.inf,
    }
    session = se.Session(se.Order(**{**fields, **order}))
    session.handle(se.Placed("r/1", "unit-1"), 1.0)
    session.handle(se.Frames([Accepted(1, 1, 7, 3, b"h", "f", 0)]), 1.01)
    return session


@pytest.mark.parametrize(
    "frame",
    [
        Tokens(1, 1, 3, (1,), "gap"),
        Tokens(1, 1, 1, (1,), "repeat"),
        Tokens(1, 1, 2, (1,) * 7, "more than was asked for"),
        Accepted(1, 1, 7, 0, b"h", "f", 0),
        Vectors(1, 0, b"", 0),
        Done(1, 1, "stop", 7, 0, 3, 0.5),
        Refused(1, "saturated", "late"),
    ],
)
def test_a_unit_that_breaks_the_protocol_is_cancelled_and_its_answer_fails(frame: WireMessage) -> None:
    session = streaming()
    session.handle(se.Frames([Tokens(1, 1, 0, (1, 2), "ok")]), 1.1)
    cancel, settle, fail = session.handle(se.Frames([frame, Tokens(1, 1, 2, (3,), "after")]), 1.2)
    assert cancel == se.CancelUnit(1)
    assert isinstance(settle, se.Settle)
    assert (settle.outcome, settle.output_tokens) == ("failed", 2)
    assert isinstance(fail, se.Fail)
    assert fail.error.code == "internal_error"
    assert session.phase is se.Phase.ENDED


@pytest.mark.parametrize("frame", [Tokens(1, 1, 0, (1,), "x"), Done(1, 1, "stop", 7, 0, 0, 0.5)])
def test_nothing_comes_before_accepted(frame: WireMessage) -> None:
    session = se.Session(se.Order(8, (), 1, 0.2, True, math.inf))
    session.handle(se.Placed("r/1", "unit-1"), 1.0)
    effects = session.handle(se.Frames([frame]), 1.0)
    assert isinstance(effects[-1], se.Fail)
    assert effects[-1].error.code == "internal_error"


def test_frames_of_an_attempt_that_was_given_up_are_dropped() -> None:
    session = se.Session(se.Order(8, (), 1, 0.2, True, math.inf))
    session.handle(se.Placed("r/1", "unit-1"), 1.0)
    session.handle(se.Frames([Refused(1, "saturated", "full"), Accepted(1, 1, 7, 0, b"h", "f", 0)]), 1.0)
    session.handle(se.Placed("r/2", "unit-2"), 1.0)
    assert session.handle(se.Frames([Accepted(1, 1, 7, 0, b"h", "f", 0)]), 1.0) == []
    assert session.phase is se.Phase.SUBMITTED
    assert session.late_frames == 2


def test_a_failure_comes_after_all_that_was_received() -> None:
    session = streaming(stops=("END",), min_tokens_per_chunk=100)
    assert session.handle(se.Frames([Tokens(1, 1, 0, (1, 2), "so EN")]), 1.1) == []
    effects = session.handle(se.Frames([Failed(1, 1, "unit_lost", "died", 7, 0, 2, 0.25)]), 1.15)
    chunk, settle, fail = effects
    assert chunk == Chunk(0, "so EN", 2)
    assert isinstance(settle, se.Settle)
    assert isinstance(fail, se.Fail)
    assert (fail.error.code, fail.usage) == ("unit_lost", (7, 0, 2, 0.25))


def test_a_tail_that_waits_is_shown_before_the_end() -> None:
    session = streaming(min_tokens_per_chunk=100, flush_on_eos=False)
    effects = session.handle(se.Frames([Tokens(1, 1, 0, (1,), "x"), Done(1, 1, "stop", 7, 0, 1, 0.5)]), 1.1)
    assert [type(effect) for effect in effects] == [se.Settle]
    assert session.due_s == 1.1 + 0.2
    chunk, finish = session.handle(se.Tick(), session.due_s)
    assert chunk == Chunk(0, "x", 1)
    assert isinstance(finish, se.Finish)


def test_a_link_that_is_lost_after_a_stop_string_ends_the_wait_for_figures() -> None:
    session = streaming(stops=("END",))
    session.handle(se.Frames([Tokens(1, 1, 0, (1,), "END")]), 1.1)
    effects = session.handle(se.LinkLost(UnitLost("gone")), 1.11)
    assert [type(effect) for effect in effects] == [se.CancelUnit, se.Settle, se.Finish]


def test_what_came_in_one_turn_leaves_as_one_chunk() -> None:
    session = streaming()
    effects = session.handle(
        se.Frames(
            [Tokens(1, 1, 0, (4,), "He"), Tokens(1, 1, 1, (5, 6), "llo"), Done(1, 1, "stop", 7, 3, 3, 0.5)]
        ),
        1.05,
    )
    chunk, settle, finish = effects
    assert chunk == Chunk(0, "Hello", 3)
    assert isinstance(settle, se.Settle)
    assert settle[:4] == ("r/1", "done", 7, 3)
    assert round(settle.ttft_ms) == round(settle.total_ms) == 50
    assert isinstance(finish, se.Finish)
    assert finish.usage == (7, 3, 3, 0.5)
    assert session.emitted_ids == [4, 5, 6]
    assert session.received_code_points == 5


def test_a_stop_string_cancels_the_unit_and_waits_for_its_figures() -> None:
    session = streaming(stops=("END",))
    session.handle(se.Frames([Tokens(1, 1, 0, (1,), "so EN")]), 1.1)
    effects = session.handle(se.Frames([Tokens(1, 1, 1, (2,), "D more"), Tokens(1, 1, 2, (3,), "!")]), 1.2)
    assert effects == [se.CancelUnit(1)]
    assert session.handle(se.Frames([Tokens(1, 1, 3, (4,), "late")]), 1.21) == []
    settle, finish = session.handle(se.Frames([Failed(1, 1, "cancelled", "", 7, 3, 4, 0.5)]), 1.22)
    assert isinstance(settle, se.Settle)
    assert settle.outcome == "done"
    assert isinstance(finish, se.Finish)
    assert finish.finish_reason == "stop"
    assert finish.usage == (7, 3, 2, 0.5), "tokens after the stop string are not charged"


def test_figures_that_do_not_come_are_not_waited_for() -> None:
    session = streaming(stops=("END",))
    session.handle(se.Frames([Tokens(1, 1, 0, (1,), "END")]), 1.1)
    assert session.due_s == 1.1 + se.FIGURES_WAIT_S
    settle, finish = session.handle(se.Tick(), session.due_s)
    assert isinstance(settle, se.Settle)
    assert isinstance(finish, se.Finish)


def test_full_units_are_tried_a_bounded_number_of_times() -> None:
    session = se.Session(se.Order(8, (), 1, 0.2, True, math.inf))
    for attempt in range(1, se.MAX_ATTEMPTS + 1):
        assert session.phase is se.Phase.PLACING
        assert session.attempt == attempt
        session.handle(se.Placed(f"r/{attempt}", f"unit-{attempt}"), 1.0)
        effects = session.handle(se.Frames([Refused(1, "saturated", "full", "", 2.0)]), 1.0)
    settle, fail = effects
    assert isinstance(settle, se.Settle)
    assert settle.outcome == "refused"
    assert isinstance(fail, se.Fail)
    assert fail.error.retry_after_s == 2.0
    assert session.excluded == ("unit-1", "unit-2")


def test_the_only_unit_being_full_is_told_as_such() -> None:
    session = se.Session(se.Order(8, (), 1, 0.2, True, math.inf))
    session.handle(se.Placed("r/1", "unit-1"), 1.0)
    session.handle(se.Frames([Refused(1, "saturated", "full", "", 2.0)]), 1.0)
    (fail,) = session.handle(se.NotPlaced(NoEligibleUnit("no other")), 1.0)
    assert isinstance(fail, se.Fail)
    assert fail.error.code == "saturated"
