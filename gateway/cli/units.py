"""`grid units` and `grid drain`: the units of a cell, how busy they are, and taking them out of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gateway.cli.console import out, print_json, print_table, steps, visible
from gateway.cli.options import AsJson, with_grid
from grid.errors import DeadlineExceeded, InvalidRequest, NotFound

if TYPE_CHECKING:
    from grid import Grid

POLL_S = 0.5
"""A view of the fleet is at most a second old."""
DEFAULT_WAIT_S = 600.0
"""Above the longest answer that the default configuration allows."""
BUSY_STATES = ("ready", "draining")


@with_grid
def units(*, grid: Grid, as_json: AsJson = False) -> None:
    """List the units: what each owns, runs and has room for."""
    listed = grid.units()
    if as_json:
        print_json({"units": listed})
    else:
        print_units(listed)


@with_grid
def drain(
    target: Annotated[
        str,
        typer.Argument(metavar="UNIT|NODE", help="A unit, or a node: all units on it.", show_default=False),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace its process by a new one once it is idle.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it has nothing left to do.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.", min=0.0)] = DEFAULT_WAIT_S,
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Take a unit out of work: nothing new goes to it, what runs moves on or ends. It stays loaded."""
    if undo and restart:
        raise InvalidRequest("--undo and --restart exclude each other", param="undo")
    chosen = named(grid.units(), target)
    rows = [grid.drain(unit_id, draining=not undo, restart=restart) for unit_id in chosen]
    if wait and not undo and not restart:
        with steps() as progress:
            rows = until_drained(grid.units, chosen, timeout_s, progress)
    if as_json:
        print_json({"units": rows})
        return
    for row in rows:
        state = "restarts once it is idle" if restart else f"is {row['state']}"
        out.print(Text(f"{visible(row['unit_id'])} {state}"))


def named(listed: Sequence[dict[str, Any]], target: str) -> list[str]:
    """Return the unit of that name, or else the units on the node of that id. Raises NotFound."""
    for attribute in ("unit_id", "node_id"):
        found = [str(unit["unit_id"]) for unit in listed if unit[attribute] == target]
        if found:
            return found
    raise NotFound(
        f"no unit and no node is called {target!r}; `grid units --json` lists both", param="target"
    )


def until_drained(
    ask: Callable[[], list[dict[str, Any]]],
    chosen: Sequence[str],
    timeout_s: float,
    progress: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Return the units once none of them has work; one that is gone has none. Raises DeadlineExceeded."""
    deadline_s = clock() + timeout_s
    while True:
        rows = [unit for unit in ask() if unit["unit_id"] in chosen]
        busy = [unit for unit in rows if unit["state"] in BUSY_STATES]
        if not busy:
            return rows
        left = sum(unit["running"] + unit["waiting"] for unit in busy)
        if clock() >= deadline_s:
            raise DeadlineExceeded(f"{left} streams still run after {timeout_s:g} s; they end by themselves")
        progress(f"waiting for {left} streams to end")
        sleep(POLL_S)


def print_units(listed: list[dict[str, Any]]) -> None:
    rows = [
        (
            u["unit_id"],
            u["model"] + (" (simulated)" if u["simulated"] else ""),
            u["state"],
            u["region"],
            u["gpu_type"],
            u["precision"],
            f"{u['running']}/{u['max_running']}",
            f"{u['waiting']}/{u['max_waiting']}",
        )
        for u in listed
    ]
    print_table(
        ("unit", "model", "state", "region", "GPU", "precision", "running", "waiting"), rows, "no units"
    )
