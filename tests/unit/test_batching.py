import pytest

from grid.engines.batching import BLOCK_TOKENS, Batch, Request, Speed

SPEED = Speed(prefill_tokens_per_s=10_000, weights_read_s=0.01, kv_read_s_per_token=1e-6, overhead_s=0.001)


def batch(max_running: int = 8, kv_tokens: int = 16_384, step_tokens: int = 512) -> Batch:
    return Batch(SPEED, max_running=max_running, kv_tokens=kv_tokens, step_tokens=step_tokens)


def request(prompt: int, new: int, *, salt: str = "a", first: int = 0, priority: int = 0) -> Request:
    return Request(tuple(range(first, first + prompt)), salt, new, priority)


def run(each: Batch) -> list[Request]:
    """Run to the end; return the owner of every token, in order."""
    tokens = []
    while each.running or each.waiting:
        each.begin_step()
        tokens += each.end_step()
    return tokens


def test_every_request_gets_its_tokens_and_everything_is_freed() -> None:
    each = batch(max_running=3)
    requests = [request(10 * i, i, first=1000 * i) for i in range(1, 9)]
    for one in requests:
        each.add(one)
    tokens = run(each)
    assert [tokens.count(one) for one in requests] == list(range(1, 9))
    assert all(one.finished for one in requests)
    assert (each.running, each.waiting, each.kv_tokens_free) == (0, 0, each.kv_tokens_total)


def test_a_long_prompt_is_computed_in_chunks_beside_a_running_decode() -> None:
    each = batch(step_tokens=100)
    short = request(5, 50)
    each.add(short)
    each.begin_step()
    assert each.end_step() == [short]
    long = request(350, 1, first=5000)
    each.add(long)
    owners = []
    while not long.finished:
        each.begin_step()
        owners.append(each.end_step())
    # 99 prompt tokens fit beside each decode token.
    assert owners == [[short], [short], [short], [short, long]]


def test_step_time_is_the_longer_of_computing_and_reading() -> None:
    each = batch()
    each.add(request(500, 2))
    prefill_s = each.begin_step()
    each.end_step()
    decode_s = each.begin_step()
    assert prefill_s == pytest.approx(500 / 10_000 + 0.001)
    assert decode_s == pytest.approx(0.01 + 500e-6 + 0.001)


def test_step_time_is_shared_out_in_full() -> None:
    each = batch(max_running=4)
    requests = [request(40 * i, 5 * i, first=1000 * i) for i in range(1, 7)]
    for one in requests:
        each.add(one)
    total = 0.0
    while each.running or each.waiting:
        total += each.begin_step()
        each.end_step()
    assert sum(one.take_seconds() for one in requests) == pytest.approx(total)
    assert requests[0].take_seconds() == 0.0


def test_an_equal_prompt_is_reused_under_the_same_salt_only() -> None:
    each = batch()
    for salt in ("a", "a", "b"):
        each.add(request(100, 1, salt=salt))
        run(each)
    same, other = request(100, 1, salt="a"), request(100, 1, salt="c")
    each.add(same)
    each.add(other)
    run(each)
    assert same.cached_tokens == 100 // BLOCK_TOKENS * BLOCK_TOKENS
    assert other.cached_tokens == 0


def test_only_the_common_prefix_is_reused() -> None:
    each = batch()
    each.add(request(100, 1))
    run(each)
    branched = Request((*range(50), *range(7000, 7050)), "a", 1)
    each.add(branched)
    run(each)
    assert branched.cached_tokens == 50 // BLOCK_TOKENS * BLOCK_TOKENS


def test_what_is_not_computed_yet_is_not_reused() -> None:
    each = batch(step_tokens=300)
    first, second = request(400, 1), request(400, 1)
    each.add(first)
    each.begin_step()
    each.end_step()
    each.add(second)
    run(each)
    assert second.cached_tokens == 300 // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    each = batch()
    prompt = 4 * BLOCK_TOKENS
    for _ in range(2):
        last = request(prompt, 1)
        each.add(last)
        run(each)
    assert last.cached_tokens == prompt - 1


def test_the_cache_is_bounded_and_gives_up_the_oldest() -> None:
    each = batch(kv_tokens=10 * BLOCK_TOKENS)
    for i in range(5):
        each.add(request(4 * BLOCK_TOKENS, 1, first=1000 * i))
        run(each)
    newest = request(4 * BLOCK_TOKENS, 1, first=4000)
    each.add(newest)
    run(each)
    oldest = request(4 * BLOCK_TOKENS, 1, first=0)
    each.add(oldest)
    run(each)
    assert newest.cached_tokens > 0
    assert oldest.cached_tokens == 0
    assert each.kv_tokens_free == each.kv_tokens_total


def test_abort_frees_slot_and_cache_at_once_whether_running_or_waiting() -> None:
    each = batch(max_running=1)
    running, waiting = request(100, 50), request(100, 50, first=500)
    each.add(running)
    each.add(waiting)
    each.begin_step()
    each.end_step()
    assert (each.running, each.waiting) == (1, 1)
    each.abort(running)
    each.abort(waiting)
    each.abort(waiting)
    assert (each.running, each.waiting, each.kv_tokens_free) == (0, 0, each.kv_tokens_total)


def test_an_abort_in_the_middle_of_a_step_gives_no_token() -> None:
    each = batch()
    gone, stays = request(10, 5), request(10, 5, first=100)
    each.add(gone)
    each.add(stays)
    each.begin_step()
    each.abort(gone)
    assert each.end_step() == [stays]


def test_when_the_cache_is_full_the_newest_is_preempted_and_still_finishes() -> None:
    each = batch(kv_tokens=12 * BLOCK_TOKENS)
    requests = [request(3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, first=1000 * i) for i in range(3)]
    for one in requests:
        each.add(one)
    tokens = run(each)
    assert each.preemptions > 0
    assert [tokens.count(one) for one in requests] == [4 * BLOCK_TOKENS] * 3
    assert each.kv_tokens_free == each.kv_tokens_total


def test_priority_goes_first_and_arrival_decides_among_equals() -> None:
    each = batch(max_running=1)
    late, urgent, later = request(5, 1), request(5, 1, first=50, priority=-1), request(5, 1, first=90)
    for one in (late, urgent, later):
        each.add(one)
    assert run(each) == [urgent, late, later]
