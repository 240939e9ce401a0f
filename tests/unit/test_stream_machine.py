"""The stream machine by examples: one attempt, and what becomes of an answer whose unit is lost."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import ANY

import pytest

from gateway.pipeline import session as machine
from gateway.pipeline import stream as st
from gateway.pipeline.attempts import MAX_BREAKS, MAX_TRIES
from gateway.pipeline.events import Chunk
from gateway.pipeline.session import Order, Phase, Session
from grid.errors import GridError, NoEligibleUnit, Saturated, UnitLost
from grid.wire.messages import Accepted, Done, Failed, Refused, Tokens, Vectors, WireMessage


def started(**order: Any) -> Session:
    fields: dict[str, Any] = {
        "max_output_tokens": 8,
        "stops": (),
        "min_tokens_per_chunk": 1,
        "max_latency_s": 0.2,
        "flush_on_eos": True,
        "deadline_s": math.inf,
    }
    session = Session(Order(**{**fields, **order}))
    session.handle(st.Start(), 1.0)
    return session


def streaming(**order: Any) -> Session:
    session = started(**order)
    session.handle(st.Placed(1, "r/1", "unit-1"), 1.0)
    frames(session, 1.01, accepted(1))
    return session


def accepted(attempt: int, *, prompt_hash: bytes = b"h", fingerprint: str = "f") -> Accepted:
    return Accepted(1, attempt, 7, 3, prompt_hash, fingerprint, 0)


def frames(session: Session, now_s: float, *messages: Any) -> list[st.Effect]:
    """Feed messages as they come on the link stream of the attempt that the first of them names."""
    return session.handle(st.Frames(getattr(messages[0], "attempt", 1), messages), now_s)


def goes_on(session: Session, attempt: int, now_s: float, **fields: Any) -> st.SubmitTo:
    """Let a new attempt be placed and accepted; return what it was to submit."""
    (submit,) = session.handle(st.Placed(attempt, f"r/{attempt}", f"unit-{attempt}"), now_s)
    assert isinstance(submit, st.SubmitTo)
    assert frames(session, now_s, accepted(attempt, **fields)) == []
    return submit


def settled(effects: list[st.Effect]) -> list[tuple[str, str, int]]:
    return [(*each[:2], each.output_tokens) for each in effects if isinstance(each, st.Settle)]


# --- one attempt ------------------------------------------------------------------------------------


def test_what_came_in_one_turn_leaves_as_one_chunk() -> None:
    session = streaming()
    chunk, settle, finish = frames(
        session,
        1.05,
        Tokens(1, 1, 0, (4,), "He"),
        Tokens(1, 1, 1, (5, 6), "llo"),
        Done(1, 1, "stop", 7, 3, 3, 0.5),
    )
    assert chunk == Chunk(0, "Hello", 3)
    assert isinstance(settle, st.Settle)
    assert settle[:4] == ("r/1", "done", 7, 3)
    assert round(settle.ttft_ms) == round(settle.total_ms) == 50
    assert isinstance(finish, st.Finish)
    assert finish.usage == (7, 3, 3, 0.5)
    assert (finish.moves, finish.exact) == (0, True)
    assert session.answer.ids == [4, 5, 6]
    assert session.answer.code_points == 5


def test_a_stop_string_cancels_the_unit_and_waits_for_its_figures() -> None:
    session = streaming(stops=("END",))
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "so EN"))
    effects = frames(session, 1.2, Tokens(1, 1, 1, (2,), "D more"), Tokens(1, 1, 2, (3,), "!"))
    assert effects == [st.CancelUnit(1)]
    assert frames(session, 1.21, Tokens(1, 1, 3, (4,), "late")) == []
    settle, finish = frames(session, 1.22, Failed(1, 1, "cancelled", "", 7, 3, 4, 0.5))
    assert isinstance(settle, st.Settle)
    assert settle.outcome == "done"
    assert isinstance(finish, st.Finish)
    assert (finish.finish_reason, finish.stop) == ("stop", "END")
    assert finish.usage == (7, 3, 2, 0.5), "tokens after the stop string are not charged"


def test_figures_that_do_not_come_are_not_waited_for() -> None:
    session = streaming(stops=("END",))
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "END"))
    assert session.due_s == 1.1 + machine.FIGURES_WAIT_S
    settle, finish = session.handle(st.Tick(), session.due_s)
    assert isinstance(settle, st.Settle)
    assert isinstance(finish, st.Finish)


def test_a_link_that_is_lost_after_a_stop_string_ends_the_wait_for_figures() -> None:
    session = streaming(stops=("END",))
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "END"))
    effects = session.handle(st.LinkLost(1, UnitLost("gone")), 1.11)
    assert [type(effect) for effect in effects] == [st.Settle, st.Finish]


def test_a_tail_that_waits_is_shown_before_the_end() -> None:
    session = streaming(min_tokens_per_chunk=100, flush_on_eos=False)
    effects = frames(session, 1.1, Tokens(1, 1, 0, (1,), "x"), Done(1, 1, "stop", 7, 0, 1, 0.5))
    assert [type(effect) for effect in effects] == [st.Settle]
    assert session.due_s == 1.1 + 0.2
    chunk, finish = session.handle(st.Tick(), session.due_s)
    assert chunk == Chunk(0, "x", 1)
    assert isinstance(finish, st.Finish)


def test_a_failure_comes_after_all_that_was_received() -> None:
    session = streaming(stops=("END",), min_tokens_per_chunk=100, deadline_s=2.0)
    assert frames(session, 1.1, Tokens(1, 1, 0, (1, 2), "so EN")) == []
    chunk, give_up, settle, fail = session.handle(st.Tick(), 2.0)
    assert chunk == Chunk(0, "so EN", 2)
    assert give_up == st.GiveUp(1)
    assert settled([settle]) == [("r/1", "cancelled", 2)], "a deadline says nothing against the unit"
    assert isinstance(fail, st.Fail)
    assert (fail.error.code, fail.usage) == ("deadline_exceeded", (7, 3, 2, 0.0))


def test_a_unit_that_breaks_the_protocol_after_the_text_has_ended_is_not_replaced() -> None:
    session = streaming(stops=("END",))
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "END"))
    assert [type(effect) for effect in frames(session, 1.11, accepted(1))] == [
        st.GiveUp,
        st.Settle,
        st.Finish,
    ]


# --- before a unit accepts ----------------------------------------------------------------------------


def test_full_units_are_tried_a_bounded_number_of_times() -> None:
    session = started()
    for attempt in range(1, MAX_TRIES + 1):
        session.handle(st.Placed(attempt, f"r/{attempt}", f"unit-{attempt}"), 1.0)
        effects = session.handle(st.Frames(attempt, [Refused(1, "saturated", "full", "", 2.0)]), 1.0)
        assert settled(effects) == [(f"r/{attempt}", "refused", 0)]
        if attempt < MAX_TRIES:
            excluded = tuple(f"unit-{each}" for each in range(1, attempt + 1))
            assert effects[-1] == st.Place(attempt + 1, excluded, 0, 8)
    fail = effects[-1]
    assert isinstance(fail, st.Fail)
    assert (fail.error.code, fail.error.retry_after_s) == ("saturated", 2.0)


def test_the_only_unit_being_full_is_told_as_such() -> None:
    session = started()
    session.handle(st.Placed(1, "r/1", "unit-1"), 1.0)
    session.handle(st.Frames(1, [Refused(1, "saturated", "full", "", 2.0)]), 1.0)
    (fail,) = session.handle(st.NotPlaced(2, NoEligibleUnit("no other")), 1.0)
    assert isinstance(fail, st.Fail)
    assert fail.error.code == "saturated"


def test_a_decision_that_nobody_waits_for_is_settled() -> None:
    session = streaming()
    session.handle(st.Suspected(1), 1.1)
    frames(session, 1.2, Tokens(1, 1, 0, (1,), "it lives"))
    effects = session.handle(st.Placed(2, "r/2", "unit-2"), 1.3)
    assert settled(effects) == [("r/2", "cancelled", 0)]


# --- a lost unit --------------------------------------------------------------------------------------


def test_an_answer_goes_on_where_its_unit_was_lost() -> None:
    session = streaming()
    frames(session, 1.1, Tokens(1, 1, 0, (11, 12), "Hé"))
    give_up, settle, place = session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    assert give_up == st.GiveUp(1)
    assert settled([settle]) == [("r/1", "failed", 2)]
    assert place == st.Place(2, ("unit-1",), 2, 6, "f")
    assert goes_on(session, 2, 1.21) == st.SubmitTo(2, (11, 12), 2, 6, b"h")
    moved, chunk = frames(session, 1.3, Tokens(1, 2, 2, (13,), "llo"))
    assert moved == st.Moved(2, pytest.approx(0.2))
    assert chunk == Chunk(2, "llo", 1)
    settle, finish = frames(session, 1.4, Done(1, 2, "stop", 7, 7, 1, 0.5))
    assert settled([settle]) == [("r/2", "done", 1)]
    assert isinstance(finish, st.Finish)
    assert (finish.moves, finish.exact) == (1, True)
    assert finish.usage == (7, 7, 3, 0.5), "the prompt is charged once"


@pytest.mark.parametrize(
    ("order", "fingerprint", "exact"),
    [({}, "f", True), ({}, "other", False), ({"is_greedy": False}, "f", False)],
)
def test_an_end_says_whether_the_text_is_that_of_one_unit(
    order: dict[str, Any], fingerprint: str, exact: bool
) -> None:
    session = streaming(**order)
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "a"))
    session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    goes_on(session, 2, 1.2, fingerprint=fingerprint)
    *_, finish = frames(session, 1.3, Tokens(1, 2, 1, (2,), "b"), Done(1, 2, "stop", 7, 0, 1, 0.5))
    assert isinstance(finish, st.Finish)
    assert finish.exact is exact


def test_an_answer_that_never_began_to_speak_is_another_units_alone() -> None:
    session = streaming(is_greedy=False, bound_by="bound")
    session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    submit = goes_on(session, 2, 1.2, prompt_hash=b"packed otherwise", fingerprint="other")
    assert submit == st.SubmitTo(2, (), 0, 8, b"")
    *_, finish = frames(session, 1.3, Tokens(1, 2, 0, (2,), "b"), Done(1, 2, "stop", 7, 0, 1, 0.5))
    assert isinstance(finish, st.Finish)
    assert (finish.moves, finish.exact) == (1, True)


def test_a_stop_string_is_found_across_the_cut() -> None:
    session = streaming(stops=("END",))
    frames(session, 1.1, Tokens(1, 1, 0, (1, 2), "so E"))
    session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    submit = goes_on(session, 2, 1.2)
    assert (submit.emitted_ids, submit.emitted_code_points) == ((1, 2), 4), (
        "held back is received all the same"
    )
    effects = frames(session, 1.3, Tokens(1, 2, 2, (3,), "ND of it"))
    assert effects == [st.Moved(2, pytest.approx(0.2)), st.CancelUnit(2)]
    *_, finish = frames(session, 1.4, Failed(1, 2, "cancelled", "", 7, 0, 1, 0.5))
    assert isinstance(finish, st.Finish)
    assert finish.stop == "END"


def test_an_answer_that_lacks_only_its_end_needs_no_other_unit() -> None:
    session = streaming(max_output_tokens=2)
    frames(session, 1.1, Tokens(1, 1, 0, (1, 2), "all"))
    effects = session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    finish = effects[-1]
    assert isinstance(finish, st.Finish)
    assert (finish.finish_reason, finish.usage.output_tokens) == ("length", 2)


def test_what_counts_output_on_one_engine_ends_with_a_clear_error() -> None:
    session = streaming(bound_by="frequency_penalty counts the tokens of one engine")
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "a"))
    assert not session.can_hedge(1)
    *_, fail = session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    assert isinstance(fail, st.Fail)
    assert fail.error.code == "unit_lost"
    assert "frequency_penalty" in fail.error.message
    assert fail.usage.output_tokens == 1


@pytest.mark.parametrize(
    "frame",
    [
        Tokens(1, 1, 3, (1,), "gap"),
        Tokens(1, 1, 1, (1,), "repeat"),
        Tokens(1, 1, 2, (1,) * 7, "more than was asked for"),
        Accepted(1, 1, 7, 0, b"h", "f", 0),
        Vectors(1, 0, b"", 0),
        Done(1, 1, "stop", 7, 0, 3, 0.5),
        Failed(1, 1, "internal_error", "the engine raised"),
        Failed(1, 1, "unit_lost", "the engine died"),
        Refused(1, "saturated", "late"),
    ],
)
def test_an_answer_leaves_a_unit_that_breaks_or_breaks_the_protocol(frame: WireMessage) -> None:
    session = streaming()
    frames(session, 1.1, Tokens(1, 1, 0, (1, 2), "ok"))
    give_up, settle, place = session.handle(st.Frames(1, [frame, Tokens(1, 1, 2, (3,), "after")]), 1.2)
    assert give_up == st.GiveUp(1)
    assert settled([settle]) == [("r/1", "failed", 2)]
    assert place == st.Place(2, ("unit-1",), 2, 6, "f")
    assert session.late_frames == 1


@pytest.mark.parametrize("frame", [Tokens(1, 1, 0, (1,), "x"), Done(1, 1, "stop", 7, 0, 0, 0.5)])
def test_nothing_comes_before_accepted(frame: WireMessage) -> None:
    session = started()
    session.handle(st.Placed(1, "r/1", "unit-1"), 1.0)
    effects = frames(session, 1.0, frame)
    assert [type(each) for each in effects] == [st.GiveUp, st.Settle, st.Place]


def test_a_continuation_with_another_prompt_is_refused() -> None:
    session = streaming()
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "a"))
    session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    session.handle(st.Placed(2, "r/2", "unit-2"), 1.2)
    effects = frames(session, 1.3, accepted(2, prompt_hash=b"other"), Tokens(1, 2, 1, (2,), "b"))
    assert effects[-1] == st.Place(3, ("unit-1", "unit-2"), 1, 7, "f")
    assert session.answer.ids == [1]


def test_a_request_that_breaks_unit_after_unit_breaks_no_more() -> None:
    session = streaming()
    for attempt in range(1, MAX_BREAKS + 1):
        if attempt > 1:
            goes_on(session, attempt, 1.1)
        effects = frames(session, 1.2, Failed(1, attempt, "unit_lost", "the engine died"))
    assert isinstance(effects[-1], st.Fail)


@pytest.mark.parametrize("error", [Saturated("full"), NoEligibleUnit("none")])
def test_an_answer_without_a_unit_asks_again_for_a_while(error: GridError) -> None:
    session = streaming()
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "a"))
    session.handle(st.LinkLost(1, UnitLost("gone")), 2.0)
    attempt, now_s = 2, 2.0
    while not (effects := session.handle(st.NotPlaced(attempt, error), now_s)):
        now_s = session.due_s
        (place,) = session.handle(st.Tick(), now_s)
        attempt += 1
        assert place == st.Place(attempt, (), 1, 7, "f"), "a unit of the same name may be another by now"
    (fail,) = effects
    assert isinstance(fail, st.Fail)
    assert fail.error.code == "unit_lost"
    assert error.message in fail.error.message
    assert now_s > 2.0 + machine.CONTINUE_WITHIN_S - 1.0


# --- two at once --------------------------------------------------------------------------------------


def suspected() -> Session:
    session = streaming()
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "a"))
    assert session.handle(st.Suspected(1), 1.2) == [st.Place(2, ("unit-1",), 1, 7, "f", is_hedge=True)]
    assert session.handle(st.Suspected(1), 1.2) == [], "at most two live"
    goes_on(session, 2, 1.21)
    return session


def test_a_unit_in_doubt_that_speaks_first_keeps_the_answer() -> None:
    session = suspected()
    give_up, settle, chunk = frames(session, 1.3, Tokens(1, 1, 1, (2,), "b"))
    assert give_up == st.GiveUp(2)
    assert settled([settle]) == [("r/2", "cancelled", 0)]
    assert chunk == Chunk(1, "b", 1)
    assert frames(session, 1.3, Tokens(1, 2, 1, (2,), "b")) == []
    assert (session.late_frames, session.moves) == (1, 0)
    assert session.can_hedge(1)


def test_whoever_has_the_next_token_first_has_the_answer() -> None:
    session = suspected()
    give_up, settle, moved, chunk = frames(session, 1.3, Tokens(1, 2, 1, (2,), "b"))
    assert give_up == st.GiveUp(1)
    assert settled([settle]) == [("r/1", "failed", 1)]
    assert moved == st.Moved(2, pytest.approx(0.2))
    assert chunk == Chunk(1, "b", 1)
    assert frames(session, 1.3, Tokens(1, 1, 1, (2,), "b"), Done(1, 1, "stop", 7, 0, 2, 0.5)) == []
    assert session.late_frames == 2


def test_a_unit_that_lost_the_answer_to_another_is_left_out_when_that_is_lost_too() -> None:
    session = suspected()
    frames(session, 1.3, Tokens(1, 2, 1, (2,), "b"))
    *_, place = session.handle(st.LinkLost(2, UnitLost("gone")), 1.4)
    assert isinstance(place, st.Place)
    assert set(place.excluded) == {"unit-1", "unit-2"}


def test_a_lost_unit_leaves_the_answer_to_the_second_attempt() -> None:
    session = suspected()
    assert settled(session.handle(st.LinkLost(1, UnitLost("gone")), 1.3)) == [("r/1", "failed", 1)]
    assert frames(session, 1.4, Tokens(1, 2, 1, (2,), "b"))[0] == st.Moved(2, pytest.approx(0.3))
    assert session.phase is Phase.STREAMING


def test_a_second_attempt_that_fails_harms_nobody() -> None:
    session = suspected()
    effects = session.handle(st.Frames(2, [Failed(1, 2, "internal_error", "no")]), 1.3)
    assert settled(effects) == [("r/2", "failed", 0)]
    assert frames(session, 1.4, Tokens(1, 1, 1, (2,), "b")) == [Chunk(1, "b", 1)]


def test_second_attempts_that_broke_are_forgotten_once_the_first_speaks_again() -> None:
    session = streaming()
    frames(session, 1.1, Tokens(1, 1, 0, (0,), "a"))
    for number in range(1, MAX_BREAKS + 1):
        assert session.can_hedge(1)
        session.handle(st.Suspected(1), 1.2)
        goes_on(session, number + 1, 1.2)
        session.handle(st.LinkLost(number + 1, UnitLost("gone")), 1.3)
        frames(session, 1.4, Tokens(1, 1, number, (number,), "a"))
    assert st.Place(MAX_BREAKS + 2, ANY, MAX_BREAKS + 1, 8 - MAX_BREAKS - 1, "f") in session.handle(
        st.LinkLost(1, UnitLost("gone")), 1.5
    )


# --- a unit that drains -------------------------------------------------------------------------------


def draining() -> Session:
    session = streaming(max_output_tokens=100)
    frames(session, 1.1, Tokens(1, 1, 0, (1,), "a"))
    assert session.handle(st.Leaving(1), 1.2) == [st.Place(2, ("unit-1",), 1, 99, "f")]
    return session


def test_an_answer_leaves_a_unit_that_drains_once_it_has_another() -> None:
    session = draining()
    assert frames(session, 1.21, Tokens(1, 1, 1, (2,), "b")) == [Chunk(1, "b", 1)], "meanwhile it goes on"
    give_up, settle, submit = session.handle(st.Placed(2, "r/2", "unit-2"), 1.22)
    assert give_up == st.GiveUp(1, is_charged=True)
    assert settled([settle]) == [("r/1", "cancelled", 2)], "which says nothing against the unit"
    assert submit == st.SubmitTo(2, (1, 2), 2, 98, b"h")
    session.handle(st.Charged(0.25), 1.23)
    frames(session, 1.3, accepted(2), Tokens(1, 2, 2, (3,), "c"))
    *_, finish = frames(session, 1.4, Done(1, 2, "stop", 7, 0, 1, 0.5))
    assert isinstance(finish, st.Finish)
    assert (finish.moves, finish.exact) == (1, True)
    assert finish.usage == (7, 0, 3, 0.75), "what both units did is charged"


def test_an_answer_without_another_unit_stays_and_asks_again() -> None:
    session = draining()
    assert session.handle(st.NotPlaced(2, NoEligibleUnit("none")), 1.3) == []
    assert session.due_s == 1.3 + machine.MOVE_AGAIN_S
    assert session.handle(st.Tick(), session.due_s) == [st.Place(3, ("unit-1",), 1, 99, "f")]


def test_an_answer_that_is_nearly_done_stays_to_its_end() -> None:
    session = streaming(max_output_tokens=machine.SHORT_REST_TOKENS)
    assert session.handle(st.Leaving(1), 1.2) == []
    assert session.due_s == math.inf


def test_an_answer_that_said_all_before_its_unit_went_needs_no_other() -> None:
    session = draining()
    frames(session, 1.3, Tokens(1, 1, 1, tuple(range(99)), "x" * 99))
    effects = session.handle(st.LinkLost(1, UnitLost("gone")), 1.31)
    assert st.GiveUp(2) in effects
    assert isinstance(effects[-1], st.Finish)
    assert effects[-1].finish_reason == "length"


def test_where_the_second_attempt_finds_no_unit_the_loss_of_the_first_is_told() -> None:
    session = started()
    session.handle(st.Placed(1, "r/1", "unit-1"), 1.0)
    session.handle(st.Suspected(1), 1.1)
    session.handle(st.LinkLost(1, UnitLost("gone")), 1.2)
    (fail,) = session.handle(st.NotPlaced(2, NoEligibleUnit("none")), 1.3)
    assert isinstance(fail, st.Fail)
    assert fail.error.code == "unit_lost"


def test_an_answer_that_has_become_bound_to_its_unit_is_not_taken_over() -> None:
    session = streaming(max_output_tokens=100, bound_by="it is bound")
    assert isinstance(session.handle(st.Leaving(1), 1.05)[0], st.Place)
    assert frames(session, 1.1, Tokens(1, 1, 0, (1,), "a")) == [st.GiveUp(2), Chunk(0, "a", 1)]
    assert session.due_s == math.inf, "nor is that tried again"
