"""Documents in, documents found: real Redis, vector store, placement and units; the engine hashes words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.local_cell import DIMENSION, EMBEDDING_MODEL, HashedWords, cell_config
from support.state import running_redis

from gateway.knowledge import documents as documents_module
from gateway.knowledge.documents import INLINE_SPLIT_CHARS, Documents, Progress
from gateway.knowledge.embedder import BATCH_TEXTS
from gateway.knowledge.retrieval import Retrieval, RetrievalRequest, RetrievalResult
from gateway.knowledge.sources import open_stores
from gateway.knowledge.sources.base import Collection, VectorStore
from gateway.knowledge.sources.embedded import VectorsActor
from gateway.pipeline.registry import Registry
from gateway.records import DataSourceRecord, Tenant
from gateway.state import open_redis
from gateway.trust.keyfiles import read_or_make_secret, secret_path
from grid.errors import (
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    NoEligibleUnit,
    NotFound,
    Rejected,
    UnitLost,
)
from grid.units.actor import Site, UnitActor
from grid.wire.link import LinkPool
from placement.actor import PlacementActor
from placement.client import PlacementClient

pytestmark = pytest.mark.slow

ACME = Tenant("acme", "key-1", False, "salt")
REGION = "eu-central-1"


@dataclass
class Engine(HashedWords):
    """Counts its work, and does as it is told: fail, or wait until it is let go."""

    calls: list[int] = field(default_factory=list)
    failure: Exception | None = None
    fail_after: int = 0
    gate: asyncio.Event | None = None
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    async def embed(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        self.calls.append(len(texts))
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None and len(self.calls) > self.fail_after:
            raise self.failure
        return await super().embed(texts)


@dataclass(frozen=True)
class Doc:
    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Shop:
    registry: Registry
    documents: Documents
    retrieval: Retrieval
    store: VectorStore
    placement: PlacementActor
    units: list[UnitActor]
    engines: list[Engine]

    async def source(self, name: str = "kb", tenant_id: str = "acme", **fields: Any) -> DataSourceRecord:
        given = {
            "type": "qdrant",
            "config": {},
            "region": REGION,
            "embedding_model": EMBEDDING_MODEL,
            "dimension": 0,
            **fields,
        }
        return await self.registry.create_source(tenant_id, name=name, **given)

    async def ask(self, source: DataSourceRecord, query: str, **fields: Any) -> RetrievalResult:
        given: dict[str, Any] = {
            "request_id": f"req_{query}",
            "step_id": "retrieval-1",
            "tenant": replace(ACME, tenant_id=source.tenant_id),
            "top_k": 3,
            "filter": {},
            "min_score": None,
            "allowed_regions": (),
            "deadline_s": asyncio.get_running_loop().time() + 10,
            **fields,
        }
        return await self.retrieval.search(RetrievalRequest(source=source, query=query, **given))

    async def until_idle(self) -> None:
        async with asyncio.timeout(5):
            while (await self.placement.stats())["reservations"]:  # noqa: ASYNC110  nobody tells of idleness
                await asyncio.sleep(0.005)


@pytest.fixture
async def shop(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    count = getattr(request, "param", 1)
    config = cell_config(tmp_path)
    secret = read_or_make_secret(secret_path(tmp_path, "link.key"))
    placement, vectors = PlacementActor(config), VectorsActor(config)
    client = PlacementClient(placement.address, peer_id="gateway-1", secret=secret)
    complete = asyncio.Event()
    client.on_fleet(lambda fleet: complete.set() if len(fleet.units) == count else None)
    pools = [LinkPool(role="gateway", peer_id="gateway-1", secret=secret) for _pool in range(2)]
    stores = open_stores(config, vectors.address, peer_id="gateway-1", secret=secret)
    engines = [Engine() for _unit in range(count)]
    units = [
        UnitActor(
            config,
            config.models[1],
            f"embed-{number}",
            Site("node-1", "127.0.0.1", REGION),
            resolve_placement=placement.address,
            end_process=lambda _status: None,
            engine=engine,
        )
        for number, engine in enumerate(engines)
    ]
    with running_redis(tmp_path):
        redis = await open_redis(config)
        registry = Registry(redis)
        await client.start()
        await stores["qdrant"].start()
        for unit in units:
            await unit.start()
        for engine in engines:
            engine.calls.clear()
            engine.entered.clear()
        async with asyncio.timeout(10):
            await complete.wait()
        yield Shop(
            registry,
            Documents(placement=client, links=pools[1], stores=stores, registry=registry, config=config),
            Retrieval(placement=client, links=pools[0], stores=stores),
            stores["qdrant"],
            placement,
            units,
            engines,
        )
        for pool in pools:
            await pool.close()
        for unit in units:
            await unit.stop()
        await stores["qdrant"].close()
        await client.close()
        await vectors.close()
        await placement.close()
        await redis.aclose()


ARTICLES = [
    Doc("reset", "Reset your password from the sign-in page.", {"status": "published", "year": 2024}),
    Doc("invoice", "Invoices are sent on the first day of the month.", {"status": "published", "year": 2022}),
    Doc("router", "The router blinks twice when it found the network.", {"status": "draft", "year": 2024}),
]


async def test_documents_are_found_by_what_they_say(shop: Shop) -> None:
    kb = await shop.source()
    counts = await shop.documents.add(ACME, kb, ARTICLES)
    assert counts == {"added": 3, "replaced": 0, "document_count": 3}
    kb = await shop.registry.get_source("acme", kb.data_source_id)
    assert (kb.document_count, kb.dimension) == (3, DIMENSION)
    assert kb.last_updated_at

    result = await shop.ask(kb, "How do I reset my password?")
    assert result.documents[0].document_id == "reset"
    assert result.documents[0].text == ARTICLES[0].text
    assert result.documents[0].metadata == ARTICLES[0].metadata
    assert [d.score for d in result.documents] == sorted((d.score for d in result.documents), reverse=True)
    assert result.usage.input_tokens > 0
    assert (result.placement.unit_id, result.placement.region) == ("embed-0", REGION)
    assert result.placement.why
    assert (result.timing.step_id, result.timing.type) == ("retrieval-1", "retrieval")
    await shop.until_idle()


async def test_filters_and_scores_narrow_what_is_found(shop: Shop) -> None:
    kb = await shop.source()
    await shop.documents.add(ACME, kb, ARTICLES)
    drafts = await shop.ask(kb, "password", filter={"status": "draft"})
    assert [d.document_id for d in drafts.documents] == ["router"]
    recent = await shop.ask(kb, "the", filter={"year": {"gte": 2023}})
    assert {d.document_id for d in recent.documents} == {"reset", "router"}
    assert (await shop.ask(kb, "password", min_score=0.99)).documents == ()
    assert len((await shop.ask(kb, "password", top_k=1)).documents) == 1


async def test_adding_again_replaces(shop: Shop) -> None:
    kb = await shop.source()
    await shop.documents.add(ACME, kb, ARTICLES)
    counts = await shop.documents.add(ACME, kb, [Doc("reset", "Call us."), Doc("new", "Something new.")])
    assert counts == {"added": 1, "replaced": 1, "document_count": 4}
    found = await shop.ask(kb, "Call us")
    assert (found.documents[0].document_id, found.documents[0].text) == ("reset", "Call us.")


async def test_a_long_document_is_found_by_the_part_that_fits(shop: Shop) -> None:
    kb = await shop.source()
    filler = "Nothing of interest stands in this sentence about the weather. "
    book = Doc("book", filler * 120 + "The secret ingredient is cardamom. " + filler * 120)
    seen: list[Progress] = []
    await shop.documents.add(ACME, kb, [book, Doc("other", "Cinnamon rolls.")], progress=seen.append)
    result = await shop.ask(kb, "secret ingredient cardamom")
    assert [d.document_id for d in result.documents] == ["book", "other"]
    assert "cardamom" in result.documents[0].text
    assert len(result.documents[0].text) < 2_000
    assert seen[-1].documents_done == seen[-1].documents_total == 2
    assert seen[-1].pieces_done > 10
    assert max(shop.engines[0].calls) <= BATCH_TEXTS


async def test_a_source_without_documents_finds_nothing(shop: Shop) -> None:
    assert (await shop.ask(await shop.source(), "anything")).documents == ()


async def test_tenants_do_not_meet(shop: Shop) -> None:
    mine, theirs = await shop.source(), await shop.source(tenant_id="umbrella")
    await shop.documents.add(ACME, mine, ARTICLES)
    assert (await shop.ask(theirs, "password")).documents == ()
    with pytest.raises(AssertionError):
        await shop.ask(mine, "password", tenant=replace(ACME, tenant_id="umbrella"))


async def test_a_source_outside_the_allowed_regions_is_not_touched(shop: Shop) -> None:
    kb = await shop.source(region="us-east-1")
    with pytest.raises(Forbidden, match="us-east-1"):
        await shop.ask(kb, "password", allowed_regions=(REGION,))
    with pytest.raises(Forbidden):
        await shop.documents.add(ACME, kb, ARTICLES, allowed_regions=(REGION,))
    assert shop.engines[0].calls == []


async def test_units_outside_the_allowed_regions_are_not_asked(shop: Shop) -> None:
    kb = await shop.source(region="us-east-1")
    with pytest.raises(NoEligibleUnit):
        await shop.ask(kb, "password", allowed_regions=("us-east-1",))
    assert shop.engines[0].calls == []


async def test_vectors_of_another_length_are_refused(shop: Shop) -> None:
    kb = await shop.source(dimension=1536)
    for call in (shop.ask(kb, "password"), shop.documents.add(ACME, kb, ARTICLES)):
        with pytest.raises(InvalidRequest, match="1536"):
            await call
    assert (await shop.registry.get_source("acme", kb.data_source_id)).document_count == 0
    await shop.until_idle()


async def test_a_bad_filter_costs_nothing(shop: Shop) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await shop.ask(await shop.source(), "password", filter={"status": {"like": "x"}})
    assert refused.value.param == "filter.status.like"
    assert shop.engines[0].calls == []


@pytest.mark.parametrize("shop", [2], indirect=True)
async def test_a_unit_that_is_lost_is_replaced_by_another(shop: Shop) -> None:
    kb = await shop.source()
    await shop.documents.add(ACME, kb, ARTICLES)
    for engine in shop.engines:
        engine.gate = asyncio.Event()
        engine.entered.clear()
    asking = asyncio.create_task(shop.ask(kb, "How do I reset my password?"))
    entered = [asyncio.create_task(engine.entered.wait()) for engine in shop.engines]
    await asyncio.wait(entered, return_when=asyncio.FIRST_COMPLETED)
    first = 0 if shop.engines[0].entered.is_set() else 1
    other_gate = shop.engines[1 - first].gate
    assert other_gate is not None
    other_gate.set()
    await shop.units[first].stop()
    result = await asking
    assert result.documents[0].document_id == "reset"
    assert (result.placement.unit_id, result.placement.moves) == (f"embed-{1 - first}", 1)
    for task in entered:
        task.cancel()
    await shop.until_idle()


@pytest.mark.parametrize("shop", [2], indirect=True)
async def test_a_cell_that_fails_everywhere_says_so_and_holds_nothing(shop: Shop) -> None:
    kb = await shop.source()
    for engine in shop.engines:
        engine.failure = InternalError("the model failed")
    with pytest.raises(InternalError):
        await shop.ask(kb, "password")
    await shop.until_idle()


async def test_a_caller_that_leaves_holds_nothing(shop: Shop) -> None:
    kb = await shop.source()
    shop.engines[0].gate = asyncio.Event()
    asking = asyncio.create_task(shop.ask(kb, "password"))
    await shop.engines[0].entered.wait()
    assert (await shop.placement.stats())["reservations"] == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    shop.engines[0].gate.set()
    await shop.until_idle()


async def test_a_deadline_ends_the_wait(shop: Shop) -> None:
    kb = await shop.source()
    shop.engines[0].gate = asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await shop.ask(kb, "password", deadline_s=asyncio.get_running_loop().time() + 0.2)
    shop.engines[0].gate.set()
    await shop.until_idle()


async def test_what_a_failed_load_did_write_is_counted(shop: Shop) -> None:
    kb = await shop.source()
    shop.engines[0].failure, shop.engines[0].fail_after = InternalError("out of order"), 2
    with pytest.raises((InternalError, UnitLost)):
        await shop.documents.add(ACME, kb, [Doc(str(n), f"text {n}") for n in range(100)])
    assert (await shop.registry.get_source("acme", kb.data_source_id)).document_count == 64
    await shop.until_idle()


async def test_a_source_that_is_deleted_during_a_load_leaves_no_vectors(shop: Shop) -> None:
    kb = await shop.source()
    shop.engines[0].gate = asyncio.Event()
    loading = asyncio.create_task(shop.documents.add(ACME, kb, ARTICLES))
    await shop.engines[0].entered.wait()
    await shop.documents.delete_source(ACME, kb.data_source_id)
    shop.engines[0].gate.set()
    with pytest.raises(NotFound):
        await loading
    assert await shop.store.count(Collection("acme", kb.data_source_id, DIMENSION)) == 0


async def test_a_deleted_source_takes_its_vectors_along(shop: Shop) -> None:
    kb = await shop.source()
    await shop.documents.add(ACME, kb, ARTICLES)
    await shop.documents.delete_source(ACME, kb.data_source_id)
    assert await shop.store.count(Collection("acme", kb.data_source_id, DIMENSION)) == 0
    with pytest.raises(NotFound):
        await shop.documents.delete_source(ACME, kb.data_source_id)


async def test_a_load_that_ends_while_its_source_is_deleted_leaves_no_vectors(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb = await shop.source()
    forget = shop.registry.delete_source

    async def forget_after_a_load(tenant_id: str, data_source_id: str) -> None:
        await shop.documents.add(ACME, kb, ARTICLES)
        await forget(tenant_id, data_source_id)

    monkeypatch.setattr(shop.registry, "delete_source", forget_after_a_load)
    await shop.documents.delete_source(ACME, kb.data_source_id)
    assert await shop.store.count(Collection("acme", kb.data_source_id, DIMENSION)) == 0


async def test_a_deletion_can_be_repeated_when_the_store_was_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb = await shop.source()
    await shop.documents.add(ACME, kb, ARTICLES)

    async def away(_collection: Collection) -> None:
        raise Rejected("away", retry_after_s=1.0)

    with monkeypatch.context() as patched:
        patched.setattr(shop.store, "drop", away)
        with pytest.raises(Rejected):
            await shop.documents.delete_source(ACME, kb.data_source_id)
    await shop.documents.delete_source(ACME, kb.data_source_id)
    assert await shop.store.count(Collection("acme", kb.data_source_id, DIMENSION)) == 0


async def test_much_text_is_split_beside_the_event_loop(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    kb = await shop.source()
    split, beside = documents_module.split_text, []

    def watched(text: str, window_pieces: int) -> tuple[str, ...]:
        beside.append(threading.current_thread() is not threading.main_thread())
        return split(text, window_pieces)

    monkeypatch.setattr(documents_module, "split_text", watched)
    half = "word " * (INLINE_SPLIT_CHARS // 10)
    await shop.documents.add(ACME, kb, [Doc("a", half), Doc("b", half)])
    await shop.documents.add(ACME, kb, [Doc("a", half), Doc("b", half + "more")])
    assert beside == [False, False, True, True]


async def test_loads_and_queries_at_once(shop: Shop) -> None:
    kb = await shop.source()
    await shop.documents.add(ACME, kb, ARTICLES)
    batches = [[Doc(f"{b}-{n}", f"filler {b} {n}") for n in range(20)] for b in range(4)]
    results = await asyncio.gather(
        *(shop.documents.add(ACME, kb, batch) for batch in batches),
        *(shop.ask(kb, "How do I reset my password?", request_id=f"req_{n}") for n in range(12)),
    )
    found = [result for result in results if isinstance(result, RetrievalResult)]
    assert {result.documents[0].document_id for result in found} == {"reset"}
    assert (await shop.registry.get_source("acme", kb.data_source_id)).document_count == 83
    await shop.until_idle()
