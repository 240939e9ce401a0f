"""`grid keys`: API keys, for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gateway.cli.console import err, print_deleted, print_fields, print_json, print_table
from gateway.cli.options import AsJson, with_grid

if TYPE_CHECKING:
    from grid import Grid

app = typer.Typer(help="API keys (operators only).", no_args_is_help=True)


@app.command("list")
@with_grid
def keys_list(*, grid: Grid, as_json: AsJson = False) -> None:
    """List the keys of all tenants, never their secrets."""
    listed = grid.keys()
    if as_json:
        print_json({"keys": listed})
        return
    rows = [
        (k["key_id"], k["tenant_id"], "yes" if k["operator"] else "no", k["label"], k["created_at"])
        for k in listed
    ]
    print_table(("key", "tenant", "operator", "label", "created"), rows, "no keys")


@app.command("create")
@with_grid
def keys_create(
    tenant: Annotated[
        str, typer.Argument(help="The tenant that the key is for; made if new.", show_default=False)
    ],
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="An operator's key.")] = False,
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown this once."""
    made = grid.create_key(tenant, label=label, operator=operator)
    if as_json:
        print_json(made)
    else:
        print_fields({"key": made["key"], "id": made["key_id"], "tenant": made["tenant_id"]})
        err.print(Text("The key is not stored and not shown again.", "dim"))


@app.command("revoke")
@with_grid
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="From `grid keys list`.", show_default=False)],
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """End a key, everywhere within a second."""
    grid.revoke_key(key_id)
    print_deleted(key_id, as_json)
