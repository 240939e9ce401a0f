"""`grid units`: the units of a cell and how busy they are."""

from __future__ import annotations

from typing import Any

from gateway.cli.console import print_json, print_table, reporting
from gateway.cli.options import DEFAULT_URL, AsJson, CaFile, Key, Url, connected


def units(url: Url = DEFAULT_URL, key: Key = "", ca: CaFile = None, as_json: AsJson = False) -> None:
    """List the units: what each owns, runs and has room for."""
    with reporting(as_json), connected(url, key, ca) as grid:
        listed = grid.units()
        if as_json:
            print_json({"units": listed})
        else:
            print_units(listed)


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
