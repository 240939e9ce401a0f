"""The attempts of one generation: which of them live, on which units, and how many more there may be. Pure.

At most two live: one whose unit is in doubt or is to be left, and the one that goes on in its place.
`session.py` decides what becomes of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from grid.wire.messages import Accepted

MAX_TRIES = 3
"""Placements in a row that bring no token: a full unit is often full only for the moment between two reports,
and three say that the cell is."""

MAX_BREAKS = 3
"""Units in a row that accepted a request and broke before its next token: one is bad luck, two a coincidence,
and three say that the request does it."""

MAX_ATTEMPTS = 32
"""Of one answer in all. Each costs a prefill, and a stream that was moved so often is in a cell that breaks
faster than it answers."""


class Stage(Enum):
    PLACING = auto()
    SUBMITTED = auto()
    ACCEPTED = auto()


@dataclass(slots=True, eq=False)
class Attempt:
    number: int
    takes_over: bool
    """It ends the other one as soon as it has a unit, rather than race it for the next token."""
    stage: Stage = Stage.PLACING
    first_index: int = 0
    """Of its first token in the answer."""
    unit_id: str = ""
    reservation_id: str = ""
    placed_s: float = math.nan
    accepted: Accepted | None = None
    first_token_s: float = math.nan
    tokens: int = 0
    """That the answer has from it."""
    is_suspect: bool = False
    is_leaving: bool = False
    """Its unit drains."""


class Attempts:
    def __init__(self) -> None:
        self.live: list[Attempt] = []
        self._opened = 0
        self._found_none = 0
        self._tries = 0
        self._breaks = 0
        self._lost_units: list[str] = []

    @property
    def may_open(self) -> bool:
        return self._tries < MAX_TRIES and self.may_ever_open

    @property
    def may_ever_open(self) -> bool:
        return self._opened - self._found_none < MAX_ATTEMPTS and self._breaks < MAX_BREAKS

    @property
    def excluded(self) -> tuple[str, ...]:
        """Units that the next attempt must not run on: those that failed this answer, and those it is on."""
        live = [each.unit_id for each in self.live if each.unit_id]
        return (*self._lost_units, *live)

    def open(self, *, takes_over: bool = False) -> Attempt:
        """Begin one more. Its number is never used again."""
        assert len(self.live) < 2
        self._opened += 1
        self._tries += 1
        attempt = Attempt(self._opened, takes_over)
        self.live.append(attempt)
        return attempt

    def find(self, number: int) -> Attempt | None:
        for attempt in self.live:
            if attempt.number == number:
                return attempt
        return None

    def end(self, attempt: Attempt) -> None:
        self.live.remove(attempt)

    def found_none(self, attempt: Attempt) -> None:
        """No unit was found for it, so it was no try."""
        self._found_none += 1
        self._tries -= 1
        self.end(attempt)

    def lost(self, attempt: Attempt) -> None:
        """Its unit broke, is gone, or refused: the next attempt is to be on another one."""
        if attempt.accepted is not None and not attempt.tokens:
            self._breaks += 1
        if attempt.unit_id and attempt.unit_id not in self._lost_units:
            self._lost_units.append(attempt.unit_id)

    def progressed(self) -> None:
        """The answer has a token more."""
        self._tries = self._breaks = 0

    def forgive(self) -> None:
        """After a while: a unit of the same name may be another process by now."""
        self._tries = 0
        self._lost_units.clear()
