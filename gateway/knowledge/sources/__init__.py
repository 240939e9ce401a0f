"""The kinds of data source that a cell serves, in plain sight: a type's name and how its store is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.knowledge.sources.base import VectorStore
from gateway.knowledge.sources.embedded import EmbeddedStore
from gateway.trust.keyfiles import read_secret
from grid.config import Config
from grid.wire.link import Resolve


def _qdrant(config: Config, resolve: Resolve, peer_id: str, secret: bytes) -> VectorStore:
    """The cell's own store, or the Qdrant server that the operator configured in its place."""
    if not config.vectors.qdrant_url:
        return EmbeddedStore(resolve, peer_id=peer_id, secret=secret)
    # Imported here: the client takes half a second to load, and most cells don't use it.
    from gateway.knowledge.sources.qdrant import QdrantStore

    key_file = config.vectors.qdrant_api_key_file
    api_key = read_secret(Path(key_file).expanduser()).decode().strip() if key_file else None
    return QdrantStore.at(config.vectors.qdrant_url, api_key)


STORES: dict[str, Callable[[Config, Resolve, str, bytes], VectorStore]] = {"qdrant": _qdrant}


def open_stores(config: Config, resolve: Resolve, *, peer_id: str, secret: bytes) -> dict[str, VectorStore]:
    """Return one store a type of data source, not started yet. `resolve` finds the cell's own store."""
    return {name: open_store(config, resolve, peer_id, secret) for name, open_store in STORES.items()}
