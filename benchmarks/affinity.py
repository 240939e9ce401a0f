"""Does prefix affinity raise what real vLLM units find in their caches, and is the estimate right?

    python benchmarks/affinity.py --data FOLDER [--json OUT] [--seconds S]

FOLDER (or the environment variable GRID_DATA) holds `traces/` of the evaluation data. Conversations of the
Mooncake trace are replayed three times on the same two units of the tiny model, its 512-token blocks scaled
down to 16 and its time to S seconds. Each unit's KV cache holds about a quarter of the distinct blocks. The
arms are two tenants' worth apart, so that none finds what another left.

  affinity   as the grid places
  cost       the same without hashes: load and speed only
  random     a unit drawn by lot (the baseline)

Reported: tokens found cached, of all of prompts; the expected ones against those; times to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import uvloop  # noqa: E402
from vllm_cell import Arm, Ask, VllmCell, quantile, vllm_cell, words  # noqa: E402

from grid.words import PlacementRequest  # noqa: E402

TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 16
OUTPUT_SCALE = 8
CONTEXT_TOKENS = 2_048
LONGEST_BLOCKS = 110
"""Of a prompt, so that its answer fits the context as well."""
EVERY = 6
"""One of so many conversations: two units on two cores follow those in the time of a coffee."""
KV_CACHE_MB = 16


def asks(data: Path, seconds: float) -> list[Ask]:
    with (data / "traces" / "mooncake_synthetic.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if row["hash_ids"][0] % EVERY == 0 and len(row["hash_ids"]) <= LONGEST_BLOCKS]
    scale = seconds / (rows[-1]["timestamp"] - rows[0]["timestamp"])
    return [_ask(row, (row["timestamp"] - rows[0]["timestamp"]) * scale) for row in rows]


def _ask(row: dict[str, Any], at_s: float) -> Ask:
    whole, rest = divmod(row["input_length"], TRACE_BLOCK_TOKENS)
    sizes = [BLOCK_TOKENS] * whole + [rest * BLOCK_TOKENS // TRACE_BLOCK_TOKENS]
    text = "".join(words(block, size) for block, size in zip(row["hash_ids"], sizes, strict=False))
    return Ask(at_s, text or words(row["hash_ids"][0], 1), max(1, row["output_length"] // OUTPUT_SCALE))


def without_hashes(request: PlacementRequest) -> PlacementRequest:
    return request._replace(prefix=())


def by_lot(unit_ids: list[str], rng: random.Random) -> Callable[[PlacementRequest], PlacementRequest]:
    def change(request: PlacementRequest) -> PlacementRequest:
        chosen = rng.choice(unit_ids)
        others = tuple(unit_id for unit_id in unit_ids if unit_id != chosen)
        return request._replace(prefix=(), exclude_units=(*request.exclude_units, *others))

    return change


def figures(arm: Arm) -> dict[str, Any]:
    rows = arm.rows
    prompts, cached = sum(row.input_tokens for row in rows), sum(row.cached_tokens for row in rows)
    foretold = [row for row in rows if row.predicted_cached_tokens]
    units = [sum(row.unit_id == unit for row in rows) for unit in sorted({row.unit_id for row in rows})]
    found = {
        "requests": len(rows),
        "not_done": arm.refused,
        "of_each_unit": units,
        "prompt_tokens": prompts,
        "cached_share": round(cached / prompts, 3),
        "ttft_ms_p50": round(quantile([row.ttft_ms for row in rows], 50), 1),
        "ttft_ms_p90": round(quantile([row.ttft_ms for row in rows], 90), 1),
        "total_ms_p50": round(quantile([row.total_ms for row in rows], 50), 1),
    }
    if foretold:
        expected = sum(row.predicted_cached_tokens for row in foretold)
        off = [abs(row.predicted_cached_tokens - row.cached_tokens) / row.input_tokens for row in foretold]
        missed = [row for row in rows if not row.predicted_cached_tokens]
        found |= {
            "expected_share": round(expected / prompts, 3),
            "found_of_expected": round(sum(row.cached_tokens for row in foretold) / expected, 3),
            "off_by_share_of_prompt_p50": round(quantile(off, 50), 3),
            "off_by_share_of_prompt_p90": round(quantile(off, 90), 3),
            "found_unexpected": sum(row.cached_tokens for row in missed),
        }
    return found


async def measure(data: Path, seconds: float) -> dict[str, dict[str, Any]]:
    trace = asks(data, seconds)
    async with vllm_cell(kv_cache_mb=KV_CACHE_MB, context_tokens=CONTEXT_TOKENS) as cell:
        await _warm(cell)
        arms = {
            "random": Arm(cell.client, by_lot(cell.unit_ids, random.Random(0))),
            "cost": Arm(cell.client, without_hashes),
            "affinity": Arm(cell.client),
        }
        return {name: figures(await cell.replay(trace, arm, name)) for name, arm in arms.items()}


async def _warm(cell: VllmCell) -> None:
    """The first requests compile and allocate, and teach placement how fast the units are."""
    await cell.replay(
        [Ask(n / 8, words(("warm", n), 40 * (n % 25 + 1)), 16) for n in range(100)], Arm(cell.client), "warm"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("GRID_DATA"), help="evaluation data")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each replay")
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where the evaluation data lies, by --data or GRID_DATA")
    found = uvloop.run(measure(Path(options.data), options.seconds))
    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    print(f"{'':<30}" + "".join(f"{arm:>16}" for arm in found))
    for name in names:
        print(f"{name:<30}" + "".join(f"{figures.get(name, '')!s:>16}" for figures in found.values()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
