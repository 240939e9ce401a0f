"""What a vector store is to the grid, and how a piece of a document lies in one.

Every call names a `Collection`, which belongs to one tenant; there is no call without one. A row carries its
tenant, and what a store returns is checked against it once more before anybody sees it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gateway.knowledge.filters import Filter, facets_of
from grid.errors import InternalError

SAFE = re.compile(r"[A-Za-z0-9_-]{1,64}")
POINT_NAMESPACE = uuid.UUID("8c1f5d0e-2b0b-5f0c-9a35-0a4e1d6f2c11")
"""Fixed for ever: document ids become row ids under it."""

TENANT, DOCUMENT, PIECE, TEXT, METADATA, TERMS, NUMBERS = (
    "tenant",
    "document",
    "piece",
    "text",
    "metadata",
    "terms",
    "numbers",
)
"""Fields of a row."""

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Collection:
    """The vectors of one data source of one tenant."""

    tenant_id: str
    source_id: str
    dimension: int

    def __post_init__(self) -> None:
        for part in (self.tenant_id, self.source_id):
            assert SAFE.fullmatch(part), "ids are made or checked before they come here"

    @property
    def name(self) -> str:
        """Unique over tenants, and safe as a folder's name: no id holds a dot."""
        return f"{self.tenant_id}.{self.source_id}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document that fits the embedding window; a short document is one piece."""

    document_id: str
    index: int
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hit:
    """A document's best piece for a query. `score` is the cosine similarity, -1 to 1."""

    document_id: str
    piece: int
    text: str
    score: float
    metadata: dict[str, Any]


class VectorStore(Protocol):
    """Where vectors lie. Every call can raise Rejected or UnitLost when the store is away."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ensure(self, collection: Collection) -> None:
        """Make the collection if it is missing. Raises Conflict if it exists with another dimension."""

    async def drop(self, collection: Collection) -> None:
        """Remove the collection and all it holds; one that is missing is fine."""

    async def upsert(self, collection: Collection, pieces: Sequence[Piece], vectors: Vectors) -> int:
        """Add or replace whole documents: `pieces` are all pieces of each document among them.

        `vectors` has shape (len(pieces), dimension). Pieces that an earlier version of a document had
        and this one has not are removed. Returns how many of the documents were there before.
        Raises NotFound if the collection is missing.
        """

    async def search(
        self, collection: Collection, vector: Vectors, where: Filter, top_k: int, min_score: float | None
    ) -> tuple[Hit, ...]:
        """Return up to `top_k` documents by their best piece, best first. `vector` has shape (dimension,).

        Raises NotFound if the collection is missing.
        """

    async def count(self, collection: Collection) -> int:
        """Return the number of documents, 0 if the collection is missing."""


def row_id(document_id: str, index: int) -> str:
    """Return the UUID of a piece: the same document always gets the same rows."""
    return str(uuid.uuid5(POINT_NAMESPACE, f"{index}:{document_id}"))


def rows_of(collection: Collection, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return the fields of each piece's row, JSON-like."""
    facets = {piece.document_id: facets_of(piece.metadata) for piece in pieces if piece.index == 0}
    return [
        {
            TENANT: collection.tenant_id,
            DOCUMENT: piece.document_id,
            PIECE: piece.index,
            TEXT: piece.text,
            METADATA: dict(piece.metadata),
            TERMS: list(facets[piece.document_id].terms),
            NUMBERS: facets[piece.document_id].numbers,
        }
        for piece in pieces
    ]


def hit_of(collection: Collection, row: Mapping[str, Any], score: float) -> Hit:
    """Return what a row says. Raises InternalError for a row of another tenant, which no store may return."""
    if row.get(TENANT) != collection.tenant_id:
        raise InternalError(
            "the vector store returned a row that is not this tenant's; nothing of it was used"
        )
    return Hit(row[DOCUMENT], int(row[PIECE]), row[TEXT], float(score), dict(row[METADATA]))


def best_pieces(scored: Sequence[tuple[str, float]], top_k: int) -> list[int]:
    """Return the positions of the first row of each document, at most `top_k`; `scored` is best first."""
    seen: set[str] = set()
    positions: list[int] = []
    for position, (document_id, _score) in enumerate(scored):
        if document_id not in seen:
            seen.add(document_id)
            positions.append(position)
            if len(positions) == top_k:
                break
    return positions
