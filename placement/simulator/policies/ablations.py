"""Our policy without one of its parts each, to see what the part is worth."""

from __future__ import annotations

from typing import ClassVar

from grid.words import PlacementRequest
from placement.rules import Rules
from placement.simulator.policies.grid import Grid
from placement.simulator.seen import Arrival, Ended
from placement.targets import NO_TARGETS


class WithoutTargets(Grid):
    name: ClassVar[str] = "grid_without_targets"
    source: ClassVar[str] = "ours, by predicted time alone: nothing done to others, no target"

    def rules(self) -> Rules:
        rules = super().rules()
        return Rules(lease_s=rules.lease_s, round_trip_ms=rules.round_trip_ms, targets=NO_TARGETS)


class WithoutRoundTrips(Grid):
    name: ClassVar[str] = "grid_without_round_trips"
    source: ClassVar[str] = "ours, as if all units were near"

    def rules(self) -> Rules:
        return Rules(lease_s=super().rules().lease_s)


class WithoutPrefixes(Grid):
    name: ClassVar[str] = "grid_without_prefixes"
    source: ClassVar[str] = "ours, without hashes of prompts"

    def request(self, arrival: Arrival) -> PlacementRequest:
        return super().request(arrival)._replace(prefix=())


class WithoutLearning(Grid):
    name: ClassVar[str] = "grid_without_learning"
    source: ClassVar[str] = (
        "ours, by the catalogue's priors and what units report: ended requests teach nothing"
    )

    def outcome(self, ended: Ended) -> str:
        return "cancelled"
