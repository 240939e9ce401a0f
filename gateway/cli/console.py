"""How the command line speaks: results on standard output, progress and errors on standard error, exit codes.

With `--json` a command prints exactly one JSON value, also when it fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from grid.calls import Unreachable
from grid.errors import GridError, InvalidRequest

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turn a GridError into its message and its exit code; a mistake in a local file is one of usage."""
    try:
        yield
    except GridError as error:
        if as_json:
            print_json({"error": error_view(error)})
        else:
            err.print(Text.assemble(("error: ", "bold red"), visible(error.message)), soft_wrap=True)
            if isinstance(error, Unreachable):
                err.print(Text("`grid up` starts a cell here; --url or GRID_URL names another.", "dim"))
            request_id = error.details.get("request_id")
            if request_id:
                err.print(Text(f"request {request_id}", "dim"))
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: GridError) -> int:
    if isinstance(error, Unreachable):
        return EXIT_UNREACHABLE
    local = "status" not in error.details
    return EXIT_USAGE if local and isinstance(error, InvalidRequest) else EXIT_FAILED


def error_view(error: GridError) -> dict[str, Any]:
    return {
        **error.details,
        "code": error.code,
        "message": error.message,
        "param": error.param or None,
        "retryable": error.retryable,
    }


def print_json(value: Any) -> None:
    """Print one JSON value, indented for people."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows under their columns, numbers to the right; `empty` when there are none."""
    if not rows:
        out.print(Text(empty, "dim"))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    out.print(table)


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values, one pair a line."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        out.print(Text.assemble((f"{name:<{width}}  ", "dim"), visible(str(value))), soft_wrap=True)


def print_record(record: Mapping[str, Any], as_json: bool) -> None:
    """Print one record of the gateway's."""
    if as_json:
        print_json(record)
    else:
        print_fields(record)


def print_deleted(what: str, as_json: bool) -> None:
    if as_json:
        print_json({"deleted": True, "id": what})
    else:
        out.print(Text(f"deleted {visible(what)}"))


def visible(text: str) -> str:
    """Return `text` without control characters: an answer or a name must not steer the reader's terminal."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


@contextmanager
def steps(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that says what is being done: one moving line on a terminal, plain lines elsewhere."""
    if quiet:
        yield lambda _line: None
    elif err.is_terminal:
        with err.status("") as status:
            yield lambda line: status.update(Text(visible(line)))
    else:
        yield lambda line: err.print(Text(visible(line)), soft_wrap=True)


@contextmanager
def counting(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that moves a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=quiet, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
