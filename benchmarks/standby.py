"""How long does the first request for a model wait when no unit of it serves?

    python benchmarks/standby.py [--json OUT] [--trials N] [--vllm]

From the request to the first token that its client reads, over HTTP, on a whole cell in one process. One
unit, put before each request, in turns, into one of these:

  serving   it serves and is idle: the baseline, a prefill and a step
  warm      it is on standby: the decision takes it in
  asleep    it is on standby with its memory given back: the request wakes it (simulated units only: a wake is
            the time in which the weights come back over PCIe; real vLLM can sleep on GPUs alone)

and once, before all, `cold`: a unit is started when the request comes. A simulated unit loads nothing, so
that is the process' own work; `--vllm` takes the tiny random model on real vLLM, whose cold start is real:
import, weights, warm-up. The supervisor's second, in which it sees that a unit is wanted, comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A neighbour's name would hide the package `gateway`; the tests' folder has a cell in one process.
sys.path = [str(HERE.parent / "tests"), *(e for e in sys.path if Path(e).resolve() != HERE)]

import httpx  # noqa: E402
from support.local_cell import LocalCell, cell_config, local_cell  # noqa: E402

from grid.config import Config, Model  # noqa: E402
from grid.engines.environment import engine_environment  # noqa: E402
from grid.engines.models import TINY_RANDOM  # noqa: E402
from grid.units.actor import Site, UnitActor  # noqa: E402
from grid.units.scaling import ROLES, Role  # noqa: E402
from grid.words import UnitState  # noqa: E402

UNIT, MODEL = "unit-m-0", "m"
TRIALS = 60
TARGET_MS = 50.0
"""A warm unit's first token beyond that of a unit which serves."""
SETTLE_S = 0.005


def served(real: bool) -> Model:
    fields: dict[str, Any] = {"name": MODEL, "min_units": 0, "max_units": 1, "max_running": 16}
    if real:
        tiny = {"source": TINY_RANDOM, "precision": "fp32", "context_tokens": 1024, "kv_cache_mb": 64}
        return Model(engine="vllm", **tiny, **fields)
    return Model(engine="simulated", precision="bf16", gpu="H100", parameters_b=8, **fields)


async def first_token_ms(client: httpx.AsyncClient, prompt: str) -> float:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }
    began_s, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not first_s and line.startswith("data: {") and '"content":"' in line.replace('": "', '":"'):
                first_s = time.perf_counter()
    assert first_s, "no token came"
    return 1e3 * (first_s - began_s)


async def put(cell: LocalCell, unit: UnitActor, role: Role) -> None:
    """Give the unit a role, and return when placement has heard of it and nothing runs."""
    await cell.until_idle()
    await unit.set_role(role)
    while role is not ROLES.get(UnitState(state_of(cell))):  # noqa: ASYNC110  asked, as a probe does
        await asyncio.sleep(SETTLE_S)


def state_of(cell: LocalCell) -> int:
    return dict(cell.placement._view.states_of({MODEL})).get(UNIT, UnitState.STARTING)


async def measure(config: Config, trials: int, kinds: tuple[Role, ...]) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"cold": [], **{kind: [] for kind in kinds}}
    rng = random.Random(0)
    async with local_cell(config) as cell, cell.client() as client:
        began_s = time.perf_counter()
        unit = UnitActor(
            config,
            config.models[0],
            UNIT,
            Site("node-1", "127.0.0.1", config.cell.region),
            resolve_placement=cell.current.address,
            end_process=os._exit,
        )
        cell.units[UNIT] = unit
        await unit.start()
        while state_of(cell) != UnitState.READY:  # noqa: ASYNC110  asked, as a probe does
            await asyncio.sleep(SETTLE_S)
        started_ms = 1e3 * (time.perf_counter() - began_s)
        took["cold"].append(started_ms + await first_token_ms(client, "Is anybody there?"))
        for number in range(trials):
            for kind in rng.sample(kinds, len(kinds)):
                await put(cell, unit, kind)
                took[kind].append(await first_token_ms(client, f"Question {number} to one who was {kind}"))
        await put(cell, unit, Role.SERVING)
    return took


def table(took: dict[str, list[float]]) -> list[dict[str, Any]]:
    base = statistics.median(took[Role.SERVING])
    rows = []
    for kind, values in took.items():
        ordered = sorted(values)
        rows.append(
            {
                "kind": str(kind),
                "requests": len(values),
                "first_token_ms_p50": round(statistics.median(values), 2),
                "first_token_ms_p99": round(ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)], 2),
                "beyond_serving_ms_p50": round(statistics.median(values) - base, 2),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    if given.vllm and importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed")
    model = served(given.vllm)
    kinds = (Role.SERVING, Role.WARM) if given.vllm else (Role.SERVING, Role.WARM, Role.ASLEEP)
    if given.vllm:
        os.environ.update({k: v for k, v in engine_environment(model).items() if k != "LD_PRELOAD"})
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    with tempfile.TemporaryDirectory() as folder:
        config = cell_config(Path(folder)).model_copy(update={"models": (model,), "aliases": {}})
        rows = table(asyncio.run(measure(config, given.trials, kinds)))
    print(f"{'':10}{'requests':>10}{'first token p50':>18}{'p99':>10}{'beyond serving':>17}")
    for row in rows:
        print(
            f"{row['kind']:10}{row['requests']:>10}{row['first_token_ms_p50']:>15.1f} ms"
            f"{row['first_token_ms_p99']:>7.1f} ms{row['beyond_serving_ms_p50']:>14.1f} ms"
        )
    warm = next(row["beyond_serving_ms_p50"] for row in rows if row["kind"] == Role.WARM)
    print(f"warm within {TARGET_MS:.0f} ms of serving: {'yes' if warm <= TARGET_MS else 'no'}")
    if given.json:
        engine = "vllm, tiny random model" if given.vllm else "simulated 8B on H100"
        given.json.write_text(json.dumps({"engine": engine, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
