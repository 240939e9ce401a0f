"""Options that several commands take, and what they stand for: a configuration, a connection."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.console import reporting
from grid.calls import DEFAULT_URL
from grid.errors import InvalidRequest, Unauthorised

if TYPE_CHECKING:
    from grid import Grid
    from grid.config import Config

DEFAULT_CONFIG = Path("grid.yaml")

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

CONNECTION = (
    Parameter("url", Parameter.KEYWORD_ONLY, default=DEFAULT_URL, annotation=Url),
    Parameter("key", Parameter.KEYWORD_ONLY, default="", annotation=Key),
    Parameter("ca", Parameter.KEYWORD_ONLY, default=None, annotation=CaFile),
)
"""Options of every command that asks a gateway."""


def with_grid(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function of a client, `grid`, and `as_json`: the options of the connection stand in
    the client's place, and what goes wrong is reported."""
    # Only a type checker imports `Grid`, whose name is the one annotation that can't be read here.
    own = inspect.signature(command, eval_str=True, locals={"Grid": None})
    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        parameters += CONNECTION if parameter.name == "grid" else [parameter]

    @wraps(command)
    def connecting(*, url: str, key: str, ca: Path | None, as_json: bool, **given: Any) -> None:
        with reporting(as_json), connected(url, key, ca) as grid:
            command(grid=grid, as_json=as_json, **given)

    connecting.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    connecting.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return connecting


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
def connected(url: str, key: str, ca: Path | None) -> Iterator[Grid]:
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
