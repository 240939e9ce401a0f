"""The cell's vector store: its one owner, its clients over a real link, what survives, and who sees what.

The same rules on a Qdrant client, in its local mode.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient

from gateway.knowledge.filters import Filter, parse_filter
from gateway.knowledge.sources import embedded
from gateway.knowledge.sources.base import Collection, Hit, Piece, Vectors, VectorStore
from gateway.knowledge.sources.edge import EdgeFolder
from gateway.knowledge.sources.embedded import EmbeddedStore, VectorsActor
from gateway.knowledge.sources.qdrant import QdrantStore
from gateway.trust.keyfiles import read_secret, secret_path
from grid.config import Config
from grid.errors import Conflict, InternalError, NotFound, Saturated, TooLarge, UnitLost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning"),
]
"""Of the client's local mode, which has none; the adapter makes them for the server."""

ACME = Collection("acme", "ds-1", 8)
UMBRELLA = Collection("umbrella", "ds-1", 8)
EVERYTHING = Filter()


def axis(number: int) -> Vectors:
    return np.eye(8, dtype=np.float32)[number % 8]


def mixed(first: int, second: int, share: float) -> Vectors:
    vector = share * axis(first) + (1 - share) * axis(second)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


async def put(store: VectorStore, collection: Collection, *documents: tuple[str, list[Vectors]]) -> int:
    pieces = [
        Piece(name, index, f"{name}#{index}", {"name": name})
        for name, vectors in documents
        for index, _vector in enumerate(vectors)
    ]
    return await store.upsert(
        collection, pieces, np.stack([vector for _name, vectors in documents for vector in vectors])
    )


def store_for(config: Config, actor: VectorsActor) -> EmbeddedStore:
    secret = read_secret(secret_path(config.cell.state_dir, "link.key"))
    return EmbeddedStore(actor.address, peer_id="gateway-1", secret=secret)


@pytest.fixture(params=["embedded", "qdrant"])
async def store(request: pytest.FixtureRequest, config: Config) -> AsyncIterator[VectorStore]:
    if request.param == "qdrant":
        local = QdrantStore(AsyncQdrantClient(":memory:"))
        yield local
        await local.close()
        return
    actor = VectorsActor(config)
    await actor.address()
    client = store_for(config, actor)
    await client.start()
    yield client
    await client.close()
    await actor.close()


async def test_documents_come_back_best_first_each_once(store: VectorStore) -> None:
    await store.ensure(ACME)
    await put(
        store,
        ACME,
        ("long", [axis(1), mixed(0, 1, 0.7), mixed(0, 1, 0.6)]),
        ("short", [axis(0)]),
        ("far", [axis(2)]),
    )
    hits = await store.search(ACME, axis(0), EVERYTHING, 2, None)
    assert [(hit.document_id, hit.piece, hit.text) for hit in hits] == [
        ("short", 0, "short#0"),
        ("long", 1, "long#1"),
    ]
    assert hits[0].score == pytest.approx(1.0)
    assert hits[0].metadata == {"name": "short"}
    assert [hit.document_id for hit in await store.search(ACME, axis(0), EVERYTHING, 9, 0.5)] == [
        "short",
        "long",
    ]
    assert await store.count(ACME) == 3


async def test_one_document_of_many_pieces_does_not_hide_the_others(store: VectorStore) -> None:
    await store.ensure(ACME)
    await put(store, ACME, ("book", [axis(0)] * 60), ("note", [mixed(0, 1, 0.6)]))
    hits = await store.search(ACME, axis(0), EVERYTHING, 2, None)
    assert [hit.document_id for hit in hits] == ["book", "note"]


async def test_a_replaced_document_leaves_no_piece_behind(store: VectorStore) -> None:
    await store.ensure(ACME)
    assert await put(store, ACME, ("a", [axis(0), axis(1), axis(2)]), ("b", [axis(1)])) == 0
    assert await put(store, ACME, ("a", [axis(3)]), ("c", [axis(4)])) == 1
    assert await store.count(ACME) == 3
    found = await store.search(ACME, axis(1), EVERYTHING, 9, 0.9)
    assert [hit.document_id for hit in found] == ["b"]


async def test_tenants_with_the_same_source_id_see_only_their_own(store: VectorStore) -> None:
    for collection in (ACME, UMBRELLA):
        await store.ensure(collection)
        await put(store, collection, (f"of-{collection.tenant_id}", [axis(0)]))
    for collection in (ACME, UMBRELLA):
        hits = await store.search(collection, axis(0), EVERYTHING, 9, None)
        assert [hit.document_id for hit in hits] == [f"of-{collection.tenant_id}"]
    await store.drop(ACME)
    assert await store.count(ACME) == 0
    assert await store.count(UMBRELLA) == 1


async def test_a_collection_has_one_dimension_and_dropping_is_final(store: VectorStore) -> None:
    await store.ensure(ACME)
    await store.ensure(ACME)
    with pytest.raises(Conflict, match="8"):
        await store.ensure(Collection("acme", "ds-1", 16))
    await store.drop(ACME)
    await store.drop(ACME)
    assert await store.count(ACME) == 0
    with pytest.raises(NotFound):
        await store.search(ACME, axis(0), EVERYTHING, 1, None)


async def test_filters_hold_on_the_way_through(store: VectorStore) -> None:
    await store.ensure(ACME)
    await put(store, ACME, ("a", [axis(0)]), ("b", [axis(0)]))
    hits = await store.search(ACME, axis(0), parse_filter({"name": ["b", "z"]}), 9, None)
    assert [hit.document_id for hit in hits] == ["b"]


async def test_writers_and_readers_at_the_same_time(store: VectorStore) -> None:
    await store.ensure(ACME)
    await put(store, ACME, ("fixed", [axis(7)]))

    async def write(number: int) -> None:
        await put(store, ACME, *[(f"{number}-{item}", [axis(item % 7)]) for item in range(20)])

    async def read() -> tuple[Hit, ...]:
        return await store.search(ACME, axis(7), EVERYTHING, 1, None)

    results = await asyncio.gather(*(write(n) for n in range(8)), *(read() for _n in range(40)))
    assert all(hits[0].document_id == "fixed" for hits in results if hits is not None and hits != 0)
    assert await store.count(ACME) == 8 * 20 + 1


async def test_vectors_survive_their_owner_and_clients_find_the_next_one(config: Config) -> None:
    first = VectorsActor(config)
    owner = first

    async def resolve() -> tuple[str, int]:
        return await owner.address()

    secret = read_secret(secret_path(config.cell.state_dir, "link.key"))
    client = EmbeddedStore(resolve, peer_id="gateway-1", secret=secret)
    await client.start()
    await client.ensure(ACME)
    await put(client, ACME, ("kept", [axis(0)]))
    await first.close()
    owner = VectorsActor(config)
    hits = await client.search(ACME, axis(0), EVERYTHING, 1, None)
    assert [hit.document_id for hit in hits] == ["kept"]
    await client.close()
    await owner.close()


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill_of_the_owner(tmp_path: Path) -> None:
    script = f"""
import os
import numpy as np
from pathlib import Path
from gateway.knowledge.sources.base import Collection, Piece
from gateway.knowledge.sources.edge import EdgeFolder
folder = EdgeFolder(Path({str(tmp_path)!r}))
collection = Collection("acme", "ds-1", 8)
folder.ensure(collection)
folder.upsert(collection, [Piece("kept", 0, "text", {{}})], np.eye(8, dtype=np.float32)[:1])
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -9
    folder = EdgeFolder(tmp_path)
    assert folder.count(ACME) == 1
    folder.close()


async def test_a_second_owner_is_refused_and_told_who_the_first_is(config: Config) -> None:
    first = VectorsActor(config)
    await first.address()
    second = VectorsActor(config)
    with pytest.raises(InternalError, match=f"pid {os.getpid()}"):
        await second.address()
    await second.close()
    await first.close()
    third = VectorsActor(config)
    await third.address()
    await third.close()


def test_half_made_and_half_dropped_collections_are_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "acme.ds-1.making" / "shard").mkdir(parents=True)
    (tmp_path / "acme.ds-2.leaving").mkdir()
    folder = EdgeFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["owner.lock"]
    folder.ensure(ACME)
    assert folder.count(ACME) == 0
    folder.close()


def test_shards_beyond_the_bound_are_closed_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.knowledge.sources.edge.MAX_OPEN_SHARDS", 1)
    folder = EdgeFolder(tmp_path)
    collections = [Collection("acme", f"ds-{number}", 8) for number in range(2)]
    for number, collection in enumerate(collections):
        folder.ensure(collection)
        folder.upsert(collection, [Piece("d", 0, str(number), {})], axis(number)[None])
    for number, collection in enumerate(collections):
        (hit,) = folder.search(collection, axis(number), EVERYTHING, 1, None)
        assert hit.text == str(number)
    folder.close()


async def test_too_many_waiting_calls_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "MAX_PENDING_CALLS", 0)
    actor = VectorsActor(config)
    await actor.address()
    client = store_for(config, actor)
    await client.start()
    with pytest.raises(Saturated) as refused:
        await client.count(ACME)
    assert refused.value.retry_after_s > 0
    await client.close()
    await actor.close()


async def test_an_answer_that_no_frame_holds_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = VectorsActor(config)
    await actor.address()
    client = store_for(config, actor)
    await client.start()
    await client.ensure(ACME)
    await client.upsert(ACME, [Piece("a", 0, "x" * 4_096, {})], axis(0)[None])
    monkeypatch.setattr("grid.wire.codec.MAX_FRAME_BYTES", 2_048)
    with pytest.raises(TooLarge):
        await client.search(ACME, axis(0), EVERYTHING, 1, None)
    assert await client.count(ACME) == 1
    await client.close()
    await actor.close()


async def test_an_owner_that_is_away_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "CONNECT_TIMEOUT_S", 0.05)

    async def resolve() -> tuple[str, int]:
        raise LookupError("no such actor")

    secret = read_secret(secret_path(config.cell.state_dir, "link.key"))
    client = EmbeddedStore(resolve, peer_id="gateway-1", secret=secret)
    await client.start()
    with pytest.raises(UnitLost):
        await client.count(ACME)
    await client.close()
