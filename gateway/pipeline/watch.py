"""What a gateway replica sees of the units that its streams run on, and what it may do about a doubt.

    pace     how long a unit usually says nothing: far beyond it, its engine is stuck
    budget   how many second attempts may be wasted, so that overload can't feed on itself
    fleet    units that drain, fail or leave the view of placement

Nothing here waits, reads a clock or decides for a stream: a stream is told, and its session decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from grid.wire.messages import Fleet
from grid.words import UnitState

HEDGE_SHARE = 0.05
"""Second attempts for each stream that begins, of those that turn out to be wasted: a stream whose unit was
silent and spoke again has cost a prefill elsewhere."""

HEDGE_BURST = 64.0
"""Wasted ones at once: the streams of a full unit that a stop of its machine has silenced for a moment."""

STUCK_LEAST_S = 1.0
"""No engine is called stuck before: a step that computes the prompts of others may take that long."""

STUCK_FACTOR = 8.0
"""Times the longest usual gap."""

FIRST_TOKEN_S = 10.0
"""Before its first token a stream is given so much more time, and STUCK_FACTOR times what was predicted: a
prompt alone in an engine that says nothing of its steps may take that long."""

GAP_MEMORY = 0.98
"""Of the longest gap, what is left of it with each frame after it: it counts for about a hundred."""

MAX_UNITS = 4096
"""Whose pace is remembered; beyond it the longest known is forgotten."""

SAME_OBSERVER = 0.5
"""A view of the fleet that has lost more than this share of its units at once is that of a placement actor
that has just started, and says nothing of the units."""


class Watched(Protocol):
    """A stream that runs on a unit."""

    def leave_unit(self, unit_id: str) -> None:
        """The unit drains."""

    def doubt_unit(self, unit_id: str) -> None:
        """The unit may be lost."""


class HedgeBudget:
    """Each stream that begins earns HEDGE_SHARE of a hedge, up to HEDGE_BURST."""

    def __init__(self) -> None:
        self._left = HEDGE_BURST
        self.spent = self.refunded = self.refused = 0

    def earn(self) -> None:
        self._left = min(self._left + HEDGE_SHARE, HEDGE_BURST)

    def spend(self) -> bool:
        """Say whether a second attempt may begin."""
        if self._left < 1.0:
            self.refused += 1
            return False
        self._left -= 1.0
        self.spent += 1
        return True

    def refund(self) -> None:
        """The second attempt was right: the answer goes on with it."""
        self._left = min(self._left + 1.0, HEDGE_BURST)
        self.refunded += 1


class Watch:
    """One for each gateway replica."""

    def __init__(self) -> None:
        self.budget = HedgeBudget()
        self._gaps_s: dict[str, float] = {}
        self._streams: dict[str, dict[Watched, None]] = {}
        """By unit, in the order in which they came."""
        self._in_view: frozenset[str] = frozenset()

    # --- pace -------------------------------------------------------------------------------------

    def said(self, unit_id: str, gap_s: float) -> float:
        """A stream of this unit has had tokens, `gap_s` after what it had before; return `stuck_after_s`."""
        gaps_s = self._gaps_s
        usual_s = gaps_s.get(unit_id)
        if usual_s is None:
            if len(gaps_s) >= MAX_UNITS:
                del gaps_s[next(iter(gaps_s))]
        elif gap_s < usual_s * GAP_MEMORY:
            gap_s = usual_s * GAP_MEMORY
        gaps_s[unit_id] = gap_s
        limit_s = STUCK_FACTOR * gap_s
        return limit_s if limit_s > STUCK_LEAST_S else STUCK_LEAST_S

    def stuck_after_s(self, unit_id: str) -> float:
        """Return after what silence of a stream the unit's engine is in doubt."""
        return max(STUCK_LEAST_S, STUCK_FACTOR * self._gaps_s.get(unit_id, 0.0))

    @staticmethod
    def first_token_s(predicted_ms: float) -> float:
        """Return how much longer than that a stream may be silent before its first token."""
        return FIRST_TOKEN_S + STUCK_FACTOR * predicted_ms / 1000

    # --- streams and the fleet ----------------------------------------------------------------------

    def begins(self, unit_id: str, stream: Watched) -> None:
        self._streams.setdefault(unit_id, {})[stream] = None

    def ends(self, unit_id: str, stream: Watched) -> None:
        streams = self._streams.get(unit_id)
        if streams is not None:
            streams.pop(stream, None)
            if not streams:
                del self._streams[unit_id]

    def fleet_changed(self, fleet: Fleet) -> None:
        """Tell the streams of units that drain, have failed or have left since the view before."""
        states = {unit.card.unit_id: unit.load.state for unit in fleet.units}
        gone = self._in_view.difference(states)
        if len(gone) > SAME_OBSERVER * len(self._in_view):
            gone = frozenset()
        self._in_view = frozenset(states)
        for unit_id in [each for each in self._streams if states.get(each) == UnitState.DRAINING]:
            for stream in self._on(unit_id):
                stream.leave_unit(unit_id)
        for unit_id in [
            each for each in self._streams if each in gone or states.get(each) == UnitState.FAILED
        ]:
            for stream in self._on(unit_id):
                stream.doubt_unit(unit_id)

    def _on(self, unit_id: str) -> Iterable[Watched]:
        return tuple(self._streams.get(unit_id, ()))
