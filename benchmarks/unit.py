"""What does a real vLLM unit show of a client that leaves, and of another tenant's prompts?

    python benchmarks/unit.py [--json OUT] [--rounds N]

One unit of the tiny random model with vLLM, its real server, and a client on a link, in one process.

  leaving   time from a cancel until the slot is free, measured in the unit; beside it, closing the engine's
            own generator with no unit in between
  start     seconds until the unit is ready, vLLM's import included, and its memory before the first request
  tenants   TTFT of a 700-token prompt that is new (baseline), that another tenant sent just before, and that
            the same tenant sent just before, with the cached tokens that each is told of
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
from pathlib import Path
from typing import Any

import psutil

from grid.config import Cell, Config, Model
from grid.engines.base import Generation, steps_of
from grid.engines.environment import engine_environment
from grid.engines.models import TINY_RANDOM
from grid.engines.registry import build_engine
from grid.units.actor import Site, UnitActor
from grid.wire.link import Link, dial
from grid.wire.messages import Accepted, Cancel, Done, Submit, Tokens
from grid.words import Message, Sampling

MODEL = Model(
    name="tiny",
    engine="vllm",
    source=TINY_RANDOM,
    precision="fp32",
    context_tokens=1024,
    kv_cache_mb=256,
    memory_grant_mb=2048,
)
PROMPT_WORDS = 350
"""About 700 tokens: a prefill long enough to be told from a cached one."""
ANSWER_TOKENS = 200
MARK = "ZEROGRID_BENCH_UNIT"


async def nowhere() -> tuple[str, int]:
    raise OSError("this unit registers with nobody")


class Bench:
    def __init__(self, unit: UnitActor, engine: Any, link: Link) -> None:
        self.unit, self.engine, self.link = unit, engine, link

    async def leave(self) -> float:
        """Cancel a stream after its first token; return the unit's own time to the free slot in ms."""
        stream = self.link.open()
        stream.send(submit(stream.id, fresh_prompt(), "a", ANSWER_TOKENS))
        while not any(isinstance(message, Tokens) for message in await stream.receive()):
            pass
        before = (await self.unit.describe())["counters"]["cancelled"]
        stream.send(Cancel(stream.id, 1))
        while True:  # a unit tells nobody that a slot is free
            seen = await self.unit.describe()
            if seen["counters"]["cancelled"] > before and not seen["load"]["running"]:
                break
            await asyncio.sleep(0.001)
        stream.close()
        return float(seen["counters"]["cancel_to_free_ms"])

    async def close_generator(self) -> float:
        """The same without a unit: milliseconds to close the engine's generator after its first step."""
        messages = (Message("user", fresh_prompt()),)
        prompt = await self.engine.prepare(messages, (), ANSWER_TOKENS)
        order = Generation(secrets.token_hex(8), prompt, Sampling(ANSWER_TOKENS, temperature=0.0), "a")
        async with aclosing(steps_of(self.engine, order)) as steps:
            await anext(steps)
            began_s = time.perf_counter()
        return (time.perf_counter() - began_s) * 1e3

    async def ttft(self, prompt: str, salt: str) -> tuple[float, int]:
        """Return TTFT in ms and the cached tokens that the caller is told of."""
        stream = self.link.open()
        began_s = time.perf_counter()
        stream.send(submit(stream.id, prompt, salt, 2))
        first_ms, cached = 0.0, 0
        while True:
            for message in await stream.receive():
                if isinstance(message, Tokens) and not first_ms:
                    first_ms = (time.perf_counter() - began_s) * 1e3
                elif isinstance(message, Accepted):
                    cached = max(cached, message.cached_tokens)
                elif isinstance(message, Done):
                    stream.close()
                    return first_ms, max(cached, message.cached_tokens)


def fresh_prompt() -> str:
    return " ".join(secrets.token_hex(2) for _ in range(PROMPT_WORDS // 2))


def submit(stream: int, prompt: str, salt: str, tokens: int) -> Submit:
    name = secrets.token_hex(8)
    return Submit(
        stream=stream,
        request_id=name,
        attempt=1,
        reservation_id=name,
        model=MODEL.name,
        messages=(Message("user", prompt),),
        documents=(),
        sampling=Sampling(tokens, temperature=0.0),
        tenant_salt=salt,
        deadline_ms=60_000.0,
    )


async def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        secret = secrets.token_bytes(32)
        (state / "secrets").mkdir(mode=0o700)
        (state / "secrets" / "link.key").write_bytes(secret)
        config = Config(cell=Cell(state_dir=state), models=(MODEL,))
        engine = build_engine(MODEL, state / "models")
        unit = UnitActor(
            config,
            MODEL,
            "unit-0",
            Site("node", "127.0.0.1", "local"),
            resolve_placement=nowhere,
            end_process=sys.exit,
            engine=engine,
        )
        began_s = time.monotonic()
        await unit.start()
        start = {"start_s": round(time.monotonic() - began_s, 1), "idle_mb": idle_mb()}
        link = await dial(*await unit.address(), role="gateway", peer_id="bench", secret=secret)
        bench = Bench(unit, engine, link)
        try:
            return start | await compare(bench, rounds)
        finally:
            link.close()
            await unit.stop()


def idle_mb() -> int:
    """Return the proportional set size of this process and its engine's."""
    unit = psutil.Process()
    both = (unit, *unit.children(recursive=True))
    return sum(int(process.memory_full_info().pss) for process in both) >> 20


async def compare(bench: Bench, rounds: int) -> dict[str, Any]:
    leaving, closing = [], []
    for _ in range(rounds):
        leaving.append(await bench.leave())
        closing.append(await bench.close_generator())
    new: list[tuple[float, int]] = []
    other: list[tuple[float, int]] = []
    same: list[tuple[float, int]] = []
    rng = random.Random(0)
    for _ in range(rounds):
        prompt = fresh_prompt()
        await bench.ttft(prompt, "tenant-a")
        asked = [(fresh_prompt(), "tenant-b", new), (prompt, "tenant-b", other), (prompt, "tenant-a", same)]
        # In any order, because whoever comes after a pause finds a colder machine.
        rng.shuffle(asked)
        for text, tenant, rows in asked:
            rows.append(await bench.ttft(text, tenant))
    return {
        "rounds": rounds,
        "cancel_to_free_ms": spread(leaving),
        "baseline_close_ms": spread(closing),
        "ttft_ms": {name: spread([t for t, _ in rows]) for name, rows in tenants(new, other, same)},
        "cached_tokens": {name: max(c for _, c in rows) for name, rows in tenants(new, other, same)},
    }


def tenants(*rows: list[tuple[float, int]]) -> list[tuple[str, list[tuple[float, int]]]]:
    return list(zip(("new", "other_tenant", "same_tenant"), rows, strict=True))


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p90": round(ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)], 3),
        "max": round(ordered[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if MARK not in os.environ:  # some of it is read before Python starts
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**os.environ, **engine_environment(MODEL), MARK: "1"},
        )
    figures = asyncio.run(measure(arguments.rounds))
    print(f"{'':24}{'p50 ms':>10}{'p90 ms':>10}{'max ms':>10}")
    rows = {
        "cancel to free slot": figures["cancel_to_free_ms"],
        "  engine alone": figures["baseline_close_ms"],
        **{f"TTFT, {name.replace('_', ' ')}": row for name, row in figures["ttft_ms"].items()},
    }
    for name, row in rows.items():
        print(f"{name:24}{row['p50']:>10}{row['p90']:>10}{row['max']:>10}")
    print("cached tokens:", figures["cached_tokens"])
    print(
        f"start {figures['start_s']} s, vLLM's import included; {figures['idle_mb']} MB once it has started"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
