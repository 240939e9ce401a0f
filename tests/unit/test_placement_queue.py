"""Who waits, in which order, for how long, and what those are told who can't."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from support.fleet import make_request

from grid.errors import Overloaded, Saturated
from placement.lines import URGENT, Waiting
from placement.queue import MAX_LINES_PER_TENANT, Limits, Queue

ROOMY = Limits(most=10_000, most_per_tenant=10_000, wait_ms=1e6)
SLOTS = 10


def waiting(number: int, tenant: str = "t", cost_ms: float = 100.0, **changes: Any) -> Waiting:
    ask = changes.pop("ask", "any")
    holder = changes.pop("holder", 1)
    request = make_request(f"req_{number}", tenant_id=tenant, **changes)
    return Waiting(request, holder, number, "model-x", ask, cost_ms, 0.0)


def join(queue: Queue, *all_of_them: Waiting, now_s: float = 0.0, slots_here: int = SLOTS) -> None:
    for each in all_of_them:
        each.joined_s = now_s
        queue.join(each, SLOTS, slots_here, now_s)


def order(queue: Queue, count: int = 100, *asks: str) -> list[Waiting]:
    pool = queue.pools["model-x"]
    return pool.in_order([line for ask, line in pool.lines.items() if not asks or ask in asks], count)


def serve_next(queue: Queue, now_s: float = 0.0, *asks: str) -> Waiting:
    first = order(queue, 1, *asks)[0]
    queue.serve(first, [], now_s)
    return first


# --- the order ------------------------------------------------------------------------------


def test_one_request_never_waits_behind_another_tenants_thousand() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(number, "crowd") for number in range(1000)))
    for _ in range(3):
        serve_next(queue)
    join(queue, waiting(2000, "single"))
    assert [serve_next(queue).request.tenant_id for _ in range(3)].count("single") == 1


def test_tenants_get_even_shares_of_slot_time_not_of_requests() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, "long", cost_ms=300.0) for n in range(200)))
    join(queue, *(waiting(1000 + n, "short", cost_ms=100.0) for n in range(200)))
    served = Counter(serve_next(queue).request.tenant_id for _ in range(200))
    assert served["short"] == pytest.approx(3 * served["long"], rel=0.05)


def test_being_away_earns_nothing() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, "steady") for n in range(300)))
    for _ in range(100):
        serve_next(queue)
    join(queue, *(waiting(1000 + n, "back") for n in range(100)))
    served = Counter(serve_next(queue).request.tenant_id for _ in range(40))
    assert abs(served["steady"] - served["back"]) <= 1


def test_one_who_sends_as_soon_as_it_was_served_gets_no_more_than_its_share() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, "steady") for n in range(300)))
    served: Counter[str] = Counter()
    for number in range(100):
        if not queue.knows(f"req_{1000 + number - 1}/s/0"):
            join(queue, waiting(1000 + number, "quick"))
        served[serve_next(queue).request.tenant_id] += 1
    assert served["quick"] <= served["steady"] + 1


def test_those_who_came_first_among_equals_are_served_first() -> None:
    queue = Queue(ROOMY)
    tenants = [f"t{n}" for n in random.Random(0).sample(range(50), 50)]
    join(queue, *(waiting(n, tenant) for n, tenant in enumerate(tenants)))
    assert [serve_next(queue).request.tenant_id for _ in tenants] == tenants


def test_priority_counts_within_a_tenant_only() -> None:
    queue = Queue(ROOMY)
    join(queue, waiting(1, "a", priority=5), waiting(2, "a"), waiting(3, "a", priority=5), waiting(4, "b"))
    assert [each.number for each in order(queue)] == [2, 4, 1, 3]


def test_a_stream_that_had_begun_goes_before_everyone() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, "a") for n in range(5)), waiting(9, "b", priority=URGENT))
    assert serve_next(queue).request.tenant_id == "b"


def test_a_stream_that_had_begun_is_let_in_where_nobody_else_is() -> None:
    queue = Queue(Limits(most=4, most_per_tenant=3, wait_ms=1e6))
    join(queue, *(waiting(n, "a") for n in range(3)), waiting(3, "b"))
    join(queue, *(waiting(10 + n, "a", priority=URGENT) for n in range(4)))
    for late in waiting(20, "a", priority=URGENT), waiting(21, "a"), waiting(22, "b"):
        with pytest.raises(Saturated):
            join(queue, late)
    assert [serve_next(queue).number for _ in range(5)] == [5, 6, 7, 8, 4]
    join(queue, waiting(30, "a", priority=URGENT), waiting(31, "b"))
    assert len(queue) == 5


def test_what_is_asked_divides_the_order_and_clocks_are_shared() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, "a", ask="eu") for n in range(10)))
    join(queue, *(waiting(10 + n, "a", ask="us") for n in range(10)))
    join(queue, *(waiting(20 + n, "b", ask="us") for n in range(10)))
    for _ in range(4):
        assert serve_next(queue, 0.0, "eu").request.tenant_id == "a"
    # What "a" got in the one place counts in the other.
    assert [serve_next(queue, 0.0, "us").request.tenant_id for _ in range(5)] == ["b", "b", "b", "b", "a"]
    assert len(order(queue, 100, "eu", "us")) == len(queue) == 21


def test_whoever_leaves_is_not_next() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, holder=n % 2) for n in range(6)))
    assert [each.stream for each in queue.leave_holder(1)] == [1, 3, 5]
    left = queue.leave("req_0/s/0")
    assert left is not None
    assert queue.leave("req_0/s/0") is None
    assert [each.stream for each in order(queue)] == [2, 4]


def test_those_whose_holds_end_keep_their_order() -> None:
    queue = Queue(ROOMY)
    held = [waiting(n, ask="here") for n in (1, 2, 4)]
    for each, ends_s in zip(held, (2.0, 2.0, 3.0), strict=True):
        each.held_until_s, each.regions = ends_s, ("here",)
    join(queue, *held[:2], waiting(3), held[2], waiting(5))
    for now_s in (2.0, 3.0):
        for each in queue.due(now_s):
            queue.let_go(each, "any")
    assert [each.stream for each in order(queue, 9, "any")] == [1, 2, 3, 4, 5]
    assert queue.leave("req_2/s/0") is held[1]
    assert [each.stream for each in order(queue, 9, "any")] == [1, 3, 4, 5]


def test_a_hold_ends_at_the_head_of_the_new_line() -> None:
    queue = Queue(ROOMY)
    held = waiting(1, ask="here")
    held.held_until_s, held.regions = 2.0, ("here",)
    join(queue, held, waiting(2))
    assert [each.stream for each in order(queue, 9, "any")] == [2]
    assert queue.due(1.9) == []
    assert queue.due(2.0) == [held]
    queue.let_go(held, "any")
    assert [each.stream for each in order(queue, 9, "any")] == [1, 2]
    assert list(queue.pools["model-x"].lines) == ["any"]
    assert queue.due(1e4) == [held, *order(queue, 9)[1:]], "its end still comes"


def test_those_refused_while_nobody_waited_are_nobody_s_predecessors() -> None:
    queue = Queue(Limits(most=1, most_per_tenant=10, wait_ms=1e6))
    for number in range(100):
        with pytest.raises(Overloaded):
            join(queue, waiting(number, "hasty", cost_ms=1e4, deadline_ms=1.0))
    join(queue, waiting(200))
    with pytest.raises(Overloaded) as refusal:
        join(queue, waiting(201, "other"))
    assert refusal.value.retry_after_s == pytest.approx(0.1), "the first to come back, at 10 ms a slot"


# --- bounds ---------------------------------------------------------------------------------


def test_a_tenants_own_share_ends_in_saturated_and_the_whole_in_overloaded() -> None:
    queue = Queue(Limits(most=5, most_per_tenant=3, wait_ms=1e6))
    join(queue, *(waiting(n, "a") for n in range(3)))
    with pytest.raises(Saturated, match="3 of your requests") as own:
        join(queue, waiting(9, "a"))
    assert type(own.value) is Saturated
    join(queue, waiting(3, "b"), waiting(4, "c"))
    with pytest.raises(Overloaded, match="5 requests wait") as whole:
        join(queue, waiting(10, "d"))
    assert own.value.retry_after_s > 0
    assert whole.value.retry_after_s > 0
    serve_next(queue)
    join(queue, waiting(11, "d"))


def test_one_who_always_asks_for_something_else_uses_up_no_lines() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, "a", ask=f"ask {n}") for n in range(MAX_LINES_PER_TENANT)))
    with pytest.raises(Saturated, match="different requirements"):
        join(queue, waiting(999, "a", ask="one more"))
    join(queue, waiting(1000, "a", ask="ask 0"), waiting(1001, "b", ask="one more"))


def test_nobody_is_let_in_who_would_not_be_served_in_time() -> None:
    queue = Queue(Limits(1000, 1000, wait_ms=1000.0))
    # Ten slots of 100 ms serve a hundred in a second.
    with pytest.raises(Saturated, match="once your other requests are served") as late:
        join(queue, *(waiting(number, "a") for number in range(1000)))
    assert type(late.value) is Saturated
    assert 95 <= len(queue) <= 105
    join(queue, waiting(2000, "b"))
    with pytest.raises(Overloaded, match=r"0\.0 s is the longest"):
        join(queue, waiting(2001, "c", deadline_ms=5.0))


def test_many_tenants_together_overload() -> None:
    queue = Queue(Limits(1000, 1000, wait_ms=1000.0))
    with pytest.raises(Overloaded, match="once those before are served"):
        join(queue, *(waiting(number, f"t{number}") for number in range(1000)))
    assert 95 <= len(queue) <= 105


def test_a_part_of_the_slots_means_a_longer_wait() -> None:
    queue = Queue(ROOMY)
    join(queue, *(waiting(n, ask="eu") for n in range(10)), slots_here=1)
    probe = waiting(99, ask="eu")
    assert queue.wait_ms(probe, SLOTS, 1, 0.0) == pytest.approx(10 * queue.wait_ms(probe, SLOTS, 10, 0.0))


def test_a_wait_that_is_over_says_so_and_when_to_come_back() -> None:
    queue = Queue(Limits(1000, 1000, wait_ms=1000.0))
    join(queue, waiting(1, "a"), waiting(2, "b", deadline_ms=300.0))
    [due] = queue.due(0.3)
    refusal = queue.expire(due, SLOTS, SLOTS, 0.3)
    assert isinstance(refusal, Overloaded)
    assert "within 0.3 s" in refusal.message
    assert refusal.retry_after_s > 0
    assert queue.due(0.999) == []
    assert [each.stream for each in queue.due(1.0)] == [1]


@pytest.mark.parametrize("tenants", [1, 5])
def test_whoever_comes_back_when_told_mostly_finds_room(tenants: int) -> None:
    """A burst of six seconds' work, of which one second may wait; a slot takes 80 to 120 ms, not 100."""
    rng = random.Random(tenants)
    queue = Queue(Limits(10_000, 10_000, wait_ms=1000.0))
    comes_s = [(0.0, number) for number in range(600)]
    ends_s = [rng.uniform(0.0, 0.1) for _ in range(SLOTS)]
    tries, refused_again, served = Counter[int](), 0, 0
    while comes_s or len(queue):
        if comes_s and (not len(queue) or comes_s[0][0] <= min(ends_s)):
            now_s, number = comes_s.pop(0)
            tries[number] += 1
            try:
                join(queue, waiting(number, f"t{number % tenants}"), now_s=now_s)
            except Saturated as refused:
                refused_again += tries[number] > 1
                comes_s = sorted([*comes_s, (now_s + refused.retry_after_s, number)])
            continue
        now_s = min(ends_s)
        assert not queue.due(now_s - 0.5), "whoever was let in is served about in time"
        serve_next(queue, now_s)
        served += 1
        ends_s[ends_s.index(now_s)] = now_s + rng.uniform(0.08, 0.12)
    assert served == 600
    comebacks = sum(count - 1 for count in tries.values())
    assert refused_again < 0.25 * comebacks


# --- figures --------------------------------------------------------------------------------


def test_figures_are_of_those_who_wait() -> None:
    queue = Queue(ROOMY)
    assert queue.figures(0.0, Counter()) == ()
    join(queue, waiting(1, "a"), waiting(2, "b"), now_s=1.0)
    [figures] = queue.figures(3.0, Counter({"model-x": SLOTS}))
    assert (figures.model, figures.waiting, figures.tenants, figures.oldest_ms) == ("model-x", 2, 2, 2000.0)
    assert figures.wait_ms > 0
    queue.leave_holder(1)
    assert queue.figures(3.0, Counter()) == ()
