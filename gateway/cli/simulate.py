"""`grid simulate`: placement policies against each other on a trace, in a simulated fleet. Needs no cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gateway.cli.console import out, print_table, reporting, steps
from grid.errors import InvalidRequest

if TYPE_CHECKING:
    from placement.simulator.report import Report

DEFAULT_LOADS = "0.5,0.8,0.95,1.1"
MAX_SEEDS = 100
MAX_JOBS = 64
ALL = "all"

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="GRID_DATA", help="Folder with the evaluation data: profiles, gpu, latency, traces."
    ),
]
Trace = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="Azure CSV, Mooncake JSON lines, or ServeGen rates.", show_default=False
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", help="Processes that simulate at once.", min=1, max=MAX_JOBS)]


def simulate(
    trace: Trace,
    fleet: Annotated[
        Path, typer.Option("--fleet", help="Which GPUs stand where (YAML).", show_default=False)
    ],
    data: Data,
    load: Annotated[
        str, typer.Option("--load", help="Loads; 1.0 is what least outstanding sustains.")
    ] = DEFAULT_LOADS,
    policies: Annotated[str, typer.Option("--policies", help="Names, or `all`.")] = ALL,
    seeds: Annotated[int, typer.Option("--seeds", help="Paired runs of each.", min=1, max=MAX_SEEDS)] = 5,
    jobs: Jobs = 1,
    sustained: Annotated[bool, typer.Option(help="Also look for the load that each policy sustains.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write rows, means and loads here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw attainment and TTFT over load here.")
    ] = None,
) -> None:
    """Compare placement policies on a trace in a simulated fleet: SLO attainment, TTFT, TPOT, cost,
    sustained load."""
    from placement.simulator.bench import Job, Runner
    from placement.simulator.figures import Slo
    from placement.simulator.policies import POLICIES
    from placement.simulator.report import compare, plot

    with reporting(False):
        loads = _loads(load)
        chosen = list(POLICIES) if policies == ALL else [name.strip() for name in policies.split(",")]
        for name in chosen:
            if name not in POLICIES:
                raise InvalidRequest(
                    f"--policies: {name!r} is none of {', '.join(POLICIES)}", param="policies"
                )
        with steps() as say:
            made = 0

            def told(job: Job) -> None:
                nonlocal made
                made += 1
                say(f"{made} runs; the last one: {job.policy} at {job.rps:.1f}/s, seed {job.seed}")

            runner = Runner(data, trace, fleet, Slo(), jobs, told)
            try:
                report = compare(runner, chosen, loads, range(seeds), sustained)
            finally:
                runner.close()
        _print(report)
        if json_file is not None:
            json_file.write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
        if plot_file is not None:
            plot(report, plot_file)


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0.01 <= load <= 10 for load in loads):
        raise InvalidRequest(
            f"--load {text!r} should be numbers from 0.01 to 10, with commas between", param="load"
        )
    return loads


def _print(report: Report) -> None:
    head = (
        f"{report.trace} on {report.fleet}: load 1.0 is {report.unit_rps:.2f} requests a second, "
        f"{len(report.seeds)} seeds"
    )
    out.print(Text(head + (f"; {report.note}" if report.note else "")), soft_wrap=True)
    rows = []
    for mean in sorted(report.means(), key=lambda mean: mean.load):
        low, high = mean.intervals["attainment"]
        rows.append(
            (
                mean.load,
                mean.policy,
                f"{mean.means['attainment']:.3f} ({low:.3f}-{high:.3f})",
                round(mean.means["goodput_rps"], 2),
                round(mean.means["ttft_ms_p50"]),
                round(mean.means["ttft_ms_p99"]),
                round(mean.means["tpot_ms_p99"], 1),
                round(mean.refused, 1),
                round(mean.means["utilisation"], 2),
                round(mean.means["usd_per_mtok_out"], 2),
            )
        )
    columns = (
        "load",
        "policy",
        "within SLO (95 %)",
        "good/s",
        "TTFT p50",
        "p99",
        "TPOT p99",
        "refused",
        "busy",
        "$/Mtok",
    )
    print_table(columns, rows, "nothing was run")
    if report.sustained:
        print_table(
            ("policy", "sustained load"),
            sorted(
                ((name, round(load, 3)) for name, load in report.sustained.items()), key=lambda row: -row[1]
            ),
            "",
        )
