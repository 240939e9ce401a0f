"""What a unit still says of a stream whose client has left: the compute that is charged for it.

The client's own call has ended by then, and its unit's slot is free: nobody waits for this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gateway.pipeline.session import FIGURES_WAIT_S
from grid.errors import GridError
from grid.wire.link import LinkStream
from grid.wire.messages import Done, Failed

MAX_FAREWELLS = 512
"""Streams that are listened to after their end at a time; of more, tokens are charged and compute is not."""


class Farewells:
    """One per runner. Each stream that it is given is closed within FIGURES_WAIT_S."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def hear(self, stream: LinkStream, charge: Callable[[float], None]) -> None:
        """Call `charge` with the stream's `cu_seconds`, if its unit says them in time."""
        if len(self._under_way) >= MAX_FAREWELLS:
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(_hear(stream, charge))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)


async def _hear(stream: LinkStream, charge: Callable[[float], None]) -> None:
    try:
        with contextlib.suppress(TimeoutError, GridError):
            async with asyncio.timeout(FIGURES_WAIT_S):
                while True:
                    for message in await stream.receive():
                        if isinstance(message, Done | Failed):
                            charge(message.cu_seconds)
                            return
    finally:
        stream.close()
