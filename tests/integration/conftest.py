"""What most modules here need: a real Redis, or a cell in this process for the whole module. A module that
wants another configuration overrides `config` or `cell`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from support.local_cell import LocalCell, cell_config, local_cell
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    async with local_cell(cell_config(Path(tmp_path_factory.mktemp("cell")))) as running:
        yield running
