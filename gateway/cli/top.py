"""`grid top`: the cell as it works, in the terminal, until Ctrl-C; or once, for scripts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gateway.cli.console import out, print_json, visible
from gateway.cli.options import AsJson, with_grid

if TYPE_CHECKING:
    from grid import Grid

FIGURES_PER_S = 4.0
"""How often the screen is drawn; the view of the fleet behind it is at most a second old."""
BAR_CHARS = 8
STYLES = {"ready": "green", "failed": "bold red", "isolated": "bold red", "starting": "cyan"}
"""Of a unit's state; draining ones are yellow."""


class Totals(NamedTuple):
    """Over all units."""

    units: int
    ready: int
    streams: int
    waiting: int
    """At units, and for one."""
    kv_tokens_used: int
    kv_tokens_total: int


@with_grid
def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between looks.", min=0.2)] = 1.0,
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Watch units, streams, queues and KV cache, and how the key's calls go. `--json` implies `--once`."""
    units, queues, metrics = look(grid)
    if as_json:
        whole = totals(units, queues)._asdict()
        print_json({"totals": whole, "metrics": metrics, "units": units, "queues": queues})
        return
    if once or not out.is_terminal:
        out.print(screen(units, queues, metrics))
        return
    from rich.live import Live

    first = screen(units, queues, metrics)
    with Live(first, console=out, screen=True, refresh_per_second=FIGURES_PER_S) as live:
        try:
            while True:
                time.sleep(interval_s)
                live.update(screen(*look(grid)))
        except KeyboardInterrupt:
            return


def look(grid: Grid) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return units, queues and the key's metrics."""
    return grid.units(), grid.queues(), grid.metrics()["metrics"]


def totals(units: list[dict[str, Any]], queues: list[dict[str, Any]]) -> Totals:
    kv_total = sum(unit["kv_tokens_total"] for unit in units)
    return Totals(
        units=len(units),
        ready=sum(unit["state"] == "ready" for unit in units),
        streams=sum(unit["running"] for unit in units),
        waiting=sum(each["waiting"] for each in (*units, *queues)),
        kv_tokens_used=kv_total - sum(unit["kv_tokens_free"] for unit in units),
        kv_tokens_total=kv_total,
    )


def screen(units: list[dict[str, Any]], queues: list[dict[str, Any]], metrics: dict[str, Any]) -> Group:
    """Return what is drawn: totals, figures, a line for each model that is waited for, and a row for each
    unit, the busiest first."""
    whole = totals(units, queues)
    kv_share = whole.kv_tokens_used / whole.kv_tokens_total if whole.kv_tokens_total else 0.0
    p99_ms = metrics["p99_latency_ms"]
    head = Text.assemble(
        (f"{whole.ready}/{whole.units}", "bold"), " units ready   ",
        (f"{whole.streams}", "bold"), " streams   ",
        (f"{whole.waiting}", "bold"), " waiting   KV ",
        (f"{kv_share:.0%}", "bold"),
    )  # fmt: skip
    calls = Text(
        f"your calls: {metrics['request_rate_per_second']:.1f}/s   "
        f"p99 {'-' if p99_ms is None else f'{p99_ms:.0f} ms'}   "
        f"5xx {metrics['error_rate_5xx']:.1%}",
        "dim",
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    # The name is what one acts on, so a narrow screen cuts everything else first.
    longest = max((len(unit["unit_id"]) for unit in units), default=0)
    table.add_column("unit", no_wrap=True, min_width=longest)
    for name in ("model", "state", "region", "GPU", "streams", "", "waiting", "KV", "age"):
        table.add_column(name, justify="right" if name in ("waiting", "KV", "age") else "left", no_wrap=True)
    for unit in sorted(units, key=lambda unit: (-load_of(unit), unit["unit_id"])):
        table.add_row(*row(unit))
    waited_for = [Text(queued(queue), "yellow") for queue in queues]
    return Group(head, calls, *waited_for, Text(), table)


def queued(queue: dict[str, Any]) -> str:
    tenants = f"{queue['tenants']} tenant{'s' if queue['tenants'] != 1 else ''}"
    return (
        f"{queue['waiting']} of {tenants} wait for {visible(queue['model'])}: "
        f"the first for {queue['oldest_ms'] / 1000:.1f} s, a new tenant for about "
        f"{queue['wait_ms'] / 1000:.1f} s"
    )


def load_of(unit: dict[str, Any]) -> float:
    """Return how full a unit is: 1 when every slot runs, more with a queue."""
    return float((unit["running"] + unit["waiting"]) / max(unit["max_running"], 1))


def row(unit: dict[str, Any]) -> list[Text]:
    total = unit["kv_tokens_total"]
    used = f"{1 - unit['kv_tokens_free'] / total:.0%}" if total else "-"
    model = unit["model"] + (" (simulated)" if unit["simulated"] else "")
    full = min(unit["running"] / max(unit["max_running"], 1), 1.0)
    age_ms = unit["sample_age_ms"]
    return [
        Text(visible(unit["unit_id"])),
        Text(visible(model)),
        Text(unit["state"], STYLES.get(unit["state"], "yellow")),
        Text(visible(unit["region"])),
        Text(visible(unit["gpu_type"])),
        bar(full),
        Text(f"{unit['running']}/{unit['max_running']}"),
        Text(str(unit["waiting"]), "yellow" if unit["waiting"] else ""),
        Text(used),
        Text(f"{age_ms / 1000:.1f} s" if age_ms >= 0 else "-", "dim"),
    ]


def bar(share: float) -> Text:
    """Return a bar that is `share` (0 to 1) full."""
    filled = round(share * BAR_CHARS)
    return Text.assemble(("█" * filled, "green"), ("·" * (BAR_CHARS - filled), "dim"))
