"""A Qdrant server that the operator configured, behind the same protocol as the cell's own store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from qdrant_client import AsyncQdrantClient, models
from qdrant_client.http.exceptions import ApiException, UnexpectedResponse

from gateway.knowledge.filters import AnyTerm, Filter, InRange
from gateway.knowledge.sources.base import (
    DOCUMENT,
    NUMBERS,
    PIECE,
    TERMS,
    Collection,
    Hit,
    Piece,
    Vectors,
    best_pieces,
    hit_of,
    row_id,
    rows_of,
)
from grid.errors import Conflict, NotFound, Rejected

PREFIX = "zerogrid."
"""The server may hold other people's collections."""
CALL_TIMEOUT_S = 30
FETCH_PER_DOCUMENT = 4
MAX_FETCH = 4_096
RETRY_AFTER_S = 1.0


class QdrantStore:
    """A VectorStore on a Qdrant server; the client is closed with the store."""

    def __init__(self, client: AsyncQdrantClient) -> None:
        self._client = client

    @classmethod
    def at(cls, url: str, api_key: str | None) -> QdrantStore:
        return cls(
            AsyncQdrantClient(url=url, api_key=api_key, timeout=CALL_TIMEOUT_S, check_compatibility=False)
        )

    async def start(self) -> None:
        """Nothing is dialled before the first call, so that a cell starts while its store is away."""

    async def close(self) -> None:
        await self._client.close()

    async def ensure(self, collection: Collection) -> None:
        name = _name(collection)
        with _store_errors(collection):
            if not await self._client.collection_exists(name):
                vectors = models.VectorParams(size=collection.dimension, distance=models.Distance.COSINE)
                with contextlib.suppress(UnexpectedResponse, ValueError):  # another gateway may have made it
                    await self._client.create_collection(name, vectors_config=vectors)
                for field, schema in (
                    (TERMS, models.PayloadSchemaType.KEYWORD),
                    (DOCUMENT, models.PayloadSchemaType.KEYWORD),
                    (PIECE, models.PayloadSchemaType.INTEGER),
                ):
                    await self._client.create_payload_index(name, field, schema)
            held = (await self._client.get_collection(name)).config.params.vectors
        if not isinstance(held, models.VectorParams) or held.size != collection.dimension:
            size = held.size if isinstance(held, models.VectorParams) else "several kinds of"
            raise Conflict(
                f"{collection.source_id} holds vectors of {size} numbers, not {collection.dimension}"
            )

    async def drop(self, collection: Collection) -> None:
        with _store_errors(collection), contextlib.suppress(NotFound):
            await self._client.delete_collection(_name(collection))

    async def upsert(self, collection: Collection, pieces: Sequence[Piece], vectors: Vectors) -> int:
        ids = [row_id(piece.document_id, piece.index) for piece in pieces]
        points = [
            models.PointStruct(id=point_id, vector=vector.tolist(), payload=row)
            for point_id, vector, row in zip(ids, vectors, rows_of(collection, pieces), strict=True)
        ]
        among = models.FieldCondition(
            key=DOCUMENT, match=models.MatchAny(any=sorted({piece.document_id for piece in pieces}))
        )
        stale = models.Filter(must=[among], must_not=[models.HasIdCondition(has_id=list(ids))])
        name = _name(collection)
        with _store_errors(collection):
            there = models.Filter(must=[among, _FIRST_PIECE])
            replaced = (await self._client.count(name, count_filter=there, exact=True)).count
            # New rows first: whoever stops in between leaves old pieces too many, never a document too few.
            await self._client.upsert(name, points, wait=True)
            await self._client.delete(name, models.FilterSelector(filter=stale), wait=True)
        return replaced

    async def search(
        self, collection: Collection, vector: Vectors, where: Filter, top_k: int, min_score: float | None
    ) -> tuple[Hit, ...]:
        limit = min(top_k * FETCH_PER_DOCUMENT, MAX_FETCH)
        while True:
            with _store_errors(collection):
                answer = await self._client.query_points(
                    _name(collection),
                    query=vector.tolist(),
                    query_filter=_qdrant_filter(where),
                    limit=limit,
                    score_threshold=min_score,
                    with_payload=[DOCUMENT],
                )
            found = answer.points
            best = best_pieces([((point.payload or {})[DOCUMENT], point.score) for point in found], top_k)
            if len(best) == top_k or len(found) < limit or limit == MAX_FETCH:
                break
            limit = min(limit * 4, MAX_FETCH)
        winners = [found[position] for position in best]
        with _store_errors(collection):
            records = await self._client.retrieve(
                _name(collection), [point.id for point in winners], with_payload=True
            )
        payloads = {record.id: record.payload or {} for record in records}
        # A document that was removed between the two calls is left out.
        return tuple(
            hit_of(collection, payloads[point.id], point.score) for point in winners if point.id in payloads
        )

    async def count(self, collection: Collection) -> int:
        whole = models.Filter(must=[_FIRST_PIECE])
        try:
            with _store_errors(collection):
                return (await self._client.count(_name(collection), count_filter=whole, exact=True)).count
        except NotFound:
            return 0


_FIRST_PIECE = models.FieldCondition(key=PIECE, match=models.MatchValue(value=0))
"""Every document has exactly one."""


def _name(collection: Collection) -> str:
    return PREFIX + collection.name


def _qdrant_filter(where: Filter) -> models.Filter | None:
    if not where.conditions:
        return None
    return models.Filter(must=[_qdrant_condition(condition) for condition in where.conditions])


def _qdrant_condition(condition: AnyTerm | InRange) -> models.FieldCondition:
    if isinstance(condition, AnyTerm):
        return models.FieldCondition(key=TERMS, match=models.MatchAny(any=list(condition.terms)))
    bounds = models.Range(gte=condition.gte, gt=condition.gt, lte=condition.lte, lt=condition.lt)
    return models.FieldCondition(key=f"{NUMBERS}.{condition.name}", range=bounds)


@contextlib.contextmanager
def _store_errors(collection: Collection) -> Iterator[None]:
    """Name what went wrong without quoting the server, whose words may hold a part of a document."""
    try:
        yield
    except UnexpectedResponse as error:
        if error.status_code == 404:
            raise NotFound(f"the data source {collection.source_id} has no documents yet") from None
        raise Rejected(
            f"the Qdrant server answered {error.status_code}", retry_after_s=RETRY_AFTER_S
        ) from error
    except (ApiException, OSError) as error:
        raise Rejected("the Qdrant server does not answer", retry_after_s=RETRY_AFTER_S) from error
    except ValueError as error:  # what the client's local mode says of a missing collection
        if "not found" in str(error):
            raise NotFound(f"the data source {collection.source_id} has no documents yet") from None
        raise
