"""`grid gpus`: the GPUs of a cell, whoever uses them, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from gateway.cli.console import err, print_json, print_table
from gateway.cli.options import AsJson, with_grid

if TYPE_CHECKING:
    from grid import Grid

UNKNOWN = "?"
"""What the hardware can't tell is not a zero."""

NODE_CHARACTERS = 8
"""Of Ray's 56: enough to tell nodes apart, and the table fits a terminal."""


@with_grid
def gpus(*, grid: Grid, as_json: AsJson = False) -> None:
    """List the GPUs: free memory and what others use of it, how busy they are, faults."""
    listed = grid.gpus()
    if as_json:
        print_json({"gpus": listed})
    else:
        print_gpus(listed)


def print_gpus(listed: list[dict[str, Any]]) -> None:
    rows = [
        (
            gpu["node_id"][:NODE_CHARACTERS],
            gpu["index"],
            gpu["product"].removeprefix("NVIDIA "),
            _whole(gpu["memory_free_mb"]),
            _whole(gpu["memory_foreign_mb"]),
            _percent(gpu["compute_utilisation"]),
            ", ".join(gpu["units"]),
            gpu["fault"] or ", ".join(gpu["throttled_by"] or ()) or "sound",
        )
        for gpu in listed
    ]
    columns = ("node", "GPU", "product", "free MB", "others' MB", "busy", "units", "state")
    print_table(columns, rows, "no GPUs that a driver tells of")
    for warning in dict.fromkeys(gpu["warning"] for gpu in listed if gpu.get("warning")):
        err.print(Text(f"warning: {warning}"), style="yellow", soft_wrap=True)


def _whole(reading: float | None) -> int | str:
    return UNKNOWN if reading is None else round(reading)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"
