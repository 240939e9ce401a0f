"""From ended calls to sums: what goes where, what adds up, and what stays bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stories import story

from gateway.observe import ledger as led
from gateway.observe.figures import BURST_LEAST_CALLS, is_burst
from gateway.observe.ledger import LIVE_SLOT_S, Batch, Ledger
from gateway.observe.story import Story
from gateway.observe.totals import TOTALS
from grid.words import Usage

DAY_S = 86_400
AT = 1_000_000
"""12 January 1970, 13:46:40."""

stories = st.lists(
    st.builds(
        story,
        st.sampled_from((200, 400, 429, 499, 503)),
        tenant_id=st.sampled_from(("a", "b", "")),
        pipeline_id=st.sampled_from(("pl-1", "pl-2", "")),
        usage=st.builds(Usage, st.integers(0, 9), st.just(0), st.integers(0, 9), st.sampled_from((0.0, 0.1))),
        total_ms=st.sampled_from((1.0, 20.0, 300.0)),
        ended_at=st.integers(AT, AT + 7_200).map(float),
    ),
    max_size=30,
)


def counted(*calls: Story, most: int = 1_000) -> Counter[tuple[str, str]]:
    ledger = Ledger(35 * DAY_S)
    for call in calls:
        ledger.add(call)
    return emptied(ledger, most)


def emptied(ledger: Ledger, most: int = 1_000) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    while (batch := ledger.take(most)) is not None:
        sums.update(flat(batch))
    return sums


def flat(batch: Batch) -> dict[tuple[str, str], int]:
    return {(to.name, name): count for to, fields in batch.sums.items() for name, count in fields.items()}


@given(stories, stories)
def test_two_replicas_add_up_to_one(one: list[Story], two: list[Story]) -> None:
    assert counted(*one) + counted(*two) == counted(*one, *two)


@given(stories, st.integers(1, 4))
def test_batches_of_any_size_hold_the_same(calls: list[Story], most: int) -> None:
    assert counted(*calls, most=most) == counted(*calls)


def test_a_good_call_is_counted_in_every_place() -> None:
    sums = counted(story(ended_at=AT))
    slot = AT // LIVE_SLOT_S
    for pipeline in ("pl-1", "*"):
        live = f"zg:{{acme}}:live:{pipeline}:{slot}"
        assert [sums[live, name] for name in ("calls", "good", "input", "cached", "output", "cu")] == [
            *(1, 1, 10, 4, 6, 250_000)
        ]
        assert sums[f"zg:{{acme}}:pace:{pipeline}:{AT // led.PACE_BLOCK_S}", str(slot)] == 1
    assert sums["zg:{acme}:usage:pl-1:19700112", "13:cu"] == 250_000
    assert sums["zg:{acme}:usage:pl-1:19700112", "13:calls"] == 1
    steps = f"zg:{{acme}}:steps:pl-1:1:{AT // led.STEP_SLOT_S}"
    assert sums[steps, "generation-1:calls"] == 1
    assert sums[steps, "generation-1:tokens"] == 16
    assert sums[TOTALS, "requests|/v1/chat/completions|m|good"] == 1
    assert sums[TOTALS, "output|m"] == 6


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, "refused"), (429, "refused"), (499, "cancelled"), (503, "failed")]
)
def test_only_good_calls_have_a_latency(status: int, outcome: str) -> None:
    sums = counted(story(status, ended_at=AT))
    live = {name: count for (key, name), count in sums.items() if ":live:pl-1:" in key}
    assert live[outcome] == 1
    assert not any(name.startswith("ms") for name in live)


def test_nobodys_call_is_counted_for_the_cell_alone() -> None:
    sums = counted(story(401, tenant_id=""))
    assert {key for key, _ in sums} == {TOTALS}


def test_compute_that_is_told_late_is_added_to_its_call() -> None:
    ledger = Ledger(DAY_S)
    ledger.add(story(499, usage=Usage(3, 0, 2, 0.0), ended_at=AT))
    ledger.charge("acme", "pl-1", "m", 0.5, AT)
    sums = emptied(ledger)
    assert sums["zg:{acme}:usage:pl-1:19700112", "13:cu"] == 500_000
    assert sums["zg:{acme}:usage:pl-1:19700112", "13:calls"] == 1
    assert sums[TOTALS, "cu|m"] == 500_000


def test_compute_that_is_told_late_counts_for_the_cell_and_as_no_call_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(led, "MAX_SERIES", 1)
    ledger = Ledger(DAY_S)
    ledger.add(story(ended_at=AT))
    ledger.charge("acme", "pl-2", "m", 0.5, AT)
    assert ledger.dropped == 0
    assert emptied(ledger)[TOTALS, "cu|m"] == 750_000


def test_while_nothing_is_written_hours_are_added_up_and_the_rest_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(led, "MAX_SERIES", 16)
    ledger = Ledger(35 * DAY_S)
    calls = 2 * 3_600 // LIVE_SLOT_S
    for number in range(calls):
        ledger.add(story(ended_at=AT + number * LIVE_SLOT_S))
    assert ledger.dropped == 0
    sums = emptied(ledger)
    hourly = sum(count for (key, name), count in sums.items() if ":usage:" in key and name.endswith("calls"))
    assert hourly == calls
    for number in range(40):
        ledger.add(story(pipeline_id=f"pl-{number}", ended_at=AT))
    assert ledger.dropped == 40 - 16
    assert len({key for key, _ in emptied(ledger) if ":usage:" in key}) == 16


def test_a_burst_is_far_above_the_last_ten_minutes() -> None:
    now = AT + 4.0
    slot = int(now) // LIVE_SLOT_S
    assert is_burst({slot: BURST_LEAST_CALLS}, now)
    assert not is_burst({slot: BURST_LEAST_CALLS - 1}, now)
    steady = {slot - age: 50 for age in range(2, 122)}
    assert not is_burst({**steady, slot: 50, slot - 1: 50}, now)
    assert is_burst({**steady, slot: 200, slot - 1: 200}, now)
    assert not is_burst({}, now)
