"""The real engine on the tiny random model: the code path is real, the text is gibberish."""

import asyncio
import gc
import importlib.util
import itertools
import multiprocessing
import os
import re
import signal
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import pytest_asyncio
from support.models import CACHE, prepared
from support.waiting import until

from grid.config import Model
from grid.engines import adaptive
from grid.engines.adaptive import Limits
from grid.engines.base import Generation, Step, steps_of
from grid.engines.environment import engine_environment
from grid.engines.meter import Meter
from grid.engines.models import TINY_RANDOM
from grid.engines.registry import build_engine
from grid.engines.vllm import VLLMEngine
from grid.engines.vllm_child import CPU_NICENESS
from grid.errors import Conflict, ContextOverflow, InvalidRequest, UnitLost
from grid.words import UNKNOWN, FinishReason, Message, Sampling

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # vLLM and torch warn about their own use of their own interfaces.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODEL = Model(
    name="tiny",
    engine="vllm",
    source=TINY_RANDOM,
    precision="fp32",
    context_tokens=1024,
    kv_cache_mb=64,
    max_running=16,
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def environment() -> None:
    prepared(TINY_RANDOM)
    os.environ.update({k: v for k, v in engine_environment(MODEL).items() if k != "LD_PRELOAD"})


async def closed(engine: VLLMEngine) -> None:
    """Close the engine, and collect what vLLM leaves to the collector, which zmq warns about."""
    await engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await asyncio.sleep(0)
        gc.collect()


async def started() -> VLLMEngine:
    engine = build_engine(MODEL, CACHE)
    assert isinstance(engine, VLLMEngine)
    facts = await engine.start()
    assert (facts.context_tokens, facts.simulated) == (MODEL.context_tokens, False)
    assert re.fullmatch(r"vllm-[\d.]+/cpu-\w+-\w+/fp32/[0-9a-f]{16}", facts.fingerprint)
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(environment: None) -> AsyncIterator[VLLMEngine]:
    one = await started()
    yield one
    await closed(one)


async def generation(
    engine: VLLMEngine,
    prompt: str,
    tokens: int,
    *,
    salt: str = "a",
    emitted: tuple[int, ...] = (),
    **sampling,
) -> Generation:
    ready = await engine.prepare([Message("user", prompt)], [], tokens)
    options = Sampling(tokens, **{"temperature": 0.0, **sampling})
    said = len(engine._detokenizer.stream([]).feed(emitted))
    return Generation(f"test/{next(_numbers)}", ready, options, salt, emitted, said)


async def run(engine: VLLMEngine, *args, **kwargs) -> list[Step]:
    return [step async for step in steps_of(engine, await generation(engine, *args, **kwargs))]


def ids(steps: list[Step]) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.ids)


def text(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


async def test_tokens_stream_and_the_last_step_says_why(engine: VLLMEngine) -> None:
    steps = await run(engine, "Tell me something.", 24)
    assert len(ids(steps)) == 24
    assert len(steps) > 12
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == FinishReason.LENGTH
    assert text(steps) == engine._detokenizer.decode(ids(steps))
    assert all(step.step_seconds > 0 for step in steps)


async def test_leaving_frees_the_slot_at_once(engine: VLLMEngine) -> None:
    steps = steps_of(engine, await generation(engine, "long", 900))
    async with aclosing(steps):
        await anext(steps)
        load = engine.load()
        assert (load.running, load.waiting) == (1, 0)
        assert load.kv_tokens_free < load.kv_tokens_total
    load = engine.load()
    assert (load.running, load.waiting, load.kv_tokens_free) == (0, 0, load.kv_tokens_total)
    # The engine itself has dropped it too: what comes next is alone in its steps.
    await run(engine, "next", 2)
    assert engine.load().running == 0


async def test_cancelling_the_reader_frees_the_slot(engine: VLLMEngine) -> None:
    first = asyncio.Event()

    async def read() -> None:
        async for _ in steps_of(engine, await generation(engine, "long", 900)):
            first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.load().running + engine.load().waiting == 0


async def test_twenty_at_once_all_end_in_order_and_none_is_mixed_up(engine: VLLMEngine) -> None:
    lengths = [5 + 7 * (number % 6) for number in range(20)]
    alone = [ids(await run(engine, f"Question {number}", lengths[number])) for number in range(4)]
    together = await asyncio.gather(
        *(run(engine, f"Question {number}", length) for number, length in enumerate(lengths))
    )
    assert [len(ids(steps)) for steps in together] == lengths
    assert [ids(steps) for steps in together[:4]] == alone
    assert all(steps[-1].finish_reason == FinishReason.LENGTH for steps in together)
    assert engine.load().running + engine.load().waiting == 0
    assert engine.load().decode_ms_per_token > 0


async def test_limits_reach_the_running_engine_and_are_kept(engine: VLLMEngine) -> None:
    full, adapter = engine._meter.limits, engine._adapter
    assert full is not None
    assert full.admits == MODEL.max_running
    assert await adapter.limit(engine._llm, Limits(64, 2)) == (66, 2)
    most = 0

    async def watched(number: int) -> int:
        nonlocal most
        async for _ in steps_of(engine, await generation(engine, f"{number} " + "word " * 300, 20)):
            most = max(most, engine._meter.sample().running)
        return number

    assert await asyncio.gather(*(watched(number) for number in range(5))) == list(range(5))
    assert most == 2
    assert await adapter.limit(engine._llm, full) == (full.chunk_tokens, full.admits)


async def test_pressure_lowers_what_the_engine_does_at_once_and_calm_brings_it_back(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = engine._meter.limits
    assert full is not None
    monkeypatch.setattr(adaptive, "RAISE_GAP_S", 0.01)
    with monkeypatch.context() as pressed:
        pressed.setattr(Meter, "sample", lambda _meter: adaptive.Sample(0.95, 3, 0, UNKNOWN, UNKNOWN))
        await until(lambda: engine.load().admits == 3 and engine.load().chunk_tokens < full.chunk_tokens)
        assert len(ids(await run(engine, "Under pressure.", 8))) == 8
    await until(lambda: engine._meter.limits == full)


async def test_prefix_cache_is_shared_within_a_salt_only(engine: VLLMEngine) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    before = engine.load()
    cold, warm, foreign, foreign_warm = [
        (await run(engine, prompt, 2, salt=salt))[0].cached_tokens for salt in ("one", "one", "two", "two")
    ]
    assert (cold, foreign) == (0, 0)
    assert warm == foreign_warm > 100
    after = engine.load()
    assert after.cached_tokens - before.cached_tokens == warm + foreign_warm
    assert after.prompt_tokens - before.prompt_tokens > 4 * warm


async def test_a_prompt_that_does_not_fit_is_refused_with_the_counts(engine: VLLMEngine) -> None:
    with pytest.raises(ContextOverflow) as refused:
        await generation(engine, "word " * 2000, 50)
    assert refused.value.details["prompt_tokens"] > 2000
    assert refused.value.details["context_tokens"] == 1024
    with pytest.raises(ContextOverflow):
        await generation(engine, "word " * 100_000, 50)
    ready = await generation(engine, "short", 900)
    too_much = Generation("test/over", ready.prompt, Sampling(1024), "a")
    with pytest.raises(ContextOverflow):
        await anext(steps_of(engine, too_much))


async def test_bad_sampling_is_the_callers_mistake(engine: VLLMEngine) -> None:
    for bad in (Sampling(0), Sampling(5, top_p=7.0), Sampling(5, temperature=-1.0)):
        ready = await generation(engine, "short", 5)
        with pytest.raises(InvalidRequest):
            await anext(steps_of(engine, Generation(f"test/{next(_numbers)}", ready.prompt, bad, "a")))
    assert engine.load().running + engine.load().waiting == 0


@pytest.mark.parametrize("prompt", ["Continue, please.", "Wo ist die Brücke? 橋はどこですか。🌉", "1, 2, 3"])
async def test_a_continuation_is_the_same_text_wherever_it_is_cut(engine: VLLMEngine, prompt: str) -> None:
    tokens = 60
    whole = await run(engine, prompt, tokens)
    assert len(set(ids(whole))) >= 30, "an answer that repeats itself proves little"
    whole_ids, decode = ids(whole), engine._detokenizer.decode
    inside = [cut for cut in range(1, tokens) if decode(whole_ids[:cut]).endswith("\ufffd")]
    for cut in {1, 17, tokens - 1, *inside[:3]}:
        rest = await run(engine, prompt, tokens - cut, emitted=whole_ids[:cut])
        before = engine._detokenizer.stream([]).feed(whole_ids[:cut])
        assert whole_ids[:cut] + ids(rest) == whole_ids
        assert before + text(rest) == text(whole)


async def test_an_answer_that_had_ended_ends_again(engine: VLLMEngine) -> None:
    (step,) = await run(engine, "Over?", 5, emitted=(9, 9, engine._end_ids[0]))
    assert (step.ids, step.text, step.finish_reason) == ((), "", FinishReason.STOP)


async def test_a_continuation_of_another_text_is_refused(engine: VLLMEngine) -> None:
    other = replace(await generation(engine, "x", 5, emitted=(9, 9)), emitted_code_points=1000)
    with pytest.raises(Conflict):
        await anext(steps_of(engine, other))


async def test_seeded_sampling_repeats_itself(engine: VLLMEngine) -> None:
    one, again, other = [ids(await run(engine, "Roll.", 12, temperature=1.0, seed=s)) for s in (7, 7, 8)]
    assert one == again != other


async def test_a_seeded_prompt_may_take_several_steps(engine: VLLMEngine) -> None:
    """vLLM by itself ends on CPU cores, for everybody, with such a request."""
    prompt = "word " * 700
    assert engine._meter.limits is not None
    assert engine._meter.limits.chunk_tokens < 700
    runs = [await run(engine, prompt, 12, temperature=1.0, seed=7, salt=salt) for salt in ("one", "two")]
    assert ids(runs[0]) == ids(runs[1])
    await engine.check()


async def test_a_healthy_engine_says_so(engine: VLLMEngine) -> None:
    assert engine.load().kv_tokens_total >= MODEL.context_tokens
    await engine.check()


async def test_a_dead_engine_process_ends_its_streams_with_unit_lost(environment: None) -> None:
    mine = {child.pid for child in multiprocessing.active_children()}
    engine = await started()
    (process,) = [child for child in multiprocessing.active_children() if child.pid not in mine]
    assert process.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + CPU_NICENESS
    steps = steps_of(engine, await generation(engine, "long", 900))
    await anext(steps)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(UnitLost):
        _ = [step async for step in steps]
    with pytest.raises(UnitLost):
        await engine.check()
    with pytest.raises(UnitLost):
        await run(engine, "after", 2)
    assert engine.load().running + engine.load().waiting == 0
    await closed(engine)
