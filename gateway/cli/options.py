"""Options that several commands take, and what they stand for: a configuration, a connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grid.errors import InvalidRequest, Unauthorised

if TYPE_CHECKING:
    from grid import Grid
    from grid.config import Config

DEFAULT_CONFIG = Path("grid.yaml")
DEFAULT_URL = "http://127.0.0.1:8000"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
Url = Annotated[str, typer.Option("--url", envvar="GRID_URL", help="Address of the gateway.")]
Key = Annotated[str, typer.Option("--key", envvar="GRID_API_KEY", help="API key.", show_default=False)]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca", envvar="GRID_CA_FILE", help="Certificates (PEM) to trust for https, instead of the usual."
    ),
]
Variables = Annotated[list[str] | None, typer.Option("--var", help="NAME=VALUE, repeatable.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-f",
        envvar="GRID_CONFIG",
        help="Configuration; by default ./grid.yaml, else all defaults.",
    ),
]


def variables_of(given: list[str] | None) -> dict[str, dict[str, str]]:
    """Return the call's option that `--var` gives; none where it wasn't given."""
    pairs = [item.partition("=") for item in given or []]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise InvalidRequest(f"--var {name!r} should be NAME=VALUE", param="var")
    return {"variables": {name: value for name, _, value in pairs}} if pairs else {}


def configuration(path: Path | None) -> Config:
    from grid.config import load

    return load(path if path is not None else DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)


@contextmanager
def connected(url: str, key: str, ca: Path | None = None) -> Iterator[Grid]:
    """Yield a client; a refused key is told with where keys come from."""
    from grid import Grid

    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url {url!r} should begin with http:// or https://", param="url")
    with Grid(url, key, ca_file=ca) as grid:
        try:
            yield grid
        except Unauthorised as error:
            if key:
                raise
            raise Unauthorised(
                "no API key was given: pass --key or set GRID_API_KEY (`grid up` shows the first keys)",
                **error.details,
            ) from None
