"""Each baseline does what its publication says, where that is known: none of them is a straw man."""

from __future__ import annotations

from collections import Counter

import pytest
from support.simulation import Driver, setting

from placement.simulator.policies import BASELINES
from placement.simulator.policies.affinity import BoundedHash, RayPrefix, SglangCacheAware
from placement.simulator.policies.learner import PlainLearner
from placement.simulator.policies.outstanding import LeastOutstanding, PowerOfTwo, Random, RoundRobin
from placement.simulator.policies.scored import Dynamo, Gorgo, LlmdScores, SkyWalker
from placement.simulator.seen import UnitReport

HERE_AND_THERE = setting(units=4, regions=("us-east-1", "eu-central-1"))
PREFIX = (1, 2, 3, 4)
PREFIX_TOKENS = 2048


@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_sends_a_prompt_where_it_does_not_fit(name: str) -> None:
    driver = Driver(BASELINES[name], setting(context=1000))
    for unit in range(4):
        driver.report(unit)
    assert driver.ask(prompt=5000) is None


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_says_where_its_rule_is_from(name: str) -> None:
    assert len(BASELINES[name].source) > 20


def test_random_reaches_all_units() -> None:
    driver = Driver(Random)
    assert set(Counter(driver.ask() for _ in range(200))) == {0, 1, 2, 3}


def test_round_robin_goes_in_turn() -> None:
    driver = Driver(RoundRobin)
    assert [driver.ask() for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_least_outstanding_fills_evenly_and_follows_ends() -> None:
    driver = Driver(LeastOutstanding)
    assert sorted(driver.ask() for _ in range(4)) == [0, 1, 2, 3]
    driver.ask()
    idle = 2
    driver.end(idle)
    assert driver.ask() == driver.units[idle]


def test_of_two_units_the_shorter_queue_is_taken() -> None:
    driver = Driver(PowerOfTwo, setting(units=2))
    first = driver.ask()
    assert driver.ask() == 1 - first


def test_power_of_two_leaves_the_longest_queue_alone() -> None:
    driver = Driver(PowerOfTwo, setting(units=3))
    for _ in range(60):
        driver.ask()
    counts = Counter(driver.units.values())
    assert max(counts.values()) - min(counts.values()) <= 3


def test_bounded_hash_keeps_a_prefix_together_up_to_its_bound() -> None:
    driver = Driver(BoundedHash)
    units = [driver.ask(blocks=PREFIX) for _ in range(8)]
    # With nothing else running the bound of a unit is 1.25 x its even share, so a lone prefix spreads.
    assert len(set(units)) > 1
    quiet = Driver(BoundedHash)
    places = []
    for request in range(8):
        places.append(quiet.ask(blocks=PREFIX))
        quiet.end(request)
    assert len(set(places)) == 1


def test_ray_follows_a_prefix_until_queues_differ_by_more_than_ten() -> None:
    driver = Driver(RayPrefix)
    home = driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX)
    assert [driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) for _ in range(10)] == [home] * 10
    after = Counter(driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) for _ in range(20))
    assert after[home] < 20


def test_ray_sends_what_matches_nowhere_to_the_smallest_tree() -> None:
    driver = Driver(RayPrefix, setting(units=2))
    first = driver.ask(prompt=4000)
    assert driver.ask(prompt=100) == 1 - first
    assert driver.ask(prompt=100) == 1 - first


def test_sglang_follows_a_match_above_its_threshold_and_balances_beyond_64() -> None:
    driver = Driver(SglangCacheAware, setting(units=2))
    home = driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX)
    assert [driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) for _ in range(64)] == [home] * 64
    assert driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) == 1 - home


def test_sglang_takes_a_small_match_for_none() -> None:
    driver = Driver(SglangCacheAware, setting(units=2))
    home = driver.ask(prompt=1024, blocks=(1, 2))
    assert driver.ask(prompt=8192, blocks=(1, 2, *range(10, 24))) == 1 - home


def test_llmd_weighs_prefix_over_an_even_queue_and_not_over_queue_and_memory() -> None:
    driver = Driver(LlmdScores, setting(units=2))
    home = driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX)
    assert driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) == home
    driver.report(home, waiting=5, free=50_000)
    driver.report(1 - home, waiting=0, free=400_000)
    assert driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) == 1 - home


def test_llmd_does_not_count_what_it_has_just_sent() -> None:
    driver = Driver(LlmdScores, setting(units=2))
    driver.report(0, waiting=3)
    assert [driver.ask() for _ in range(10)] == [1] * 10


def test_dynamo_counts_its_dispatches_until_their_first_tokens() -> None:
    driver = Driver(Dynamo, setting(units=2))
    first = driver.ask(prompt=4096)
    assert driver.ask(prompt=1024) == 1 - first
    assert driver.ask(prompt=1024) == 1 - first
    # Its prompt is computed now; its KV still counts as decode blocks.
    driver.first(0)
    driver.end(0)
    assert driver.ask(prompt=1024) == first


def test_dynamo_prefers_overlap_by_the_blocks_that_units_announce() -> None:
    driver = Driver(Dynamo, setting(units=2))
    driver.policy.reported([UnitReport(1, 0, 0, 400_000, 400_000, 0, 1, (), 10.0, 0, 0, PREFIX, ())], 0.0)
    assert driver.ask(prompt=PREFIX_TOKENS, blocks=PREFIX) == 1


def test_skywalker_holds_what_no_unit_has_room_for() -> None:
    driver = Driver(SkyWalker, setting(units=2))
    for unit in range(2):
        driver.report(unit, waiting=1)
    assert driver.ask() is None
    driver.report(1, waiting=0)
    assert driver.units == {0: 1}


def test_skywalker_stays_in_its_region_while_a_unit_there_has_room() -> None:
    driver = Driver(SkyWalker, HERE_AND_THERE)
    near = {driver.ask(origin="eu-central-1") for _ in range(6)}
    assert near == {1, 3}
    for unit in near:
        driver.report(unit, waiting=1)
    assert driver.ask(origin="eu-central-1") in {0, 2}


def test_gorgo_weighs_the_way_against_the_queue() -> None:
    driver = Driver(Gorgo, HERE_AND_THERE)
    assert driver.ask(prompt=500, origin="us-east-1") in {0, 2}
    for _ in range(4):
        driver.ask(prompt=900, origin="us-east-1")
    # 98 ms more of way are 980 tokens of queue at the first rate.
    assert driver.ask(prompt=900, origin="us-east-1") in {1, 3}


def test_the_plain_learner_learns_which_gpu_is_quick_and_forgets_what_it_sent() -> None:
    driver = Driver(PlainLearner, setting(units=2, gpus=("L4", "H100-SXM")))
    request = 0
    while request < 40:
        unit = driver.ask()
        ttft_ms = 50.0 if unit == 1 else 400.0
        driver.end(request, ttft_ms, ttft_ms + 200.0)
        request += 1
    assert [driver.ask() for _ in range(5)] == [1] * 5
