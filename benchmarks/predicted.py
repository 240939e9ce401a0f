"""How far are predicted times from actual ones on real vLLM units, after placement has learned?

    python benchmarks/predicted.py --data FOLDER [--json OUT] [--seconds S] [--requests N] [--rows OUT]

FOLDER (or the environment variable GRID_DATA) holds `traces/` of the evaluation data. N requests of the hour
of the Azure code trace, evenly drawn, are replayed in S seconds on two units of the tiny model; prompts have
a quarter of their tokens, answers all of theirs, and nothing is shared. What the decision said of the chosen
unit is compared with what the gateway saw from then on: until the first token, and until the last. The first
fifth of the requests warms up and is left out.

Baseline: the median of the last 100 actual times, which is what a grid that predicts nothing knows. Floor: a
straight line over the request's tokens and what really was on its unit, fitted afterwards to the very times
that it is compared with. What that is off by is the machine's noise, for the largest part.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
import uvloop  # noqa: E402
from vllm_cell import Arm, Ask, Row, quantile, vllm_cell, words  # noqa: E402

PROMPT_SCALE = 4
CONTEXT_TOKENS = 2_048
KV_CACHE_MB = 64
WARM_UP_SHARE = 0.2
REWEIGHTINGS, LEAST_ERROR = 60, 1e-3
REMEMBERED = 100
"""Actual times that the baseline rests on."""


def asks(data: Path, count: int, seconds: float) -> list[Ask]:
    with (data / "traces" / "azure2023_code.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    rows = rows[:: max(1, len(rows) // count)][:count]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    scale = seconds / (times[-1] - times[0])
    return [
        Ask(
            (at_s - times[0]) * scale,
            words(("azure", number), max(1, int(row["ContextTokens"]) // PROMPT_SCALE)),
            max(1, min(int(row["GeneratedTokens"]), 128)),
        )
        for number, (row, at_s) in enumerate(zip(rows, times, strict=True))
    ]


def floor(rows: Sequence[Row], actual: Callable[[Row], float], with_answer: bool) -> dict[str, float]:
    """Return the errors of the best line in hindsight: least absolute ones, by reweighting."""
    begins = [row.at_s - row.total_ms / 1e3 for row in rows]
    lines = []
    for row, began_s in zip(rows, begins, strict=True):
        there = [
            (other, other_s)
            for other, other_s in zip(rows, begins, strict=True)
            if other.unit_id == row.unit_id and other_s < began_s < other.at_s
        ]
        ahead = sum(other.input_tokens for other, other_s in there if other_s + other.ttft_ms / 1e3 > began_s)
        line = [1.0, row.input_tokens - row.cached_tokens, len(there), ahead]
        lines.append(line + [row.output_tokens, row.output_tokens * len(there)] * with_answer)
    first = int(len(rows) * WARM_UP_SHARE)
    times = np.array([actual(row) for row in rows[first:]])
    relative = np.array(lines[first:]) / times[:, None]
    weights = np.ones(len(times))
    for _ in range(REWEIGHTINGS):
        fitted = np.linalg.lstsq(relative * weights[:, None], weights, rcond=None)[0]
        off = np.abs(relative @ fitted - 1.0)
        weights = 1 / np.sqrt(np.maximum(off, LEAST_ERROR))
    return {f"floor_p{p}": round(quantile(off.tolist(), p), 3) for p in (50, 90)}


def errors(
    rows: Sequence[Row], predicted: Callable[[Row], float], actual: Callable[[Row], float]
) -> dict[str, Any]:
    first = int(len(rows) * WARM_UP_SHARE)
    off, guess, ratio = [], [], []
    for at in range(first, len(rows)):
        real = actual(rows[at])
        usual = quantile([actual(row) for row in rows[max(0, at - REMEMBERED) : at]], 50)
        off.append(abs(predicted(rows[at]) - real) / real)
        guess.append(abs(usual - real) / real)
        ratio.append(predicted(rows[at]) / real)
    return {
        "requests": len(off),
        "actual_p50": round(quantile([actual(row) for row in rows[first:]], 50), 1),
        "actual_p90": round(quantile([actual(row) for row in rows[first:]], 90), 1),
        "error_p50": round(quantile(off, 50), 3),
        "error_p90": round(quantile(off, 90), 3),
        "baseline_p50": round(quantile(guess, 50), 3),
        "baseline_p90": round(quantile(guess, 90), 3),
        "predicted_by_actual_p50": round(quantile(ratio, 50), 2),
    }


WHAT: dict[str, tuple[Callable[[Row], float], Callable[[Row], float]]] = {
    "time to first token, ms": (lambda row: row.predicted_ttft_ms, lambda row: row.ttft_ms),
    "total time, ms": (lambda row: row.predicted_total_ms, lambda row: row.total_ms),
    "prompt by its text, tokens": (lambda row: row.prompt_tokens, lambda row: row.input_tokens),
    "answer, tokens": (lambda row: row.predicted_output_tokens, lambda row: row.output_tokens),
    "between tokens, ms": (
        lambda row: (
            (row.predicted_total_ms - row.predicted_ttft_ms) / max(row.predicted_output_tokens - 1, 1)
        ),
        lambda row: max(row.total_ms - row.ttft_ms, 1e-3) / max(row.output_tokens - 1, 1),
    ),
}


async def measure(data: Path, count: int, seconds: float) -> Arm:
    async with vllm_cell(kv_cache_mb=KV_CACHE_MB, context_tokens=CONTEXT_TOKENS) as cell:
        return await cell.replay(asks(data, count, seconds), Arm(cell.client), "azure")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("GRID_DATA"), help="evaluation data")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--rows", type=Path, help="write every request there")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--requests", type=int, default=700)
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where the evaluation data lies, by --data or GRID_DATA")
    arm = uvloop.run(measure(Path(options.data), options.requests, options.seconds))
    if options.rows:
        options.rows.write_text(json.dumps([row._asdict() for row in arm.rows]) + "\n")
    several = [row for row in arm.rows if row.output_tokens > 1]
    found = {name: errors(several if "between" in name else arm.rows, *each) for name, each in WHAT.items()}
    found["time to first token, ms"] |= floor(arm.rows, lambda row: row.ttft_ms, False)
    found["total time, ms"] |= floor(arm.rows, lambda row: row.total_ms, True)
    print(
        f"{'':<26}{'actual p50':>12}{'p90':>9}{'error p50':>12}{'p90':>8}{'baseline p50':>15}{'p90':>8}"
        f"{'ratio':>8}{'floor p50':>12}{'p90':>8}"
    )
    for name, row in found.items():
        print(
            f"{name:<26}{row['actual_p50']:>12}{row['actual_p90']:>9}{row['error_p50']:>12.0%}"
            f"{row['error_p90']:>8.0%}{row['baseline_p50']:>15.0%}{row['baseline_p90']:>8.0%}"
            f"{row['predicted_by_actual_p50']:>8}"
            + (f"{row['floor_p50']:>12.0%}{row['floor_p90']:>8.0%}" if "floor_p50" in row else "")
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
