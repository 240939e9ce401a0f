"""The link's tests run on both event loops: Ray's actors and Serve have uvloop, a plain client may not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop
from support.link import Cell


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    cell = Cell()
    cell.address = await cell.server.start("127.0.0.1")
    yield cell
    await cell.server.close()
