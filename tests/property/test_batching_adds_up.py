"""Whatever comes, goes and in which order: blocks add up, and every request gets exactly its tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from grid.engines.batching import BLOCK_TOKENS, Batch, Request, Speed

SPEED = Speed(prefill_tokens_per_s=1e4, weights_read_s=0.01, kv_read_s_per_token=0, overhead_s=0.001)
KV_TOKENS = 20 * BLOCK_TOKENS

arrivals = st.tuples(
    st.just("add"),
    st.integers(1, 10 * BLOCK_TOKENS),
    st.integers(1, 5 * BLOCK_TOKENS),
    st.integers(0, 2),
    st.sampled_from(["a", "b"]),
)
actions = st.lists(
    st.one_of(
        arrivals, st.tuples(st.just("abort"), st.integers(0, 50)), st.tuples(st.just("step"), st.just(0))
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(actions=actions, max_running=st.integers(1, 6), step_tokens=st.integers(8, 200))
def test_tokens_and_blocks_add_up(actions: list[tuple], max_running: int, step_tokens: int) -> None:
    batch = Batch(SPEED, max_running=max_running, kv_tokens=KV_TOKENS, step_tokens=step_tokens)
    requests: list[Request] = []
    wanted: dict[Request, int] = {}
    aborted: set[Request] = set()
    got: dict[Request, int] = {}

    def step() -> None:
        if batch.running or batch.waiting:
            assert batch.begin_step() > 0
            for request in batch.end_step():
                got[request] = got.get(request, 0) + 1
        assert 0 <= batch.kv_tokens_free <= batch.kv_tokens_total
        assert batch.running <= max_running

    for action, *args in actions:
        if action == "add":
            prompt, new, priority, salt = args
            request = Request(tuple(range(prompt)), salt, new, priority)
            requests.append(request)
            wanted[request] = new
            batch.add(request)
        elif action == "abort" and requests:
            victim = requests[args[0] % len(requests)]
            if not victim.finished:
                aborted.add(victim)
            batch.abort(victim)
        else:
            step()
    for _ in range(20_000):
        if not (batch.running or batch.waiting):
            break
        step()
    assert (batch.running, batch.waiting) == (0, 0)
    assert batch.kv_tokens_free == batch.kv_tokens_total
    for request in requests:
        if request not in aborted:
            assert got[request] == wanted[request]
