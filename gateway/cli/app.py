"""The command `grid`, put together."""

from __future__ import annotations

import typer

from gateway.cli import cell, gpus, keys, pipelines, plans, requests, simulate, sources, top, units

app = typer.Typer(
    help="Zerogrid: declare an AI pipeline and call it; the grid does the rest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    cell.up,
    cell.down,
    cell.status,
    pipelines.apply,
    pipelines.invoke,
    pipelines.run,
    plans.dry_run,
    requests.explain,
    units.units,
    gpus.gpus,
    top.top,
    units.drain,
    simulate.simulate,
    simulate.plan,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(keys.app, name="keys")
app.add_typer(sources.app, name="sources")
