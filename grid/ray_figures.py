"""Figures of one process on Ray's metrics port, where the Ray dashboard and Prometheus find them.

They are read once a second from what the process counts anyway, so nothing of Ray's metrics is on a request's
way. Ray exports them as `ray_NAME` with the tags as labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from ray.util.metrics import Gauge

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Ray's agent collects every few seconds, and Prometheus scrapes it every 15."""


class RayFigures:
    """`texts` describes each gauge by its name; `read` returns the values of those that are known now."""

    def __init__(
        self, texts: Mapping[str, str], tags: Mapping[str, str], read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._read = read
        self._gauges = {name: Gauge(name, text, tag_keys=tuple(tags)) for name, text in texts.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags(dict(tags))
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the running loop."""
        self._loop = asyncio.create_task(self._export())

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop

    def export(self) -> None:
        for name, value in self._read().items():
            self._gauges[name].set(value)

    async def _export(self) -> None:
        while True:
            try:
                self.export()
            except Exception:
                # Figures are not worth a unit.
                logger.exception("figures were not exported to Ray")
            await asyncio.sleep(PERIOD_S)
