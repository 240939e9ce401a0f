"""A node's batch: what it carries of its units, and what placement believes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet import make_card, make_load, make_request, make_view

from grid.errors import InvalidRequest
from grid.samples import COUNTS, READINGS, columns_of, load_of, packed, unpacked
from grid.units.gathering import MAX_UNITS, WHOLE_EVERY, Gathering, Numbering
from grid.units.node import phase
from grid.wire.messages import HeldReservations, ReportUnits
from grid.words import NodeCard, UnitCard, UnitLoad
from placement import samples
from placement.fleet import View
from placement.intake import GATHER_S, MAX_TURN_UNITS, Intake
from placement.reports import load_flaw
from placement.samples import Batch

NODE_LINK = 77
FIRST, SECOND = make_request("req_1"), make_request("req_2")
NUMBERS = st.one_of(st.integers(-3, 100), st.integers(2**40 - 2, 2**40 + 2))
READINGS_OF_ANY_KIND = st.one_of(st.floats(), st.sampled_from([-1.0, 0.0, -0.5, 1e13]))


def cards(count: int = 2) -> list[UnitCard]:
    return [make_card(f"u{number}") for number in range(count)]


def node_view(*units: UnitCard) -> View:
    """A view of units that have not reported, and of their node."""
    view = View(make_view().rules, 0.0)
    view.join_node(NodeCard("node", "inc", "575", ()), NODE_LINK)
    for link, card in enumerate(units, start=1):
        view.join(card, link)
    return view


def hear(view: View, batch: ReportUnits | None, link: int = NODE_LINK, now_s: float = 0.0) -> None:
    assert batch is not None
    view.take([samples.of_node(batch, link)], now_s)


# --- the columns ------------------------------------------------------------------------------


def test_samples_survive_the_way_save_for_their_lists() -> None:
    loads = [
        make_load(card, running=3, steps=7, decode_ms_per_token=12.5, reservations=("r",), sequence=4)
        for card in cards(3)
    ]
    counts, readings = unpacked(*packed(*columns_of(loads)), 3)
    for place, load in enumerate(loads):
        told = load_of(load.unit_id, load.incarnation, counts[:, place].tolist(), readings[:, place].tolist())
        assert told == load._replace(reservations=())


def test_an_older_peers_columns_lack_rows_and_a_newer_ones_have_more() -> None:
    load = make_load(make_card(), running=2, prompt_tokens=9, sequence=3)
    counts, readings = packed(*columns_of([load]))
    lacking = COUNTS.index("sequence")
    older, _ = unpacked(counts[: 8 * lacking], readings, 1)
    assert older[:, 0].tolist() == columns_of([load._replace(sequence=0, held_since=0)])[0][:, 0].tolist()
    newer, _ = unpacked(counts + bytes(8), readings, 1)
    assert newer.shape == (len(COUNTS), 1)


@pytest.mark.parametrize("data", [b"123", b"", bytes(8 * 3)])
def test_bytes_that_are_no_rows_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="rows"):
        unpacked(data, bytes(8 * len(READINGS)), 1)


@given(
    counts=st.lists(NUMBERS, min_size=len(COUNTS), max_size=len(COUNTS)),
    readings=st.lists(READINGS_OF_ANY_KIND, min_size=len(READINGS), max_size=len(READINGS)),
)
def test_columns_are_believed_exactly_where_samples_are(counts: list[int], readings: list[float]) -> None:
    load = load_of("u", "i", counts, readings)
    assert samples.sound(*columns_of([load])).tolist() == [not load_flaw(load)]


# --- lists of reservations --------------------------------------------------------------------


def told(batch: ReportUnits | None) -> tuple[HeldReservations, ...]:
    assert batch is not None
    return tuple(change._replace(begun=tuple(sorted(change.begun))) for change in batch.held)


def test_a_list_is_told_whole_once_and_then_by_its_changes() -> None:
    numbering, gathering = Numbering(), Gathering("node")

    def say(*reservations: str) -> tuple[HeldReservations, ...]:
        gathering.take(numbering.next(make_load(make_card(), reservations=reservations)))
        return told(gathering.batch())

    assert say("a", "b") == (HeldReservations(0, ("a", "b")),)
    assert say("a", "b") == ()
    assert say("b", "c") == (HeldReservations(0, ("c",), ("a",), 1),)
    gathering.anew()
    assert say("b", "c") == (HeldReservations(0, ("b", "c")),)
    assert sum(say("b", "c") != () for _ in range(2 * WHOLE_EVERY)) == 2
    assert gathering.batch() is None, "what was told is not told again"


def test_a_list_that_grew_while_nobody_was_told_comes_as_one_change() -> None:
    numbering, gathering = Numbering(), Gathering("node")
    for reservations in [("a",), ("a", "b"), ("b", "c")]:
        gathering.take(numbering.next(make_load(make_card(), reservations=reservations)))
        if len(reservations) == 1:
            gathering.batch()
    assert told(gathering.batch()) == (HeldReservations(0, ("b", "c"), ("a",), 1),)


def test_what_a_lost_unit_said_is_not_passed_on() -> None:
    gathering = Gathering("node")
    gathering.take(make_load(make_card()))
    gathering.forget("u0")
    assert gathering.batch() is None


def test_a_node_tells_of_no_more_units_than_placement_takes() -> None:
    gathering = Gathering("node")
    for number in range(MAX_UNITS + 1):
        gathering.take(make_load(make_card(f"u{number}")))
    batch = gathering.batch()
    assert batch is not None
    assert len(samples.of_node(batch, NODE_LINK).units) == MAX_UNITS


# --- what placement believes ------------------------------------------------------------------


def test_a_nodes_batch_is_the_newest_sample_of_its_units() -> None:
    first, second = cards()
    view = node_view(first, second)
    view.reserve(FIRST, "u0", 9, 0.0)
    numbering, gathering = Numbering(), Gathering("node")
    gathering.take(numbering.next(make_load(first, running=1, reservations=(FIRST.reservation_id,))))
    gathering.take(make_load(second, running=3))
    hear(view, gathering.batch())
    assert view.loads() == {"u0": 1, "u1": 3}
    gathering.take(numbering.next(make_load(first)))
    hear(view, gathering.batch())
    assert (view.loads(), view.reservations, view.dropped) == ({"u0": 0, "u1": 3}, 0, {})


def test_a_sample_that_comes_late_by_the_other_way_changes_nothing() -> None:
    [card] = cards(1)
    view, numbering, gathering = node_view(card), Numbering(), Gathering("node")
    gathering.take(numbering.next(make_load(card, running=1)))
    late = gathering.batch()
    view.report([numbering.next(make_load(card, running=2))], 1, 0.0)
    hear(view, late)
    assert (view.loads(), view.dropped) == ({"u0": 2}, {"late_sample": 1})


def test_both_ways_in_one_turn_leave_the_newer_sample() -> None:
    [card] = cards(1)
    view, numbering, gathering = node_view(card), Numbering(), Gathering("node")
    gathering.take(numbering.next(make_load(card, running=1)))
    batch = gathering.batch()
    assert batch is not None
    newer = samples.own([numbering.next(make_load(card, running=2))], 1)
    view.take([newer, samples.of_node(batch, NODE_LINK)], 0.0)
    assert view.loads() == {"u0": 2}


def test_changes_to_an_unknown_list_are_not_believed_until_it_is_told_whole() -> None:
    [card] = cards(1)
    view, numbering, gathering = node_view(card), Numbering(), Gathering("node")
    view.reserve(FIRST, "u0", 9, 0.0)

    def say(**load: Any) -> ReportUnits | None:
        gathering.take(numbering.next(make_load(card, **load)))
        return gathering.batch()

    say(reservations=("lost",))
    hear(view, say(running=2, reservations=("lost", FIRST.reservation_id)))
    assert (view.loads(), view.dropped) == ({"u0": 1}, {"unknown_list": 1})
    for _ in range(WHOLE_EVERY):
        hear(view, say(running=2, reservations=("lost", FIRST.reservation_id)))
    assert view.loads() == {"u0": 2}


def test_a_node_speaks_only_for_its_own_units_and_only_by_its_own_link() -> None:
    ours, foreign = make_card("u0"), make_card("u1", node_id="other")
    view, gathering = node_view(ours, foreign), Gathering("node")
    for card in (ours, foreign, make_card("ghost"), ours._replace(incarnation="old")):
        gathering.take(make_load(card, running=1))
    hear(view, gathering.batch())
    # One of each reason: the last two samples of u0 are one in a batch, the newest.
    assert view.loads() == {"u0": 0, "u1": 0}
    assert view.dropped == {"foreign_unit": 1, "unknown_unit": 1, "wrong_incarnation": 1}
    gathering.take(make_load(ours, running=1))
    hear(view, gathering.batch(), link=78)
    assert (view.loads()["u0"], view.dropped["foreign_unit"]) == (0, 2)


def test_nonsense_of_one_unit_costs_the_others_nothing() -> None:
    first, second = cards()
    view, gathering = node_view(first, second), Gathering("node")
    gathering.take(make_load(first, decode_ms_per_token=float("nan")))
    gathering.take(make_load(second, running=1))
    hear(view, gathering.batch())
    assert (view.loads(), view.dropped) == ({"u0": 0, "u1": 1}, {"bad_sample": 1})
    assert view.last_flaw.startswith("u0: decode_ms_per_token is nan")
    assert view.is_silent("u0")


def test_an_own_report_that_no_column_holds_is_dropped() -> None:
    view = make_view(*cards(1))
    view.report([make_load(make_card("u0"), running=2**64 - 1)], 1, 0.0)
    assert (view.loads(), view.dropped) == ({"u0": 0}, {"bad_sample": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"units": ()},
        {"units": ("u0", "u0")},
        {"incarnations": ("only one",)},
        {"counts": b"odd"},
        {"held": (HeldReservations(2, ()),)},
    ],
)
def test_a_batch_that_is_none_is_refused(change: dict[str, Any]) -> None:
    gathering = Gathering("node")
    for card in cards():
        gathering.take(make_load(card))
    batch = gathering.batch()
    assert batch is not None
    with pytest.raises(InvalidRequest):
        samples.of_node(batch._replace(**change), NODE_LINK)


def test_rows_that_moved_are_found_anew() -> None:
    units = cards(3)
    view, gathering = node_view(*units), Gathering("node")

    def say(running: int) -> None:
        for card in units[1:]:
            gathering.take(make_load(card, running=running))
        hear(view, gathering.batch())

    say(1)
    view.leave(1)
    say(2)
    assert view.loads() == {"u1": 2, "u2": 2}


# --- turns ------------------------------------------------------------------------------------


class Turns:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.taken: list[int] = []
        self.intake = Intake(self.take, lambda: self.now_s)

    def take(self, batches: Sequence[Batch]) -> None:
        self.taken.append(sum(len(batch.units) for batch in batches))


def batch_of(units: int, link: int = 1) -> Batch:
    loads: list[UnitLoad] = [make_load(make_card(f"u{number}")) for number in range(units)]
    return samples.own(loads, link)


async def test_a_lone_sample_is_taken_at_once_and_others_gather() -> None:
    turns = Turns()
    turns.intake.add(batch_of(1))
    turns.intake.add(batch_of(2))
    turns.intake.add(batch_of(3, link=2))
    assert turns.taken == [1]
    await asyncio.sleep(2 * GATHER_S)
    assert turns.taken == [1, 5]
    turns.intake.add(batch_of(1))
    turns.intake.add(batch_of(2, link=2), at_once=True)
    assert turns.taken == [1, 5, 3]
    turns.intake.add(batch_of(1))
    turns.intake.add(batch_of(2), at_once=True)
    assert turns.taken == [1, 5, 3, 1, 2], "one sender's batches are newer and newer samples of its units"


async def test_a_large_intake_is_taken_in_short_turns() -> None:
    turns = Turns()
    turns.intake.add(batch_of(1))
    for link in range(5):
        turns.intake.add(batch_of(MAX_TURN_UNITS // 2, link))
    async with asyncio.timeout(5):
        while sum(turns.taken) < 1 + 5 * (MAX_TURN_UNITS // 2):  # noqa: ASYNC110  nothing tells of a turn
            await asyncio.sleep(0)
    assert max(turns.taken) <= MAX_TURN_UNITS


def test_nodes_tell_at_different_times() -> None:
    phases = np.array([phase(f"node-{number}") for number in range(1000)])
    counts, _ = np.histogram(phases, 10, (0.0, 1.0))
    assert counts.min() > 50
