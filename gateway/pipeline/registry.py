"""What tenants declared: pipelines and data sources. The only reader and writer of their records.

Every key of Redis that a call touches is built from the tenant's id, so a foreign id is looked for in the
caller's own namespace and is as unknown there as one that never existed.

    zg:{TENANT}:pipelines       hash  pipeline id → record
    zg:{TENANT}:sources         hash  data source id → record
    zg:{TENANT}:sources-names   hash  name → data source id
    zg:{TENANT}:made:…          what an idempotency key made, for a day
    zg:unsettled-pipelines      hash  "TENANT PIPELINE" → revision, of those that are deploying or failed
    zg:sources-version          counter, raised by every change of any data source

`get_pipeline`, `get_source` and `find_source` are on the hot path: they may be `tables.CACHE_S` (1 s) old in
a process that did not make the change itself. `read_pipeline` and `read_source` never are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from redis.asyncio import Redis

from gateway.pipeline.contract import Contract
from gateway.pipeline.stored import age_of, load_pipeline, load_source, store_pipeline, store_source
from gateway.pipeline.tables import FIRST_REVISION, Made, Swapped, Table, Tables
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus, Revision
from gateway.state import as_bytes, state_errors
from grid.errors import Conflict, IdempotencyReused, InvalidRequest, NotFound, TooLarge
from grid.words import new_id

UNSETTLED = "zg:unsettled-pipelines"
SOURCES_VERSION = "zg:sources-version"
MAX_CONTRACT_BYTES = 64 * 1024
"""A long system prompt has 20 KB. A record holds two at most, so a tenant's 1,000 at most 128 MB."""
MAX_PAGE = 100
"""Pipelines in one answer: at most 6 MB of contracts, a few hundred KB of usual ones."""
CURSOR_MARK = "~"
"""Between the time and the id of a cursor; neither holds one, and URLs take it as it is."""
MAX_NAMED = 8
"""Pipelines that a refusal names."""
MAX_SWAPS = 16
"""Attempts to write over a record that others write too; each failure means that somebody else succeeded."""

PIPELINES = Table("pipelines", "pipeline", "pipeline_id", bound=1_000, unsettled=UNSETTLED)
"""All are read to sort them for a page; a thousand contracts of a few KB are a few MB."""
SOURCES = Table(
    "sources", "data source", "data_source_id", bound=200, unique_names=True, version=SOURCES_VERSION
)
"""Each is a collection with files of its own in the vector store."""


class Unsettled(NamedTuple):
    """A revision that the deployer has to look at."""

    tenant_id: str
    pipeline_id: str
    revision: int


class Registry:
    """`clock` counts seconds, for the age of remembered reads only."""

    def __init__(self, client: Redis, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = client
        self._tables = Tables(client, clock)

    # --- pipelines --------------------------------------------------------------------------

    async def create_pipeline(
        self, tenant_id: str, contract: Contract, *, idempotency_key: str = ""
    ) -> PipelineRecord:
        """Store a new pipeline as `deploying`. A repeated idempotency key makes nothing: it answers with what
        the first call made, as that is now.

        Raises TooLarge for a contract above `MAX_CONTRACT_BYTES`, IdempotencyReused for the same key with
        another contract or when what it made was deleted, Conflict at the tenant's bound.
        """
        _check_size(contract)
        new = Made(new_id("pl-"), _now())
        record = PipelineRecord(
            pipeline_id=new.record_id,
            tenant_id=tenant_id,
            name=contract.name or "",
            revision=FIRST_REVISION,
            contract=contract,
            status=PipelineStatus.DEPLOYING,
            reason="",
            created_at=new.created_at,
            updated_at=new.created_at,
        )
        made = await self._tables.create(
            PIPELINES,
            tenant_id,
            new,
            store_pipeline(record),
            body=contract.model_dump(mode="json"),
            idempotency_key=idempotency_key,
        )
        if made == new:
            return record
        return load_pipeline(await self._made_before(PIPELINES, tenant_id, made))

    async def revise_pipeline(
        self, tenant_id: str, pipeline_id: str, contract: Contract, *, idempotency_key: str = ""
    ) -> PipelineRecord:
        """Make `contract` the pipeline's next revision, `deploying`; until it is active, calls run the newest
        one that was. Of several at once each becomes a revision of its own. A contract that equals the
        newest revision's makes none: the pipeline is returned as it is.

        A repeated idempotency key makes no revision, and answers with the pipeline as it is now. Raises
        NotFound, TooLarge and IdempotencyReused as above.
        """
        _check_size(contract)
        body = contract.model_dump(mode="json")
        for _attempt in range(MAX_SWAPS):
            old = await self._tables.read(PIPELINES, tenant_id, pipeline_id)
            now = load_pipeline(old)
            active = now.status is PipelineStatus.ACTIVE
            is_new = body != now.contract.model_dump(mode="json")
            record = replace(
                now,
                name=contract.name or "",
                revision=now.revision + 1,
                contract=contract,
                status=PipelineStatus.DEPLOYING,
                reason="",
                updated_at=_now(),
                serving=Revision(now.revision, now.contract) if active else now.serving,
            )
            swapped = await self._tables.swap(
                PIPELINES,
                tenant_id,
                pipeline_id,
                old,
                store_pipeline(record) if is_new else old,
                unsettled_revision=record.revision if is_new else None if active else now.revision,
                body=body,
                idempotency_key=idempotency_key,
            )
            if swapped is Swapped.SWAPPED:
                return record if is_new else now
            if swapped is Swapped.REPEATED:
                return load_pipeline(await self._tables.read(PIPELINES, tenant_id, pipeline_id))
        raise _contended(f"pipeline {pipeline_id}")

    async def read_pipeline(self, tenant_id: str, pipeline_id: str) -> PipelineRecord:
        """Return a pipeline as it is now. Raises NotFound, for a foreign id too."""
        return load_pipeline(await self._tables.read(PIPELINES, tenant_id, pipeline_id))

    async def get_pipeline(self, tenant_id: str, pipeline_id: str) -> PipelineRecord:
        """Raises NotFound, for a foreign id too."""

        async def load() -> PipelineRecord:
            return await self.read_pipeline(tenant_id, pipeline_id)

        return await self._tables.remembered(tenant_id, "pipeline", pipeline_id, load)

    async def list_pipelines(
        self, tenant_id: str, *, limit: int = MAX_PAGE, after: str = ""
    ) -> tuple[list[PipelineRecord], str]:
        """Return up to `limit` of the tenant's pipelines, oldest first, and the cursor of the next page.

        `after` is such a cursor, "" for the first page; the cursor of the last page is "". What is made or
        deleted meanwhile makes no other pipeline come twice or not at all. Raises InvalidRequest.
        """
        last = _place(after)
        stored = await self._tables.read_all(PIPELINES, tenant_id)
        left = sorted((age, each) for each in stored if (age := age_of(each)) > last)
        page = [load_pipeline(each) for _, each in left[:limit]]
        more = len(left) > limit
        return page, _cursor(page[-1]) if more else ""

    async def delete_pipeline(self, tenant_id: str, pipeline_id: str) -> None:
        """Raises NotFound. Calls in flight finish on what they loaded."""
        await self._tables.delete(PIPELINES, tenant_id, pipeline_id)

    async def set_status(
        self, tenant_id: str, pipeline_id: str, revision: int, status: PipelineStatus, reason: str
    ) -> PipelineRecord | None:
        """Write what became of one revision. Returns None, and writes nothing, if it is gone or replaced."""
        for _attempt in range(MAX_SWAPS):
            try:
                old = await self._tables.read(PIPELINES, tenant_id, pipeline_id)
            except NotFound:
                return None
            record = load_pipeline(old)
            if record.revision != revision:
                return None
            if (record.status, record.reason) == (status, reason):
                return record
            settled = status is PipelineStatus.ACTIVE
            record = replace(
                record,
                status=status,
                reason=reason,
                updated_at=_now(),
                serving=None if settled else record.serving,
            )
            swapped = await self._tables.swap(
                PIPELINES,
                tenant_id,
                pipeline_id,
                old,
                store_pipeline(record),
                unsettled_revision=None if settled else revision,
            )
            if swapped is Swapped.SWAPPED:
                return record
        raise _contended(f"pipeline {pipeline_id}")

    async def unsettled(self) -> list[Unsettled]:
        """Return every pipeline whose newest revision is deploying or failed. For the deployer."""
        with state_errors():
            revisions = await self._redis.hgetall(UNSETTLED)
        found = []
        for member, revision in revisions.items():
            tenant_id, pipeline_id = as_bytes(member).decode().split(" ", 1)
            found.append(Unsettled(tenant_id, pipeline_id, int(revision)))
        return sorted(found)

    # --- data sources -----------------------------------------------------------------------

    async def create_source(
        self,
        tenant_id: str,
        *,
        name: str,
        type: str,
        config: Mapping[str, Any],
        region: str,
        embedding_model: str,
        dimension: int,
        idempotency_key: str = "",
    ) -> DataSourceRecord:
        """Store a new data source; `dimension` 0 means: as the embedding model's first vectors say.

        Raises Conflict for a name that the tenant already uses and at its bound, IdempotencyReused as above.
        """
        new = Made(new_id("ds-"), _now())
        record = DataSourceRecord(
            data_source_id=new.record_id,
            tenant_id=tenant_id,
            name=name,
            type=type,
            config=dict(config),
            region=region,
            embedding_model=embedding_model,
            dimension=dimension,
            document_count=0,
            last_updated_at="",
            created_at=new.created_at,
        )
        made = await self._tables.create(
            SOURCES,
            tenant_id,
            new,
            store_source(record),
            name=name,
            body=[name, type, dict(config), region, embedding_model, dimension],
            idempotency_key=idempotency_key,
        )
        if made == new:
            return record
        return load_source(await self._made_before(SOURCES, tenant_id, made))

    async def read_source(self, tenant_id: str, data_source_id: str) -> DataSourceRecord:
        """Return a data source as it is now. Raises NotFound, for a foreign id too."""
        return load_source(await self._tables.read(SOURCES, tenant_id, data_source_id))

    async def get_source(self, tenant_id: str, data_source_id: str) -> DataSourceRecord:
        """Raises NotFound, for a foreign id too."""

        async def load() -> DataSourceRecord:
            return await self.read_source(tenant_id, data_source_id)

        return await self._tables.remembered(tenant_id, "source", data_source_id, load)

    async def find_source(self, tenant_id: str, name: str) -> DataSourceRecord:
        """Return the tenant's data source of that name. Raises NotFound."""

        async def load() -> DataSourceRecord:
            return load_source(await self._tables.read_named(SOURCES, tenant_id, name))

        return await self._tables.remembered(tenant_id, "source name", name, load)

    async def list_sources(self, tenant_id: str) -> list[DataSourceRecord]:
        """Return the tenant's data sources, oldest first."""
        records = [load_source(stored) for stored in await self._tables.read_all(SOURCES, tenant_id)]
        return sorted(records, key=lambda record: (record.created_at, record.data_source_id))

    async def check_unused(self, source: DataSourceRecord) -> None:
        """Raise Conflict, which names them, if pipelines of its tenant read this data source: in the newest
        revision, or in the one that serves until that is active."""
        stored = await self._tables.read_all(PIPELINES, source.tenant_id)
        using = [record for record in map(load_pipeline, stored) if _reads(record, source)]
        if using:
            shown = ", ".join(f"{each.name or 'unnamed'} ({each.pipeline_id})" for each in using[:MAX_NAMED])
            more = f" and {len(using) - MAX_NAMED} more" if len(using) > MAX_NAMED else ""
            raise Conflict(
                f"data source {source.name!r} is read by {shown}{more}; delete or revise what reads it, or "
                "delete it all the same with `force=true`: their calls then answer 404",
                param="data_source_id",
                pipelines=[each.pipeline_id for each in using[:MAX_NAMED]],
            )

    async def delete_source(self, tenant_id: str, data_source_id: str) -> None:
        """Forget a data source; its vectors are the caller's to drop first. Raises NotFound."""
        record = load_source(await self._tables.read(SOURCES, tenant_id, data_source_id))
        await self._tables.delete(SOURCES, tenant_id, data_source_id, record.name)

    async def touch_source(
        self, tenant_id: str, data_source_id: str, *, document_count: int, dimension: int
    ) -> DataSourceRecord:
        """Write what a change of documents left behind; `last_updated_at` becomes now.

        Raises NotFound, and Conflict when `dimension` contradicts one that is already known.
        """
        for _attempt in range(MAX_SWAPS):
            old = await self._tables.read(SOURCES, tenant_id, data_source_id)
            record = load_source(old)
            if record.dimension not in (0, dimension):
                raise Conflict(
                    f"data source {data_source_id} holds vectors of {record.dimension} numbers, "
                    f"not {dimension}"
                )
            record = replace(
                record, dimension=dimension, document_count=document_count, last_updated_at=_now()
            )
            swapped = await self._tables.swap(SOURCES, tenant_id, data_source_id, old, store_source(record))
            if swapped is Swapped.SWAPPED:
                return record
        raise _contended(f"data source {data_source_id}")

    async def sources_version(self) -> int:
        """Return a number that rises with every change of any data source."""
        with state_errors():
            return int(await self._redis.get(SOURCES_VERSION) or 0)

    async def _made_before(self, table: Table, tenant_id: str, made: Made) -> bytes:
        """Return what an idempotency key made, as it is now. Raises IdempotencyReused when it is gone: a call
        that is repeated never brings back what was deleted."""
        try:
            return await self._tables.read(table, tenant_id, made.record_id)
        except NotFound:
            raise IdempotencyReused(
                f"this idempotency key made {table.noun} {made.record_id}, which was deleted since; use a "
                "new key to make another",
                param="idempotency-key",
            ) from None


def _reads(record: PipelineRecord, source: DataSourceRecord) -> bool:
    contracts = [record.contract, *([record.serving.contract] if record.serving is not None else [])]
    return any(
        step.data_source_id == source.data_source_id or step.source == source.name
        for contract in contracts
        for step in contract.pipeline.retrievals
    )


def _check_size(contract: Contract) -> None:
    size = len(contract.model_dump_json().encode())
    if size > MAX_CONTRACT_BYTES:
        raise TooLarge(
            f"the contract has {size} bytes; {MAX_CONTRACT_BYTES} can be stored. "
            "Send long texts with the call, as `input` or `variables`",
            param="pipeline",
        )


def _contended(what: str) -> Conflict:
    return Conflict(f"{what} is being changed by others all the time; try again")


def _cursor(record: PipelineRecord) -> str:
    return f"{record.created_at}{CURSOR_MARK}{record.pipeline_id}"


def _place(cursor: str) -> tuple[str, str]:
    """Return what the record of a cursor was ordered by. Raises InvalidRequest for what is none."""
    created_at, mark, pipeline_id = cursor.partition(CURSOR_MARK)
    if cursor and not (mark and pipeline_id.startswith("pl-")):
        raise InvalidRequest("after: is no cursor; give the `next` of the page before", param="after")
    return created_at, pipeline_id


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
