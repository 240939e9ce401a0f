"""Whatever the demand: between the bounds, never less than is needed now, and fewer only late."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from grid.model import Model, Standby
from grid.units.scaling import SHRINK_AFTER_S, TARGET_BUSY, Role, Wanted

SLOTS = 4
steps = st.tuples(st.integers(0, 60), st.booleans(), st.floats(0.5, SHRINK_AFTER_S / 3))


def pool(least: int, most: int, warm: int = 0, asleep: int = 0) -> Model:
    standby = Standby(warm=warm, asleep=asleep)
    return Model(
        name="m",
        engine="simulated",
        min_units=least,
        max_units=most,
        max_running=SLOTS,
        standby=standby,
    )


@settings(max_examples=50)
@given(least=st.integers(0, 3), more=st.integers(0, 6), demand=st.lists(steps, max_size=40))
def test_it_follows_demand(least: int, more: int, demand: list[tuple[int, bool, float]]) -> None:
    wanted = Wanted(pool(least, least + more), least)
    now_s, refused = 0.0, 0
    needs: list[tuple[float, int]] = []
    for requests, is_refused, pause_s in demand:
        now_s += pause_s
        refused += is_refused
        before = wanted.units
        left = wanted.follow(requests, refused, before, now_s)
        needed = wanted.bounded(math.ceil(requests / (TARGET_BUSY * SLOTS)))
        needs.append((now_s, needed))
        assert least <= wanted.units <= least + more
        assert wanted.units >= needed
        assert 0 <= left <= requests
        if is_refused:
            assert wanted.units == wanted.bounded(max(before + 1, needed))
        if wanted.units < before:
            recent = [need for at_s, need in needs if at_s >= now_s - SHRINK_AFTER_S]
            assert wanted.units >= max(recent)


@settings(max_examples=50)
@given(
    warm=st.integers(0, 3),
    asleep=st.integers(0, 3),
    serving=st.integers(0, 4),
    ready=st.lists(st.sampled_from(Role), max_size=12),
)
def test_roles_fill_serving_first_then_warm_then_asleep(
    warm: int, asleep: int, serving: int, ready: list[Role]
) -> None:
    wanted = Wanted(pool(0, 12, warm, asleep), serving)
    roles = Counter(wanted.roles(ready))
    assert roles.total() == len(ready)
    assert roles[Role.SERVING] >= min(serving, len(ready))
    assert roles[Role.WARM] == min(warm, len(ready) - roles[Role.SERVING])
    assert roles[Role.ASLEEP] <= asleep
    # Nobody serves whose place one that serves already could have.
    for before, after in zip(ready, wanted.roles(ready), strict=True):
        if before is Role.SERVING and after is not Role.SERVING:
            assert all(
                role is not Role.SERVING or was is Role.SERVING
                for was, role in zip(ready, wanted.roles(ready), strict=True)
            )


@settings(max_examples=50)
@given(ready=st.lists(st.sampled_from(Role), max_size=8), serving=st.integers(0, 4))
def test_who_has_the_right_role_keeps_it(ready: list[Role], serving: int) -> None:
    wanted = Wanted(pool(0, 8, 2, 2), serving)
    settled = wanted.roles(ready)
    assert wanted.roles(settled) == settled
