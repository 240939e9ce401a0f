"""One node's probe as a process: ten times a second it reads the GPUs, and tells placement of them and of the
node's units, a batch each.

A plain class: the supervisor wraps it for Ray, tests use it as it is. It owns the probe and its one thread,
on which alone the driver is called, since some calls block for tens of milliseconds. Without a driver it says
so once, to placement too, and from then on only tells of the units. These send it their samples over the
node's loopback; while it is away each tells placement by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grid.config import Config
from grid.hardware.nvml import NoDriver, Probe
from grid.units.actor import REPORT_PERIOD_S
from grid.units.gathering import Gathering
from grid.wire.link import Link, LinkServer, Peer, Reconnecting, Resolve
from grid.wire.messages import AnnounceNode, Report, ReportNode, WireMessage
from grid.words import GpuSample, NodeCard, new_id

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

REOPEN_PERIOD_S = 5.0
"""A driver that is updated or reloaded is away for seconds to minutes."""


class NodeProbe:
    """Of the node `node_id`. `resolve_placement` finds the placement actor; `is_ours` tells the cell's
    processes from others', None where it can't."""

    def __init__(
        self,
        config: Config,
        node_id: str,
        *,
        resolve_placement: Resolve,
        is_ours: Callable[[int], bool | None],
    ) -> None:
        self._config = config
        self._resolve_placement = resolve_placement
        self._probe = Probe(is_ours)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        self._card = NodeCard(node_id, new_id("inc-"), "", ())
        self._newest: tuple[GpuSample, ...] = ()
        self._read_once = asyncio.Event()
        self._placement: Reconnecting | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._gathering = Gathering(node_id)
        self._server: LinkServer | None = None
        self._address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Begin to read and to report; returns at once."""
        secret = (self._config.cell.state_dir / "secrets" / "link.key").read_bytes()
        self._placement = Reconnecting(
            self._resolve_placement,
            role="node",
            peer_id=self._card.node_id,
            secret=secret,
            on_connected=self._announce,
        )
        self._tasks.append(asyncio.create_task(self._read_for_ever()))
        self._server = LinkServer(
            role="node", peer_id=self._card.node_id, secret=secret, handler=_Units(self._gathering)
        )
        self._address.set_result(await self._server.start(LOOPBACK, 0))
        self._tasks.append(asyncio.create_task(self._tell_of_units()))
        await self._placement.start()

    async def address(self) -> tuple[str, int]:
        """Return where the node's units send their samples, as soon as it listens."""
        return await asyncio.shield(self._address)

    async def hardware(self) -> tuple[NodeCard, tuple[GpuSample, ...]]:
        """Return the node's GPUs and their newest samples, as soon as the driver was asked once."""
        await self._read_once.wait()
        return self._card, self._newest

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        if self._placement is not None:
            await self._placement.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._probe.close)
        self._thread.shutdown()

    # --- reading ----------------------------------------------------------------------------

    async def _read_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.run_in_executor(self._thread, self._probe.open)
                self._found(NodeCard(self._card.node_id, new_id("inc-"), *found))
                await self._read_while_it_lasts()
            except NoDriver as missing:
                await loop.run_in_executor(self._thread, self._probe.close)
                self._lost(missing.message)
                if missing.is_final:
                    return
            except Exception as error:
                # A bug. What was read last must not be believed for ever.
                log.exception("the GPUs of node %s can't be read", self._card.node_id)
                await loop.run_in_executor(self._thread, self._probe.close)
                self._lost(f"the probe failed ({type(error).__name__}); see its log")
            await asyncio.sleep(REOPEN_PERIOD_S)

    async def _read_while_it_lasts(self) -> None:
        """Read at 10 Hz without drift; whoever was late skips what it missed. Raises NoDriver."""
        loop, due_s = asyncio.get_running_loop(), time.monotonic()
        while True:
            self._newest = await loop.run_in_executor(self._thread, self._probe.read, time.monotonic())
            self._read_once.set()
            link = self._ready_link()
            if link is not None:
                link.send(ReportNode(0, self._card.node_id, self._card.incarnation, self._newest))
            now_s = time.monotonic()
            due_s = max(due_s + REPORT_PERIOD_S, now_s)
            await asyncio.sleep(due_s - now_s)

    def _found(self, card: NodeCard) -> None:
        log.info("driver %s with %d GPUs %s", card.driver, len(card.gpus), card.flaw)
        self._card, self._newest = card, ()
        self._tell()

    def _lost(self, reason: str) -> None:
        if self._card.flaw != reason:
            log.warning("node %s: %s", self._card.node_id, reason)
            self._card = NodeCard(self._card.node_id, new_id("inc-"), "", (), reason)
            self._newest = ()
            self._tell()
        self._read_once.set()

    # --- telling ----------------------------------------------------------------------------

    def _announce(self, link: Link) -> None:
        self._gathering.anew()
        link.send(AnnounceNode(0, self._card))

    def _ready_link(self) -> Link | None:
        """Return the link to placement. What a peer has not taken yet is older than the next batch."""
        link = self._placement.link if self._placement is not None else None
        return link if link is not None and not link.is_paused else None

    async def _tell_of_units(self) -> None:
        """At 10 Hz without drift; nodes that start together do not tell together."""
        due_s = time.monotonic() + REPORT_PERIOD_S * phase(self._card.node_id)
        while True:
            await asyncio.sleep(due_s - time.monotonic())
            link = self._ready_link()
            if link is not None and (batch := self._gathering.batch()) is not None:
                link.send(batch)
            due_s = max(due_s + REPORT_PERIOD_S, time.monotonic())

    def _tell(self) -> None:
        link = self._placement.link if self._placement is not None else None
        if link is not None:
            self._announce(link)


class _Units:
    """The handler of the links of the node's units, each of which speaks for itself."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering

    def connected(self, peer: Peer) -> None:
        """Whoever knows the cell's secret is of the cell; placement knows whether it is of this node."""

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Report):
            for load in message.loads:
                if load.unit_id == peer.peer_id:
                    self._gathering.take(load)

    def disconnected(self, peer: Peer, reason: str) -> None:
        self._gathering.forget(peer.peer_id)


def phase(node_id: str) -> float:
    """Return when in each period a node tells, from 0 to 1: spread over nodes, the same for one."""
    return zlib.crc32(node_id.encode()) / 2**32
