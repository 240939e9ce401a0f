"""Quantiles of bucketed times are within the stated error of the exact ones, however replicas share them."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.observe.histogram import LEAST_MS, MOST_MS, RELATIVE_ERROR, bucket, quantile_ms

times = st.lists(st.floats(LEAST_MS, MOST_MS), min_size=1, max_size=60)


@given(times, times, st.sampled_from((0.0, 0.5, 0.99, 1.0)))
def test_a_quantile_of_two_replicas_is_within_its_error(
    one: list[float], two: list[float], share: float
) -> None:
    counts = Counter(map(bucket, one)) + Counter(map(bucket, two))
    both = sorted(one + two)
    exact = both[max(math.ceil(share * len(both)), 1) - 1]
    estimate = quantile_ms(counts, share)
    assert estimate is not None
    assert abs(estimate - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


@given(st.floats(allow_nan=False))
def test_every_time_has_a_bucket_of_the_range(value_ms: float) -> None:
    assert bucket(LEAST_MS) <= bucket(value_ms) <= bucket(MOST_MS)


def test_of_nothing_there_is_no_quantile() -> None:
    assert quantile_ms({}, 0.99) is None
