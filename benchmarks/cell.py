"""How long does a cell take to start, and what does it hold when idle?

    python benchmarks/cell.py [--json OUT] [--rounds N] [--settle S]

Starts and stops the cell of `examples/cells/simulated.yaml` in a temporary folder. The baseline, alternating
with it, is Ray alone: the same head with the same settings and nothing on it. Memory is the proportional set
size over all processes, read after the cell was left alone for a while.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from gateway import launch  # noqa: E402
from grid.config import Config, load  # noqa: E402

EXAMPLE = HERE.parent / "examples/cells/simulated.yaml"


def config(folder: Path) -> Config:
    base = load(EXAMPLE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return base.model_copy(
        update={
            "cell": base.cell.model_copy(update={"state_dir": folder}),
            "gateway": base.gateway.model_copy(update={"port": port}),
        }
    )


def cell(settle_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="zgb-") as folder:
        made = config(Path(folder))
        try:
            started_s = time.monotonic()
            launch.up(made)
            up_s = time.monotonic() - started_s
            time.sleep(settle_s)
            held = launch.status(made)
        finally:
            stopping_s = time.monotonic()
            launch.down(made)
        down_s = time.monotonic() - stopping_s
    return {
        "start_s": up_s,
        "stop_s": down_s,
        "memory_mb": held["memory_mb"],
        "processes": held["processes"],
    }


def ray_alone(settle_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="zgb-") as folder:
        made = config(Path(folder))
        started_s = time.monotonic()
        with launch.ray_head(made):
            up_s = time.monotonic() - started_s
            time.sleep(settle_s)
            held = launch.status(made)
            stopping_s = time.monotonic()
        down_s = time.monotonic() - stopping_s
    return {
        "start_s": up_s,
        "stop_s": down_s,
        "memory_mb": held["memory_mb"],
        "processes": held["processes"],
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before memory is read")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"cell": [], "ray alone": []}
    for _ in range(arguments.rounds):
        rows["ray alone"].append(ray_alone(arguments.settle))
        rows["cell"].append(cell(arguments.settle))
    figures: dict[str, Any] = {name: medians(of) for name, of in rows.items()}
    print(f"{'':12}{'start s':>10}{'stop s':>10}{'memory MB':>12}{'processes':>12}")
    for name, row in figures.items():
        print(
            f"{name:12}{row['start_s']:>10}{row['stop_s']:>10}{row['memory_mb']:>12}{row['processes']:>12.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds": arguments.rounds, **figures}, indent=1))


if __name__ == "__main__":
    main()
