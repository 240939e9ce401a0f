"""A retrieval step: the query becomes a vector, the vector finds documents. Nothing here writes.

Residency is checked before anything else: neither the query nor the vectors leave the allowed regions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.knowledge.embedder import Embedder, EmbedOrder, Places
from gateway.knowledge.filters import parse_filter
from gateway.knowledge.sources.base import Collection, VectorStore
from gateway.observe.story import RunStory
from gateway.pipeline.events import StepPlacement, StepTiming
from gateway.records import DataSourceRecord, RetrievedDocument, Tenant
from gateway.tracing import PROVIDER, span
from grid.errors import DeadlineExceeded, Forbidden, InternalError, InvalidRequest, NotFound
from grid.tracing.spans import Kind
from grid.wire.link import LinkPool
from grid.words import Usage


@dataclass(frozen=True, slots=True)
class RetrievalRequest:
    """`deadline_s` is in the loop's time; `allowed_regions` empty means anywhere."""

    request_id: str
    step_id: str
    tenant: Tenant
    source: DataSourceRecord
    query: str
    top_k: int
    filter: Mapping[str, Any]
    min_score: float | None
    allowed_regions: tuple[str, ...]
    deadline_s: float
    noted: RunStory | None = None


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    documents: tuple[RetrievedDocument, ...]
    """Best first; of a long document, the part that fits the query best."""
    usage: Usage
    placement: StepPlacement
    timing: StepTiming


class Retrieval:
    """`stores` maps a data source's type to the store of that type."""

    def __init__(self, *, placement: Places, links: LinkPool, stores: Mapping[str, VectorStore]) -> None:
        self._embedder = Embedder(placement=placement, links=links)
        self._stores = stores

    async def search(self, request: RetrievalRequest) -> RetrievalResult:
        """Raises Forbidden for a source outside the allowed regions, InvalidRequest for a filter or vectors
        that don't fit the source, and what embedding and the store raise."""
        source = request.source
        attributes = (
            PROVIDER,
            ("gen_ai.operation.name", "retrieval"),
            ("gen_ai.data_source.id", source.data_source_id),
        )
        with span(f"retrieval {source.name}", attributes=attributes):
            return await self._search(request)

    async def _search(self, request: RetrievalRequest) -> RetrievalResult:
        # Not the loop's time, which uvloop gives in whole milliseconds.
        started_s = time.monotonic()
        source = request.source
        check_region(source, request.allowed_regions)
        store = store_of(self._stores, source)
        where = parse_filter(request.filter)
        embedded = await self._embedder.embed(
            EmbedOrder(
                tenant_id=request.tenant.tenant_id,
                request_id=request.request_id,
                step_id=request.step_id,
                model=source.embedding_model,
                texts=(request.query,),
                allowed_regions=request.allowed_regions,
                deadline_s=request.deadline_s,
                noted=request.noted,
            )
        )
        collection = collection_of(request.tenant, source, embedded.vectors.shape[1])
        search_s = time.monotonic()
        try:
            with span(f"search {source.type}", Kind.CLIENT, (("db.system.name", source.type),)):
                async with asyncio.timeout_at(request.deadline_s):
                    hits = await store.search(
                        collection, embedded.vectors[0], where, request.top_k, request.min_score
                    )
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the vector store was searched") from None
        except NotFound:
            hits = ()  # a source that nobody has put documents into
        ended_s = time.monotonic()
        return RetrievalResult(
            documents=tuple(
                RetrievedDocument(hit.document_id, hit.text, hit.score, hit.metadata) for hit in hits
            ),
            usage=embedded.usage,
            placement=embedded.placement,
            timing=StepTiming(
                step_id=request.step_id,
                type="retrieval",
                total_ms=(ended_s - started_s) * 1000,
                placement_ms=embedded.placement_ms,
                queue_ms=embedded.queue_ms,
                embed_ms=embedded.embed_ms,
                search_ms=(ended_s - search_s) * 1000,
                usage=embedded.usage,
            ),
        )


def check_region(source: DataSourceRecord, allowed_regions: tuple[str, ...]) -> None:
    """Raises Forbidden when the source's vectors lie outside the allowed regions."""
    if allowed_regions and source.region not in allowed_regions:
        raise Forbidden(
            f"data source {source.data_source_id} lies in region {source.region!r}; "
            f"this request may use {', '.join(allowed_regions)}",
            param="data_source_id",
        )


def store_of(stores: Mapping[str, VectorStore], source: DataSourceRecord) -> VectorStore:
    try:
        return stores[source.type]
    except KeyError:
        raise InternalError(f"this cell no longer serves data sources of type {source.type!r}") from None


def collection_of(tenant: Tenant, source: DataSourceRecord, dimension: int) -> Collection:
    """Return the source's collection for vectors of `dimension` numbers.

    Raises InvalidRequest when the source holds vectors of another length. A source of another tenant is a
    bug of the caller: the registry hands out a tenant's own.
    """
    assert source.tenant_id == tenant.tenant_id, "a data source reached another tenant's request"
    if source.dimension not in (0, dimension):
        raise InvalidRequest(
            f"data source {source.data_source_id} holds vectors of {source.dimension} numbers, but "
            f"{source.embedding_model!r} makes {dimension}; create a data source for this model",
            param="query_embedding.dimension",
        )
    return Collection(tenant.tenant_id, source.data_source_id, dimension)
