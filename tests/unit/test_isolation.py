"""Units that fail: when they are put away, how much of a model at once, and how they come back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.fleet import make_card

from grid.words import UnitCard
from placement import health
from placement.health import CANARIES_FAILED, CANARY_GAP_S, RELAPSES, REST_S, TOGETHER_S, Breaker, Phase
from placement.isolation import Isolation, Serving

APART_S = 2 * TOGETHER_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def later(self, seconds: float = APART_S) -> float:
        self.now_s += seconds
        return self.now_s


def feed(breaker: Breaker, failed: bool, clock: Clock) -> bool:
    now_s = clock.later()
    return breaker.settled("failed" if failed else "done", now_s, now_s)


def requests_until_isolated(failing: random.Random | None, share: float, limit: int = 100_000) -> int:
    """Without `failing`, every request at which the share is reached fails: as regular as can be."""
    breaker, clock = Breaker(), Clock()
    for number in range(1, limit):
        failed = failing.random() < share if failing is not None else number % round(1 / share) == 0
        if feed(breaker, failed, clock):
            return number
    return limit


def canary(breaker: Breaker, flaw: str | None, clock: Clock) -> None:
    """Wait for the next canary and let it end."""
    while not breaker.canary_due(clock.later(CANARY_GAP_S)):
        assert breaker.phase in (Phase.OPEN, Phase.HALF_OPEN)
    breaker.canary_ended(flaw, clock.now_s)


def opened(clock: Clock) -> Breaker:
    breaker = Breaker()
    while not feed(breaker, True, clock):
        pass
    return breaker


# --- who is found out ----------------------------------------------------------------------------


def test_a_unit_that_fails_every_tenth_request_is_isolated_at_its_twentieth() -> None:
    assert requests_until_isolated(None, 0.1) == 20


def test_by_chance_the_median_is_below_twenty_and_nine_in_ten_below_fifty() -> None:
    found = sorted(requests_until_isolated(random.Random(seed), 0.1) for seed in range(400))
    assert found[200] <= 20
    assert found[360] <= 50


def test_a_sound_unit_stays_for_thousands_of_requests() -> None:
    found = sorted(requests_until_isolated(random.Random(seed), 0.001, 10_000) for seed in range(8))
    assert found[1] > 1_000
    assert found[4] == 10_000


def test_one_failure_is_no_proof_and_two_in_a_row_are() -> None:
    breaker, clock = Breaker(), Clock()
    assert not feed(breaker, True, clock)
    assert feed(breaker, True, clock)
    assert (breaker.phase, breaker.reason) == (Phase.OPEN, "failed 2 of its newest 2 requests")


@pytest.mark.parametrize("outcome", ["cancelled", "refused"])
def test_what_a_client_does_says_nothing(outcome: str) -> None:
    breaker = Breaker()
    for second in range(100):
        assert not breaker.settled(outcome, second, second)
    assert breaker.is_clean(100.0)


def test_requests_that_failed_together_are_one_failure() -> None:
    breaker = Breaker()
    for _ in range(50):
        assert not breaker.settled("failed", 0.0, 1.0)
    assert not breaker.settled("failed", 0.0, 1.0 + TOGETHER_S)
    assert breaker.settled("failed", 0.0, 1.1 + TOGETHER_S), "a later one is another"


def test_those_that_were_there_when_it_failed_do_not_speak_for_it_either() -> None:
    breaker = Breaker()
    breaker.settled("failed", 0.0, 1.0)
    before = breaker.evidence
    for _ in range(50):
        breaker.settled("done", 0.5, 1.0)
    assert breaker.evidence == before
    breaker.settled("done", 1.01, 1.02)
    assert breaker.evidence < before


# --- canaries ------------------------------------------------------------------------------------


def test_canaries_come_after_a_rest_one_at_a_time() -> None:
    clock = Clock()
    breaker = opened(clock)
    isolated_s = clock.now_s
    assert not breaker.canary_due(isolated_s + 0.99 * REST_S)
    assert breaker.canary_due(isolated_s + REST_S)
    assert not breaker.canary_due(isolated_s + 100 * REST_S), "one is under way"
    breaker.canary_ended("", isolated_s + 101 * REST_S)
    assert breaker.canary_due(isolated_s + 102 * REST_S)


def test_good_canaries_bring_a_unit_back_on_probation() -> None:
    clock = Clock()
    breaker = opened(clock)
    count = 0
    while breaker.phase is not Phase.CLOSED:
        canary(breaker, "", clock)
        count += 1
    assert 30 < count < 90
    assert breaker.reason == ""
    assert feed(breaker, True, clock), "on probation one failure is enough"


def test_failed_canaries_condemn_a_unit() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(CANARIES_FAILED):
        canary(breaker, "no answer", clock)
    assert breaker.phase is Phase.CONDEMNED
    assert breaker.is_dead
    assert "failed 2 of its newest 2 requests" in breaker.reason
    assert "no answer" in breaker.reason
    assert not breaker.canary_due(clock.later(1000.0))


def test_one_that_fails_some_canaries_is_condemned_and_not_dead() -> None:
    clock = Clock()
    breaker = opened(clock)
    for number in range(1, 31):
        if breaker.phase is not Phase.CONDEMNED:
            canary(breaker, "" if number % 10 else "broken", clock)
    assert breaker.phase is Phase.CONDEMNED
    assert not breaker.is_dead


def test_a_canary_that_says_nothing_changes_nothing() -> None:
    clock = Clock()
    breaker = opened(clock)
    before = breaker.evidence
    for _ in range(10):
        canary(breaker, None, clock)
    assert (breaker.evidence, breaker.phase) == (before, Phase.HALF_OPEN)


def test_one_that_passes_canaries_and_fails_requests_is_condemned_in_the_end() -> None:
    clock = Clock()
    breaker = Breaker()
    for _ in range(RELAPSES):
        while not feed(breaker, True, clock):
            pass
        while breaker.phase in (Phase.OPEN, Phase.HALF_OPEN):
            canary(breaker, "", clock)
    assert breaker.phase is Phase.CONDEMNED
    assert f"{RELAPSES} times" in breaker.reason


def test_an_unasked_canary_is_ignored() -> None:
    breaker = Breaker()
    assert not breaker.canary_ended("broken", 1.0)
    assert breaker.is_clean(1.0)


# --- how much at once ----------------------------------------------------------------------------


class Fleet:
    """Alike units of one model; `isolation.judge` after everything that changes."""

    def __init__(self, units: int, most: float = 0.5) -> None:
        self.cards = {f"u{number}": make_card(f"u{number}") for number in range(units)}
        self.isolation, self.clock = Isolation(most), Clock()

    def judge(self) -> set[str]:
        slots = sum(card.max_running for card in self.cards.values())
        models = [Serving(len(self.cards), slots, names) for names in self.isolation.suspects.values()]
        self.isolation.judge(models, self.clock.now_s)
        return set(self.isolation.isolated)

    def fail(self, unit_id: str, times: int = 2) -> set[str]:
        for _ in range(times):
            now_s = self.clock.later()
            self.isolation.settled(self.cards[unit_id], "failed", now_s, now_s)
        return self.judge()

    def canaries(self, flaw: str, times: int) -> set[str]:
        for _ in range(times):
            self.clock.later(REST_S)
            for card in self.isolation.canaries_due(self.clock.now_s):
                self.isolation.canary_ended(card, flaw, self.clock.now_s)
        return self.judge()


@pytest.mark.parametrize(("units", "at_once"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_at_most_half_of_a_model_is_isolated_at_once(units: int, at_once: int) -> None:
    fleet = Fleet(units)
    for unit_id in fleet.cards:
        fleet.fail(unit_id)
    assert len(fleet.judge()) == at_once


def test_one_unit_goes_on_even_where_everything_may_be_isolated() -> None:
    fleet = Fleet(3, most=1.0)
    for unit_id in fleet.cards:
        fleet.fail(unit_id)
    assert len(fleet.judge()) == 2


def test_who_is_away_stays_away_whoever_fails_next() -> None:
    fleet = Fleet(2)
    assert fleet.fail("u1") == {"u1"}
    assert fleet.fail("u0", times=5) == {"u1"}


def test_dead_units_are_isolated_beyond_the_cap() -> None:
    fleet = Fleet(2)
    for unit_id in fleet.cards:
        fleet.fail(unit_id)
    assert fleet.canaries("no answer", 4) == {"u0", "u1"}
    assert {each.unit_id for each in fleet.isolation.condemned()} == {"u0", "u1"}


def test_a_spared_unit_is_tried_and_can_be_acquitted() -> None:
    fleet = Fleet(1)
    assert fleet.fail("u0") == set()
    assert fleet.isolation.suspects == {"model-x": ["u0"]}
    fleet.canaries("", 100)
    assert not fleet.isolation.suspects


def test_a_new_process_starts_clean_and_a_reconnection_does_not() -> None:
    fleet = Fleet(2)
    assert fleet.fail("u0") == {"u0"}
    fleet.isolation.join(fleet.cards["u0"])
    assert fleet.judge() == {"u0"}
    fleet.isolation.join(fleet.cards["u0"]._replace(incarnation="second"))
    assert fleet.judge() == set()


def test_a_canary_of_an_earlier_process_is_ignored() -> None:
    fleet = Fleet(2)
    fleet.fail("u0")
    fleet.clock.later(REST_S)
    [card] = fleet.isolation.canaries_due(fleet.clock.now_s)
    fleet.isolation.join(card._replace(incarnation="second"))
    assert not fleet.isolation.canary_ended(card, "broken", fleet.clock.now_s)


def test_nothing_is_kept_of_units_that_only_do_well_or_are_long_gone() -> None:
    fleet = Fleet(2)
    for _ in range(3):
        fleet.isolation.settled(fleet.cards["u0"], "done", 0.0, 0.0)
    assert not fleet.isolation._records
    fleet.fail("u1")
    fleet.clock.later(2 * health.RELAPSE_S)
    fleet.judge()
    assert not fleet.isolation._records


def test_a_slow_unit_is_isolated_once() -> None:
    fleet = Fleet(2)
    assert fleet.isolation.slow(fleet.cards["u0"], "is slow", 1.0)
    assert not fleet.isolation.slow(fleet.cards["u0"], "is slow", 2.0)
    assert fleet.judge() == {"u0"}
    assert fleet.isolation.isolated["u0"] == "is slow"


def test_capacity_counts_and_not_the_number_of_units() -> None:
    fleet = Fleet(3)
    large: UnitCard = fleet.cards["u0"]._replace(max_running=64)
    fleet.cards["u0"] = large
    assert fleet.fail("u0") == set(), "it holds more than half of all places"
    assert fleet.fail("u1") == {"u1"}
    assert Counter(fleet.judge()) == Counter({"u1": 1})
