"""Whatever peers say, and whatever the clock does: the placement actor answers with a decision on a unit that
may be trusted or with a typed refusal that says why. Nothing is a bug; nothing looks idle that isn't."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.fleet import make_card, make_load, make_request

from grid.config import Config
from grid.errors import ERRORS
from grid.samples import columns_of, packed
from grid.wire.messages import (
    Announce,
    AnnounceNode,
    Decided,
    HeldReservations,
    Place,
    Refused,
    Report,
    ReportNode,
    ReportUnits,
    Settle,
    WireMessage,
)
from grid.words import GpuCard, GpuSample, NodeCard, UnitState
from placement.actor import PlacementActor

UNITS = ("u0", "u1", "u2")
NODES = ("node", "other")

counts = st.one_of(st.integers(0, 5), st.sampled_from([-1, 2**40, 2**62, -(2**62)]))
readings = st.one_of(
    st.floats(0, 1e4), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, -0.5, 1e308, 5e-324])
)
unit_ids = st.sampled_from([*UNITS, "ghost", ""])
incarnations = st.sampled_from([*(f"{unit}-first" for unit in UNITS), "second", ""])


class Ear:
    """A peer that keeps what it is told."""

    is_paused = False

    def __init__(self, role: str, link_id: int) -> None:
        self.role, self.peer_id, self.link_id = role, role, link_id
        self.heard: list[WireMessage] = []

    def send(self, message: WireMessage) -> None:
        self.heard.append(message)


def changed(make: Any, *names: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Something sensible but for its `names`, or of which a few fields are what a broken peer might send."""
    sensible = st.fixed_dictionaries({name: fields[name] for name in names})
    broken = st.dictionaries(st.sampled_from(sorted(fields)), st.none(), max_size=3).flatmap(
        lambda some: st.fixed_dictionaries({name: fields[name] for name in some})
    )
    return st.one_of(sensible, sensible, broken).map(lambda some: make(**some))


cards = changed(
    lambda **some: make_card(some.pop("unit_id", "u0"), **{"max_running": 1, "host": "127.0.0.1", **some}),
    unit_id=unit_ids,
    incarnation=incarnations,
    node_id=st.sampled_from(NODES),
    model=st.sampled_from(["model-x", "model-y", ""]),
    max_running=counts,
    max_waiting=counts,
    context_tokens=counts,
    memory_grant_mb=counts,
    task=counts,
    precision=counts,
    gpus=readings,
    cu_factor=readings,
    prefill_tokens_per_s=readings,
    decode_ms_per_token=readings,
)
loads = changed(
    lambda **some: make_load(make_card(some.pop("unit_id", "u0")), **some),
    "unit_id",
    "reservations",
    unit_id=unit_ids,
    incarnation=incarnations,
    state=st.one_of(st.sampled_from([int(state) for state in UnitState]), counts),
    running=counts,
    waiting=counts,
    kv_tokens_free=counts,
    kv_tokens_total=counts,
    prefill_tokens_queued=counts,
    steps=counts,
    reservations=st.lists(st.sampled_from(["req_1/s/0", "nobody's"]), max_size=3).map(tuple),
    decode_ms_per_token=readings,
    memory_used_mb=readings,
    compute_utilisation=readings,
    prompt_tokens=counts,
    cached_tokens=counts,
)


def batch(samples: list[Any], node_id: str, cut: int) -> ReportUnits:
    packed_counts, packed_readings = packed(*columns_of(samples))
    held = tuple(
        HeldReservations(place + cut, sample.reservations, (), cut) for place, sample in enumerate(samples)
    )
    names = tuple(sample.unit_id for sample in samples)
    told = tuple(sample.incarnation for sample in samples)
    return ReportUnits(0, node_id, names, told, packed_counts[cut:], packed_readings, held)


gpu_samples = changed(
    lambda **some: GpuSample(some.pop("uuid", "GPU-0"), **some),
    uuid=st.sampled_from(["GPU-0", "GPU-9"]),
    memory_used_mb=readings,
    compute_utilisation=readings,
    temperature_c=readings,
    ecc_corrected=counts,
    xid=counts,
)
requests = changed(
    lambda **some: make_request(some.pop("request_id", "req_1"), **some),
    "request_id",
    request_id=st.sampled_from([f"req_{number}" for number in range(4)]),
    model=st.sampled_from(["model-x", "model-y", "none", ""]),
    task=counts,
    prompt_tokens=counts,
    max_output_tokens=counts,
    min_memory_mb=counts,
    lowest_precision=counts,
    deadline_ms=st.one_of(readings, st.just(500.0)),
    priority=counts,
    prefix=st.lists(counts, max_size=3).map(tuple),
    prefer_regions=st.just(("nowhere", "eu-central-1")),
    allowed_regions=st.sampled_from([(), ("eu-central-1",), ("mars",)]),
    dry_run=st.booleans(),
    explain=st.booleans(),
)
messages = st.one_of(
    cards.map(lambda card: Announce(0, card)),
    st.lists(loads, min_size=1, max_size=3).map(lambda some: Report(0, "node", tuple(some))),
    st.builds(batch, st.lists(loads, min_size=1, max_size=3), st.sampled_from(NODES), st.integers(0, 3)),
    st.lists(gpu_samples, max_size=2).map(lambda some: ReportNode(0, "node", "first", tuple(some))),
    requests.map(lambda request: Place(1, request)),
    st.builds(
        Settle,
        st.just(0),
        st.sampled_from(["req_0/s/0", "req_1/s/0", "nobody's", ""]),
        st.sampled_from(["done", "failed", "refused", "cancelled", "?"]),
        counts,
        counts,
        readings,
        readings,
        counts,
    ),
)
ROLES: dict[type[WireMessage], str] = {Place: "gateway", Settle: "gateway"}
ROLES |= {ReportUnits: "node", ReportNode: "node"}
steps = st.lists(
    st.tuples(messages, st.sampled_from([0.0, 0.1, 0.1, 3.0, 1e6, -50.0]), st.booleans()), max_size=25
)


async def play(steps: list[tuple[WireMessage, float, bool]]) -> None:
    now_s = 1000.0
    actor = PlacementActor(Config(), secret=b"s" * 32, clock=lambda: now_s, rng=random.Random(0))
    await actor.start()
    ears = {role: Ear(role, number) for number, role in enumerate(("unit", "node", "gateway"), start=1)}
    view = actor._view
    for card in (make_card(unit, max_running=1, host="127.0.0.1") for unit in UNITS[:2]):
        actor.received(ears["unit"], Announce(0, card))
        actor.received(ears["unit"], Report(0, "node", (make_load(card),)))
    actor.received(
        ears["node"], AnnounceNode(0, NodeCard("node", "first", "", (GpuCard("GPU-0", 0, "", 1.0),)))
    )
    asked = 0
    try:
        for message, later_s, ticks in steps:
            now_s += later_s
            if isinstance(message, Place):
                asked += 1
                message = Place(asked, message.request)
            role = ROLES.get(type(message), "unit")
            heard = len(ears[role].heard)
            actor.received(ears[role], message)
            while actor._intake._waiting:
                actor._intake._take_some()
            for answer in ears[role].heard[heard:]:
                check(answer, view)
            if ticks:
                actor._tick(now_s)
                actor._serve()
        answered = [m.stream for m in ears["gateway"].heard if isinstance(m, Decided | Refused) and m.stream]
        waiting = [each.stream for each in actor._dispatch.queue]
        assert sorted([*answered, *waiting]) == list(range(1, asked + 1)), "each question has one answer"
        assert actor._counts["bugs"] == 0
    finally:
        await actor.close()


def check(answer: WireMessage, view: Any) -> None:
    if isinstance(answer, Refused):
        assert answer.code in ERRORS
        assert answer.code != "internal_error"
        assert answer.message
        assert math.isfinite(answer.retry_after_s)
    elif isinstance(answer, Decided):
        decision = answer.decision
        for candidate in (decision.chosen, *decision.next_best):
            assert all(math.isfinite(part) and part >= 0 for part in candidate if isinstance(part, float))
        row = view.row(decision.chosen.unit_id)
        state = view.columns.state[row]
        assert state == UnitState.READY or state >= UnitState.STANDBY, "the latter are taken in"
        assert view.columns.sampled_s[row] > -np.inf, "a unit that never spoke gets nothing"
        assert view.columns.load[row] <= view.columns.slots[row]


@pytest.mark.slow
@given(steps)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_that_is_said_breaks_it(steps: list[tuple[WireMessage, float, bool]]) -> None:
    asyncio.run(play(steps))
