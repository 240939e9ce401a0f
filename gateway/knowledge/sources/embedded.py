"""The cell's own vector store: one process owns the engine, gateways call it over the link.

`VectorsActor` is the owner; every call runs in its one thread, in the order of arrival, so the engine never
sees two at once. `EmbeddedStore` is a gateway's side: searches on one connection, bulk writes on another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gateway.knowledge.filters import AnyTerm, Filter, InRange
from gateway.knowledge.sources.base import Collection, Hit, Piece, Vectors
from gateway.knowledge.sources.edge import EdgeFolder, as_rows
from gateway.trust.keyfiles import LINK_KEY_FILE, read_secret, secret_path
from grid.config import Config
from grid.errors import GridError, InternalError, InvalidRequest, Saturated, UnitLost
from grid.wire.link import LinkServer, Peer, Reconnecting, Resolve
from grid.wire.messages import Refused, StoreCall, StoreReply, WireMessage

log = logging.getLogger(__name__)

ROLE = "store"
PEER_ID = "vectors"
FOLDER = "vectors"
MAX_PENDING_CALLS = 256
"""Calls that wait for the one thread: at 2 ms a search, half a second's worth."""
RETRY_AFTER_S = 1.0
CALL_TIMEOUT_S = 10.0
"""A search takes milliseconds; this covers one that waits behind an index build."""
BULK_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
"""A restarted owner is back sooner than this."""


class VectorsActor:
    """Owner of the state folder's vectors. `address()` starts it when it is first asked."""

    def __init__(self, config: Config, host: str = "127.0.0.1") -> None:
        self._host = host
        self._path = config.cell.state_dir.expanduser().absolute() / FOLDER
        self._secret = read_secret(secret_path(config.cell.state_dir, LINK_KEY_FILE))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vectors")
        self._starting = asyncio.Lock()
        self._folder: EdgeFolder | None = None
        self._server: LinkServer | None = None
        self._address: tuple[str, int] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def address(self) -> tuple[str, int]:
        """Return where the store listens. Raises InternalError when another process owns the folder."""
        async with self._starting:
            if self._address is None:
                self._folder = await self._in_thread(EdgeFolder, self._path)
                self._server = LinkServer(role=ROLE, peer_id=PEER_ID, secret=self._secret, handler=self)
                self._address = await self._server.start(self._host)
            return self._address

    async def close(self) -> None:
        """Finish what was accepted, write everything out, let go of the folder."""
        if self._calls:
            await asyncio.wait(self._calls)
        if self._server is not None:
            await self._server.close("closed", "the vector store stops")
        if self._folder is not None:
            await self._in_thread(self._folder.close)
            self._folder = None
        self._address = None
        self._thread.shutdown()

    # --- link handler -----------------------------------------------------------------------

    def connected(self, peer: Peer) -> None:
        log.debug("connected: %s %s", peer.role, peer.peer_id)

    def disconnected(self, peer: Peer, reason: str) -> None:
        log.debug("disconnected: %s %s (%s)", peer.role, peer.peer_id, reason)

    def received(self, peer: Peer, message: WireMessage) -> None:
        if not isinstance(message, StoreCall):
            return
        if len(self._calls) >= MAX_PENDING_CALLS:
            busy = Saturated("the vector store has too many calls waiting", retry_after_s=RETRY_AFTER_S)
            peer.send(Refused.of(message.stream, busy))
            return
        task = asyncio.create_task(self._answer(peer, message))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, peer: Peer, call: StoreCall) -> None:
        assert self._folder is not None
        try:
            result = await self._in_thread(_run, self._folder, call)
            # Encodes at once, and refuses a reply that no frame holds: the caller is told that too.
            peer.send(StoreReply(call.stream, result))
        except GridError as error:
            peer.send(Refused.of(call.stream, error))
            return
        except Exception as error:  # the engine raises bare Exceptions; their text may quote a document
            log.error("%s on %s failed: %s", call.op, call.collection, type(error).__name__)
            peer.send(Refused.of(call.stream, InternalError(f"the vector store could not {call.op}")))
            return
        if call.op == "upsert":
            await self._in_thread(self._folder.optimise)

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _run(folder: EdgeFolder, call: StoreCall) -> dict[str, Any]:
    """Carry out one call, in the owner's thread."""
    operation = _OPERATIONS.get(call.op)
    if operation is None:
        raise InvalidRequest(f"the vector store knows no operation {call.op!r}", param="op")
    collection = Collection(call.args["tenant"], call.args["source"], int(call.args["dimension"]))
    if collection.name != call.collection:
        raise InternalError("a call names one collection and means another; nothing was done")
    return operation(folder, collection, call)


def _ensure(folder: EdgeFolder, collection: Collection, _call: StoreCall) -> dict[str, Any]:
    folder.ensure(collection)
    return {}


def _drop(folder: EdgeFolder, collection: Collection, _call: StoreCall) -> dict[str, Any]:
    folder.drop(collection)
    return {}


def _count(folder: EdgeFolder, collection: Collection, _call: StoreCall) -> dict[str, Any]:
    return {"documents": folder.count(collection)}


def _upsert(folder: EdgeFolder, collection: Collection, call: StoreCall) -> dict[str, Any]:
    metadata = call.args["metadata"]
    pieces = [
        Piece(document_id, index, text, metadata[document_id])
        for document_id, index, text in call.args["pieces"]
    ]
    return {
        "replaced": folder.upsert(collection, pieces, as_rows(call.data, len(pieces), collection.dimension))
    }


def _search(folder: EdgeFolder, collection: Collection, call: StoreCall) -> dict[str, Any]:
    vector = as_rows(call.data, 1, collection.dimension)[0]
    where = Filter(tuple(_condition_from(given) for given in call.args["where"]))
    hits = folder.search(collection, vector, where, call.args["top_k"], call.args["min_score"])
    return {"hits": [[hit.document_id, hit.piece, hit.text, hit.score, hit.metadata] for hit in hits]}


_OPERATIONS: dict[str, Callable[[EdgeFolder, Collection, StoreCall], dict[str, Any]]] = {
    "ensure": _ensure,
    "drop": _drop,
    "count": _count,
    "upsert": _upsert,
    "search": _search,
}


def _condition_to(condition: AnyTerm | InRange) -> dict[str, Any]:
    if isinstance(condition, AnyTerm):
        return {"terms": list(condition.terms)}
    return {
        "name": condition.name,
        "gte": condition.gte,
        "gt": condition.gt,
        "lte": condition.lte,
        "lt": condition.lt,
    }


def _condition_from(given: dict[str, Any]) -> AnyTerm | InRange:
    return AnyTerm(tuple(given["terms"])) if "terms" in given else InRange(**given)


class EmbeddedStore:
    """A gateway's side of the cell's own store. A VectorStore."""

    def __init__(self, resolve: Resolve, *, peer_id: str, secret: bytes) -> None:
        self._searches = Reconnecting(resolve, role="gateway", peer_id=peer_id, secret=secret)
        self._bulk = Reconnecting(resolve, role="gateway", peer_id=f"{peer_id}/bulk", secret=secret)

    async def start(self) -> None:
        await self._searches.start()
        await self._bulk.start()

    async def close(self) -> None:
        await self._searches.close()
        await self._bulk.close()

    async def ensure(self, collection: Collection) -> None:
        await self._call(self._bulk, "ensure", collection, {})

    async def drop(self, collection: Collection) -> None:
        await self._call(self._bulk, "drop", collection, {})

    async def upsert(self, collection: Collection, pieces: Sequence[Piece], vectors: Vectors) -> int:
        # A document's metadata travels once, whatever the number of its pieces.
        args = {
            "metadata": {piece.document_id: dict(piece.metadata) for piece in pieces},
            "pieces": [[piece.document_id, piece.index, piece.text] for piece in pieces],
        }
        reply = await self._call(self._bulk, "upsert", collection, args, vectors.astype("<f4").tobytes())
        return int(reply["replaced"])

    async def search(
        self, collection: Collection, vector: Vectors, where: Filter, top_k: int, min_score: float | None
    ) -> tuple[Hit, ...]:
        args = {
            "where": [_condition_to(condition) for condition in where.conditions],
            "top_k": top_k,
            "min_score": min_score,
        }
        reply = await self._call(self._searches, "search", collection, args, vector.astype("<f4").tobytes())
        return tuple(Hit(*hit) for hit in reply["hits"])

    async def count(self, collection: Collection) -> int:
        reply = await self._call(self._searches, "count", collection, {})
        return int(reply["documents"])

    async def _call(
        self, over: Reconnecting, op: str, collection: Collection, args: dict[str, Any], data: bytes = b""
    ) -> dict[str, Any]:
        """Make one call, and once more if the owner went away: every operation can be repeated."""
        named = {
            "tenant": collection.tenant_id,
            "source": collection.source_id,
            "dimension": collection.dimension,
            **args,
        }
        timeout_s = BULK_TIMEOUT_S if over is self._bulk else CALL_TIMEOUT_S
        for attempt in (1, 2):
            link = await over.wait(CONNECT_TIMEOUT_S)
            try:
                reply = await link.call(
                    lambda stream: StoreCall(stream, op, collection.name, named, data), timeout_s
                )
            except UnitLost:
                if attempt == 2:
                    raise
            else:
                if not isinstance(reply, StoreReply):
                    raise InternalError(f"the vector store answered a call with {type(reply).__name__}")
                return reply.result
        raise AssertionError("the loop above returns or raises")
