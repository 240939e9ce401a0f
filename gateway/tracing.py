"""Which trace the running code belongs to, and spans around blocks of it.

A traced request carries its `Branch` in a context variable, so that whatever runs for it, in whichever task,
finds it; where tracing is off the variable is never set and every look at it gives None. Names of spans and
attributes are OpenTelemetry's for HTTP and GenAI; what those have no name for begins with `zerogrid.`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

from grid.errors import GridError
from grid.tracing.spans import Attributes, Kind
from grid.tracing.tracer import Branch

PROVIDER = ("gen_ai.provider.name", "zerogrid")

_current: ContextVar[Branch | None] = ContextVar("zerogrid_trace", default=None)


def current() -> Branch | None:
    """Return the span under which the running code works; None where its request is not traced."""
    return _current.get()


def enter(branch: Branch) -> Token[Branch | None]:
    """Let what runs from here on come under `branch`, until `leave` is called with what this returns."""
    return _current.set(branch)


def leave(outside: Token[Branch | None]) -> None:
    _current.reset(outside)


@contextmanager
def span(name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes = ()) -> Iterator[Branch | None]:
    """Put a span around a block; what runs in it comes under it. Yields None where nothing is traced."""
    parent = _current.get()
    if parent is None:
        yield None
        return
    branch = parent.child()
    started_s = time.monotonic()
    error = ""
    outside = enter(branch)
    try:
        yield branch
    except BaseException as raised:
        error = error_type(raised)
        attributes += (("error.type", error),)
        raise
    finally:
        leave(outside)
        branch.end(name, started_s, time.monotonic(), attributes, kind=kind, error=error)


def error_type(error: BaseException) -> str:
    return error.code if isinstance(error, GridError) else type(error).__name__


def traceparent() -> str:
    """Return the context for a peer of the cell; "" where nothing is traced."""
    branch = _current.get()
    return "" if branch is None else branch.traceparent
