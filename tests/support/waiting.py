"""Waiting for what nobody tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds. Fails after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  nothing signals the state of another task
            await asyncio.sleep(0.001)
