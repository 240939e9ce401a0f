"""How far are the simulator's step times from engines measured end to end?

    python benchmarks/step_times.py --data FOLDER [--json OUT]

Baseline in the same table: the catalogue's roofline priors, which placement begins with. Two sources:

- `aiconfigurator_silicon_sample.csv`: Llama-3.1-8B in bf16 on one H100 (TensorRT-LLM), 42 points of time
between tokens at 8 to 128 requests in flight. A simulated unit is kept at that number of requests, as the
measurement was. - `splitwise_perf_model.csv`: Llama-2-70B on A100 and H100, tensor parallel 2 to 8 (batch 64
at 2 left out). The simulator has no tables for that model, so what is compared is what one GPU is worth
against the other: the ratio of A100 to H100, of a prompt of 512 to 4,096 tokens and of a decode step at batch
1 to 32.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package `placement`.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from grid.hardware import catalogue  # noqa: E402
from grid.words import Precision  # noqa: E402
from placement.simulator.hardware import Gpu, read_gpus, read_kernels  # noqa: E402
from placement.simulator.kv import KvMemory  # noqa: E402
from placement.simulator.steps import StepTimes, step_times  # noqa: E402
from placement.simulator.unit import Sequence, Unit  # noqa: E402

PARAMETERS_B = 8.03
ROUNDS = 6
"""Answers of each slot; the first round, in which all prompts come at once, is not counted."""


def kept_at(times: StepTimes, gpu: Gpu, flight: int, prompt: int, output: int) -> float:
    """Return the mean time between tokens in ms with `flight` requests always there."""
    unit = Unit(times, KvMemory(gpu.kv_tokens), gpu.kv_tokens, 1.0, random.Random(1))
    sent, at_s, gaps = 0, 0.0, []
    while sent < flight:
        unit.land(Sequence(sent, prompt, output, ()), 0.0)
        sent += 1
    while unit.jump:
        at_s = unit.ends_s
        _, ended = unit.finish(at_s)
        for sequence in ended:
            if sequence.request >= flight:
                gaps.append(1e3 * (sequence.last_s - sequence.first_s) / (output - 1))
            if sent < flight * ROUNDS:
                unit.land(Sequence(sent, prompt, output, ()), at_s)
                sent += 1
        if unit.jump == 0:
            unit.start(at_s)
    return statistics.mean(gaps)


def silicon(data: Path) -> Iterator[dict[str, Any]]:
    gpus, kernels = read_gpus(data), read_kernels(data)
    gpu = gpus["H100-SXM"]
    times = step_times(gpu, gpus, kernels)
    lone_ms = catalogue.decode_ms_per_token("H100", PARAMETERS_B, Precision.BF16)
    rate = catalogue.prefill_tokens_per_s("H100", PARAMETERS_B, Precision.BF16)
    with (data / "profiles" / "aiconfigurator_silicon_sample.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["model_path"], row["system"], row["tp_size"]) != (
                *("meta-llama/Llama-3.1-8B-Instruct", "h100_sxm"),
                "1",
            ):
                continue
            prompt, output, flight = int(row["isl"]), int(row["osl"]), int(row["batch_size"])
            yield {
                "in flight": flight,
                "measured_ms": float(row["silicon_tpot_ms"]),
                "tables_ms": kept_at(times, gpu, flight, prompt, output),
                # A step reads the weights and computes its share of prompts.
                "prior_ms": lone_ms + 1e3 * flight * (1 + prompt / output) / rate,
            }


def splitwise(data: Path) -> Iterator[dict[str, Any]]:
    gpus, kernels = read_gpus(data), read_kernels(data)
    times = {
        "a100-80gb": step_times(gpus["A100-SXM-80"], gpus, kernels),
        "h100-80gb": step_times(gpus["H100-SXM"], gpus, kernels),
    }
    measured: dict[tuple[int, int, int], dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with (data / "profiles" / "splitwise_perf_model.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            key = int(row["tensor_parallel"]), int(row["prompt_size"]), int(row["batch_size"])
            if row["model"] == "llama2-70b" and row["hardware"] in times and key[::2] != (2, 64):
                measured[key][row["hardware"]].append((float(row["prompt_time"]), float(row["token_time"])))
    for (_, prompt, batch), by_gpu in sorted(measured.items()):
        if len(by_gpu) < 2 or not 512 <= prompt * batch <= 4096:
            continue
        found = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)]
            for name, rows in by_gpu.items()
        }
        slow, fast = times["a100-80gb"], times["h100-80gb"]
        chunks = _chunks(prompt * batch)
        told = [
            sum(slow.mixed_ms(0, 0, [chunk], 1) for chunk in chunks)
            / sum(fast.mixed_ms(0, 0, [chunk], 1) for chunk in chunks),
            slow.decode_ms(batch, batch * prompt) / fast.decode_ms(batch, batch * prompt),
        ]
        for what, at in (("prompt", 0), ("step", 1)):
            yield {
                "what": what,
                "measured": found["a100-80gb"][at] / found["h100-80gb"][at],
                "tables": told[at],
            }


def _chunks(tokens: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + 2048, tokens)) for begin in range(0, tokens, 2048)]


def off(pairs: list[tuple[float, float]]) -> str:
    """Return by how much predictions are off: median and 90 % quantile of the factor, and the sign of it."""
    logs = [math.log(told / measured) for measured, told in pairs]
    sizes = sorted(abs(each) for each in logs)
    middle, most = statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1))]
    bias = math.exp(statistics.median(logs)) - 1
    return f"{math.exp(middle) - 1:.0%}, {math.exp(most) - 1:.0%} ({bias:+.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("GRID_DATA"), help="evaluation data")
    parser.add_argument("--json", type=Path, help="write all points here")
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where the evaluation data lies, by --data or GRID_DATA")
    data = Path(options.data)
    points, ratios = list(silicon(data)), list(splitwise(data))
    print("Time between tokens, Llama-3.1-8B bf16 on H100: factor off, median, 90 % quantile (its sign)")
    print(f"{'in flight':<12}{'points':>8}{'simulator':>22}{'catalogue prior':>22}")
    for flight in (*sorted({point["in flight"] for point in points}), None):
        chosen = [point for point in points if flight in (point["in flight"], None)]
        tables, prior = (
            off([(p["measured_ms"], p[name]) for p in chosen]) for name in ("tables_ms", "prior_ms")
        )
        print(f"{flight or 'all':<12}{len(chosen):>8}{tables:>22}{prior:>22}")
    print("\nA100 against H100: measured with Llama-2-70B, simulated with 8B")
    for what in ("prompt", "step"):
        pairs = [(each["measured"], each["tables"]) for each in ratios if each["what"] == what]
        print(f"{what:<12}{len(pairs):>8}{off(pairs):>22}")
    if options.json:
        options.json.write_text(json.dumps({"silicon": points, "splitwise": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
