"""What the gateway keeps about its users' things: tenants, pipelines, data sources. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway.pipeline.contract import Contract


def tenant_key(tenant_id: str, what: str) -> str:
    """Return the key of Redis of something that is a tenant's own. All such keys are made here, so that no
    tenant's call ever names another's."""
    return f"zg:{{{tenant_id}}}:{what}"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls. `salt` separates the tenant's prefix caches from every other's."""

    tenant_id: str
    key_id: str
    operator: bool
    salt: str


class PipelineStatus(StrEnum):
    DEPLOYING = "deploying"
    ACTIVE = "active"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Revision:
    number: int
    contract: Contract


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """A pipeline; contract, status and reason are those of its newest revision."""

    pipeline_id: str
    """`pl-…`"""
    tenant_id: str
    name: str
    revision: int
    contract: Contract
    status: PipelineStatus
    reason: str
    """Why it failed, with what would have to change; "" otherwise."""
    created_at: str
    """RFC 3339, UTC."""
    updated_at: str
    serving: Revision | None = None
    """While the newest revision is not active: the one before it that was, which calls run meanwhile."""


GRID_EMBEDDED_TYPES = frozenset({"qdrant"})
"""Types of data source whose vectors the grid makes itself, from the documents that it is given."""


@dataclass(frozen=True, slots=True)
class DataSourceRecord:
    data_source_id: str
    """`ds-…`"""
    tenant_id: str
    name: str
    type: str
    config: dict[str, Any]
    region: str
    embedding_model: str
    dimension: int
    document_count: int
    last_updated_at: str
    created_at: str

    @property
    def grid_embeds(self) -> bool:
        """Whether the grid made the vectors, and so may choose how a query for them is embedded."""
        return self.type in GRID_EMBEDDED_TYPES


@dataclass(frozen=True, slots=True)
class RetrievedDocument:
    document_id: str
    text: str
    score: float
    metadata: dict[str, Any] = field(default_factory=dict)
