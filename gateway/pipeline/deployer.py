"""Takes declared pipelines from `deploying` to `active` or `failed`, and failed ones to a new look.

Every replica runs one; a lease in Redis lets one of them work at a time. What a look means is decided in
`deployment`. Two that work at once for a moment do no harm: a status is written only over the revision that
was looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from redis.asyncio import Redis

from gateway.pipeline.deployment import (
    Finding,
    Seen,
    dry_runs,
    finding_of,
    is_due,
    retrieval_steps,
    transition,
)
from gateway.pipeline.registry import Registry, Unsettled
from gateway.pipeline.resolution import check_models, check_sources
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus
from gateway.state import Lease
from grid.config import Config
from grid.errors import GridError, InvalidRequest, NotFound
from grid.wire.messages import Fleet
from grid.words import Decision, PlacementRequest

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long pipelines wait for another replica when the one that works dies."""
POLL_S = 0.25
"""A pipeline that another replica took in is seen after at most this; two cheap reads of Redis each time."""
PLACE_TIMEOUT_S = 2.0
MAX_LOOKS = 100
"""Of one round, about 0.3 s: the lease is renewed between rounds."""


class Fleets(Protocol):
    """What is needed of `placement.client.PlacementClient`."""

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision: ...

    @property
    def fleet(self) -> Fleet: ...

    @property
    def connected(self) -> bool: ...

    def on_fleet(self, callback: Callable[[Fleet], None]) -> None: ...


class Deployer:
    """`start` it in the replica's loop; `wake` it when something changed that it should look at."""

    def __init__(self, *, redis: Redis, registry: Registry, placement: Fleets, config: Config) -> None:
        self._config = config
        self._registry = registry
        self._placement = placement
        self._lease = Lease(redis, "deployer", LEASE_S)
        self._tried: dict[Unsettled, Seen] = {}
        """Revisions that failed, and when; forgotten with the lease, so a new holder looks at all once."""
        self._waking = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        self._placement.on_fleet(lambda _fleet: self.wake())
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and let another replica go on at once."""
        # A cancel alone may get lost: what is awaited below can end together with it and swallow it.
        self._closing = True
        self.wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(GridError):
            await self._lease.release()

    def wake(self) -> None:
        """Look soon; never waits."""
        self._waking.set()

    async def round(self) -> int:
        """Look at the pipelines that are due, if this replica may; return how many changed their status."""
        if not self._placement.connected:
            return 0
        if not await self._lease.hold():
            self._tried.clear()
            return 0
        now = Seen(self._placement.fleet.version, await self._registry.sources_version())
        unsettled = await self._registry.unsettled()
        self._tried = {each: self._tried[each] for each in unsettled if each in self._tried}
        due = [each for each in unsettled if is_due(self._tried.get(each), now)]
        # New ones first: a tenant whose many failed pipelines are due again delays nobody's first look.
        due.sort(key=lambda each: each in self._tried)
        changed = 0
        for each in due[:MAX_LOOKS]:
            changed += await self._look(each, now)
        if len(due) > MAX_LOOKS:
            self.wake()
        return changed

    async def _run(self) -> None:
        while not self._closing:
            self._waking.clear()
            try:
                await self.round()
            except GridError as error:
                log.warning("pipelines were not looked at: %s", error.message)
            except Exception:
                log.exception("looking at pipelines failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._waking.wait()

    async def _look(self, unsettled: Unsettled, now: Seen) -> bool:
        tenant_id, pipeline_id, revision = unsettled
        try:
            record = await self._registry.get_pipeline(tenant_id, pipeline_id)
        except NotFound:
            return False  # deleted since the list was read
        if record.revision != revision:
            return False  # replaced since then, or remembered from before; the next round sees it
        next_status = transition(record.status, await self._findings(record, now))
        if next_status is None:
            return False
        written = await self._registry.set_status(
            tenant_id, pipeline_id, revision, next_status.status, next_status.reason
        )
        if next_status.status is PipelineStatus.FAILED:
            self._tried[unsettled] = now
        return written is not None and written.status is not record.status

    async def _findings(self, record: PipelineRecord, now: Seen) -> list[Finding]:
        try:
            check_models(record.contract, self._config)
        except InvalidRequest as unknown:
            return [Finding("contract", problem=unknown.message)]
        findings: list[Finding] = []
        sources: dict[str, DataSourceRecord] = {}
        for step_id, step in retrieval_steps(record.contract):
            try:
                if step.data_source_id is not None:
                    source = await self._registry.get_source(record.tenant_id, step.data_source_id)
                else:
                    source = await self._registry.find_source(record.tenant_id, step.source or "")
            except NotFound as unknown:
                findings.append(Finding(step_id, problem=unknown.message))
            else:
                sources[step_id] = source
        try:
            check_sources(record.contract, sources, self._config)
        except InvalidRequest as wrong:
            return [*findings, Finding("contract", problem=wrong.message)]
        for request in dry_runs(record, sources, now):
            refusal: GridError | None = None
            try:
                await self._placement.place(request, PLACE_TIMEOUT_S)
            except GridError as error:
                refusal = error
            findings.append(finding_of(request.step_id, refusal))
        return findings
