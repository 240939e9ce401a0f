"""Factors on predictions, learned one observation at a time: of two terms together, and of one unit. Pure.

Both are Kalman filters of logarithms: a factor is never negative, and half is as far off as double. A kind of
units learns two terms; a unit learns by what it differs from its kind.
"""

from __future__ import annotations

import math

KIND_DOUBT = 0.7
"""Standard deviation of a term's prior, as a logarithm: rooflines are right within a factor of two."""

UNIT_DOUBT = 0.15
"""The same of a unit among its kind: clocks, cooling, neighbours."""

MAX_UNREST = 4.0
"""How many times noisier than these a kind's observations are taken to be at most."""
UNREST_STEP = 0.05
"""By how much that changes with one of them: twenty find a noise that is twice the usual one."""
MEDIAN_DEVIATION = 0.6745
"""Of a normal distribution, in standard deviations."""

DRIFT = 0.0015
"""Standard deviation of how far a truth wanders between two observations. Against REQUEST_NOISE it makes half
of what is known come from the last 115 requests, so that a unit that gets hot is found out."""

OUTLIER = 3.0
"""Standard deviations beyond which an observation counts as if it lay there."""

MAX_LOG_FACTOR = 4.0
"""No term is corrected by more than a factor of 55."""

UNIT_STEP = 0.05
"""A unit's own factor has to move by this to be published anew, and one that is smaller is none."""
APART = 0.08
"""By how much, as a logarithm, a unit has to be off its kind to be told apart from it."""
SURE = 3.5
"""And by how many standard deviations. Each request is another look, and among many looks at many units three
deviations are nothing rare."""


class Factor:
    """One factor on a prediction, as a logarithm with its variance (a Kalman filter of one state)."""

    __slots__ = ("log", "published", "variance")

    def __init__(self) -> None:
        self.log = self.published = 0.0
        self.variance = UNIT_DOUBT**2

    def take(self, off: float, noise: float) -> None:
        """`off` is the logarithm of observed over predicted without this factor, `noise` its variance."""
        self.variance += DRIFT**2
        spread = self.variance + noise
        bound = OUTLIER * math.sqrt(spread)
        gain = self.variance / spread
        self.log += gain * min(max(off - self.log, -bound), bound)
        self.variance *= 1 - gain

    def publish(self) -> bool:
        """Return whether the published factor had to follow."""
        before, off = self.published, abs(self.log)
        if before == 0.0:
            if off > max(APART, SURE * math.sqrt(self.variance)):
                self.published = self.log
        elif off < UNIT_STEP:
            self.published = 0.0
        elif abs(self.log - before) > UNIT_STEP:
            self.published = self.log
        return self.published != before


class TwoTerms:
    """`a * x + b * y` with a factor each on a and b: an extended Kalman filter of their logarithms."""

    __slots__ = ("drift", "log_x", "log_y", "of_units", "unrest", "var_x", "var_xy", "var_y")

    def __init__(self) -> None:
        self.drift = DRIFT**2
        """Variance of how far the truth wanders between two observations."""
        self.of_units = 0.0
        """Sum of the logarithms of the units' own factors."""
        self.unrest = 1.0
        """How much noisier its observations are than was thought."""
        self.log_x = self.log_y = 0.0
        self.var_x = self.var_y = KIND_DOUBT**2
        self.var_xy = 0.0

    @property
    def factors(self) -> tuple[float, float]:
        return math.exp(self.log_x), math.exp(self.log_y)

    def predict(self, x: float, y: float) -> float:
        return math.exp(self.log_x) * x + math.exp(self.log_y) * y

    def take(self, x: float, y: float, off: float, noise: float) -> float:
        """Learn from one observation; return the variance that is left in `predict(x, y)`'s logarithm.

        `off` is the logarithm of observed over predicted, `noise` its variance beyond these terms.
        """
        share_x = math.exp(self.log_x) * x / self.predict(x, y)
        share_y = 1.0 - share_x
        # Noisier observations are not remembered longer: the drift grows with them.
        drift = self.drift * self.unrest**2
        var_x, var_y, var_xy = self.var_x + drift, self.var_y + drift, self.var_xy
        to_x, to_y = var_x * share_x + var_xy * share_y, var_xy * share_x + var_y * share_y
        doubt = share_x * to_x + share_y * to_y
        spread = doubt + noise
        self._listen(abs(off) > MEDIAN_DEVIATION * math.sqrt(spread))
        bound = OUTLIER * math.sqrt(spread)
        off = min(max(off, -bound), bound) / spread
        self.log_x = min(max(self.log_x + to_x * off, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
        self.log_y = min(max(self.log_y + to_y * off, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
        self.var_x = var_x - to_x * to_x / spread
        self.var_y = var_y - to_y * to_y / spread
        self.var_xy = var_xy - to_x * to_y / spread
        return doubt * noise / spread

    def _listen(self, louder: bool) -> None:
        """Follow the noise of what is observed: half of it should be within the median deviation."""
        unrest = self.unrest * ((1 + UNREST_STEP) if louder else 1 / (1 + UNREST_STEP))
        self.unrest = min(max(unrest, 1.0), MAX_UNREST)


def learn(terms: TwoTerms, own: Factor, x: float, y: float, observed_ms: float, noise: float) -> None:
    """Share out what an observation says between a kind and its unit, each allowing for the other's doubt."""
    noise = (noise * terms.unrest) ** 2
    off = math.log(observed_ms / terms.predict(x, y))
    doubt = terms.take(x, y, off - own.log, noise + own.variance)
    before = own.log
    own.take(math.log(observed_ms / terms.predict(x, y)), noise + doubt)
    terms.of_units += own.log - before
