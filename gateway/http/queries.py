"""The query of a URL on the grid's own routes: what a route does not know is refused, never ignored.

Compatible routes take what their ecosystems' clients add, and probes and scrapers add what they like.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import parse_qsl

from fastapi import Request

from gateway.http.errors import GRID, ecosystem_at
from gateway.pipeline.refusals import cut, nearest
from grid.errors import InvalidRequest

CHECKED_PREFIX = "/v1/"


def check_query(path: str, query: str, known: Collection[str] = ()) -> None:
    """Raise InvalidRequest, which names it, for a parameter of `query` that `path` does not take."""
    if not query or not path.startswith(CHECKED_PREFIX) or ecosystem_at(path) is not GRID:
        return
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if name in known:
            continue
        remedy = (
            nearest(name, known, "parameters") if known else "this route takes none; fields go into the body"
        )
        raise InvalidRequest(f"{cut(name)}: unknown query parameter; {remedy}", param=cut(name))


def query_known(request: Request) -> None:
    """A dependency of routes that FastAPI serves: they take what their handlers name."""
    dependant = request.scope["route"].dependant
    known = [field.alias for field in dependant.query_params]
    check_query(request.scope["path"], request.scope["query_string"].decode("latin-1"), known)
