"""A real Redis for tests of what the gateway keeps in it. A module with a configuration of its own overrides
`config`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.state import config_at, running_redis

from gateway.state import open_redis
from grid.config import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_at(tmp_path)


@pytest.fixture
async def redis(config: Config) -> AsyncIterator[Redis]:
    with running_redis(config.cell.state_dir):
        client = await open_redis(config)
        yield client
        await client.aclose()
