"""`grid simulate` and `grid plan`: placement policies against each other on a trace in a simulated fleet,
and the cheapest fleet for a trace. They need no cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gateway.cli.console import out, print_table, reporting, steps
from grid.errors import InvalidRequest

if TYPE_CHECKING:
    from placement.simulator.capacity import Tried
    from placement.simulator.figures import Slo
    from placement.simulator.report import Report

DEFAULT_LOADS = "0.5,0.8,0.95,1.1"
MAX_SEEDS = 100
MAX_JOBS = 64
DEFAULT_SLO = "ttft_ms=2000,ttft_ms_per_token=0.25,tpot_ms=100,attainment=0.95"
DEFAULT_REGIONS = "us-east-1,us-west-2,eu-central-1,ap-northeast-1"

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
    policies: Annotated[
        str, typer.Option("--policies", help="Names, `all`, or `ablations`: ours without a part each.")
    ] = "all",
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
    from placement.simulator.policies import ABLATIONS, COMPARED, POLICIES
    from placement.simulator.report import compare, plot

    with reporting(False):
        loads = _loads(load)
        sets = {"all": COMPARED, "ablations": {"grid": POLICIES["grid"], **ABLATIONS}}
        chosen = list(sets[policies]) if policies in sets else [name.strip() for name in policies.split(",")]
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


def plan(
    trace: Trace,
    data: Data,
    rps: Annotated[float, typer.Option("--rps", help="Requests a second.", min=0.01, show_default=False)],
    slo: Annotated[str, typer.Option("--slo", help="What to keep.")] = DEFAULT_SLO,
    gpus: Annotated[str, typer.Option("--gpus", help="GPUs to choose among.")] = "h100,a100-sxm-80,l40s,l4",
    regions: Annotated[str, typer.Option("--regions", help="AWS regions to choose among.")] = DEFAULT_REGIONS,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan and all that was tried here.")
    ] = None,
) -> None:
    """Find the cheapest fleet that keeps an SLO on a trace, and where it should stand."""
    from placement.simulator.capacity import Planner, Question, named
    from placement.simulator.geography import read_origins, read_round_trips
    from placement.simulator.hardware import read_gpus, read_kernels
    from placement.simulator.traces import read_trace

    with reporting(False):
        limits, attainment = _slo(slo)
        sheets, trips, origins = read_gpus(data), read_round_trips(data), read_origins(data)
        places = tuple(region.strip() for region in regions.split(","))
        trips.check(places, "--regions")
        chosen = named(gpus.split(","), sheets)
        question = Question(read_trace(trace, origins), rps, limits, attainment, chosen, places)
        with steps() as say:
            planner = Planner(question, sheets, read_kernels(data), trips, origins, lambda t: say(_tried(t)))
            best = planner.plan()
        rows = [
            (count, gpu, region, round(count * sheets[gpu].usd_per_hour, 2))
            for gpu, region, count in best.groups()
        ]
        print_table(("units", "GPU", "region", "$/h"), rows, "nothing")
        out.print(Text(_tried(best)))
        if json_file is not None:
            told = {
                "best": _plan_record(best),
                "tried": [_plan_record(each) for each in planner.tried.values()],
            }
            json_file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _tried(tried: Tried) -> str:
    fleet = " + ".join(f"{count} {gpu} in {region}" for gpu, region, count in tried.groups())
    figures = tried.figures
    return (
        f"{fleet}: ${tried.usd_per_hour:.2f}/h, {figures.attainment:.1%} within the SLO, "
        f"TTFT p99 {figures.ttft_ms_p99:.0f} ms, busy {figures.utilisation:.0%}"
    )


def _plan_record(tried: Tried) -> dict[str, object]:
    return {
        "units": [{"gpu": gpu, "region": region, "count": count} for gpu, region, count in tried.groups()],
        "usd_per_hour": round(tried.usd_per_hour, 4),
        "kept": tried.kept,
        **{name: round(value, 4) for name, value in tried.figures._asdict().items()},
    }


def _slo(text: str) -> tuple[Slo, float]:
    from placement.simulator.figures import Slo

    numbers = dict(pair.split("=") for pair in DEFAULT_SLO.split(","))
    for pair in text.split(","):
        name, equals, value = pair.strip().partition("=")
        try:
            ok = bool(equals) and name in numbers and float(value) > 0
        except ValueError:
            ok = False
        if not ok:
            raise InvalidRequest(f"--slo {pair!r} should be as in {DEFAULT_SLO}", param="slo")
        numbers[name] = value
    attainment = float(numbers.pop("attainment"))
    if attainment >= 1:
        raise InvalidRequest(f"--slo: attainment is {attainment:g}; it should be below 1", param="slo")
    return Slo(**{name: float(value) for name, value in numbers.items()}), attainment


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
