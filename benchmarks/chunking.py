"""What do running streams feel of a long prompt while KV memory is short, with adaptive limits and without?

    python benchmarks/chunking.py [--json OUT] [--rounds N]

One engine of the tiny random model on real vLLM, whose KV cache holds 32,768 tokens. Sixteen streams fill it
to the brim; once it is short, prompts of 900 tokens come one after the other. With and without adaptive
limits take turns on the same engine, and without is the baseline. Medians over the rounds:

  decode    median time between tokens of the streams while no long prompt is computed
  beside    the same, and the 90th percentile, while one is, from its first step to its first token
  ratio     beside over decode: 1 means that nobody feels it
  TTFT      of the long prompts, from their submission
  evicted   requests that vLLM evicted for want of memory and had to compute again, in a round
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from grid.config import Model
from grid.engines.adaptive import Adaptive
from grid.engines.base import Generation, Prepared, steps_of
from grid.engines.environment import engine_environment
from grid.engines.meter import Stay
from grid.engines.models import TINY_RANDOM
from grid.engines.registry import build_engine
from grid.engines.vllm import VLLMEngine
from grid.words import Sampling

STREAMS = 16
STREAM_PROMPT_TOKENS = 1_700
STREAM_TOKENS = (150, 400)
LONG_TOKENS, LONG_ANSWER_TOKENS = 900, 4
LONG_PROMPTS = 4
SHORT_FROM = 0.85
"""Of the cache in use: then the long prompts come."""
WORD_IDS = range(1_000, 40_000)
MODEL = Model(
    name="tiny",
    engine="vllm",
    source=TINY_RANDOM,
    precision="fp32",
    context_tokens=4_096,
    kv_cache_mb=16,
    max_running=STREAMS + 4,
)
MARK = "ZEROGRID_BENCH_CHUNKING"


class Long(NamedTuple):
    """A long prompt's prefill, by the engine's clock, which is this process' own."""

    began_s: float
    ended_s: float
    asked_s: float


class Bench:
    def __init__(self, engine: VLLMEngine) -> None:
        assert engine._meter.limits is not None
        self.engine, self.meter, self.full = engine, engine._meter, engine._meter.limits
        self.rng = random.Random(1)
        self.prefills: list[tuple[int, float, float]] = []
        """Of how many tokens, from when to when."""
        note = engine._note_prefill

        def noted(stay: Stay, output: Any) -> None:
            times = output.metrics
            self.prefills.append((stay.prompt_tokens, times.scheduled_ts, times.first_token_ts))
            note(stay, output)

        engine._note_prefill = noted  # type: ignore[method-assign]

    async def round(self, adaptive: bool) -> dict[str, Any]:
        engine, full = self.engine, self.full
        assert engine._adapting is not None
        engine._adapting.cancel()
        await engine._adapter.limit(engine._llm, full)
        self.meter.limits = full
        if adaptive:
            engine._adapting = asyncio.create_task(engine._adapt(Adaptive(full)))
        self.prefills.clear()
        before = engine.load().preemptions
        began_s = time.monotonic()
        streams = [asyncio.create_task(self.stream()) for _ in range(STREAMS)]
        # vLLM tells nobody that its memory gets short.
        while self.meter.sample().kv_usage < SHORT_FROM:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        longs = []
        for _ in range(LONG_PROMPTS):
            if all(task.done() for task in streams):
                break
            longs.append(await self.long())
        gaps = [gap for times in await asyncio.gather(*streams) for gap in pairwise(times)]
        inside, outside = [], []
        for start_s, end_s in gaps:
            beside = any(start_s < long.ended_s and end_s > long.began_s for long in longs)
            (inside if beside else outside).append(1e3 * (end_s - start_s))
        return {
            "decode_ms": statistics.median(outside),
            "beside_ms": statistics.median(inside),
            "beside_p90_ms": sorted(inside)[len(inside) * 9 // 10],
            "long_ttft_ms": statistics.median(1e3 * (long.ended_s - long.asked_s) for long in longs),
            "long_prompts": len(longs),
            "evicted": engine.load().preemptions - before,
            "seconds": time.monotonic() - began_s,
        }

    async def stream(self) -> list[float]:
        """Return when each of its tokens came. Raises if one is missing."""
        wanted = self.rng.randint(*STREAM_TOKENS)
        times = []
        async with aclosing(steps_of(self.engine, self.order(STREAM_PROMPT_TOKENS, wanted))) as steps:
            async for step in steps:
                times += [time.monotonic()] * len(step.ids)
        assert len(times) == wanted, f"{len(times)} of {wanted} tokens came"
        return times

    async def long(self) -> Long:
        asked_s = time.monotonic()
        async with aclosing(steps_of(self.engine, self.order(LONG_TOKENS, LONG_ANSWER_TOKENS))) as steps:
            async for _ in steps:
                pass
        _, began_s, ended_s = next(each for each in reversed(self.prefills) if each[0] == LONG_TOKENS)
        return Long(began_s, ended_s, asked_s)

    def order(self, prompt_tokens: int, tokens: int) -> Generation:
        """Return a request whose prompt is new to the prefix cache."""
        ids = tuple(self.rng.choice(WORD_IDS) for _ in range(prompt_tokens))
        sampling = Sampling(tokens, temperature=1.0, seed=self.rng.randrange(1 << 30))
        return Generation(secrets.token_hex(8), Prepared(ids, b"", 0), sampling, "bench")


async def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine = build_engine(MODEL, Path(folder))
        assert isinstance(engine, VLLMEngine)
        await engine.start()
        bench = Bench(engine)
        try:
            await bench.round(adaptive=False)
            arms: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
            for number in range(rounds):
                # In turns, because whoever comes second finds a warmer machine.
                for name in sorted(arms, reverse=bool(number % 2)):
                    arms[name].append(await bench.round(adaptive=name == "with"))
        finally:
            await engine.close()
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in arms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if MARK not in os.environ:  # some of it is read before Python starts
        environment = {**os.environ, **engine_environment(MODEL), MARK: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    figures = asyncio.run(measure(arguments.rounds))
    columns = ("decode", "beside", "p90", "ratio", "p90 ratio", "TTFT", "evicted")
    print(f"{'ms':<10}" + "".join(f"{column:>11}" for column in columns))
    for name, row in figures.items():
        row["ratio"] = row["beside_ms"] / row["decode_ms"]
        row["p90_ratio"] = row["beside_p90_ms"] / row["decode_ms"]
        keys = ("decode_ms", "beside_ms", "beside_p90_ms", "ratio", "p90_ratio", "long_ttft_ms", "evicted")
        print(f"{name:<10}" + "".join(f"{row[key]:>11.1f}" for key in keys), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
