"""How long does a decision take on one core, and what would a plain loop take?

    python benchmarks/placement.py [--json OUT] [--seconds S]

Fleets of 10 to 100,000 units of two models in three regions, loaded at random. Grid: `decide` with all rules,
a residency list, a preferred region, an avoided model, prefix affinity and learning from each request that
ends, as the placement actor calls it, with the garbage collector set as there. Baseline: least outstanding
requests by a Python loop over the same view, with the model and the limit as its only filters.
Prompts begin with 128 tokens that all have in common and that every unit was given before, go on with their
pipeline's own, and two of three continue one of 500 conversations; the third is new.
Both decide for like requests in alternating blocks of one run. Times are CPU time of the thread, so that
neighbours on the machine are not counted. Then what a request costs beside its decision (reserve and settle),
and the time to take one unit's sample out of a node's batch of eight, which comes ten times a second.
Last, what a gateway takes to hash a prompt of 4,000 tokens, beside one hash over the same bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# This file's name would hide the package of that name; the tests' folder has cards to build on.
others = (entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")
sys.path = [str(ROOT / "tests"), *others]

from support.fleet import make_card, make_load, make_request  # noqa: E402

from gateway.pipeline.prefix import prompt_prefix  # noqa: E402
from grid import heap  # noqa: E402
from grid.words import Message, PlacementRequest, Precision, UnitCard, UnitLoad  # noqa: E402
from placement.decide import decide  # noqa: E402
from placement.fleet import View  # noqa: E402
from placement.prefixes import END_TOKENS  # noqa: E402
from placement.reports import Spent  # noqa: E402
from placement.rules import Rules  # noqa: E402

FLEETS = (10, 100, 1_000, 10_000, 100_000)
REGIONS = ("us-east-1", "eu-central-1", "ap-northeast-1")
MODELS = ("model-a", "model-b")
GPUS = (("H100", 6.0), ("A100-80", 10.0), ("L40S", 20.0), ("L4", 55.0))
HELD = 64
"""Reservations open at a time, so that decisions meet unseen ones as they do in traffic."""
TICK_EVERY = 100
"""Decisions between two ticks of the actor, at which it publishes what was learned: 1,000 a second."""
CONVERSATIONS = 500
PIPELINES = 31
PROMPT_TOKENS, HASHED = 4_000, 500
COMMON_BLOCKS, PIPELINE_BLOCKS = 2, 6
UNITS_A_NODE = 8
BLOCK = 20
"""Decisions of one side before the other takes its turn."""

Decider = Callable[[PlacementRequest, View], str]


def fleet(size: int, rng: random.Random) -> View:
    view = View(Rules(stale_after_s=1e9), 0.0)
    for number in range(size):
        gpu, step_ms = GPUS[number % len(GPUS)]
        card = make_card(
            f"unit-{number}",
            incarnation="first",
            node_id=f"node-{number // UNITS_A_NODE}",
            region=REGIONS[number % len(REGIONS)],
            model=MODELS[0] if number % 5 else MODELS[1],
            precision=int(Precision.BF16),
            context_tokens=8192,
            gpu_type=gpu,
            max_running=64,
            max_waiting=64,
            prefill_tokens_per_s=60_000 / step_ms,
            decode_ms_per_token=step_ms,
        )
        link = number // UNITS_A_NODE
        view.join(card, link)
        view.report([sample(card, rng)], link, 0.0)
        given = make_request(f"given_{number}", prompt_tokens=600, prefix=opening(number))
        view.reserve(given, card.unit_id, 1, 0.0)
        view.settle(given.reservation_id, "done", 0.0, Spent(600, 1, 0.0, 0.0))
    return view


def chain(above: tuple[int, ...], blocks: int, what: object) -> tuple[int, ...]:
    """Hashes of a text that goes on by so many blocks."""
    made = list(above)
    for block in range(blocks):
        made.append(hash((made[-1] if made else 0, what, block)) & (1 << 62) - 1)
    return tuple(made)


def opening(number: int) -> tuple[int, ...]:
    """The beginning of a prompt of a pipeline."""
    return chain(chain((), COMMON_BLOCKS, "all"), PIPELINE_BLOCKS, f"pl-{number % PIPELINES}")


def conversation(number: int, rng: random.Random) -> tuple[int, ...]:
    """A prompt of 512 to 3,800 tokens."""
    going_on = number % 3
    which = rng.randrange(CONVERSATIONS) if going_on else CONVERSATIONS + number
    return chain(opening(which), rng.randrange(18), which)


def sample(card: UnitCard, rng: random.Random) -> UnitLoad:
    running = rng.randrange(48)
    return make_load(
        card,
        running=running,
        kv_tokens_free=400_000 - 4_000 * running,
        kv_tokens_total=400_000,
        prefill_tokens_queued=rng.randrange(4_000),
        steps=1,
    )


def request(number: int, rng: random.Random) -> PlacementRequest:
    prefix = conversation(number, rng)
    return make_request(
        f"req_{number}",
        model=MODELS[0],
        prompt_tokens=END_TOKENS[len(prefix) - 1] + rng.randrange(200),
        max_output_tokens=512,
        allowed_regions=REGIONS[:2],
        prefer_regions=(REGIONS[1],),
        avoid_models=("model-x",),
        min_memory_mb=20_000,
        lowest_precision=int(Precision.INT8),
        pipeline_id=f"pl-{number % PIPELINES}",
        prefix=prefix,
    )


def spent(rng: random.Random) -> Spent:
    tokens, slower = rng.randrange(20, 500), rng.lognormvariate(0.0, 0.2)
    read = rng.randrange(512, 4_000)
    return Spent(read, tokens, 200.0 * slower, (200.0 + 15.0 * tokens) * slower, read // 2)


def least_outstanding(asked: PlacementRequest, view: View) -> str:
    """The baseline: the first unit of the model with the fewest requests."""
    reported, released, unseen = (
        view.columns.reported.tolist(),
        view.columns.released.tolist(),
        view.columns.unseen.tolist(),
    )
    best, fewest = "", 1 << 62
    for row, unit in enumerate(view.units):
        card = unit.card
        if card.model == asked.model:
            load = reported[row] - released[row] + unseen[row]
            if load < fewest and load < card.max_running + card.max_waiting:
                best, fewest = card.unit_id, load
    return best


def measure(size: int, seconds: float) -> dict[str, Any]:
    rng = random.Random(size)
    view = fleet(size, rng)
    heap.freeze()
    deciders: dict[str, Decider] = {
        "grid": lambda asked, view: decide(asked, view, 0.0, rng).chosen.unit_id,
        "baseline": least_outstanding,
    }
    times: dict[str, list[int]] = {name: [] for name in deciders}
    held: deque[str] = deque()
    around_ns = 0
    number, ends_s = 0, time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for name, choose in deciders.items():
            for _ in range(BLOCK):
                number += 1
                asked = request(number, rng)
                began_ns = time.thread_time_ns()
                unit_id = choose(asked, view)
                times[name].append(time.thread_time_ns() - began_ns)
                ending = spent(rng)
                began_ns = time.thread_time_ns()
                view.reserve(asked, unit_id, 1, 0.0)
                held.append(asked.reservation_id)
                if len(held) > HELD:
                    view.settle(held.popleft(), "done", 0.0, ending)
                around_ns += time.thread_time_ns() - began_ns
                if number % TICK_EVERY == 0:
                    view.tick(0.0)
    return {
        "units": size,
        "decisions": len(times["grid"]),
        **{f"{name}_us_p{p}": percentile(times[name], p) for name in deciders for p in (50, 99)},
        "reserve_us": round(around_ns / 1e3 / number, 1),
        "sample_us": sample_us(view, rng),
        "prefix_blocks": view.prefixes.held,
    }


def sample_us(view: View, rng: random.Random) -> float:
    batches: dict[int, list[UnitLoad]] = {}
    for unit in view.units:
        batches.setdefault(unit.link, []).append(sample(unit.card, rng))
    rounds = max(1, 2_000 // len(view.units))
    began_ns = time.thread_time_ns()
    for _ in range(rounds):
        for link, batch in batches.items():
            view.report(batch, link, 0.0)
    return round((time.thread_time_ns() - began_ns) / 1e3 / rounds / len(view.units), 2)


def hashing_us() -> dict[str, float]:
    text = "".join(f"sentence {number} says something " for number in range(1_000))[: 4 * PROMPT_TOKENS]
    messages = (Message("system", text[:1_000]), Message("user", text[1_000:]))
    hashed: dict[str, Callable[[], object]] = {
        "hash_us": lambda: prompt_prefix("salt", messages, ()).hashes,
        "one_hash_us": lambda: blake2b(text.encode(), key=b"salt", digest_size=8).digest(),
    }
    times: dict[str, list[int]] = {name: [] for name in hashed}
    for _ in range(HASHED):
        for name, make in hashed.items():
            began_ns = time.thread_time_ns()
            make()
            times[name].append(time.thread_time_ns() - began_ns)
    return {name: percentile(each, 50) for name, each in times.items()}


def percentile(times_ns: list[int], percent: int) -> float:
    return round(sorted(times_ns)[len(times_ns) * percent // 100] / 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each fleet")
    options = parser.parse_args()
    header = ("units", "grid p50", "grid p99", "loop p50", "loop p99", "reserve", "sample")
    print("microseconds\n" + "".join(f"{name:>11}" for name in header))
    rows = []
    for size in FLEETS:
        row = measure(size, options.seconds)
        rows.append(row)
        times = ("grid_us_p50", "grid_us_p99", "baseline_us_p50", "baseline_us_p99")
        keys = ("units", *times, "reserve_us", "sample_us")
        print("".join(f"{row[key]:>11}" for key in keys), flush=True)
    prompt = hashing_us()
    print(f"hashing a prompt: {prompt['hash_us']}, one hash over its bytes: {prompt['one_hash_us']}")
    if options.json:
        figures = {"python": platform.python_version(), "machine": platform.machine(), "fleets": rows}
        figures |= prompt
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
