"""How good are the predictions: answers' lengths, and the time of a step?

    python benchmarks/learning.py [--data FOLDER] [--json OUT]

FOLDER (or the environment variable GRID_DATA) holds `traces/` and `profiles/` of the evaluation data.

Lengths: both traces are replayed in the order of their times as two pipelines of one tenant; the 90 %
quantile of each answer is asked for before it is learned from. Baselines: one quantile over everybody's
answers, learned the same way, and the cap of `max_output_tokens` that a client would send.

Steps: measured points of engines on one GPU at several batch sizes, prompt and output lengths. The mean time
between tokens is predicted from the catalogue alone, and again after 50 requests seen at the *other* batch
sizes of the same engine and lengths, each with 10 % of noise. Baselines: a lone request's step, which is what
the catalogue knows without batch and context, and the prior without any correction. Of the requests kept in
flight no more are taken to run than the GPU's memory holds. Mixture-of-experts models are left out: the
catalogue knows one number of parameters, they have two. An error is the factor by which a prediction is off.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package `placement`.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from grid.hardware import catalogue  # noqa: E402
from grid.words import Precision, Task, UnitCard  # noqa: E402
from placement.lengths import OutputLengths  # noqa: E402
from placement.speeds import LearnedSpeeds, Ran, UnitSpeed  # noqa: E402

CAP_TOKENS = 4_096
"""What clients send as `max_output_tokens` when they don't care."""
OBSERVED = 50
NOISE = 0.10
MEMORY_SHARE = 0.9
"""Of a GPU's memory that an engine takes; the common default."""
QUIET_BATCH = 8
"""Above it a measured time to first token is mostly queueing: all requests of a point start together."""

SYSTEMS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "gb200": "B200"}
DENSE_PARAMETERS_B = {
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "nvidia/Llama-3.1-8B-Instruct-FP8": 8.03,
    "Qwen/Qwen3-32B": 32.8,
    "nvidia/Qwen3-32B-NVFP4": 32.8,
    "meta-llama/Llama-3.1-70B": 70.6,
}
PRECISIONS = {"fp8": Precision.FP8, "fp4": Precision.INT4, "int4": Precision.INT4, "": Precision.BF16}


# --- lengths --------------------------------------------------------------------------------


class Answer(NamedTuple):
    at_s: float
    trace: str
    tokens: int


def answers(data: Path) -> list[Answer]:
    found = []
    with (data / "traces" / "azure2023_code.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    stamps = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    for row, at_s in zip(rows, stamps, strict=True):
        found.append(Answer(at_s - stamps[0], "azure code", int(row["GeneratedTokens"])))
    with (data / "traces" / "mooncake_synthetic.jsonl").open() as lines:
        found += [
            Answer(row["timestamp"] / 1e3, "mooncake", row["output_length"]) for row in map(json.loads, lines)
        ]
    return sorted(found)


def lengths_report(data: Path) -> list[dict[str, Any]]:
    grouped, pooled = OutputLengths(), OutputLengths()
    asked: dict[str, Callable[[str], int]] = {
        "learned": lambda trace: grouped.forecast("tenant", trace, "model").p90_tokens,
        "one for all": lambda trace: pooled.forecast("", "", "").p90_tokens,
        "max_output_tokens": lambda trace: CAP_TOKENS,
    }
    within: dict[tuple[str, str], list[bool]] = defaultdict(list)
    foretold: dict[tuple[str, str], list[int]] = defaultdict(list)
    for answer in answers(data):
        for name, ask in asked.items():
            p90 = ask(answer.trace)
            within[answer.trace, name].append(answer.tokens <= p90)
            foretold[answer.trace, name].append(p90)
        grouped.take("tenant", answer.trace, "model", answer.tokens)
        pooled.take("", "", "", answer.tokens)
    return [
        {
            "trace": trace,
            "quantile": name,
            "answers": len(hits),
            "coverage": round(statistics.fmean(hits), 3),
            "mean_p90_tokens": round(statistics.fmean(foretold[trace, name])),
        }
        for (trace, name), hits in within.items()
    ]


# --- steps ----------------------------------------------------------------------------------


class Point(NamedTuple):
    """One measurement of an engine on one GPU, with a number of requests kept in flight."""

    model: str
    gpu: str
    precision: Precision
    backend: str
    prompt_tokens: int
    output_tokens: int
    batch: float
    """Requests that run together."""
    ttft_ms: float
    token_ms: float

    @property
    def work(self) -> tuple[str, str, str, str, int, int]:
        """All but the batch."""
        engine = (self.model, self.gpu, self.precision.label, self.backend)
        return (*engine, self.prompt_tokens, self.output_tokens)

    @property
    def kv_tokens(self) -> float:
        return self.batch * (self.prompt_tokens + self.output_tokens / 2)


def held(gpu: str, parameters_b: float, precision: Precision, tokens: float) -> float:
    """Return how many requests of so many tokens the memory of a GPU holds."""
    weights_mb = catalogue.weights_mb(parameters_b, precision)
    left_bytes = (catalogue.GPUS[gpu].memory_mb * MEMORY_SHARE - weights_mb) * 2**20
    return left_bytes / catalogue.kv_bytes_per_token(parameters_b) / tokens


def points(data: Path) -> list[Point]:
    with (data / "profiles" / "aiconfigurator_silicon_sample.csv").open() as lines:
        return list(_points(csv.DictReader(lines)))


def _points(rows: csv.DictReader[str]) -> Iterator[Point]:
    for row in rows:
        known = row["system"] in SYSTEMS and row["model_path"] in DENSE_PARAMETERS_B
        if known and row["mode"] == "agg" and row["tp_size"] == "1":
            gpu, precision = SYSTEMS[row["system"]], PRECISIONS[row["precision"]]
            prompt_tokens, output_tokens = int(row["isl"]), int(row["osl"])
            parameters_b = DENSE_PARAMETERS_B[row["model_path"]]
            room = held(gpu, parameters_b, precision, prompt_tokens + output_tokens / 2)
            yield Point(
                model=row["model_path"],
                gpu=gpu,
                precision=precision,
                backend=row["backend"],
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                batch=min(int(row["batch_size"]), room),
                ttft_ms=float(row["silicon_ttft_ms"]),
                token_ms=float(row["silicon_tpot_ms"]),
            )


def fresh_unit(point: Point) -> UnitSpeed:
    """Return a unit with the catalogue's priors, and the point's prompts for each output known."""
    what = (point.gpu, DENSE_PARAMETERS_B[point.model], point.precision)
    card = UnitCard(
        *("unit", "first", "host", 1, "node", "region", int(Task.GENERATE), point.model),
        precision=int(point.precision),
        fingerprint="f",
        context_tokens=1 << 17,
        gpu_type=point.gpu,
        gpus=1.0,
        memory_grant_mb=80_000,
        max_running=1_024,
        max_waiting=0,
        cu_factor=1.0,
        prefill_tokens_per_s=catalogue.prefill_tokens_per_s(*what),
        decode_ms_per_token=catalogue.decode_ms_per_token(*what),
    )
    unit = LearnedSpeeds().join(card)
    unit.kind.inputs, unit.kind.outputs = float(point.prompt_tokens), float(point.output_tokens)
    unit.kind.published = unit.kind.speeds()
    return unit


def token_ms(unit: UnitSpeed, point: Point) -> float:
    known = unit.kind.speeds()
    return (
        known.step_ms + known.step_ms_per_request * point.batch + known.step_ms_per_kv_token * point.kv_tokens
    )


def off(predicted: float, measured: float) -> float:
    """Return by what factor a prediction is off, less one: 0.5 for half as well as for double."""
    return math.exp(abs(math.log(predicted / measured))) - 1


def after_observing(point: Point, others: list[Point], rng: random.Random) -> float:
    unit = fresh_unit(point)
    for _ in range(OBSERVED):
        seen = rng.choice(others)
        noisy_ms = seen.token_ms * rng.lognormvariate(0, NOISE)
        unit.ran(Ran(seen.prompt_tokens, seen.output_tokens, 0.0, noisy_ms, seen.batch, seen.kv_tokens))
    return token_ms(unit, point)


def steps_report(data: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    measured, rng = points(data), random.Random(0)
    works: dict[object, list[Point]] = defaultdict(list)
    for point in measured:
        works[point.work].append(point)
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, list[float]] = defaultdict(list)
    for point in measured:
        unit, engine = fresh_unit(point), f"{point.model.split('/')[-1]} {point.gpu} {point.precision.label}"
        known = unit.kind.speeds()
        lone_ms = known.step_ms + known.step_ms_per_request
        if point.batch <= QUIET_BATCH:
            first_ms = token_ms(unit, point) + known.prefill_ms_per_token * point.prompt_tokens
            first[point.backend].append(off(first_ms, point.ttft_ms))
        others = [other for other in works[point.work] if other.batch != point.batch]
        if len(others) < 2:
            continue
        for name in (engine, "all"):
            errors[name]["lone step"].append(off(lone_ms, point.token_ms))
            errors[name]["prior"].append(off(token_ms(unit, point), point.token_ms))
        learned = off(after_observing(point, others, rng), point.token_ms)
        errors[engine]["learned"].append(learned)
        errors["all"]["learned"].append(learned)
    rows = [
        {"engine": name, "points": len(by["prior"])}
        | {f"{which}_{p}": round(quantile(by[which], p), 2) for which in by for p in (50, 90)}
        for name, by in errors.items()
    ]
    return rows, [
        {"backend": backend, "points": len(offs), "p50": round(quantile(offs, 50), 2)}
        for backend, offs in first.items()
    ]


def quantile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("GRID_DATA"), help="evaluation data")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where the evaluation data lies, by --data or GRID_DATA")
    lengths = lengths_report(Path(options.data))
    print(f"{'trace':<14}{'quantile':<20}{'answers':>8}{'coverage':>10}{'mean p90':>10}")
    for row in lengths:
        print(
            f"{row['trace']:<14}{row['quantile']:<20}{row['answers']:>8}{row['coverage']:>10}"
            f"{row['mean_p90_tokens']:>10}"
        )
    steps, first = steps_report(Path(options.data))
    print(f"\nerror of the time between tokens{'points':>22}{'lone step':>16}{'prior':>16}{'learned':>16}")
    for row in steps:
        figures = "".join(
            f"{row[f'{which}_50']:>10.0%}{row[f'{which}_90']:>6.0%}"
            for which in ("lone step", "prior", "learned")
        )
        print(f"{row['engine']:<44}{row['points']:>10}{figures}")
    print(f"\nerror of the prior of a first token, up to {QUIET_BATCH} requests in flight")
    for row in first:
        print(f"{row['backend']:<44}{row['points']:>10}{row['p50']:>10.0%}")
    if options.json:
        options.json.write_text(
            json.dumps({"lengths": lengths, "steps": steps, "first": first}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
