import pytest

from grid.engines.meter import Meter
from grid.words import UNKNOWN


def meter() -> Meter:
    one = Meter(max_running=4)
    one.kv_tokens_total = 1000
    return one


def test_step_time_is_split_over_those_who_are_there() -> None:
    one = meter()
    first = one.joined(10, 0.0)
    one.stepped(1.0, running=1, kv_usage=0.1, prefilling=True)
    second = one.joined(10, 1.0)
    one.stepped(3.0, running=2, kv_usage=0.2, prefilling=False)
    assert one.take_seconds(first) == pytest.approx(1.0 + 1.0)
    assert one.take_seconds(second) == pytest.approx(1.0)
    assert one.take_seconds(first) == 0.0


def test_idle_time_is_nobodys() -> None:
    one = meter()
    one.left(one.joined(10, 0.0))
    late = one.joined(10, 100.0)
    one.stepped(100.5, running=1, kv_usage=0.1, prefilling=True)
    assert one.take_seconds(late) == pytest.approx(0.5)


def test_load_knows_who_came_and_left_since_the_last_step() -> None:
    one = meter()
    stays = [one.joined(30, 0.0) for _ in range(3)]
    assert (one.load().running, one.load().waiting, one.load().prefill_tokens_queued) == (0, 3, 90)
    one.stepped(0.1, running=3, kv_usage=0.25, prefilling=True)
    one.prefilled(stays[0], 30, 0.1)
    assert (one.load().running, one.load().kv_tokens_free, one.load().prefill_tokens_queued) == (3, 750, 60)
    for stay in stays:
        one.left(stay)
    assert (one.load().running, one.load().waiting, one.load().kv_tokens_free) == (0, 0, 1000)


def test_speeds_are_unknown_until_measured_and_then_follow() -> None:
    one = meter()
    assert one.load().decode_ms_per_token == one.load().prefill_tokens_per_s == UNKNOWN
    stay = one.joined(200, 0.0)
    one.stepped(0.1, running=1, kv_usage=0.1, prefilling=True)
    one.prefilled(stay, 200, 0.1)
    for step in range(1, 200):
        one.stepped(0.1 + step * 0.02, running=1, kv_usage=0.1, prefilling=False)
    assert one.load().prefill_tokens_per_s == pytest.approx(2000)
    assert one.load().decode_ms_per_token == pytest.approx(20)
    assert one.load().steps == 200


def test_the_prefix_cache_is_counted_from_the_start() -> None:
    one = meter()
    one.looked_up(100, 0)
    one.looked_up(100, 96)
    assert (one.load().prompt_tokens, one.load().cached_tokens) == (200, 96)


def test_a_short_prefill_measures_nothing() -> None:
    one = meter()
    one.prefilled(one.joined(5, 0.0), 5, 0.1)
    assert one.load().prefill_tokens_per_s == UNKNOWN
