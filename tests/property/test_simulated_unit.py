"""A simulated unit gives every request its tokens once, and its memory is whole again in the end."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulation import FAST_TIMES, lone_unit

from placement.simulator import unit as unit_module
from placement.simulator.kv import BLOCK_TOKENS
from placement.simulator.steps import TOKEN_BUDGET
from placement.simulator.unit import Sequence, Unit


class Came(NamedTuple):
    gap_ms: int
    prompt: int
    output: int
    family: int


CAME = st.builds(
    Came,
    st.integers(0, 400),
    st.integers(1, 6000),
    st.integers(1, 300),
    st.integers(0, 2),
)


def drive(unit: Unit, sequences: list[tuple[float, Sequence]]) -> list[Sequence]:
    """Run `unit` until all has ended; return sequences in the order of their ends."""
    ended: list[Sequence] = []
    coming = list(sequences)
    runs, at_s = False, 0.0
    while coming or runs:
        if coming and (not runs or coming[0][0] <= unit.ends_s):
            at_s, sequence = coming.pop(0)
            at_s = max(at_s, 0.0)
            runs = unit.land(sequence, at_s) or runs
            continue
        at_s = unit.ends_s
        _, done = unit.finish(at_s)
        ended += done
        runs = unit.start(at_s)
    return ended


def sequence(number: int, came: Came) -> Sequence:
    blocks = tuple(came.family * 1000 + at for at in range(-(-came.prompt // BLOCK_TOKENS)))
    return Sequence(number, came.prompt, came.output, blocks)


@settings(max_examples=60, deadline=None)
@given(st.lists(CAME, min_size=1, max_size=25))
def test_every_request_ends_once_and_memory_is_whole(came: list[Came]) -> None:
    unit = lone_unit(kv_tokens=8_000)
    at_s, landing = 0.0, []
    for number, each in enumerate(came):
        at_s += each.gap_ms / 1e3
        landing.append((at_s, sequence(number, each)))
    ended = drive(unit, landing)
    assert sorted(s.request for s in ended) == list(range(len(came)))
    assert all(0 <= s.first_s <= s.last_s for s in ended)
    assert unit.kv.private == 0
    assert unit.queued_tokens == 0
    assert unit.kv_sum == 0
    assert not unit.held
    # What is left is shared blocks that nobody holds, all of which could make room.
    assert unit.kv.free == unit.kv.capacity


def test_a_jump_takes_as_long_as_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "STEP_NOISE", 0.0)

    def last_s(jump: int) -> float:
        monkeypatch.setattr(unit_module, "MAX_JUMP_STEPS", jump)
        landing = [(0.0, Sequence(0, 900, 500, ())), (0.31, Sequence(1, 700, 200, ()))]
        return drive(lone_unit(), landing)[-1].last_s

    assert last_s(1024) == pytest.approx(last_s(1), rel=1e-3)


def test_an_arrival_waits_for_the_step_that_runs_and_no_longer() -> None:
    unit = lone_unit()
    unit.land(Sequence(0, 100, 800, ()), 0.0)
    unit.finish(unit.ends_s)
    begin_s = unit.ends_s
    unit.start(begin_s)
    whole_s = unit.ends_s
    step_s = FAST_TIMES.decode_ms(1, 101) / 1e3
    assert unit.land(Sequence(1, 100, 5, ()), begin_s + 10.5 * step_s)
    assert unit.ends_s < whole_s
    assert unit.ends_s - (begin_s + 10.5 * step_s) < 1.2 * step_s


def test_a_long_prompt_is_computed_in_chunks_beside_answers() -> None:
    unit = lone_unit()
    unit.land(Sequence(0, 10, 100, ()), 0.0)
    unit.finish(unit.ends_s)
    unit.land(Sequence(1, 3 * TOKEN_BUDGET, 2, ()), unit.ends_s)
    unit.start(unit.ends_s)
    chunks = 0
    while unit.prefilling:
        before = unit.kv_sum
        unit.finish(unit.ends_s)
        chunks += 1
        assert unit.kv_sum > before, "the answer beside it must go on"
        unit.start(unit.ends_s)
    # Each chunk leaves room for one token of the answer.
    assert chunks == 4


def test_a_cached_prefix_is_not_computed_again() -> None:
    unit = lone_unit()
    blocks = tuple(range(4))
    ended = drive(
        unit,
        [
            (0.0, Sequence(0, 4 * BLOCK_TOKENS, 2, blocks)),
            (9.0, Sequence(1, 5 * BLOCK_TOKENS, 2, (*blocks, 9))),
        ],
    )
    assert [s.cached for s in ended] == [0, 4 * BLOCK_TOKENS]
    assert ended[1].first_s - 9.0 < ended[0].first_s


def test_the_longest_unused_blocks_make_room() -> None:
    unit = lone_unit(kv_tokens=6 * BLOCK_TOKENS)
    old, new = (1, 2), (11, 12)
    drive(unit, [(0.0, Sequence(0, 1024, 2, old)), (9.0, Sequence(1, 1024, 2, new))])
    assert (unit.kv.matched(old), unit.kv.matched(new)) == (2, 2)
    drive(unit, [(20.0, Sequence(2, 3 * BLOCK_TOKENS, 2, (21, 22, 23)))])
    assert (unit.kv.matched(old) < 2, unit.kv.matched(new)) == (True, 2)


def test_memory_that_runs_out_evicts_the_youngest_which_is_computed_anew() -> None:
    unit = lone_unit(kv_tokens=2_100)
    ended = drive(unit, [(0.0, Sequence(0, 900, 400, ())), (0.1, Sequence(1, 900, 400, ()))])
    assert unit.preemptions >= 1
    assert [s.request for s in ended] == [0, 1]
    assert ended[1].preempted >= 1
