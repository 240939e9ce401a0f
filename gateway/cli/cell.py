"""`grid up`, `down` and `status`: the cell on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gateway.cli.console import out, print_fields, print_json, reporting, steps
from gateway.cli.options import AsJson, ConfigFile, Key, configuration
from gateway.cli.units import print_units
from grid.errors import GridError

if TYPE_CHECKING:
    import httpx

    from grid import Grid
    from grid.config import Tls

Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for the units; without, only for the gateway.")
]


def up(config: ConfigFile = None, wait: Wait = True, as_json: AsJson = False) -> None:
    """Start a cell on this machine."""
    from gateway import launch

    with reporting(as_json):
        loaded = configuration(config)
        with steps() as progress:
            info = launch.up(loaded, wait=wait, progress=progress)
        if as_json:
            print_json(info.as_dict())
            return
        said = "is already up" if info.already_running else f"is up in {info.seconds:g} s"
        out.print(Text.assemble(("Cell ", ""), (info.name, "bold"), f" {said}"))
        print_fields(
            {
                "API": f"{info.base_url} (documentation: {info.base_url}/docs)",
                "Dashboard": info.dashboard_url,
                "State": info.state_dir,
                "Units": ", ".join(info.units) or "none",
            }
        )
        if info.operator_key or info.tenant_key:
            out.print(Text("\nKeys, shown this once:", "bold"))
            print_fields({"Operator": info.operator_key or "", "Tenant": info.tenant_key or ""})
            out.print(
                Text(f"\nexport GRID_URL={info.base_url} GRID_API_KEY={info.tenant_key}"), soft_wrap=True
            )


def down(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Stop the cell on this machine. Pipelines, documents and keys stay."""
    from gateway import launch

    with reporting(as_json):
        loaded = configuration(config)
        with steps() as progress:
            stopped = launch.down(loaded, progress=progress)
        if as_json:
            print_json({"stopped": stopped})
        else:
            out.print("The cell is down." if stopped else "No cell was running.")


def status(config: ConfigFile = None, key: Key = "", as_json: AsJson = False) -> None:
    """Show the cell on this machine; with an operator's key, its units too."""
    from gateway import launch
    from grid import Grid

    with reporting(as_json):
        loaded = configuration(config)
        state = launch.status(loaded)
        if state["running"]:
            transport = _pinned(loaded.gateway.tls)
            with Grid(state["base_url"], key, max_retries=0, transport=transport) as grid:
                state |= told_by(grid, with_units=key.startswith("zg-op-"))
        if as_json:
            print_json(state)
        elif not state["running"]:
            out.print("No cell is running; `grid up` starts one.")
        else:
            units = state.pop("units", [])
            reasons = "; ".join(state.pop("not_ready"))
            print_fields({**state, "ready": "yes" if state["ready"] else f"no: {reasons}"})
            if units and isinstance(units[0], dict):
                out.print()
                print_units(units)


def told_by(grid: Grid, *, with_units: bool) -> dict[str, Any]:
    """Return what the gateway says of itself and its units. One that is silent hides nothing else: what runs
    on this machine is known without it."""
    try:
        answer = grid.readiness()
    except GridError as error:
        return {"ready": False, "not_ready": [f"the gateway does not answer: {error.message}"]}
    if "ready" not in answer:
        # HAProxy's own word, in front of replicas that are away.
        return {"ready": False, "not_ready": [f"the gateway does not answer: {answer['error']['message']}"]}
    told: dict[str, Any] = {"ready": answer["ready"], "not_ready": answer["reasons"]}
    if with_units:
        try:
            told["units"] = grid.units()
        except GridError as error:
            told["units_unknown"] = error.message
    return told


def _pinned(tls: Tls | None) -> httpx.HTTPTransport | None:
    """Trust the very certificate that the cell of this machine was given, whatever name it is for."""
    if tls is None:
        return None
    import ssl

    import httpx

    trusted = ssl.create_default_context(cafile=tls.certificate)
    trusted.check_hostname = False
    trusted.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return httpx.HTTPTransport(verify=trusted)
