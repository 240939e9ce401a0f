"""Whatever units do: the cap holds, somebody goes on, and verdicts follow from evidence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.fleet import make_card, make_load, make_request, make_view

from grid.words import UnitState
from placement.filters import Question, sift
from placement.health import RELAPSE_S, REST_S

UNITS = 4
SHARE = 0.5
TICK_S = 0.1
names = st.integers(0, UNITS - 1)


class Cell(RuleBasedStateMachine):
    """The view as its actor drives it: outcomes, canaries, lost and restarted units."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.cards = [make_card(f"u{number}") for number in range(UNITS)]
        self.view = make_view(*self.cards, stale_after_s=1e9, isolated_share_max=SHARE)
        self.requests = 0
        self.failed: set[str] = set()
        """Incarnations that something failed on."""

    @rule(
        unit=names, outcomes=st.lists(st.sampled_from(("done", "failed", "cancelled", "refused")), max_size=8)
    )
    def work(self, unit: int, outcomes: list[str]) -> None:
        for outcome in outcomes:
            self.requests += 1
            request = make_request(f"req_{self.requests}")
            if self.view.row(f"u{unit}") is None:
                return
            self.view.reserve(request, f"u{unit}", 9, self.now_s)
            self.wait(3)
            self.view.settle(request.reservation_id, outcome, self.now_s)
            if outcome == "failed":
                self.failed.add(self.cards[unit].incarnation)

    @rule(ticks=st.integers(1, 30))
    def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += TICK_S
            self.view.tick(self.now_s)

    @rule(flaw=st.sampled_from(("", "", "", "broken", None)), times=st.integers(1, 60))
    def canaries(self, flaw: str | None, times: int) -> None:
        for _ in range(times):
            self.wait(1)
            for card in self.view.canaries_due(self.now_s):
                self.view.canary_ended(card, flaw, self.now_s)
                if flaw:
                    self.failed.add(card.incarnation)

    @rule(unit=names)
    def restart(self, unit: int) -> None:
        self.requests += 1
        self.cards[unit] = self.cards[unit]._replace(incarnation=f"inc-{self.requests}")
        self.connect(unit, UnitState.READY)

    @rule(unit=names, state=st.sampled_from((UnitState.READY, UnitState.DRAINING, UnitState.FAILED)))
    def connect(self, unit: int, state: UnitState) -> None:
        self.requests += 1
        link = 1000 + self.requests
        self.view.join(self.cards[unit], link)
        self.view.report([make_load(self.cards[unit], state=int(state))], link, self.now_s)

    @rule(unit=names)
    def lose(self, unit: int) -> None:
        row = self.view.row(f"u{unit}")
        if row is not None:
            self.view.leave(self.view.units[row].link)

    @invariant()
    def the_cap_holds_and_somebody_goes_on(self) -> None:
        able = [
            unit.card
            for row, unit in enumerate(self.view.units)
            if self.view.columns.state[row] == UnitState.READY
        ]
        isolated = [card for card in able if self.view.isolated(card.unit_id)]
        alive = [card for card in isolated if card.unit_id not in self.dead()]
        assert len(alive) <= SHARE * len(able)
        if able and alive:
            assert len(isolated) < len(able)

    def dead(self) -> set[str]:
        return {unit_id for unit_id, each in self.view._isolation._records.items() if each.breaker.is_dead}

    @invariant()
    def only_units_that_failed_are_isolated_and_filters_agree(self) -> None:
        rows = set(sift(Question(make_request(), self.view, self.now_s)).rows.tolist())
        for row, unit in enumerate(self.view.units):
            isolated = bool(self.view.isolated(unit.card.unit_id))
            assert isolated == bool(self.view.columns.isolated[row])
            assert not isolated or unit.card.incarnation in self.failed
            assert not (isolated and row in rows)

    def teardown(self) -> None:
        """Good canaries bring back every unit that is not condemned; time forgets even those."""
        self.canaries("", 200)
        condemned = {each.unit_id for each in self.view.condemned()}
        there = {unit.card.unit_id for unit in self.view.units}
        assert {unit_id for unit_id in there if self.view.isolated(unit_id)} <= condemned
        self.wait(int((RELAPSE_S + REST_S) / TICK_S))
        self.restart(0)
        assert not any(self.view.isolated(unit_id) for unit_id in there)


TestCell = pytest.mark.slow(Cell.TestCase)
TestCell.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
