"""Pipelines and data sources against a real Redis: two tenants, repeats, restarts, races."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.state import config_at, running_redis

from gateway.pipeline import tables
from gateway.pipeline.contract import Contract
from gateway.pipeline.registry import PIPELINES, SOURCES, Registry
from gateway.records import DataSourceRecord, PipelineStatus, Revision
from gateway.state import open_redis
from grid.errors import (
    Conflict,
    GridError,
    IdempotencyReused,
    InternalError,
    InvalidRequest,
    NotFound,
    TooLarge,
)

pytestmark = pytest.mark.slow

CONTRACT = Contract.model_validate_json(
    """{"name": "support", "pipeline": {"steps": [
        {"type": "retrieval", "source": "kb", "top_k": 3, "filter": {"status": ["published"], "year": 2024}},
        {"type": "generation", "model": "smollm2-135m-instruct", "stop": ["END"]}]},
        "execution_hints": {"quantization": "int8"}}"""
)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def source(registry: Registry, tenant_id: str, name: str = "kb", **fields: Any) -> DataSourceRecord:
    given: dict[str, Any] = {
        "type": "qdrant",
        "config": {},
        "region": "local",
        "embedding_model": "all-minilm-l6-v2",
        "dimension": 0,
        **fields,
    }
    return await registry.create_source(tenant_id, name=name, **given)


async def test_a_pipeline_comes_back_as_it_was_declared(redis: Redis) -> None:
    made = await Registry(redis).create_pipeline("acme", CONTRACT)
    assert made.pipeline_id.startswith("pl-")
    assert (made.status, made.revision, made.name) == (PipelineStatus.DEPLOYING, 1, "support")
    assert await Registry(redis).get_pipeline("acme", made.pipeline_id) == made
    assert await Registry(redis).list_pipelines("acme") == ([made], "")


async def test_a_foreign_id_answers_like_an_unknown_one(redis: Redis) -> None:
    registry = Registry(redis)
    pipeline = await registry.create_pipeline("acme", CONTRACT)
    kb = await source(registry, "acme")
    calls = {
        pipeline.pipeline_id: (registry.get_pipeline, registry.delete_pipeline),
        kb.data_source_id: (registry.get_source, registry.delete_source),
        kb.name: (registry.find_source,),
    }
    for foreign, methods in calls.items():
        for method in methods:
            said = []
            for asked in (foreign, "pl-unknown"):
                with pytest.raises(NotFound) as refused:
                    await method("umbrella", asked)
                said.append((refused.value.message.replace(asked, "ID"), refused.value.param))
            assert said[0] == said[1]
    assert await registry.list_pipelines("umbrella") == ([], "")
    assert await registry.list_sources("umbrella") == []
    assert await registry.set_status("umbrella", pipeline.pipeline_id, 1, PipelineStatus.ACTIVE, "") is None
    assert (await registry.get_pipeline("acme", pipeline.pipeline_id)).status is PipelineStatus.DEPLOYING


async def test_everything_survives_a_restart_of_redis(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with running_redis(tmp_path):
        client = await open_redis(config)
        pipeline = await Registry(client).create_pipeline("acme", CONTRACT, idempotency_key="k")
        kb = await source(Registry(client), "acme")
        await client.aclose()
    with running_redis(tmp_path):
        client = await open_redis(config)
        registry = Registry(client)
        assert await registry.get_pipeline("acme", pipeline.pipeline_id) == pipeline
        assert await registry.find_source("acme", "kb") == kb
        assert await registry.create_pipeline("acme", CONTRACT, idempotency_key="k") == pipeline
        assert await registry.unsettled() == [("acme", pipeline.pipeline_id, 1)]
        await client.aclose()


async def test_an_idempotency_key_makes_one_thing(redis: Redis) -> None:
    registry = Registry(redis)
    made = await asyncio.gather(
        *(registry.create_pipeline("acme", CONTRACT, idempotency_key="once") for _call in range(8))
    )
    assert len({record.pipeline_id for record in made}) == 1
    assert len((await registry.list_pipelines("acme"))[0]) == 1
    with pytest.raises(IdempotencyReused):
        await registry.create_pipeline(
            "acme", CONTRACT.model_copy(update={"name": "other"}), idempotency_key="once"
        )
    other_tenant = await registry.create_pipeline("umbrella", CONTRACT, idempotency_key="once")
    assert other_tenant.pipeline_id != made[0].pipeline_id
    kb = await source(registry, "acme", idempotency_key="once")
    assert await source(registry, "acme", idempotency_key="once") == kb
    with pytest.raises(InvalidRequest):
        await registry.create_pipeline("acme", CONTRACT, idempotency_key="x" * 256)
    keys = [key async for key in redis.scan_iter("zg:*:made:*")]
    assert len(keys) == 3
    assert all([0 < await redis.ttl(key) <= tables.IDEMPOTENCY_S for key in keys])


async def test_a_repeat_answers_with_what_the_first_call_made_as_it_is_now(redis: Redis) -> None:
    registry = Registry(redis)
    first = await registry.create_pipeline("acme", CONTRACT, idempotency_key="k")
    active = await registry.set_status("acme", first.pipeline_id, 1, PipelineStatus.ACTIVE, "")
    assert await registry.create_pipeline("acme", CONTRACT, idempotency_key="k") == active
    kb = await source(registry, "acme", idempotency_key="k")
    touched = await registry.touch_source("acme", kb.data_source_id, document_count=7, dimension=384)
    assert await source(registry, "acme", idempotency_key="k") == touched


async def test_a_repeat_brings_nothing_back_that_was_deleted(redis: Redis) -> None:
    registry = Registry(redis)
    pipeline = await registry.create_pipeline("acme", CONTRACT, idempotency_key="k")
    await registry.delete_pipeline("acme", pipeline.pipeline_id)
    with pytest.raises(IdempotencyReused, match="deleted since"):
        await registry.create_pipeline("acme", CONTRACT, idempotency_key="k")
    kb = await source(registry, "acme", idempotency_key="k")
    await registry.delete_source("acme", kb.data_source_id)
    with pytest.raises(IdempotencyReused, match="deleted since"):
        await source(registry, "acme", idempotency_key="k")
    assert await registry.list_pipelines("acme") == ([], "")
    assert await registry.list_sources("acme") == []


# --- revisions and pages --------------------------------------------------------------------------


def revised(name: str) -> Contract:
    return CONTRACT.model_copy(update={"name": name})


async def test_a_revision_deploys_while_the_active_one_serves(redis: Redis) -> None:
    registry = Registry(redis)
    made = await registry.create_pipeline("acme", CONTRACT)
    await registry.set_status("acme", made.pipeline_id, 1, PipelineStatus.ACTIVE, "")
    second = await registry.revise_pipeline("acme", made.pipeline_id, revised("second"))
    assert (second.revision, second.name, second.status) == (2, "second", PipelineStatus.DEPLOYING)
    assert second.serving == Revision(1, CONTRACT)
    assert second.created_at == made.created_at
    assert await Registry(redis).get_pipeline("acme", made.pipeline_id) == second
    assert await registry.unsettled() == [("acme", made.pipeline_id, 2)]
    late = await registry.set_status("acme", made.pipeline_id, 1, PipelineStatus.FAILED, "of the old one")
    assert late is None
    await registry.set_status("acme", made.pipeline_id, 2, PipelineStatus.FAILED, "no units")
    third = await registry.revise_pipeline("acme", made.pipeline_id, revised("third"))
    assert (third.revision, third.serving) == (3, Revision(1, CONTRACT)), "the newest that was active"
    active = await registry.set_status("acme", made.pipeline_id, 3, PipelineStatus.ACTIVE, "")
    assert active is not None
    assert active.serving is None
    assert await registry.unsettled() == []
    with pytest.raises(NotFound):
        await registry.revise_pipeline("umbrella", made.pipeline_id, CONTRACT)
    await registry.revise_pipeline("acme", made.pipeline_id, CONTRACT)
    assert await registry.unsettled() == [("acme", made.pipeline_id, 4)]
    await registry.delete_pipeline("acme", made.pipeline_id)
    assert await registry.unsettled() == []


@pytest.mark.parametrize("status", [PipelineStatus.DEPLOYING, PipelineStatus.ACTIVE, PipelineStatus.FAILED])
async def test_an_equal_contract_is_no_revision(redis: Redis, status: PipelineStatus) -> None:
    registry = Registry(redis)
    made = await registry.create_pipeline("acme", CONTRACT)
    await registry.set_status("acme", made.pipeline_id, 1, status, "so it is")
    before, unsettled = await registry.read_pipeline("acme", made.pipeline_id), await registry.unsettled()
    same = await registry.revise_pipeline(
        "acme", made.pipeline_id, CONTRACT.model_copy(deep=True), idempotency_key="k"
    )
    assert same == before == await registry.read_pipeline("acme", made.pipeline_id)
    assert await registry.unsettled() == unsettled
    with pytest.raises(IdempotencyReused):
        await registry.revise_pipeline("acme", made.pipeline_id, revised("other"), idempotency_key="k")
    assert (await registry.revise_pipeline("acme", made.pipeline_id, revised("other"))).revision == 2


async def test_what_another_process_changed_is_read_at_once(redis: Redis) -> None:
    here, there = Registry(redis), Registry(redis)
    made = await here.create_pipeline("acme", CONTRACT)
    assert (await here.get_pipeline("acme", made.pipeline_id)).revision == 1
    await there.revise_pipeline("acme", made.pipeline_id, revised("second"))
    assert (await here.read_pipeline("acme", made.pipeline_id)).revision == 2
    await there.delete_pipeline("acme", made.pipeline_id)
    with pytest.raises(NotFound):
        await here.read_pipeline("acme", made.pipeline_id)


async def test_revisions_at_the_same_time_are_all_kept_apart(redis: Redis) -> None:
    registries = [Registry(redis) for _replica in range(8)]
    made = await registries[0].create_pipeline("acme", CONTRACT)
    records = await asyncio.gather(
        *(
            registry.revise_pipeline("acme", made.pipeline_id, revised(f"by {number}"))
            for number, registry in enumerate(registries)
        )
    )
    assert sorted(record.revision for record in records) == list(range(2, 10))
    last = max(records, key=lambda record: record.revision)
    assert await registries[0].get_pipeline("acme", made.pipeline_id) == last


async def test_an_idempotency_key_makes_one_revision(redis: Redis) -> None:
    registry = Registry(redis)
    made = await registry.create_pipeline("acme", CONTRACT, idempotency_key="k")
    other = await registry.create_pipeline("acme", CONTRACT)
    records = await asyncio.gather(
        *(
            registry.revise_pipeline("acme", made.pipeline_id, revised("second"), idempotency_key="k")
            for _call in range(6)
        )
    )
    assert [record.revision for record in records] == [2] * 6
    with pytest.raises(IdempotencyReused):
        await registry.revise_pipeline("acme", made.pipeline_id, revised("third"), idempotency_key="k")
    elsewhere = await registry.revise_pipeline(
        "acme", other.pipeline_id, revised("second"), idempotency_key="k"
    )
    assert elsewhere.revision == 2


async def test_pages_hold_every_pipeline_once(redis: Redis) -> None:
    registry = Registry(redis)
    made = [await registry.create_pipeline("acme", revised(f"p{n}")) for n in range(7)]
    await registry.create_pipeline("umbrella", CONTRACT)
    seen: list[str] = []
    after, pages = "", 0
    while after or not pages:
        page, after = await registry.list_pipelines("acme", limit=3, after=after)
        seen += [record.pipeline_id for record in page]
        pages += 1
        if pages == 1:
            await registry.delete_pipeline("acme", seen[-1])
            made.append(await registry.create_pipeline("acme", revised("new")))
    expected = sorted(made, key=lambda record: (record.created_at, record.pipeline_id))
    assert seen == [record.pipeline_id for record in expected]
    assert pages == 3
    for odd in ("pl-1", "~", "2026~ds-1"):
        with pytest.raises(InvalidRequest) as refused:
            await registry.list_pipelines("acme", after=odd)
        assert refused.value.param == "after"


async def test_a_source_name_is_its_tenants_own(redis: Redis) -> None:
    registry = Registry(redis)
    kb = await source(registry, "acme")
    with pytest.raises(Conflict, match="'kb'"):
        await source(registry, "acme")
    await source(registry, "umbrella")
    await registry.delete_source("acme", kb.data_source_id)
    with pytest.raises(NotFound):
        await registry.find_source("acme", "kb")
    again = await source(registry, "acme")
    assert (await registry.find_source("acme", "kb")).data_source_id == again.data_source_id


async def test_a_tenant_has_bounds_and_only_its_own(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.registry.PIPELINES", replace(PIPELINES, bound=2))
    monkeypatch.setattr("gateway.pipeline.registry.SOURCES", replace(SOURCES, bound=1))
    registry = Registry(redis)
    for _pipeline in range(2):
        await registry.create_pipeline("acme", CONTRACT)
    await source(registry, "acme", "one")
    with pytest.raises(Conflict, match="2 pipelines"):
        await registry.create_pipeline("acme", CONTRACT)
    with pytest.raises(Conflict, match="1 sources"):
        await source(registry, "acme", "two")
    await registry.create_pipeline("umbrella", CONTRACT)


async def test_a_status_is_written_for_the_revision_that_was_looked_at(redis: Redis) -> None:
    registry = Registry(redis)
    made = await registry.create_pipeline("acme", CONTRACT)
    assert await registry.set_status("acme", made.pipeline_id, 2, PipelineStatus.ACTIVE, "") is None
    failed = await registry.set_status("acme", made.pipeline_id, 1, PipelineStatus.FAILED, "no units")
    assert failed is not None
    assert await registry.get_pipeline("acme", made.pipeline_id) == failed
    assert await registry.unsettled() == [("acme", made.pipeline_id, 1)]
    await registry.set_status("acme", made.pipeline_id, 1, PipelineStatus.ACTIVE, "")
    assert await registry.unsettled() == []
    await registry.delete_pipeline("acme", made.pipeline_id)
    assert await registry.set_status("acme", made.pipeline_id, 1, PipelineStatus.FAILED, "late") is None
    assert await registry.list_pipelines("acme") == ([], "")


async def test_another_process_change_shows_within_the_bound(redis: Redis) -> None:
    clock = Clock()
    here, elsewhere = Registry(redis), Registry(redis, clock=clock)
    made = await here.create_pipeline("acme", CONTRACT)
    await elsewhere.get_pipeline("acme", made.pipeline_id)
    await here.set_status("acme", made.pipeline_id, 1, PipelineStatus.ACTIVE, "")
    assert (await here.get_pipeline("acme", made.pipeline_id)).status is PipelineStatus.ACTIVE
    assert (await elsewhere.get_pipeline("acme", made.pipeline_id)).status is PipelineStatus.DEPLOYING
    clock.now_s += tables.CACHE_S
    assert (await elsewhere.get_pipeline("acme", made.pipeline_id)).status is PipelineStatus.ACTIVE


async def test_touches_from_everywhere_all_count(redis: Redis) -> None:
    registries = [Registry(redis) for _replica in range(4)]
    kb = await source(registries[0], "acme")
    before = await registries[0].sources_version()
    await asyncio.gather(
        *(
            each.touch_source("acme", kb.data_source_id, document_count=7, dimension=384)
            for each in registries
        )
    )
    after = await Registry(redis).get_source("acme", kb.data_source_id)
    assert (after.document_count, after.dimension) == (7, 384)
    assert after.last_updated_at > ""
    assert await registries[0].sources_version() == before + 4
    with pytest.raises(Conflict, match="384"):
        await registries[0].touch_source("acme", kb.data_source_id, document_count=7, dimension=768)


async def test_a_record_of_another_release_says_so(redis: Redis) -> None:
    registry = Registry(redis)
    made = await registry.create_pipeline("acme", CONTRACT)
    await redis.hset(
        "zg:{acme}:pipelines", made.pipeline_id, b'{"pipeline_id": "pl-x", "contract": {"new": 1}}'
    )
    with pytest.raises(InternalError, match="pl-x"):
        await Registry(redis).get_pipeline("acme", made.pipeline_id)


async def test_names_can_not_leave_their_namespace(redis: Redis) -> None:
    registry = Registry(redis)
    await source(registry, "acme", "kb")
    for odd in ("*", "kb\x00", "../kb", "kb} ", ""):
        with pytest.raises(GridError):
            await registry.find_source("acme", odd)


async def test_a_contract_too_large_to_be_kept_is_refused(redis: Redis) -> None:
    registry = Registry(redis)
    large = {"type": "generation", "model": "m", "system_prompt": "word " * 20_000}
    contract = Contract.model_validate({"name": "large", "pipeline": {"steps": [large]}})
    with pytest.raises(TooLarge, match="can be stored"):
        await registry.create_pipeline("a", contract)
    assert await registry.list_pipelines("a") == ([], "")
