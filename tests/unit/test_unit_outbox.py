"""What a unit holds for a peer that does not read, and how long it expects its streams to run."""

from __future__ import annotations

import pytest

from grid.units import outbox as held
from grid.units.outbox import Outbox
from grid.units.pace import FALLBACK_S_PER_TOKEN, Pace
from grid.wire.messages import Accepted, Done, Tokens, Vectors


def tokens(stream: int, index: int, count: int = 1, attempt: int = 0) -> Tokens:
    return Tokens(stream, attempt, index, tuple(range(index, index + count)), "ab" * count)


def test_tokens_of_a_stream_are_joined_and_nothing_overtakes() -> None:
    box = Outbox()
    assert not box
    accepted, done = Accepted(1, 0, 3, 0, b"h", "f", 0), Done(1, 0, "stop", 3, 0, 3, 0.1)
    for message in (accepted, tokens(1, 0), tokens(2, 0), tokens(1, 1, 2), tokens(2, 1), done):
        box.hold(message)
    assert box
    taken = box.take()
    assert [message for message in taken if message.stream == 1] == [accepted, tokens(1, 0, 3), done]
    assert [message for message in taken if message.stream == 2] == [tokens(2, 0, 2)]
    assert not box
    assert box.held_bytes == 0


def test_tokens_of_two_attempts_are_not_joined() -> None:
    box = Outbox()
    box.hold(tokens(1, 0))
    box.hold(tokens(1, 1, attempt=1))
    assert box.take() == [tokens(1, 0), tokens(1, 1, attempt=1)]


def test_the_bound_counts_vectors() -> None:
    box = Outbox()
    box.hold(Vectors(1, 1, bytes(held.MAX_HELD_BYTES), 1))
    assert box.is_full


def test_pace_without_any_measure_uses_the_prior() -> None:
    assert Pace(10.0).remaining_s(0, 100, 0.0) == pytest.approx(1.0)
    assert Pace().remaining_s(0, 1, 0.0) == pytest.approx(FALLBACK_S_PER_TOKEN)


def test_pace_expects_the_usual_length_but_no_more_than_the_budget() -> None:
    pace = Pace()
    pace.ended(tokens=10, busy_s=5.0)
    assert pace.remaining_s(0, 100, 0.0) == pytest.approx(5.0)
    assert pace.remaining_s(0, 4, 0.0) == pytest.approx(2.0)
    assert pace.remaining_s(6, 100, 6.0) == pytest.approx(4.0), "at its own pace"
    assert pace.remaining_s(30, 100, 30.0) == pytest.approx(1.0), "longer than usual: one token more"
    pace.ended(tokens=0, busy_s=1.0)
    assert pace.remaining_s(0, 100, 0.0) == pytest.approx(5.0)
