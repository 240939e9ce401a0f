"""Whether one unit is to be trusted with work: a circuit breaker over a sequential test. Pure.

    CLOSED ──enough evidence──▶ OPEN ──rest over──▶ HALF_OPEN ──canaries good──▶ CLOSED
                                 ▲                      │
                                 └───a canary failed────┤
                                                        └──failed again, or relapsed too often──▶ CONDEMNED

Evidence is the log-likelihood ratio of "it fails one request in ten" against "one in a thousand", never
below zero (Page's cumulative sum test): each failure adds much, each success takes a little off. Outcomes of
requests and of canaries count alike, so a unit comes back only by as much good work as put it away. What is
the client's doing (a cancel, its deadline, a bad request, a refusal) says nothing. What was on the unit
together when it failed says one thing, not many. `isolation.py` says what is done about an open breaker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

SOUND_SHARE = 0.001
"""Failures of a sound unit: restarts of gateways and lost packets, which are nobody's fault."""

BAD_SHARE = 0.1
"""Failures of a unit that must be found out within twenty of its requests."""

FAILURE = math.log(BAD_SHARE / SOUND_SHARE)
SUCCESS = -math.log((1 - BAD_SHARE) / (1 - SOUND_SHARE))
"""What takes evidence off, as a positive number."""

CONVICTED = 7.0
"""Two failures among 22 requests. A sound unit reaches it once in about 50,000 requests, and is back after
`ACQUITTED`; one that fails every tenth is found at its second failure."""

ACQUITTED = CONVICTED / 2
"""A unit that came back is on probation: one more failure soon puts it away again. From CONVICTED it takes 35
good canaries in a row, which a unit that fails one in ten brings once in forty times."""

TOGETHER_S = 0.25
"""Observers of one loss notice it within a beat of each other; later failures are new ones."""

MOST = CONVICTED + FAILURE
"""Evidence beyond it adds nothing: what was under way when the unit was put away may still fail."""

REST_S = 1.0
"""From isolation, or from a failed canary, to the next canary: what was a hiccup is over by then."""

CANARY_GAP_S = 0.1
"""Between canaries: they are short, and an idle unit has room for them."""

CANARIES_FAILED = 2
"""One failed canary may be the fault that was already seen; two of a few dozen are a broken unit."""

RELAPSES = 3
"""Isolated so often within RELAPSE_S, it passes canaries and fails requests."""
RELAPSE_S = 600.0


class Phase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    CONDEMNED = "condemned"
    """Not to be trusted again: the supervisor replaces it."""


@dataclass(slots=True)
class Breaker:
    """One unit's record. Times are the observer's; methods return whether the phase changed."""

    phase: Phase = Phase.CLOSED
    reason: str = ""
    """Why it is not closed, for people."""
    evidence: float = 0.0
    since_s: float = -math.inf
    """When it left CLOSED."""
    canaries_good: int = 0
    canaries_failed: int = 0
    """Both since then."""
    _failures: int = 0
    _outcomes: int = 0
    """Of both, since the evidence was last nothing."""
    _failed_s: float = -math.inf
    """When the newest failure that counted was seen."""
    _next_canary_s: float = math.inf
    _relapses: tuple[float, ...] = ()

    def is_clean(self, now_s: float) -> bool:
        """Nothing is held against the unit, so that a new record would be the same."""
        relapsed = bool(self._relapses) and self._relapses[-1] > now_s - RELAPSE_S
        return self.phase is Phase.CLOSED and not self.evidence and not relapsed

    @property
    def is_dead(self) -> bool:
        """Nothing that it was tried with succeeded."""
        return self.phase is Phase.CONDEMNED and not self.canaries_good

    def settled(self, outcome: str, reserved_s: float, now_s: float) -> bool:
        """Take the outcome of a request that was sent to the unit at `reserved_s`."""
        if outcome not in ("done", "failed") or self._was_there_already(reserved_s, now_s):
            return False
        self._weigh(outcome == "failed", now_s)
        if self.phase is not Phase.CLOSED or self.evidence < CONVICTED:
            return False
        self.open(f"failed {self._failures} of its newest {self._outcomes} requests", now_s)
        return True

    def open(self, reason: str, now_s: float) -> None:
        self.reason, self.since_s = reason, now_s
        self.canaries_good = self.canaries_failed = 0
        self._relapses = (*(s for s in self._relapses if s > now_s - RELAPSE_S), now_s)
        if len(self._relapses) >= RELAPSES:
            self._condemn(f"was isolated {RELAPSES} times within {RELAPSE_S / 60:.0f} minutes, and {reason}")
            return
        self.phase, self._next_canary_s = Phase.OPEN, now_s + REST_S

    def canary_due(self, now_s: float) -> bool:
        """Whether a canary is to be sent now; if so, none is due until it has ended."""
        if now_s < self._next_canary_s:
            return False
        self.phase, self._next_canary_s = Phase.HALF_OPEN, math.inf
        return True

    def canary_ended(self, flaw: str | None, now_s: float) -> bool:
        """Take how a canary went: "" well, None nobody knows (the unit was full), else what was wrong."""
        if self.phase is not Phase.HALF_OPEN:
            return False
        if flaw is None:
            self._next_canary_s = now_s + REST_S
            return False
        self._weigh(bool(flaw), now_s)
        if not flaw:
            self.canaries_good += 1
            self._next_canary_s = now_s + CANARY_GAP_S
            if self.evidence > ACQUITTED:
                return False
            self.phase, self.reason, self._next_canary_s = Phase.CLOSED, "", math.inf
            return True
        self.canaries_failed += 1
        if self.canaries_failed >= CANARIES_FAILED:
            self._condemn(f"{self.reason}; {self.canaries_failed} canaries failed, the last one: {flaw}")
        else:
            self.phase, self._next_canary_s = Phase.OPEN, now_s + REST_S
        return True

    def _condemn(self, reason: str) -> None:
        self.phase, self.reason, self._next_canary_s = Phase.CONDEMNED, reason, math.inf

    def _was_there_already(self, reserved_s: float, now_s: float) -> bool:
        return reserved_s <= self._failed_s and now_s <= self._failed_s + TOGETHER_S

    def _weigh(self, failed: bool, now_s: float) -> None:
        self.evidence = min(max(0.0, self.evidence + (FAILURE if failed else -SUCCESS)), MOST)
        self._failures += failed
        self._outcomes += 1
        if failed:
            self._failed_s = now_s
        if not self.evidence:
            self._failures = self._outcomes = 0
