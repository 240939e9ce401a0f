"""The deployer on a real Redis, with a placement that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.local_cell import CHAT_MODEL, EMBEDDING_MODEL, cell_config
from support.state import running_redis

from gateway.pipeline import deployer as module
from gateway.pipeline.contract import Contract
from gateway.pipeline.deployer import Deployer
from gateway.pipeline.registry import Registry
from gateway.pipeline.tables import CACHE_S
from gateway.records import PipelineRecord, PipelineStatus
from gateway.state import open_redis
from grid.config import Config
from grid.errors import GridError, NoEligibleUnit, Saturated
from grid.wire.messages import Fleet
from grid.words import Candidate, Decision, PlacementRequest

CHOSEN = Candidate(
    "unit-0", "1", "127.0.0.1", 1, "local", CHAT_MODEL, 16, "H100", True, 0.1, 0.0, 1.0, 1.0, 0.0
)


@dataclass
class Placement:
    """Refuses what `refusals` names by model; decides everything else."""

    refusals: dict[str, GridError] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=lambda: Fleet(0, 1, ()))
    connected: bool = True
    asked: list[PlacementRequest] = field(default_factory=list)
    callbacks: list[Callable[[Fleet], None]] = field(default_factory=list)

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision:
        self.asked.append(request)
        if request.model in self.refusals:
            raise self.refusals[request.model]
        return Decision(request.reservation_id, CHOSEN, (), (), (), request.model, 0.0, 1, 1.0)

    def on_fleet(self, callback: Callable[[Fleet], None]) -> None:
        self.callbacks.append(callback)

    def change(self) -> None:
        self.fleet = Fleet(0, self.fleet.version + 1, ())
        for callback in self.callbacks:
            callback(self.fleet)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return cell_config(tmp_path)


def contract(source: str = "", model: str = CHAT_MODEL) -> Contract:
    retrieval = f'{{"type": "retrieval", "source": "{source}"}},' if source else ""
    return Contract.model_validate_json(
        f'{{"pipeline": {{"steps": [{retrieval} {{"type": "generation", "model": "{model}"}}]}}}}'
    )


async def status(redis: Redis, record: PipelineRecord) -> tuple[PipelineStatus, str]:
    found = await Registry(redis).get_pipeline(record.tenant_id, record.pipeline_id)
    return found.status, found.reason


async def add_source(redis: Redis, name: str, tenant_id: str = "acme") -> None:
    await Registry(redis).create_source(
        tenant_id,
        name=name,
        type="qdrant",
        config={},
        region="local",
        embedding_model=EMBEDDING_MODEL,
        dimension=0,
    )


def deployer_on(redis: Redis, config: Config, placement: Placement) -> Deployer:
    return Deployer(redis=redis, registry=Registry(redis), placement=placement, config=config)


async def test_one_that_is_woken_as_it_closes_ends(redis: Redis, config: Config) -> None:
    deployer = deployer_on(redis, config, Placement())
    await deployer.start()
    async with asyncio.timeout(5):
        while not deployer._waking._waiters:  # noqa: ASYNC110  its first round is done
            await asyncio.sleep(0.01)
        deployer.wake()
        await deployer.close()


async def test_a_pipeline_that_can_run_becomes_active(redis: Redis, config: Config) -> None:
    placement = Placement()
    await add_source(redis, "kb")
    made = await Registry(redis).create_pipeline("acme", contract("kb"))
    assert await deployer_on(redis, config, placement).round() == 1
    assert await status(redis, made) == (PipelineStatus.ACTIVE, "")
    assert [request.model for request in placement.asked] == [EMBEDDING_MODEL, CHAT_MODEL]
    assert all(request.dry_run for request in placement.asked)


async def test_a_new_revision_of_a_failed_pipeline_is_looked_at_at_once(redis: Redis, config: Config) -> None:
    placement = Placement({CHAT_MODEL: NoEligibleUnit("no unit has the memory", ever=False)})
    made = await Registry(redis).create_pipeline("acme", contract())
    now_s = [0.0]
    registry = Registry(redis, clock=lambda: now_s[0])
    deployer = Deployer(redis=redis, registry=registry, placement=placement, config=config)
    assert await deployer.round() == 1
    placement.refusals.clear()
    assert await deployer.round() == 0, "nothing changed that it could see"
    await registry.get_pipeline("acme", made.pipeline_id)
    renamed = contract().model_copy(update={"name": "renamed"})
    await Registry(redis).revise_pipeline("acme", made.pipeline_id, renamed)
    assert await deployer.round() == 0, "it remembers the revision before"
    now_s[0] += CACHE_S
    assert await deployer.round() == 1
    assert await status(redis, made) == (PipelineStatus.ACTIVE, "")


async def test_failed_ones_wait_for_a_change_of_the_fleet(redis: Redis, config: Config) -> None:
    placement = Placement({CHAT_MODEL: NoEligibleUnit("no unit has the memory", ever=False)})
    made = await Registry(redis).create_pipeline("acme", contract())
    deployer = deployer_on(redis, config, placement)
    assert await deployer.round() == 1
    assert await status(redis, made) == (PipelineStatus.FAILED, "generation-1: no unit has the memory")
    asked = len(placement.asked)
    assert await deployer.round() == 0
    assert len(placement.asked) == asked
    placement.refusals.clear()
    assert await deployer.round() == 0
    placement.change()
    assert await deployer.round() == 1
    assert await status(redis, made) == (PipelineStatus.ACTIVE, "")


async def test_failed_ones_wait_for_a_source_of_their_own_tenant(redis: Redis, config: Config) -> None:
    made = await Registry(redis).create_pipeline("acme", contract("kb"))
    deployer = deployer_on(redis, config, Placement())
    await deployer.round()
    found, reason = await status(redis, made)
    assert found is PipelineStatus.FAILED
    assert "'kb'" in reason
    await add_source(redis, "kb", "umbrella")
    await deployer.round()
    assert (await status(redis, made))[0] is PipelineStatus.FAILED
    await add_source(redis, "kb")
    deployer = deployer_on(redis, config, Placement())  # another replica, which remembers nothing
    await redis.delete("zg:lease:deployer")
    assert await deployer.round() == 1
    assert (await status(redis, made))[0] is PipelineStatus.ACTIVE


async def test_a_model_that_the_cell_does_not_have_is_named(redis: Redis, config: Config) -> None:
    made = await Registry(redis).create_pipeline("acme", contract(model="gpt-99"))
    await deployer_on(redis, config, Placement()).round()
    found, reason = await status(redis, made)
    assert found is PipelineStatus.FAILED
    assert "gpt-99" in reason


async def test_busy_units_will_do_and_an_absent_placement_decides_nothing(
    redis: Redis, config: Config
) -> None:
    placement = Placement({CHAT_MODEL: Saturated("the placement actor can't be reached")})
    made = await Registry(redis).create_pipeline("acme", contract())
    deployer = deployer_on(redis, config, placement)
    assert await deployer.round() == 0
    placement.connected = False
    assert await deployer.round() == 0
    assert (await status(redis, made))[0] is PipelineStatus.DEPLOYING
    placement.connected = True
    placement.refusals[CHAT_MODEL] = Saturated("every unit is full", ever=True)
    assert await deployer.round() == 1
    assert (await status(redis, made))[0] is PipelineStatus.ACTIVE


async def test_one_replica_works_at_a_time_and_hands_over(redis: Redis, config: Config) -> None:
    placements = [Placement(), Placement()]
    first, second = (deployer_on(redis, config, placement) for placement in placements)
    await first.round()
    await Registry(redis).create_pipeline("acme", contract())
    assert await second.round() == 0
    assert placements[1].asked == []
    await first.close()
    assert await second.round() == 1


async def test_more_than_one_round_holds_are_all_looked_at(
    redis: Redis, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOOKS", 2)
    registry = Registry(redis)
    for _pipeline in range(5):
        await registry.create_pipeline("acme", contract())
    deployer = deployer_on(redis, config, Placement())
    assert [await deployer.round() for _round in range(4)] == [2, 2, 1, 0]


async def test_running_it_reacts_to_the_fleet(redis: Redis, config: Config) -> None:
    placement = Placement({CHAT_MODEL: NoEligibleUnit("none", ever=False)})
    registry = Registry(redis)
    deployer = Deployer(redis=redis, registry=registry, placement=placement, config=config)
    await deployer.start()
    made = await registry.create_pipeline("acme", contract())
    deployer.wake()
    async with asyncio.timeout(10):
        while (await status(redis, made))[0] is not PipelineStatus.FAILED:  # noqa: ASYNC110  as a client asks
            await asyncio.sleep(0.01)
        placement.refusals.clear()
        placement.change()
        while (await status(redis, made))[0] is not PipelineStatus.ACTIVE:  # noqa: ASYNC110  as a client asks
            await asyncio.sleep(0.01)
    await deployer.close()
    assert await redis.get("zg:lease:deployer") is None


async def test_a_redis_that_is_away_for_a_while_does_not_end_it(config: Config) -> None:
    with running_redis(config.cell.state_dir) as server:
        client = await open_redis(config)
        registry = Registry(client)
        deployer = Deployer(redis=client, registry=registry, placement=Placement(), config=config)
        await deployer.start()
        made = await registry.create_pipeline("acme", contract(model="gpt-99"))
        await asyncio.to_thread(server.stop)
        deployer.wake()
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(20):
            while (await status(client, made))[0] is not PipelineStatus.FAILED:  # noqa: ASYNC110  as a client asks
                await asyncio.sleep(0.01)
        await deployer.close()
        await client.aclose()
