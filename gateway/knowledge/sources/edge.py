"""One folder of vectors and the engine on it: Qdrant's own, in this process. Blocking; one thread at a time.

The folder has one owner: a lock is held on it for as long as an `EdgeFolder` is open, because a second
engine on the same files would ruin them. A collection is a shard in a folder of its own; it appears whole,
by a rename, and leaves the same way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import orjson
import qdrant_edge as edge

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
from grid.errors import Conflict, InternalError, InvalidRequest, NotFound, Saturated

MAX_OPEN_SHARDS = 64
"""An open shard costs threads, files and a few MB; the one that was used longest ago is closed."""
MAX_ROWS_PER_COLLECTION = 500_000
"""At 384 numbers a row that is 0.8 GB of vectors: above it a Qdrant server serves better."""
FETCH_PER_DOCUMENT = 4
"""Rows looked at for each document wanted at first: long documents have several pieces."""
MAX_FETCH = 4_096
OPTIMISE_ROWS = 20_000
"""New rows after which an index is built: below it a full scan takes under 20 ms."""
META = "collection.json"
SHARD = "shard"


class EdgeFolder:
    """Owner of `folder`. Raises InternalError, naming the owner, when another process has it open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _own(folder)
        self._open: OrderedDict[str, edge.EdgeShard] = OrderedDict()
        self._unindexed: dict[str, int] = {}
        for left in (*folder.glob("*.making"), *folder.glob("*.leaving")):
            shutil.rmtree(left)

    def close(self) -> None:
        """Write everything out and let go of the folder."""
        for shard in self._open.values():
            shard.flush()
            shard.close()
        self._open.clear()
        self._lock.close()

    def ensure(self, collection: Collection) -> None:
        folder = self._folder / collection.name
        if folder.exists():
            self._check(collection)
            return
        making = self._folder / f"{collection.name}.making"
        shutil.rmtree(making, ignore_errors=True)
        (making / SHARD).mkdir(parents=True, mode=0o700)
        vectors = edge.EdgeVectorParams(size=collection.dimension, distance=edge.Distance.Cosine)
        shard = edge.EdgeShard.create(
            str(making / SHARD), edge.EdgeConfig(vectors=vectors, max_search_threads=1)
        )
        for field, schema in (
            (TERMS, edge.PayloadSchemaType.Keyword),
            (DOCUMENT, edge.PayloadSchemaType.Keyword),
            (PIECE, edge.PayloadSchemaType.Integer),
        ):
            shard.update(edge.UpdateOperation.create_field_index(field, schema))
        shard.flush()
        shard.close()
        meta = {
            "tenant": collection.tenant_id,
            "source": collection.source_id,
            "dimension": collection.dimension,
        }
        (making / META).write_bytes(orjson.dumps(meta))
        making.rename(folder)

    def drop(self, collection: Collection) -> None:
        folder = self._folder / collection.name
        shard = self._open.pop(collection.name, None)
        self._unindexed.pop(collection.name, None)
        if shard is not None:
            shard.close()
        if folder.exists():
            leaving = self._folder / f"{collection.name}.leaving"
            folder.rename(leaving)
            shutil.rmtree(leaving)

    def upsert(self, collection: Collection, pieces: Sequence[Piece], vectors: Vectors) -> int:
        shard = self._shard(collection)
        if vectors.shape != (len(pieces), collection.dimension):
            raise InvalidRequest(
                f"expected {len(pieces)} x {collection.dimension} numbers, not {vectors.shape}"
            )
        if shard.count(edge.CountRequest(exact=False)) + len(pieces) > MAX_ROWS_PER_COLLECTION:
            raise Saturated(
                f"the embedded store takes {MAX_ROWS_PER_COLLECTION} pieces of text a data source; "
                "set vectors.qdrant_url in grid.yaml to a Qdrant server for more"
            )
        ids = [row_id(piece.document_id, piece.index) for piece in pieces]
        points = [
            edge.Point(id=point_id, vector=vector.tolist(), payload=row)
            for point_id, vector, row in zip(ids, vectors, rows_of(collection, pieces), strict=True)
        ]
        among = edge.FieldCondition(
            key=DOCUMENT, match=edge.MatchAny(sorted({piece.document_id for piece in pieces}))
        )
        replaced = shard.count(edge.CountRequest(filter=edge.Filter(must=[among, _first_piece()])))
        # New rows first: whoever stops in between leaves old pieces too many, never a document too few.
        shard.update(edge.UpdateOperation.upsert_points(points))
        stale = edge.Filter(must=[among], must_not=[edge.HasIdCondition(set(ids))])
        shard.update(edge.UpdateOperation.delete_points_by_filter(stale))
        self._unindexed[collection.name] = self._unindexed.get(collection.name, 0) + len(pieces)
        return int(replaced)

    def search(
        self, collection: Collection, vector: Vectors, where: Filter, top_k: int, min_score: float | None
    ) -> list[Hit]:
        shard = self._shard(collection)
        if vector.shape != (collection.dimension,):
            raise InvalidRequest(f"a vector of {collection.dimension} numbers expected, not {vector.size}")
        query = edge.Query.Nearest(vector.tolist())
        limit = min(top_k * FETCH_PER_DOCUMENT, MAX_FETCH)
        while True:
            found = shard.query(
                edge.QueryRequest(
                    limit=limit,
                    query=query,
                    filter=_edge_filter(where),
                    score_threshold=min_score,
                    with_payload=[DOCUMENT],
                )
            )
            best = best_pieces([((point.payload or {})[DOCUMENT], point.score) for point in found], top_k)
            if len(best) == top_k or len(found) < limit or limit == MAX_FETCH:
                break
            limit = min(limit * 4, MAX_FETCH)
        winners = [found[position] for position in best]
        payloads = {
            str(record.id): record.payload or {}
            for record in shard.retrieve(
                [point.id for point in winners], with_payload=True, with_vector=False
            )
        }
        return [hit_of(collection, payloads[str(point.id)], point.score) for point in winners]

    def count(self, collection: Collection) -> int:
        try:
            shard = self._shard(collection)
        except NotFound:
            return 0
        return int(shard.count(edge.CountRequest(filter=edge.Filter(must=[_first_piece()]))))

    def optimise(self) -> bool:
        """Build the index of one collection that needs it; True when there was one."""
        for name, rows in self._unindexed.items():
            if rows >= OPTIMISE_ROWS:
                self._unindexed[name] = 0
                shard = self._open.get(name)
                if shard is not None:
                    shard.optimize()
                    return True
        return False

    def _shard(self, collection: Collection) -> edge.EdgeShard:
        shard = self._open.get(collection.name)
        if shard is None:
            self._check(collection)
            shard = edge.EdgeShard.load(str(self._folder / collection.name / SHARD))
            self._open[collection.name] = shard
            if len(self._open) > MAX_OPEN_SHARDS:
                _name, oldest = self._open.popitem(last=False)
                oldest.flush()
                oldest.close()
        self._open.move_to_end(collection.name)
        return shard

    def _check(self, collection: Collection) -> None:
        """The folder's own record must agree with the call. Raises NotFound or Conflict."""
        try:
            meta = orjson.loads((self._folder / collection.name / META).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"the data source {collection.source_id} has no documents yet") from None
        assert (meta["tenant"], meta["source"]) == (collection.tenant_id, collection.source_id)
        if meta["dimension"] != collection.dimension:
            raise Conflict(
                f"data source {collection.source_id} holds vectors of {meta['dimension']} numbers, "
                f"not {collection.dimension}"
            )


def _own(folder: Path) -> IO[str]:
    lock = open(folder / "owner.lock", "a+")  # noqa: SIM115  held as long as the folder is
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise InternalError(
            f"the vectors in {folder} are open in another process (pid {owner}); stop that cell first"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _first_piece() -> edge.FieldCondition:
    """Every document has exactly one."""
    return edge.FieldCondition(key=PIECE, match=edge.MatchValue(0))


def _edge_filter(where: Filter) -> edge.Filter | None:
    if not where.conditions:
        return None
    return edge.Filter(must=[_edge_condition(condition) for condition in where.conditions])


def _edge_condition(condition: AnyTerm | InRange) -> edge.FieldCondition:
    if isinstance(condition, AnyTerm):
        return edge.FieldCondition(key=TERMS, match=edge.MatchAny(list(condition.terms)))
    bounds = edge.RangeFloat(gte=condition.gte, gt=condition.gt, lte=condition.lte, lt=condition.lt)
    return edge.FieldCondition(key=f"{NUMBERS}.{condition.name}", range=bounds)


def as_rows(data: bytes, rows: int, dimension: int) -> Vectors:
    """Return `data` (row-major little-endian float32) as an array. Raises InvalidRequest if it can't be."""
    if len(data) != rows * dimension * 4:
        raise InvalidRequest(
            f"{rows} x {dimension} numbers take {rows * dimension * 4} bytes, not {len(data)}"
        )
    return np.frombuffer(data, dtype="<f4").reshape(rows, dimension)
