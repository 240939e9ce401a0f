"""What an engine may do at once falls quickly under memory pressure, rises slowly, and comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grid.engines.adaptive import (
    AMPLE,
    LOWER_GAP_S,
    MIN_CHUNK_TOKENS,
    RAISE_GAP_S,
    RAISES,
    SHORT,
    Adaptive,
    Limits,
    Sample,
)
from grid.words import UNKNOWN

FULL = Limits(chunk_tokens=2048, admits=16)
CALM = Sample(kv_usage=0.2, running=4, preemptions=0, decode_ms=10.0, prefill_tokens_per_s=20_000.0)
PRESSED = CALM._replace(kv_usage=0.9, running=10)

samples = st.builds(
    Sample,
    kv_usage=st.one_of(st.floats(0, 1), st.sampled_from([AMPLE, SHORT])),
    running=st.integers(0, 20),
    preemptions=st.integers(0, 3),
    decode_ms=st.sampled_from([UNKNOWN, 0.5, 10.0, 500.0]),
    prefill_tokens_per_s=st.sampled_from([UNKNOWN, 10.0, 20_000.0]),
)
walks = st.lists(st.tuples(samples, st.sampled_from([0.05, 0.1, 0.5, 3.0])), max_size=60)
fulls = st.builds(Limits, st.integers(1, 8192), st.integers(1, 64))


def test_without_pressure_nothing_changes() -> None:
    adaptive = Adaptive(FULL)
    assert [adaptive.handle(CALM, now_s) for now_s in range(10)] == [FULL] * 10


def test_pressure_bounds_a_prompts_piece_by_the_streams_own_step_and_stops_growth() -> None:
    adaptive = Adaptive(FULL)
    # 10 ms at 20,000 tokens a second: 200 tokens, in whole blocks.
    assert adaptive.handle(PRESSED, 0.0) == Limits(192, 10)
    slower = PRESSED._replace(prefill_tokens_per_s=10_000.0, running=9)
    assert adaptive.handle(slower, LOWER_GAP_S / 2) == Limits(192, 10), "what was done shows first"
    assert adaptive.handle(slower, LOWER_GAP_S) == Limits(96, 9)
    assert adaptive.handle(slower, 2 * LOWER_GAP_S) == Limits(96, 9), "what nobody feels need not be less"


def test_where_no_speed_is_known_a_piece_is_halved() -> None:
    assert Adaptive(FULL).handle(PRESSED._replace(decode_ms=UNKNOWN), 0.0) == Limits(1024, 10)


def test_an_eviction_leaves_room_for_one_fewer() -> None:
    adaptive = Adaptive(FULL)
    evicted = CALM._replace(preemptions=1, running=7)
    assert adaptive.handle(evicted, 0.0).admits == 6
    assert adaptive.handle(evicted, 1.0).admits == 6, "it counts once"


def test_limits_come_back_to_full_and_no_faster_than_a_step_a_second() -> None:
    adaptive, steps, now_s = Adaptive(FULL), 0, 0.0
    for _ in range(20):
        adaptive.handle(PRESSED._replace(running=1, decode_ms=UNKNOWN), now_s)
        now_s += LOWER_GAP_S
    assert adaptive.limits == Limits(MIN_CHUNK_TOKENS, 1)
    calm_s = now_s
    while adaptive.limits != FULL:
        before = adaptive.limits
        steps += adaptive.handle(CALM, now_s) != before
        now_s += 0.1
    assert steps <= max(RAISES + 1, 2048 // MIN_CHUNK_TOKENS)
    assert now_s - calm_s >= steps * RAISE_GAP_S


@given(full=fulls, walk=walks)
def test_limits_are_bounded_and_never_swing(full: Limits, walk: list[tuple[Sample, float]]) -> None:
    adaptive, now_s, lowered_s, raised_s = Adaptive(full), 0.0, -99.0, -99.0
    for sample, wait_s in walk:
        now_s += wait_s
        before = adaptive.limits
        after = adaptive.handle(sample, now_s)
        assert 1 <= after.admits <= full.admits
        assert min(MIN_CHUNK_TOKENS, full.chunk_tokens) <= after.chunk_tokens <= full.chunk_tokens
        if after.chunk_tokens < before.chunk_tokens or after.admits < before.admits:
            assert after.chunk_tokens <= before.chunk_tokens
            assert after.admits <= before.admits
            assert now_s - lowered_s >= LOWER_GAP_S - 1e-9
            lowered_s = now_s
        elif after != before:
            assert sample.kv_usage < AMPLE
            assert now_s - max(lowered_s, raised_s) >= RAISE_GAP_S - 1e-9
            raised_s = now_s


@given(full=fulls, walk=walks)
def test_after_any_walk_calm_brings_back_everything(full: Limits, walk: list[tuple[Sample, float]]) -> None:
    adaptive, now_s, last = Adaptive(full), 0.0, CALM
    for last, wait_s in walk:
        now_s += wait_s
        adaptive.handle(last, now_s)
    calm = CALM._replace(preemptions=last.preemptions)
    for _ in range(400):
        now_s += 0.1
        adaptive.handle(calm, now_s)
    assert adaptive.limits == full
