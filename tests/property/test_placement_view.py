"""Under any interleaving of what can happen to a fleet, requests count once and none stays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fleet import make_card, make_load, make_request, make_view

from grid.errors import Cancelled, NoEligibleUnit, Rejected, Saturated
from grid.units.gathering import Gathering, Numbering
from grid.wire.messages import ReportUnits
from grid.words import Decision, NodeCard, PlacementRequest, UnitCard, UnitLoad, UnitState
from placement import cost, samples
from placement.decide import decide
from placement.dispatch import Answer, Dispatch
from placement.fleet import View
from placement.lines import URGENT
from placement.queue import Limits
from placement.reports import Spent
from placement.rules import Rules

LEASE_S = 3.0
OUTCOMES = ("done", "cancelled", "refused")
STEP_S = 0.125
"""Exact in binary, so that the model and the view agree on when a lease is over."""
LEASE_TICKS = int(LEASE_S / STEP_S)
UNITS, GATEWAYS, MODELS = 2, 2, ("model-x", "model-y")
LONGEST_S = 4.0
LIMITS = Limits(most=12, most_per_tenant=6, wait_ms=1e3 * LONGEST_S)
NODE_LINK = 50


@dataclass
class World:
    """A unit as it really is: what it works on, and what of that its newest believed sample said."""

    card: UnitCard
    link: int | None = None
    works_on: set[str] = field(default_factory=set)
    sampled: set[str] = field(default_factory=set)
    has_sample: bool = False
    numbering: Numbering = field(default_factory=Numbering)
    newest: int = 0
    """Sequence of its newest believed sample."""
    listed_since: int = 0
    """The list of reservations that placement knows of it."""


@dataclass
class Held:
    """A reservation that the view should hold."""

    index: int
    incarnation: str
    gateway: int
    seen: bool
    expires_s: float


def ask(
    view: View, request: PlacementRequest, now_s: float, rng: random.Random
) -> tuple[Decision | None, Rejected | None]:
    try:
        return decide(request, view, now_s, rng), None
    except Rejected as refused:
        return None, refused


class Fleet(RuleBasedStateMachine):
    """The model keeps sets of ids; the view keeps counts. They must agree after every step."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.view = View(Rules(lease_s=LEASE_S, stale_after_s=1e9), self.now_s)
        self.units = [
            World(make_card(f"u{i}", model=MODELS[i % 2], max_running=2, max_waiting=1)) for i in range(UNITS)
        ]
        self.links = list(range(100, 100 + GATEWAYS))
        self.numbers = 0
        self.open: dict[str, Held] = {}
        self.on_way: list[tuple[str, int, str]] = []
        self.settled_since: dict[int, set[str]] = {i: set() for i in range(UNITS)}
        self.gathering = Gathering("node")
        self.on_line: list[ReportUnits] = []
        self.said: dict[tuple[str, int], UnitLoad] = {}
        self.view.join_node(NodeCard("node", "inc", "575", ()), NODE_LINK)
        for index in range(UNITS):
            self.connect(index, report=True)

    def fresh_number(self) -> int:
        self.numbers += 1
        return self.numbers

    # --- units ------------------------------------------------------------------------------

    @rule(index=st.integers(0, UNITS - 1), report=st.booleans())
    def connect(self, index: int, report: bool) -> None:
        unit = self.units[index]
        unit.link = 1000 + self.fresh_number()
        unit.has_sample, unit.sampled, unit.newest, unit.listed_since = False, set(), 0, 0
        self.settled_since[index] = set()
        self.view.join(unit.card, unit.link)
        for key, held in list(self.open.items()):
            if held.index == index and held.incarnation != unit.card.incarnation:
                del self.open[key]
        if report:
            self.report(index, 0)

    @rule(index=st.integers(0, UNITS - 1))
    def lose_unit_link(self, index: int) -> None:
        unit = self.units[index]
        if unit.link is not None:
            assert self.view.leave(unit.link) == (unit.card.unit_id,)
            unit.link, unit.has_sample, unit.sampled = None, False, set()
        assert self.view.leave(1_000_000) == ()

    @rule(index=st.integers(0, UNITS - 1), comes_back=st.booleans())
    def restart_unit(self, index: int, comes_back: bool) -> None:
        self.lose_unit_link(index)
        unit = self.units[index]
        unit.card = unit.card._replace(incarnation=f"inc-{self.fresh_number()}")
        unit.works_on, unit.numbering = set(), Numbering()
        self.gathering.forget(unit.card.unit_id)
        if comes_back:
            self.connect(index, report=True)

    def sample(self, index: int, hidden: int) -> UnitLoad:
        """The engine doesn't count `hidden` requests yet."""
        unit = self.units[index]
        running = max(0, len(unit.works_on) - hidden)
        reservations = tuple(sorted(unit.works_on))
        load = unit.numbering.next(make_load(unit.card, running=running, reservations=reservations))
        self.said[load.incarnation, load.sequence] = load
        return load

    @rule(index=st.integers(0, UNITS - 1), hidden=st.integers(0, 1))
    def report(self, index: int, hidden: int) -> None:
        unit = self.units[index]
        if unit.link is None:
            return
        load = self.sample(index, hidden)
        self.view.report([load], unit.link, self.now_s)
        unit.listed_since = load.held_since
        self.sampled(index, load)

    def sampled(self, index: int, load: UnitLoad) -> None:
        unit, held_ids = self.units[index], set(load.reservations)
        unit.sampled, unit.has_sample, unit.newest = held_ids, True, load.sequence
        self.settled_since[index] = set()
        for key, held in list(self.open.items()):
            if held.index != index or held.incarnation != unit.card.incarnation:
                continue
            if key in held_ids:
                held.seen, held.expires_s = True, self.now_s + LEASE_S
            elif held.seen:
                del self.open[key]

    @rule(index=st.integers(0, UNITS - 1), hidden=st.integers(0, 1))
    def tell_node(self, index: int, hidden: int) -> None:
        self.gathering.take(self.sample(index, hidden))

    @rule(placement_is_new=st.booleans())
    def node_sends(self, placement_is_new: bool) -> None:
        if placement_is_new:
            self.gathering.anew()
        batch = self.gathering.batch()
        if batch is not None:
            self.on_line.append(batch)

    @precondition(lambda self: self.on_line)
    @rule(count=st.integers(1, 3))
    def node_is_heard(self, count: int) -> None:
        """Batches arrive in order, but units may have said more by their own links meanwhile."""
        arrived, self.on_line = self.on_line[:count], self.on_line[count:]
        self.view.take([samples.of_node(batch, NODE_LINK) for batch in arrived], self.now_s)
        for batch in arrived:
            changes = {change.place: change for change in batch.held}
            counts = samples.of_node(batch, NODE_LINK).counts
            for place, (unit_id, incarnation) in enumerate(zip(batch.units, batch.incarnations, strict=True)):
                index = int(unit_id[1:])
                unit, load = self.units[index], self.said[incarnation, int(counts[samples.SEQUENCE, place])]
                if unit.link is None or unit.card.incarnation != incarnation or load.sequence <= unit.newest:
                    continue
                if place in changes and changes[place].since in (0, unit.listed_since):
                    unit.listed_since = load.held_since
                if unit.listed_since == load.held_since:
                    self.sampled(index, load)

    @rule(index=st.integers(0, UNITS - 1))
    def report_nonsense(self, index: int) -> None:
        """Neither a senseless sample nor one of another process or by another's link changes anything."""
        unit = self.units[index]
        sample = make_load(unit.card, running=2, reservations=tuple(self.open))
        wrong = [sample._replace(running=-1), sample._replace(incarnation="?")]
        self.view.report(wrong, unit.link or 0, self.now_s)
        self.view.report([sample], 1, self.now_s)

    # --- requests ---------------------------------------------------------------------------

    @rule(
        gateway=st.integers(0, GATEWAYS - 1), models=st.lists(st.sampled_from(MODELS), min_size=1, max_size=5)
    )
    def place_many(self, gateway: int, models: list[str]) -> None:
        for model in models:
            self.place(gateway, model, again=False)

    @rule(gateway=st.integers(0, GATEWAYS - 1), model=st.sampled_from(MODELS), again=st.booleans())
    def place(self, gateway: int, model: str, again: bool) -> None:
        number = self.rng.randint(1, self.numbers) if again and self.numbers else self.fresh_number()
        request = make_request(f"req_{number}", model=model)
        key = request.reservation_id
        if key in self.open:
            if any(key in unit.works_on for unit in self.units):
                return  # a gateway never asks anew for what already runs
            self.end(key)
        self.view.withdraw(key)
        decision, refused = ask(self.view, request, self.now_s, self.rng)
        if decision is None:
            assert refused is not None
            assert refused.details["reasons"]
            able = [i for i, unit in enumerate(self.units) if unit.has_sample and unit.card.model == model]
            assert all(self.load_of(index) >= 2 for index in able)
            return
        self.view.reserve(request, decision.chosen.unit_id, self.links[gateway], self.now_s)
        self.hold(key, decision, self.links[gateway])

    def hold(self, key: str, decision: Decision, link: int) -> None:
        index = int(decision.chosen.unit_id[1:])
        incarnation = decision.chosen.incarnation
        assert incarnation == self.units[index].card.incarnation
        self.open[key] = Held(index, incarnation, link, False, self.now_s + LEASE_S)
        self.on_way.append((key, index, incarnation))

    @precondition(lambda self: self.on_way)
    @rule(count=st.integers(1, 4), report=st.booleans())
    def submits_arrive(self, count: int, report: bool) -> None:
        for key, index, incarnation in self.on_way[:count]:
            if self.units[index].card.incarnation == incarnation:
                self.units[index].works_on.add(key)
            if report:
                self.report(index, 0)
        del self.on_way[:count]

    @rule(pick=st.integers(0, 9), outcome=st.sampled_from(OUTCOMES), unit_ends=st.booleans())
    def settle(self, pick: int, outcome: str, unit_ends: bool) -> None:
        """The gateway's settlement and the unit's own end of the work come in any order."""
        key = [*self.open, "req_unknown/s/0"][pick % (len(self.open) + 1)]
        if unit_ends:
            for unit in self.units:
                unit.works_on.discard(key)
        tokens = self.rng.randrange(1, 100)
        spent = Spent(100, tokens, 200.0, 200.0 + tokens * self.rng.uniform(5.0, 50.0))
        assert self.view.settle(key, outcome, self.now_s, spent) == (key in self.open)
        if key in self.open:
            self.end(key)

    @rule(gateway=st.integers(0, GATEWAYS - 1))
    def lose_gateway(self, gateway: int) -> None:
        link = self.links[gateway]
        lost = [key for key, held in self.open.items() if held.gateway == link and not held.seen]
        assert self.view.release_holder(link) == len(lost)
        for key in lost:
            self.end(key)
        self.links[gateway] = 100_000 + self.fresh_number()

    @rule(ticks=st.integers(1, 20))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += STEP_S
            due = [key for key, held in self.open.items() if held.expires_s <= self.now_s]
            before = self.view.reservations
            expired = self.view.tick(self.now_s)
            assert expired == before - self.view.reservations == len(due)
            for key in due:
                del self.open[key]

    def end(self, key: str) -> None:
        held = self.open.pop(key)
        unit = self.units[held.index]
        is_here = held.incarnation == unit.card.incarnation and unit.link is not None
        if is_here and held.seen and key in unit.sampled:
            self.settled_since[held.index].add(key)

    # --- what must hold ---------------------------------------------------------------------

    def load_of(self, index: int) -> int:
        """The load of a unit, over ids: in its sample and not settled since, or decided and unseen."""
        unit = self.units[index]
        in_sample = unit.sampled - self.settled_since[index]
        # An id that expired and was asked for again is another request than the one in the sample.
        unseen = [
            key
            for key, held in self.open.items()
            if (held.index, held.incarnation) == (index, unit.card.incarnation)
            and not (held.seen and key in unit.sampled)
        ]
        return len(in_sample) + len(unseen)

    @invariant()
    def every_request_counts_once(self) -> None:
        if not hasattr(self, "view"):
            return
        expected = {
            unit.card.unit_id: self.load_of(index)
            for index, unit in enumerate(self.units)
            if unit.link is not None
        }
        assert self.view.loads() == expected
        assert self.view.reservations == len(self.open)
        columns = self.view.columns
        for counts in (
            columns.unseen,
            columns.released,
            columns.unseen_prompt_tokens,
            columns.unseen_kv_tokens,
        ):
            assert (counts >= 0).all()
        assert (columns.unseen_prompt_tokens == 100 * columns.unseen).all()
        assert (columns.load == columns.reported - columns.released + columns.unseen).all()
        for row, unit in enumerate(self.view.units):
            here = (columns.load.item(row), columns.tokens_ahead.item(row), columns.kv_tokens_held.item(row))
            weight = cost.weigh(unit.speeds, unit.card.max_running, *here)
            kept = (columns.next_step_ms.item(row), columns.wait_ms.item(row), columns.crowd.item(row))
            assert kept == tuple(weight), "what decisions read follows from what is counted"
            assert unit.speeds == unit.speed.speeds

    def teardown(self) -> None:
        """When all work has ended and all leases are over, nothing is left."""
        if not hasattr(self, "view"):
            return
        for _ in range(LEASE_TICKS):
            self.now_s += STEP_S
            self.view.tick(self.now_s)
        for unit in self.units:
            unit.works_on.clear()
            if unit.link is not None:
                self.view.report([make_load(unit.card)], unit.link, self.now_s)
        assert set(self.view.loads().values()) <= {0}
        assert self.view.reservations == 0
        for unit in self.units:
            if unit.link is not None:
                self.view.leave(unit.link)
        assert len(self.view.models) == len(self.view.regions) == self.view.columns.size == 0


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_walk(seed: int) -> None:
    """The same machine, walked deep with the weights of a busy cell; Hypothesis walks wide and shrinks."""
    rng, fleet = random.Random(seed), Fleet()
    fleet.begin(seed)
    one_in = rng.randrange

    def flip() -> bool:
        return rng.random() < 0.5

    walk: list[tuple[int, Callable[[], object]]] = [
        (10, lambda: fleet.place(one_in(GATEWAYS), rng.choice(MODELS), again=rng.random() < 0.2)),
        (8, lambda: fleet.submits_arrive(1, report=flip()) if fleet.on_way else None),
        (8, lambda: fleet.report(one_in(UNITS), one_in(2))),
        (8, lambda: fleet.tell_node(one_in(UNITS), one_in(2))),
        (6, lambda: fleet.node_sends(placement_is_new=one_in(10) == 0)),
        (6, lambda: fleet.node_is_heard(1 + one_in(3)) if fleet.on_line else None),
        (8, lambda: fleet.settle(one_in(10), rng.choice(OUTCOMES), unit_ends=flip())),
        (4, lambda: fleet.time_passes(1 + one_in(4))),
        (1, lambda: fleet.time_passes(LEASE_TICKS)),  # over the leases of what samples hold as well
        (1, lambda: fleet.report_nonsense(one_in(UNITS))),
        (1, lambda: fleet.lose_gateway(one_in(GATEWAYS))),
        (1, lambda: fleet.lose_unit_link(one_in(UNITS))),
        (1, lambda: fleet.restart_unit(one_in(UNITS), comes_back=flip())),
        (3, lambda: fleet.connect(one_in(UNITS), report=flip())),
    ]
    steps = rng.choices([step for _, step in walk], [weight for weight, _ in walk], k=400)
    for step in steps:
        step()
        fleet.every_request_counts_once()
    fleet.teardown()


class QueueingFleet(Fleet):
    """The same with those who wait: each is answered once, and no slot that fits is kept from anybody.

    What the units and the gateways do is as in `Fleet`; every answer comes by way of the dispatch.
    """

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.dispatch = Dispatch(
            self.view,
            LIMITS,
            lambda request, now_s, among: decide(request, self.view, now_s, self.rng, among),
        )
        self.asked: dict[int, tuple[str, int, float]] = {}
        """By stream: who has not been answered yet, on which link, and when at the latest."""
        self.streams = 0

    @rule(
        gateway=st.integers(0, GATEWAYS - 1),
        model=st.sampled_from(MODELS),
        again=st.booleans(),
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 5, URGENT]),
        deadline_s=st.sampled_from([0.0, 0.5, 60.0]),
        prefer=st.booleans(),
    )
    def ask(
        self,
        gateway: int,
        model: str,
        again: bool,
        tenant: str,
        priority: int,
        deadline_s: float,
        prefer: bool,
    ) -> None:
        number = self.rng.randint(1, self.numbers) if again and self.numbers else self.fresh_number()
        request = make_request(
            f"req_{number}",
            model=model,
            tenant_id=tenant,
            priority=priority,
            deadline_ms=1e3 * deadline_s,
            prefer_regions=("eu-central-1",) if prefer else (),
        )
        key, link = request.reservation_id, self.links[gateway]
        if any(key in unit.works_on for unit in self.units):
            return  # a gateway never asks anew for what already runs
        if key in self.open:
            self.end(key)
        self.streams += 1
        self.asked[self.streams] = key, link, self.now_s + min(deadline_s or LONGEST_S, LONGEST_S)
        self.hear(self.dispatch.place(request, link, self.streams, self.now_s))

    def place(self, gateway: int, model: str, again: bool) -> None:
        self.ask(gateway, model, again, "a", 0, 0.0, prefer=False)

    def hear(self, answers: list[Answer]) -> None:
        for answer in answers:
            key, link, _ = self.asked.pop(answer.stream)
            assert (answer.request.reservation_id, answer.holder) == (key, link)
            if isinstance(answer.outcome, Decision):
                self.hold(key, answer.outcome, link)
            elif isinstance(answer.outcome, Saturated):
                assert answer.outcome.retry_after_s > 0
            else:
                assert isinstance(answer.outcome, Cancelled | NoEligibleUnit)

    @rule(pick=st.integers(0, 9), outcome=st.sampled_from(OUTCOMES), unit_ends=st.booleans())
    def settle(self, pick: int, outcome: str, unit_ends: bool) -> None:
        waiting = [key for key, _, _ in self.asked.values()]
        keys = [*self.open, *waiting, "req_unknown/s/0"]
        key = keys[pick % len(keys)]
        if unit_ends:
            for unit in self.units:
                unit.works_on.discard(key)
        is_known = key in self.open or key in waiting
        if key in self.open:
            self.end(key)
        held, answers = self.dispatch.settle(key, outcome, self.now_s)
        assert held == is_known
        self.hear(answers)

    @rule(gateway=st.integers(0, GATEWAYS - 1))
    def lose_gateway(self, gateway: int) -> None:
        link = self.links[gateway]
        gone = [stream for stream, (_, on, _) in self.asked.items() if on == link]
        assert self.dispatch.leave(link) == len(gone)
        for stream in gone:
            del self.asked[stream]
        super().lose_gateway(gateway)

    @rule(index=st.integers(0, UNITS - 1), draining=st.booleans())
    def drain(self, index: int, draining: bool) -> None:
        self.view.drain(f"u{index}", draining)

    @rule()
    def serve(self) -> None:
        self.hear(self.dispatch.serve(self.now_s))
        rng = random.Random(0)
        for waiting in self.dispatch.queue:
            _, refused = ask(self.view, waiting.request, self.now_s, rng)
            assert refused is not None or waiting.regions, "a free slot is kept from one whom it fits"
        for key, _, until_s in self.asked.values():
            assert until_s > self.now_s, f"{key} waits beyond its time"

    @rule(ticks=st.integers(1, 20))
    def time_passes(self, ticks: int) -> None:
        super().time_passes(ticks)
        self.serve()

    @invariant()
    def every_question_waits_until_it_is_answered(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        queue = self.dispatch.queue
        assert {waiting.stream for waiting in queue} == set(self.asked)
        usual = [waiting for waiting in queue if not waiting.urgent]
        assert max(len(usual), len(queue) - len(usual)) <= LIMITS.most
        tenants = Counter(waiting.request.tenant_id for waiting in usual)
        assert max(tenants.values(), default=0) <= LIMITS.most_per_tenant
        for pool in queue.pools.values():
            here = [waiting for waiting in queue if waiting.model == pool.model]
            assert pool.waiting == len(here)
            assert pool.tenants == len({waiting.request.tenant_id for waiting in here})
            assert pool.cost_ms == pytest.approx(sum(waiting.cost_ms for waiting in here))
            assert set(pool.in_order(pool.lines.values(), len(here) + 1)) == set(here)

    def teardown(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        self.time_passes(int(LONGEST_S / STEP_S))
        assert not self.asked
        assert len(self.dispatch.queue) == 0
        assert not any(pool.lines or pool.flows for pool in self.dispatch.queue.pools.values())
        self.rng.shuffle(keys := [*self.open])
        for key in keys:
            self.end(key)
            assert self.dispatch.settle(key, "done", self.now_s)[0]
        super().teardown()


TestQueueingFleet = QueueingFleet.TestCase
TestQueueingFleet.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_random_walk_with_a_queue(seed: int) -> None:
    rng, fleet = random.Random(seed), QueueingFleet()
    fleet.begin(seed)
    one_in, flip = rng.randrange, lambda: rng.random() < 0.5

    def question() -> None:
        urgency, left_s = rng.choice([0, 0, 0, 5, URGENT]), rng.choice([0.0, 0.5, 60.0])
        fleet.ask(
            one_in(GATEWAYS), rng.choice(MODELS), one_in(5) == 0, rng.choice("abc"), urgency, left_s, flip()
        )

    walk: list[tuple[int, Callable[[], object]]] = [
        (20, question),
        (8, lambda: fleet.submits_arrive(1, report=flip()) if fleet.on_way else None),
        (8, lambda: fleet.report(one_in(UNITS), one_in(2))),
        (14, lambda: fleet.settle(one_in(6), rng.choice(OUTCOMES), unit_ends=flip())),
        (4, fleet.serve),
        (4, lambda: fleet.time_passes(1 + one_in(4))),
        (1, lambda: fleet.time_passes(LEASE_TICKS)),
        (1, lambda: fleet.lose_gateway(one_in(GATEWAYS))),
        (1, lambda: fleet.lose_unit_link(one_in(UNITS))),
        (1, lambda: fleet.restart_unit(one_in(UNITS), comes_back=flip())),
        (2, lambda: fleet.drain(one_in(UNITS), draining=one_in(4) == 0)),
        (8, lambda: fleet.connect(one_in(UNITS), report=True)),
    ]
    for step in rng.choices([step for _, step in walk], [weight for weight, _ in walk], k=400):
        step()
        fleet.every_request_counts_once()
        fleet.every_question_waits_until_it_is_answered()
    fleet.teardown()


cards = st.builds(
    make_card,
    st.text("abcdefgh", min_size=1, max_size=6),
    model=st.sampled_from(MODELS),
    region=st.sampled_from(["a", "b", "c"]),
    memory_grant_mb=st.integers(0, 100),
    max_running=st.integers(1, 3),
    max_waiting=st.integers(0, 2),
    decode_ms_per_token=st.sampled_from([-1.0, 1.0, 50.0]),
)


@given(
    fleet=st.lists(cards, max_size=8, unique_by=lambda card: card.unit_id),
    running=st.integers(0, 5),
    state=st.sampled_from(UnitState),
    allowed=st.lists(st.sampled_from("abcd"), max_size=2),
    prefer=st.lists(st.sampled_from("abcd"), max_size=3),
    avoid=st.lists(st.sampled_from([*MODELS, "model"]), max_size=1),
    memory=st.integers(0, 100),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_a_decision_keeps_every_hard_rule_and_a_refusal_has_reasons(
    fleet: list[UnitCard],
    running: int,
    state: UnitState,
    allowed: list[str],
    prefer: list[str],
    avoid: list[str],
    memory: int,
    seed: int,
) -> None:
    view = make_view(*fleet)
    if fleet:
        view.report([make_load(fleet[0], running=running, state=int(state))], 1, 0.0)
    request = make_request(
        allowed_regions=tuple(allowed),
        prefer_regions=tuple(prefer),
        avoid_models=tuple(avoid),
        min_memory_mb=memory,
        # A dry run is told of a unit that a call would take in.
        dry_run=state < UnitState.STANDBY,
        explain=True,
    )

    def may_run(card: UnitCard) -> bool:
        return (
            card.model == request.model
            and card.model not in avoid
            and (not allowed or card.region in allowed)
            and card.memory_grant_mb >= memory
            and (card is not fleet[0] or state == UnitState.READY)
        )

    fit = {card.unit_id for card in fleet if may_run(card)}
    full = {card.unit_id for card in fleet[:1] if running >= card.max_running}
    decision, refused = ask(view, request, 0.0, random.Random(seed))
    if isinstance(refused, NoEligibleUnit):
        assert not fit
        assert refused.details["reasons"]
        assert len(refused.details["rejections"]) == len(fleet)
        assert sum(refused.details["rejected_by_code"].values()) == len(fleet)
    elif isinstance(refused, Saturated):
        assert fit
        assert fit <= full
        assert refused.retry_after_s > 0
    else:
        assert decision is not None
        assert decision.chosen.unit_id in fit - full
        candidates = {decision.chosen.unit_id, *(c.unit_id for c in decision.next_best)}
        assert candidates == fit - full, "whoever asks to explain is told of all of them"
        assert decision.candidates == len(candidates)
        assert {r.unit_id for r in decision.rejections} == {c.unit_id for c in fleet} - (fit - full)
        assert sum(Counter(dict(decision.rejected_by_code)).values()) == len(decision.rejections)
