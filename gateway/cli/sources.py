"""`grid sources`: data sources and their documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.console import counting, print_deleted, print_json, print_record, print_table
from gateway.cli.manifest import load_documents
from gateway.cli.options import AsJson, with_grid

if TYPE_CHECKING:
    from grid import Grid

app = typer.Typer(help="Data sources and their documents.", no_args_is_help=True)


@app.command("list")
@with_grid
def sources_list(*, grid: Grid, as_json: AsJson = False) -> None:
    """List the data sources."""
    listed = grid.sources()
    if as_json:
        print_json({"data_sources": listed})
        return
    rows = [
        (
            s["name"],
            s["data_source_id"],
            s["type"],
            s["embedding_model"],
            s["document_count"],
            s["last_updated_at"],
        )
        for s in listed
    ]
    print_table(("name", "id", "type", "embedding model", "documents", "updated"), rows, "no data sources")


@app.command("create")
@with_grid
def sources_create(
    name: Annotated[str, typer.Argument(show_default=False)],
    model: Annotated[str | None, typer.Option(help="Embedding model; the cell's first by default.")] = None,
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Create a data source in the cell's vector store."""
    options = {"embedding_model": model} if model else {}
    print_record(grid.create_source(name, **options), as_json)


@app.command("show")
@with_grid
def sources_show(
    source: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Show one data source."""
    print_record(grid.source(source), as_json)


@app.command("add")
@with_grid
def sources_add(
    source: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    file: Annotated[
        Path, typer.Argument(help="JSON lines of {id, text, metadata, title}.", show_default=False)
    ],
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Add or replace documents from a file."""
    documents = load_documents(file)
    with counting("documents") as on_progress:
        print_record(grid.add_documents(source, documents, on_progress), as_json)


@app.command("delete")
@with_grid
def sources_delete(
    source: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Also while pipelines read it.")] = False,
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Delete a data source with its documents."""
    grid.delete_source(source, force=force)
    print_deleted(source, as_json)
