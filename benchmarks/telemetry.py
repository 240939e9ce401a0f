"""What does it cost to watch a cell: the probe's share of a core, and placement's to take what it is sent?

    python benchmarks/telemetry.py [--json OUT] [--rounds N]

The probe reads five GPUs of the tests' driver library (two H100 with NVLink, an A100, an L40S, an L4) through
real pynvml, so a real driver's own time comes on top; its baseline asks for five readings a GPU and keeps
none. Placement decodes and takes the samples of 1,000 units with 24 requests each, of which half end one and
begin another in each round, in one batch for each of 125 nodes; and those of their 1,000 GPUs. Its baseline
decodes them without types and keeps none. Times are CPU time of the thread; the share is at ten rounds a
second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
# Its own folder would hide the package `placement`; the tests' one carries the driver library.
others = (entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")
sys.path = [str(ROOT / "tests"), *others]

import pynvml  # noqa: E402
from support import fake_nvml  # noqa: E402
from support.fleet import make_card, make_load  # noqa: E402

from grid.hardware.nvml import Probe  # noqa: E402
from grid.units.gathering import Gathering, Numbering  # noqa: E402
from grid.wire.codec import Decoder, encode  # noqa: E402
from grid.wire.messages import ReportNode, WireMessage  # noqa: E402
from grid.words import GpuCard, GpuSample, NodeCard  # noqa: E402
from placement import samples  # noqa: E402
from placement.fleet import View  # noqa: E402
from placement.rules import Rules  # noqa: E402

GPUS = 1_000
GPUS_A_NODE = 8
ROUNDS_A_SECOND = 10
RUNNING = 24
"""Requests on each unit."""
BATCHES_A_TURN = 12
"""What comes in while samples gather at the actor, from 125 nodes."""
HEADER_BYTES = 5
"""Of a frame, before its msgpack."""


def cpu_us(work: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU time of one round."""
    times = []
    for _ in range(rounds):
        began_ns = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - began_ns)
    return sorted(times)[rounds // 2] / 1e3


def probe_us(rounds: int) -> tuple[float, float]:
    """Return the CPU time of one round of the probe and of bare calls."""
    with TemporaryDirectory() as folder:
        fake_nvml.load(fake_nvml.build(Path(folder)))
        os.environ.update(fake_nvml.FakeGpus(Path(folder) / "gpus").environment)
        probe = Probe(lambda pid: True)
        count = len(probe.open().gpus)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]

        def bare() -> None:
            for handle in handles:
                pynvml.nvmlDeviceGetMemoryInfo(handle)
                pynvml.nvmlDeviceGetUtilizationRates(handle)
                pynvml.nvmlDeviceGetPowerUsage(handle)
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)

        figures = cpu_us(lambda: probe.read(time.monotonic()), rounds), cpu_us(bare, rounds)
        probe.close()
    return figures


def units_us(rounds: int) -> tuple[float, float]:
    """Return the CPU time of taking one sample of every unit, and of decoding them only."""
    view = View(Rules(), 0.0)
    nodes, gatherings = [], []
    for number in range(GPUS // GPUS_A_NODE):
        node_id = f"node-{number}"
        cards = [make_card(f"unit-{number}-{each}", node_id=node_id) for each in range(GPUS_A_NODE)]
        view.join_node(NodeCard(node_id, "first", "575", ()), number)
        for card in cards:
            view.join(card, number)
        nodes.append([(card, Numbering()) for card in cards])
        gatherings.append(Gathering(node_id))
    requests = itertools.count()
    held = {
        card.unit_id: deque(f"req_{next(requests):016}/s/0" for _ in range(RUNNING))
        for node in nodes
        for card, _ in node
    }

    def frames() -> list[bytes]:
        """One round: every other unit has ended a request and begun another."""
        told = []
        for node, gathering in zip(nodes, gatherings, strict=True):
            for place, (card, numbering) in enumerate(node):
                mine = held[card.unit_id]
                if place % 2:
                    mine.append(f"req_{next(requests):016}/s/0")
                    mine.popleft()
                load = make_load(card, running=RUNNING, steps=next(requests), reservations=tuple(mine))
                gathering.take(numbering.next(load))
            batch = gathering.batch()
            assert batch is not None
            told.append(encode(batch))
        return told

    decoders = [Decoder() for _ in nodes]
    ours, baseline = [], []
    for _ in range(rounds):
        round_of = frames()
        began_ns = time.thread_time_ns()
        batches = [
            samples.of_node(message, link)
            for link, frame in enumerate(round_of)
            for message in decoders[link].feed(frame)
        ]
        for first in range(0, len(batches), BATCHES_A_TURN):
            view.take(batches[first : first + BATCHES_A_TURN], 0.0)
        ended_ns = time.thread_time_ns()
        for frame in round_of:
            _untyped(frame)
        ours.append(ended_ns - began_ns)
        baseline.append(time.thread_time_ns() - ended_ns)
    assert not view.dropped, view.dropped
    return sorted(ours)[rounds // 2] / 1e3, sorted(baseline)[rounds // 2] / 1e3


def gpus_us(rounds: int) -> tuple[float, float]:
    """Return the CPU time of taking one sample of every GPU, and of decoding them only."""
    view = View(Rules(), 0.0)
    frames = []
    for number in range(GPUS // GPUS_A_NODE):
        node_id = f"node-{number}"
        cards = tuple(GpuCard(f"GPU-{number}-{g}", g, "NVIDIA H100", 81_559.0) for g in range(GPUS_A_NODE))
        view.join_node(NodeCard(node_id, "first", "575", cards), number)
        readings = [1.0 / (place + 2) for place in range(10)]
        samples = tuple(GpuSample(card.uuid, 40_000.0, 41_559.0, 0.0, *readings, 4, 61.5) for card in cards)
        frames.append(encode(ReportNode(0, node_id, "first", samples)))

    def take(link: int, message: WireMessage) -> None:
        assert isinstance(message, ReportNode)
        view.report_node(message.node_id, message.incarnation, message.samples, link, 0.0)

    figures = _taken(frames, take, rounds)
    assert not view.gpus.dropped, view.gpus.dropped
    return figures


def _taken(frames: list[bytes], take: Callable[[int, WireMessage], None], rounds: int) -> tuple[float, float]:
    decoders = [Decoder() for _ in frames]

    def all_of_them() -> None:
        for link, frame in enumerate(frames):
            for message in decoders[link].feed(frame):
                take(link, message)

    return cpu_us(all_of_them, rounds), cpu_us(lambda: [_untyped(frame) for frame in frames], rounds)


def _untyped(frame: bytes) -> Any:
    return msgspec.msgpack.decode(frame[HEADER_BYTES:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args()
    print(f"{'':<34}{'ms a round':>12}{'baseline':>12}{'% of a core':>14}")
    rows = {}
    for name, (ours_us, baseline_us) in (
        ("probe: 5 GPUs", probe_us(options.rounds)),
        (f"placement: {GPUS:,} units", units_us(options.rounds // 5)),
        (f"placement: {GPUS:,} GPUs", gpus_us(options.rounds // 5)),
    ):
        share = 100 * ours_us * ROUNDS_A_SECOND / 1e6
        rows[name] = {"round_us": ours_us, "baseline_us": baseline_us, "core_percent": share}
        print(f"{name:<34}{ours_us / 1e3:>12.2f}{baseline_us / 1e3:>12.2f}{share:>14.2f}")
    if options.json:
        figures = {"python": platform.python_version(), "machine": platform.machine(), "costs": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
