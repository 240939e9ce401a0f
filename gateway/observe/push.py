"""Sends the cell's figures to an OTLP collector, from one gateway replica at a time. The shell of `otlp.py`.

Figures are the whole cell's, so replicas that all sent them would be added up by whoever adds up instances:
the holder of a lease sends, another replica goes on when it is gone. No request waits for any of it, and a
collector that is away costs a try each period, said once in the log.

    zg:totals:since   Unix ns: the start of the sums, as collectors are told
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from gateway.observe.figures import Figures
from gateway.observe.series import all_series
from gateway.state import Lease, state_errors
from grid.config import Config
from grid.errors import GridError
from grid.tracing.collector import headers_in, resource_of
from grid.wire.messages import Fleet

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from gateway.observe.otlp import Sender

log = logging.getLogger(__name__)

SINCE = "zg:totals:since"
SEND_TIMEOUT_S = 5.0
"""With all tries. A collector takes milliseconds; a replica that ends waits for no more than this."""
LEASE_PERIODS = 2
"""A holder that missed one period is only slow."""


class Push:
    """`start` it in the replica's loop. `now_ns` gives Unix nanoseconds."""

    def __init__(
        self,
        config: Config,
        *,
        redis: Redis,
        figures: Figures,
        fleet: Callable[[], Fleet],
        sender: Sender,
        resource: Resource,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._redis = redis
        self._figures = figures
        self._fleet = fleet
        self._sender = sender
        self._resource = resource
        self._now_ns = now_ns
        self._period_s = config.metrics.period_s
        self._stale_after_ms = config.placement.stale_after_ms
        self._lease = Lease(redis, "metrics", LEASE_PERIODS * self._period_s + SEND_TIMEOUT_S)
        self._away = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and let another replica go on at once."""
        self._closing.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._sender.close)
        with contextlib.suppress(GridError):
            await self._lease.release()

    async def round(self) -> bool:
        """Send once if this replica is the one that sends; True if it did. Raises GridError when Redis is
        away, CollectorAway when the collector is."""
        from gateway.observe.otlp import metrics_data

        if not await self._lease.hold():
            return False
        since_ns = await self._since_ns()
        totals, now_ns = await self._figures.totals(), self._now_ns()
        fleet = self._fleet()
        families = all_series(totals, fleet, self._stale_after_ms)
        data = metrics_data(families, self._resource, since_ns, now_ns)
        await asyncio.to_thread(self._sender.send, data)
        return True

    async def _since_ns(self) -> int:
        with state_errors():
            await self._redis.set(SINCE, self._now_ns(), nx=True)
            return int(await self._redis.get(SINCE) or self._now_ns())

    async def _run(self) -> None:
        from gateway.observe.otlp import CollectorAway

        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._closing.wait()
            try:
                sent = await self.round()
            except (GridError, CollectorAway) as error:
                if not self._away:
                    log.warning("the cell's figures are not sent: %s (metrics.endpoint)", error)
                self._away = True
            except Exception:
                log.exception("sending the cell's figures failed")
            else:
                if sent and self._away:
                    log.warning("the cell's figures are sent again")
                    self._away = False


def open_push(config: Config, redis: Redis, figures: Figures, fleet: Callable[[], Fleet]) -> Push | None:
    """Return what sends the cell's figures; None where `metrics.endpoint` is empty. Raises InvalidRequest for
    a headers file that can't be used."""
    settings = config.metrics
    if not settings.endpoint:
        return None
    headers = headers_in(settings.headers_file, "metrics.headers_file")
    from gateway.observe.otlp import Sender

    # One identity for the cell, whichever replica sends: its series go on when the lease moves.
    resource = resource_of("cell", config.cell.name, config.cell.region)
    sender = Sender(settings.endpoint, headers, SEND_TIMEOUT_S)
    return Push(config, redis=redis, figures=figures, fleet=fleet, sender=sender, resource=resource)
