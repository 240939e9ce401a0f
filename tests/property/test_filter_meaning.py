"""A filter finds exactly what it says, by itself and on both stores, whatever metadata looks like."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qdrant_client import AsyncQdrantClient
from support.filter_oracle import RANGES, VALUES, filters, matches, metadata

from gateway.knowledge.filters import AnyTerm, Condition, Facets, check_metadata, facets_of, parse_filter
from gateway.knowledge.sources.base import Collection, Piece
from gateway.knowledge.sources.edge import EdgeFolder
from gateway.knowledge.sources.qdrant import QdrantStore

COLLECTION = Collection("acme", "ds-1", 4)
DOCUMENTS = 10

batches = st.lists(metadata, min_size=DOCUMENTS, max_size=DOCUMENTS)
questions = st.lists(filters, min_size=4, max_size=4)


def pieces_of(batch: list[dict[str, Any]]) -> list[Piece]:
    return [Piece(f"d{number}", 0, "text", document) for number, document in enumerate(batch)]


def expected(batch: list[dict[str, Any]], where: dict[str, Any]) -> set[str]:
    return {f"d{number}" for number, document in enumerate(batch) if matches(document, where)}


def holds(condition: Condition, facets: Facets) -> bool:
    """What a store has to do with a condition."""
    if isinstance(condition, AnyTerm):
        return not set(condition.terms).isdisjoint(facets.terms)
    return any(
        (condition.gte is None or number >= condition.gte)
        and (condition.gt is None or number > condition.gt)
        and (condition.lte is None or number <= condition.lte)
        and (condition.lt is None or number < condition.lt)
        for number in facets.numbers.get(condition.name, [])
    )


def test_every_value_against_every_value_and_range(folder: EdgeFolder) -> None:
    collection = Collection("acme", "ds-pairs", 4)
    batch = [{"a b": value} for value in VALUES]
    folder.ensure(collection)
    vectors = np.ones((len(batch), 4), np.float32)
    folder.upsert(collection, pieces_of(batch), vectors)
    for condition in (*VALUES, *RANGES, VALUES):
        where = {"a b": condition}
        hits = folder.search(collection, vectors[0], parse_filter(where), len(batch), None)
        assert {hit.document_id for hit in hits} == expected(batch, where), where


@settings(deadline=None)
@given(document=metadata, where=filters)
def test_by_itself(document: dict[str, Any], where: dict[str, Any]) -> None:
    facets = facets_of(document)
    assert all(holds(condition, facets) for condition in parse_filter(where).conditions) == matches(
        document, where
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeFolder]:
    folder = EdgeFolder(Path(tmp_path_factory.mktemp("vectors")))
    folder.ensure(COLLECTION)
    yield folder
    folder.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches, wheres=questions)
def test_on_the_embedded_store(folder: EdgeFolder, batch: list[dict[str, Any]], wheres: list[Any]) -> None:
    for document in batch:
        check_metadata(document, "metadata")
    folder.upsert(COLLECTION, pieces_of(batch), np.eye(4, dtype=np.float32)[np.zeros(DOCUMENTS, int)])
    for where in wheres:
        hits = folder.search(COLLECTION, np.ones(4, np.float32), parse_filter(where), DOCUMENTS, None)
        assert {hit.document_id for hit in hits} == expected(batch, where)
        assert {hit.document_id: hit.metadata for hit in hits} == {
            name: batch[int(name[1:])] for name in expected(batch, where)
        }


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches, wheres=questions)
def test_on_a_qdrant_client(batch: list[dict[str, Any]], wheres: list[Any]) -> None:
    async def ask() -> None:
        store = QdrantStore(AsyncQdrantClient(":memory:"))
        await store.ensure(COLLECTION)
        await store.upsert(
            COLLECTION, pieces_of(batch), np.eye(4, dtype=np.float32)[np.zeros(DOCUMENTS, int)]
        )
        for where in wheres:
            hits = await store.search(
                COLLECTION, np.ones(4, np.float32), parse_filter(where), DOCUMENTS, None
            )
            assert {hit.document_id for hit in hits} == expected(batch, where)
        await store.close()

    asyncio.run(ask())
