"""Ends the waits of one task: in time, or because somebody else has news for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Alarm:
    """The timer is set once and moved only to ring earlier, so that a stream with a far deadline pays nothing
    a token."""

    __slots__ = ("_rang", "_rings_s", "_task", "_timer", "_until_s")

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0
        self._task: asyncio.Task[object] | None = None
        self._until_s = 0.0
        self._rang = False

    async def wait(self, coroutine: Coroutine[Any, Any, T], until_s: float) -> T | None:
        """Return what `coroutine` returns; None if the alarm rang before, at `until_s` (monotonic seconds) or
        because of `ring`."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._task, self._until_s, self._rang = task, until_s, False
        if self._timer is None or until_s < self._rings_s:
            self._set(until_s)
        try:
            return await coroutine
        except asyncio.CancelledError:
            # As asyncio.timeout does: a cancel that came from elsewhere as well is not ours to swallow.
            if self._rang and task.uncancel() <= cancelling:
                return None
            raise
        finally:
            self._task = None

    def ring(self) -> None:
        """End the wait that is under way, if there is one."""
        if self._task is not None and not self._rang:
            self._rang = True
            self._task.cancel()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, until_s: float) -> None:
        self.cancel()
        self._rings_s = until_s
        delay_s = max(until_s - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if time.monotonic() < self._until_s:
            self._set(self._until_s)
        else:
            self.ring()
