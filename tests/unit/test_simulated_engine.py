import asyncio
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace

import pytest

from grid.config import Model, Simulated
from grid.engines import simulated_text as text
from grid.engines.base import Generation, Step, steps_of
from grid.engines.simulated import SimulatedEngine, kv_tokens
from grid.errors import Conflict, ContextOverflow, InvalidRequest, UnitLost
from grid.words import FinishReason, Message, Sampling


def model(**changes) -> Model:
    simulated = {"full_speed": True, **changes.pop("simulated", {})}
    return Model(
        **{"name": "sim", "engine": "simulated", "precision": "fp8", **changes, "simulated": simulated}
    )


class Bench:
    """A started engine, and short forms of what tests do with it."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.ids = 0

    async def generation(
        self, prompt: str = "hello", tokens: int = 20, salt: str = "a", emitted=(), documents=(), **sampling
    ) -> Generation:
        prepared = await self.engine.prepare([Message("user", prompt)], documents, tokens)
        self.ids += 1
        options = Sampling(tokens, **{"temperature": 0.0, **sampling})
        said = len(text.decode(emitted))
        return Generation(f"g{self.ids}", prepared, options, salt, tuple(emitted), said)

    async def run(self, *args, **kwargs) -> list[Step]:
        generation = await self.generation(*args, **kwargs)
        return [step async for step in steps_of(self.engine, generation)]


@pytest.fixture
async def bench():
    engine = SimulatedEngine(model())
    await engine.start()
    yield Bench(engine)
    await engine.close()


def joined(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def ids(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.ids]


async def test_an_answer_is_marked_as_simulated_and_uses_the_documented_words(bench: Bench) -> None:
    facts = await SimulatedEngine(model()).start()
    steps = await bench.run()
    assert facts.simulated
    assert joined(steps).startswith("[simulated] ")
    assert all(f" {word}" in text.VOCABULARY for word in joined(steps).split()[1:])


async def test_one_token_a_step_then_the_reason(bench: Bench) -> None:
    steps = await bench.run(tokens=7)
    assert [len(step.ids) for step in steps] == [1] * 7
    assert [step.finish_reason for step in steps] == [None] * 6 + [FinishReason.LENGTH]
    assert joined(steps) == text.decode(ids(steps))
    assert all(step.step_seconds > 0 for step in steps)


async def test_equal_prompts_give_equal_greedy_answers_and_others_do_not(bench: Bench) -> None:
    first, again, other = [await bench.run(prompt) for prompt in ("one", "one", "two")]
    assert ids(first) == ids(again) != ids(other)


async def test_two_engines_of_one_configuration_agree_and_another_seed_does_not() -> None:
    answers = []
    for seed in (0, 0, 1):
        engine = SimulatedEngine(model(simulated={"seed": seed}))
        await engine.start()
        answers.append(ids(await Bench(engine).run()))
        await engine.close()
    assert answers[0] == answers[1] != answers[2]


async def test_sampled_answers_follow_their_seed(bench: Bench) -> None:
    one, again, other = [await bench.run(temperature=0.8, seed=seed) for seed in (1, 1, 2)]
    assert ids(one) == ids(again) != ids(other)


@pytest.mark.parametrize("cut", [0, 1, 9, 19])
async def test_a_continuation_goes_on_exactly(bench: Bench, cut: int) -> None:
    whole = await bench.run(tokens=20)
    generation = await bench.generation(tokens=20)
    rest = generation.sampling._replace(max_output_tokens=20 - cut)
    said = len(joined(whole[:cut]))
    continued = Generation("again", generation.prompt, rest, "a", tuple(ids(whole)[:cut]), said)
    steps = [step async for step in steps_of(bench.engine, continued)]
    assert ids(whole)[:cut] + ids(steps) == ids(whole)
    assert joined(whole[:cut]) + joined(steps) == joined(whole)
    assert steps[-1].finish_reason == FinishReason.LENGTH


async def test_a_continuation_of_another_text_is_refused(bench: Bench) -> None:
    generation = await bench.generation("x", 10)
    other = replace(generation, emitted_ids=(0, 1), emitted_code_points=3)
    with pytest.raises(Conflict, match="3: this unit's tokenizer"):
        await anext(steps_of(bench.engine, other))


async def test_answers_can_end_by_themselves() -> None:
    engine = SimulatedEngine(model(simulated={"answer_tokens": 10}))
    await engine.start()
    bench = Bench(engine)
    whole = await bench.run(tokens=100)
    assert 5 <= len(ids(whole)) <= 15
    assert whole[-1].finish_reason == FinishReason.STOP
    after_the_end = await bench.run(tokens=100, emitted=ids(whole))
    assert after_the_end == [Step((), "", FinishReason.STOP, 0, 0.0)]
    assert (await bench.run(tokens=3))[-1].finish_reason == FinishReason.LENGTH
    await engine.close()


async def test_streams_advance_together(bench: Bench) -> None:
    order: list[int] = []

    async def consume(number: int) -> None:
        note = order.append
        async for _ in steps_of(bench.engine, await bench.generation(f"prompt {number}", 5)):
            note(number)

    await asyncio.gather(*(consume(number) for number in range(4)))
    assert sorted(order) == [number for number in range(4) for _ in range(5)]
    assert order != sorted(order)


async def test_leaving_frees_the_slot_at_once(bench: Bench) -> None:
    generation = await bench.generation(tokens=1000)
    async with aclosing(steps_of(bench.engine, generation)) as steps:
        await anext(steps)
        assert bench.engine.load().running == 1
    load = bench.engine.load()
    assert (load.running, load.waiting, load.kv_tokens_free) == (0, 0, load.kv_tokens_total)


async def test_cancelling_the_consumer_frees_the_slot() -> None:
    engine = SimulatedEngine(model(simulated={"full_speed": False, "speed": 1e-4}))
    await engine.start()
    generation = await Bench(engine).generation(tokens=10)
    task = asyncio.ensure_future(anext(steps_of(engine, generation)))
    await asyncio.sleep(0)
    assert engine.load().running + engine.load().waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.load().running + engine.load().waiting == 0
    await engine.close()


async def test_a_crash_ends_every_stream_and_every_later_call(bench: Bench) -> None:
    steps = steps_of(bench.engine, await bench.generation(tokens=1000))
    first = await anext(steps)
    bench.engine.crash("power cut")
    assert first.finish_reason is None
    with pytest.raises(UnitLost, match="power cut"):
        _ = [step async for step in steps]
    with pytest.raises(UnitLost):
        await bench.engine.check()
    with pytest.raises(UnitLost):
        await bench.run()


async def test_prefix_cache_is_separate_for_each_salt(bench: Bench) -> None:
    prompt = "a long shared prompt " * 40
    cold, warm, foreign = [(await bench.run(prompt, salt=salt))[0] for salt in ("a", "a", "b")]
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > 100
    assert foreign.cached_tokens == 0
    load = bench.engine.load()
    assert load.cached_tokens == warm.cached_tokens
    assert load.prompt_tokens > 3 * load.cached_tokens


async def test_a_prompt_that_does_not_fit_is_refused_with_the_counts(bench: Bench) -> None:
    with pytest.raises(ContextOverflow) as refused:
        await bench.generation("word " * 100_000, 50)
    assert refused.value.details["prompt_tokens"] > 2048
    assert refused.value.details["max_output_tokens"] == 50
    assert refused.value.details["context_tokens"] == 2048
    fits = await bench.generation("x", 2000)
    assert len(fits.prompt.prompt_ids) + 2000 <= 2048
    with pytest.raises(ContextOverflow):
        await bench.generation("x", 2046)


async def test_documents_are_packed_whole_and_best_first(bench: Bench) -> None:
    documents = ["first " * 100, "second " * 2000, "third"]
    prepared = await bench.engine.prepare([Message("user", "q")], documents, 100)
    assert prepared.documents_used == 1
    shown = text.decode(prepared.prompt_ids)
    assert documents[0].strip() in shown
    assert "third" not in shown
    assert (await bench.engine.prepare([Message("user", "q")], documents[:1], 100)) == prepared


async def test_roles_come_from_the_messages_only(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="unknown role"):
        await bench.engine.prepare([Message("tool", "x")], [], 10)
    plain = text.render([Message("user", "assistant: system: hi")])
    roles = [token for token in plain if len(text.VOCABULARY) <= token < 1024]
    assert len(roles) == 3


def test_load_is_measured_in_the_models_own_time() -> None:
    async def measure() -> float:
        engine = SimulatedEngine(model(gpu="A100-80", precision="int8", parameters_b=8.0))
        facts = await engine.start()
        await Bench(engine).run(tokens=50)
        measured = engine.load().decode_ms_per_token
        await engine.close()
        return measured / facts.decode_ms_per_token

    assert asyncio.run(measure()) == pytest.approx(1.0, rel=0.05)


def test_kv_cache_is_what_the_weights_leave_or_what_is_configured() -> None:
    by_memory = kv_tokens(model(gpu="H100", parameters_b=8.0))
    configured = kv_tokens(model(kv_cache_mb=1024))
    assert by_memory > 400_000
    assert configured == pytest.approx(1024 * 2**20 / (128 * 1024), rel=0.01)
    assert kv_tokens(model(kv_cache_mb=16)) >= 2048


def test_it_needs_no_heavy_import() -> None:
    check = (
        "import sys, grid.engines.registry, grid.engines.simulated; "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'ray', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_settings_default_to_answers_that_run_to_their_limit() -> None:
    assert Simulated().answer_tokens == 0
