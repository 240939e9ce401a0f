"""Times in logarithmic buckets: counts that add up over replicas, with quantiles of a known error. Pure.

Bucket i holds the values from GAMMA**(i-1) to GAMMA**i and is read as the value that is off by the same
share from both ends, which is RELATIVE_ERROR (the DDSketch of Masson, Rim and Lee, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

RELATIVE_ERROR = 0.02
"""Below what two calls in a row differ by; the whole range of a call is 440 buckets."""
LEAST_MS = 0.1
MOST_MS = 3_600_000.0
"""A deadline is an hour at most; values outside are counted at the nearest end."""

GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(GAMMA)


def bucket(value_ms: float) -> int:
    """Return the bucket of a time."""
    return math.ceil(math.log(min(max(value_ms, LEAST_MS), MOST_MS)) * _PER_LOG)


def quantile_ms(counts: Mapping[int, int], share: float) -> float | None:
    """Return the time that `share` (0 to 1) of all counted ones don't exceed, by nearest rank.

    It is within RELATIVE_ERROR of that one's value; None where nothing was counted.
    """
    total = sum(counts.values())
    rank = max(math.ceil(share * total), 1)
    for index in sorted(counts):
        rank -= counts[index]
        if rank <= 0:
            upper: float = GAMMA**index
            return 2 * upper / (GAMMA + 1)
    return None
