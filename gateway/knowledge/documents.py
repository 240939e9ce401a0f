"""What goes into a data source: documents are split, embedded in batches and stored whole.

The only writer of collections. Adding can be repeated: a document's id decides which rows it owns. What a
call that failed half-way did write is counted like the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gateway.knowledge.embedder import BATCH_TEXTS, Embedded, Embedder, EmbedOrder, Places
from gateway.knowledge.filters import check_metadata
from gateway.knowledge.retrieval import check_region, collection_of, store_of
from gateway.knowledge.sources.base import Piece, VectorStore
from gateway.knowledge.splitting import split_text
from gateway.pipeline.contract import clean_text
from gateway.pipeline.registry import Registry
from gateway.pipeline.resolution import stands_for
from gateway.records import DataSourceRecord, Tenant
from grid.config import Config
from grid.errors import InvalidRequest, NotFound
from grid.wire.link import LinkPool
from grid.words import Usage, new_id

MAX_DOCUMENTS = 1_000
"""Of one call; a longer load comes in several, each of which can be repeated."""
MAX_TEXT_CHARS = 2_000_000
"""Of one call, all documents together: some thousand pieces, minutes of work for a CPU unit."""
MAX_DOCUMENT_CHARS = 200_000
"""A document is stored in one write, which has to fit a frame of the link."""
MAX_DOCUMENT_ID_CHARS = 256
STORE_PIECES = 64
"""Pieces after which a write is made: progress shows, and a failure loses seconds of work."""
INLINE_SPLIT_CHARS = 20_000
"""Of one call, all documents together: 10 to 40 ms of splitting. More would stall every other
request of this process, so it's done in a thread."""
MAX_COUNTS = 8
"""Tries to record a count that nobody else changes meanwhile; whoever does records a later one."""
DEFAULT_WINDOW = 256
"""Word pieces that an embedding model reads when the configuration doesn't know it."""


class Document(Protocol):
    """A document as the caller's parser made it."""

    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one call has come."""

    documents_done: int
    documents_total: int
    pieces_done: int
    usage: Usage


class Documents:
    """`links` is a pool of its own for bulk work; `stores` maps a data source's type to its store."""

    def __init__(
        self,
        *,
        placement: Places,
        links: LinkPool,
        stores: Mapping[str, VectorStore],
        registry: Registry,
        config: Config,
    ) -> None:
        self._embedder = Embedder(placement=placement, links=links)
        self._stores = stores
        self._registry = registry
        self._config = config

    async def add(
        self,
        tenant: Tenant,
        source: DataSourceRecord,
        documents: Sequence[Document],
        *,
        allowed_regions: tuple[str, ...] = (),
        timeout_s: float | None = None,
        progress: Callable[[Progress], None] = lambda _progress: None,
    ) -> dict[str, int]:
        """Add documents, or replace those of the same id; return `added`, `replaced` and `document_count`.

        Raises InvalidRequest naming the document, Forbidden for a source outside the allowed regions, and
        what embedding and the store raise. `timeout_s` None: the configuration's deadline.
        """
        check_region(source, allowed_regions)
        check_documents(documents)
        deadline_s = asyncio.get_running_loop().time() + (
            timeout_s or self._config.gateway.default_deadline_s
        )
        window = self._window(source.embedding_model)
        in_thread = sum(len(document.text) for document in documents) > INLINE_SPLIT_CHARS
        load = _Load(tenant, source, new_id("load_"), allowed_regions, deadline_s)
        added = replaced = pieces_done = 0
        usage = Usage()
        group: list[Piece] = []
        try:
            for position, document in enumerate(documents, start=1):
                if in_thread:
                    group += await asyncio.to_thread(_pieces, document, window)
                else:
                    group += _pieces(document, window)
                if len(group) < STORE_PIECES and position < len(documents):
                    continue
                there, spent = await self._store(load, group)
                stored = len({piece.document_id for piece in group})
                added, replaced = added + stored - there, replaced + there
                pieces_done, usage = pieces_done + len(group), usage + spent
                group = []
                progress(Progress(position, len(documents), pieces_done, usage))
        finally:
            count = await self._settle(load) if load.dimension else source.document_count
        return {"added": added, "replaced": replaced, "document_count": count}

    async def delete_source(self, tenant: Tenant, data_source_id: str, *, force: bool = False) -> None:
        """Delete a data source and its vectors. A failure in between can be repeated.

        Raises NotFound, and Conflict where pipelines read it, unless that is to be ignored (`force`)."""
        source = await self._registry.read_source(tenant.tenant_id, data_source_id)
        if not force:
            await self._registry.check_unused(source)
        store, collection = store_of(self._stores, source), collection_of(tenant, source, source.dimension)
        # While the record stands a store that is away can be tried again.
        await store.drop(collection)
        await self._registry.delete_source(tenant.tenant_id, data_source_id)
        # A load may have settled between the two; one that settles from now on finds no record and drops.
        await store.drop(collection)

    async def _store(self, load: _Load, pieces: Sequence[Piece]) -> tuple[int, Usage]:
        """Embed and write one group of whole documents; return how many of them were there, and the cost."""
        batches = [await self._embed(load, pieces[start : start + BATCH_TEXTS]) for start in _starts(pieces)]
        vectors = np.concatenate([batch.vectors for batch in batches])
        collection = collection_of(load.tenant, load.source, vectors.shape[1])
        store = store_of(self._stores, load.source)
        if not load.dimension:
            await store.ensure(collection)
            load.dimension = collection.dimension
        there = await store.upsert(collection, pieces, vectors)
        return there, sum((batch.usage for batch in batches), Usage())

    async def _embed(self, load: _Load, pieces: Sequence[Piece]) -> Embedded:
        load.batches += 1
        return await self._embedder.embed(
            EmbedOrder(
                tenant_id=load.tenant.tenant_id,
                request_id=load.request_id,
                step_id=f"batch-{load.batches}",
                model=load.source.embedding_model,
                texts=tuple(piece.text for piece in pieces),
                allowed_regions=load.allowed_regions,
                deadline_s=load.deadline_s,
            )
        )

    async def _settle(self, load: _Load) -> int:
        """Write what the source holds now. If it was deleted meanwhile, what was just written goes too."""
        collection = collection_of(load.tenant, load.source, load.dimension)
        store = store_of(self._stores, load.source)
        count = await store.count(collection)
        for _attempt in range(MAX_COUNTS):
            try:
                await self._registry.touch_source(
                    load.tenant.tenant_id,
                    load.source.data_source_id,
                    document_count=count,
                    dimension=load.dimension,
                )
            except NotFound:
                await store.drop(collection)
                raise
            # Another load may have written between count and record: then the record is already old.
            written, count = count, await store.count(collection)
            if count == written:
                break
        return count

    def _window(self, name: str) -> int:
        resolved = stands_for(name, self._config)
        windows = [model.context_tokens for model in self._config.models if model.name == resolved]
        return windows[0] if windows else DEFAULT_WINDOW


@dataclass(slots=True)
class _Load:
    """One call of `add` under way."""

    tenant: Tenant
    source: DataSourceRecord
    request_id: str
    allowed_regions: tuple[str, ...]
    deadline_s: float
    batches: int = 0
    dimension: int = 0
    """Of the collection, once this call has made sure of it."""


def check_documents(documents: Sequence[Document]) -> None:
    """Raises InvalidRequest whose `param` is the path of what is wrong."""
    if not 0 < len(documents) <= MAX_DOCUMENTS:
        raise InvalidRequest(
            f"one call adds 1 to {MAX_DOCUMENTS} documents, not {len(documents)}", param="documents"
        )
    seen: dict[str, int] = {}
    total = 0
    for position, document in enumerate(documents):
        path = f"documents[{position}]"
        if not 0 < len(document.id) <= MAX_DOCUMENT_ID_CHARS:
            raise InvalidRequest(
                f"a document's id has 1 to {MAX_DOCUMENT_ID_CHARS} characters", param=f"{path}.id"
            )
        if document.id in seen:
            raise InvalidRequest(
                f"the id {document.id!r} is also that of documents[{seen[document.id]}]; each needs its own",
                param=f"{path}.id",
            )
        seen[document.id] = position
        if not document.text.strip() or len(document.text) > MAX_DOCUMENT_CHARS:
            raise InvalidRequest(
                f"a document's text has 1 to {MAX_DOCUMENT_CHARS} characters, not only blanks",
                param=f"{path}.text",
            )
        total += len(document.text)
        check_metadata(document.metadata, f"{path}.metadata")
    if total > MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"one call takes {MAX_TEXT_CHARS} characters of text, not {total}; send several",
            param="documents",
        )


def _pieces(document: Document, window: int) -> list[Piece]:
    texts = split_text(clean_text(document.text), window)
    return [Piece(document.id, index, text, document.metadata) for index, text in enumerate(texts)]


def _starts(pieces: Sequence[Piece]) -> range:
    return range(0, len(pieces), BATCH_TEXTS)
