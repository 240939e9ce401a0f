"""What a gateway decides by while the placement actor is away: the view of the fleet that it was pushed last.

The same filters, without the rule on freshness, since nothing is fresh: residency never relaxes. Of the units
that pass, of those on the variant that an answer began on if there are any, two are drawn and the cheaper one
is taken, so that gateways which know nothing of each other do not all choose the same. Where none passes, a
unit on standby is: its first request takes it in. Loads are those of the last push and what was decided here
since; a unit that seems full may have room by now, and one that seems free may have none: its own admission
is the truth. Pure.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np

from grid.wire.messages import Fleet
from grid.words import UNKNOWN, Decision, FleetUnit, PlacementRequest, UnitLoad, UnitState
from placement.columns import Ints
from placement.decide import decide, other_variants, region_tiers
from placement.filters import Question, Sifted
from placement.fleet import View
from placement.rules import Rules

CHOICES = 2
"""Of two at random the better one: nearly as even as the best of all, without anybody's knowing the rest."""

WAIVED_S = 1e9
"""Stands for never, where a rule has a time limit."""

NOW_S = 0.0
"""In the last view no time passes."""


class LastView:
    def __init__(self, fleet: Fleet, rules: Rules) -> None:
        self._view = View(replace(rules, lease_s=WAIVED_S, stale_after_s=WAIVED_S), NOW_S)
        for unit in fleet.units:
            self._view.join(unit.card, 0)
            if unit.sample_age_ms != UNKNOWN:  # who never reported is not known to be ready
                self._view.report([_as_seen(unit)], 0, NOW_S)
        self._isolated = {u.card.unit_id: u.isolated for u in fleet.units if u.isolated}
        self._view.isolate(self._isolated)
        self._version = fleet.version

    def decide(self, request: PlacementRequest, rng: random.Random, *, even_full: bool = False) -> Decision:
        """Choose a unit, and count the request there. `even_full` also tries those that seemed full.

        Raises as `decide.decide`.
        """
        decision = decide(request, self._view, NOW_S, rng, partial(drawn, rng=rng, even_full=even_full))
        if not request.dry_run:
            self._take_in(decision.chosen.unit_id)
            self._view.withdraw(request.reservation_id)
            self._view.reserve(request, decision.chosen.unit_id, 0, NOW_S)
        return decision._replace(stale_view=True, fleet_version=self._version)

    def _take_in(self, unit_id: str) -> None:
        """One that was on standby serves from now on, and so has no more room than others."""
        view, row = self._view, self._view.row(unit_id)
        assert row is not None
        if view.columns.state[row] >= UnitState.STANDBY and not view.columns.taken_in[row]:
            view.take_in(row)
            view.isolate(self._isolated)  # the verdict is another view's, and this one has just judged anew

    def settle(self, reservation_id: str) -> None:
        """End what was decided here; others' reservations are ignored."""
        self._view.withdraw(reservation_id)


def drawn(question: Question, sifted: Sifted, *, rng: random.Random, even_full: bool) -> Ints:
    """Return up to CHOICES of the units that may run it: of the preferred variant if it has any, and of
    these of the most preferred region that has any."""
    rows = sifted.rows
    for code in ("standby", "saturated") if even_full else ("standby",):
        if not len(rows):
            rows = sifted.rows_of(code)
    preferred, fingerprint = question.request.prefer_regions, question.request.prefer_fingerprint
    if fingerprint and len(rows):
        same = rows[~other_variants(question.view, fingerprint)[rows]]
        rows = same if len(same) else rows
    if preferred and len(rows):
        tiers = region_tiers(question.view, preferred)[rows]
        rows = rows[tiers == tiers.min()]
    if len(rows) > CHOICES:
        rows = np.array(sorted(rng.sample(rows.tolist(), CHOICES)))
    return rows


def _as_seen(unit: FleetUnit) -> UnitLoad:
    """Return a unit's sample with what was reserved on it: reservations themselves are not pushed."""
    card, load = unit.card, unit.load
    requests = max(load.running + load.waiting, unit.reserved)
    running = min(requests, card.max_running)
    return load._replace(running=running, waiting=requests - running)
