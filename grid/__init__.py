"""The compute side of the grid, the words that everyone shares, and the Python client.

`from grid import Grid, AsyncGrid` loads the client when it is asked for, so that units and actors, which
import this package too, don't pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grid.async_client import AsyncGrid
    from grid.client import Grid

__all__ = ["AsyncGrid", "Grid"]


def __getattr__(name: str) -> Any:
    if name == "Grid":
        from grid.client import Grid

        return Grid
    if name == "AsyncGrid":
        from grid.async_client import AsyncGrid

        return AsyncGrid
    raise AttributeError(f"module 'grid' has no attribute {name!r}")
