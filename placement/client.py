"""The gateway's side of placement: ask for a unit, say when its use ended, hear of the fleet.

Owns one link to the placement actor. A caller may be cancelled at any moment: until `place` returns, the
reservation, or the place in the actor's queue, is this client's to end; from then on it is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from grid.errors import InternalError, NotFound, Overloaded, UnitLost
from grid.wire.codec import MAX_FRAME_BYTES
from grid.wire.link import Link, Peer, Reconnecting, Resolve
from grid.wire.messages import Decided, DrainUnit, Fleet, Place, Refused, Settle, Watch, WireMessage
from grid.words import Decision, FleetUnit, PlacementRequest

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""The actor is restarted within seconds; its clients are told to come back after one."""

UNREACHABLE_S = 5.0
"""The actor is back from a restart within it; a longer silence is the caller's to know."""

FleetCallback = Callable[[Fleet], None]


class PlacementClient:
    """`resolve` returns the placement actor's current address; it is asked before every dial."""

    def __init__(self, resolve: Resolve, *, peer_id: str, secret: bytes) -> None:
        self._fleet = Fleet(0, 0, ())
        self._callbacks: list[FleetCallback] = []
        self._reconnecting = Reconnecting(
            resolve,
            role="gateway",
            peer_id=peer_id,
            secret=secret,
            handler=_Listener(self._take),
            on_connected=lambda link: link.send(Watch(0)),
        )

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        await self._reconnecting.start()

    async def close(self) -> None:
        """Leave. The actor releases what this client still holds and no unit reports."""
        await self._reconnecting.close()

    @property
    def connected(self) -> bool:
        return self._reconnecting.link is not None

    @property
    def fleet(self) -> Fleet:
        """The newest view that was pushed; version 0 before the first, kept while disconnected."""
        return self._fleet

    def on_fleet(self, callback: FleetCallback) -> None:
        """Call `callback` whenever a view with another version arrives. It must not block."""
        self._callbacks.append(callback)

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision:
        """Return the decision for `request`; its reservation is then the caller's to settle.

        While all units are full the actor lets the request wait, up to its own bounds. Raises what the actor
        refuses with (NoEligibleUnit, Saturated, Overloaded, InvalidRequest), and Overloaded when it can't be
        reached or doesn't answer within `timeout_s`. A link that is lost meanwhile is waited for, and the
        request asked again: the actor released what the lost link held. Cancelling leaves no reservation, and
        nobody waiting.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            link = self._reconnecting.link or await self._wait(deadline_s)
            try:
                return await self._ask(link, request, deadline_s)
            except UnitLost as lost:
                log.info("placement was lost while deciding (%s); asking again", lost.message)

    def settle(
        self,
        reservation_id: str,
        outcome: str,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        ttft_ms: float = 0.0,
        total_ms: float = 0.0,
        cached_tokens: int = 0,
        prefix: tuple[int, ...] = (),
    ) -> None:
        """End a reservation: `done`, `failed`, `refused` or `cancelled`. Never fails and never waits.

        Without a link nothing is sent: the actor has released the reservation, or its unit reports its end.
        """
        link = self._reconnecting.link
        if link is not None:
            # Nobody waits for it, and the next question takes it along.
            link.send_lazily(
                Settle(
                    *(0, reservation_id, outcome, input_tokens, output_tokens, ttft_ms, total_ms),
                    cached_tokens,
                    prefix,
                )
            )

    async def drain(
        self, unit_id: str, *, draining: bool = True, restart: bool = False, timeout_s: float
    ) -> FleetUnit:
        """Let a unit take no new work, or take it again; return it as it now is.

        Raises NotFound for an unknown unit, and Saturated when the actor can't be reached or doesn't answer.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        link = self._reconnecting.link or await self._wait(deadline_s)
        reply = await link.call(lambda stream: DrainUnit(stream, unit_id, draining, restart), timeout_s)
        if not isinstance(reply, Fleet) or not reply.units:
            raise NotFound(f"unit {unit_id!r} is not connected now; see `grid units`", param="unit_id")
        return reply.units[0]

    # --- asking -----------------------------------------------------------------------------

    async def _wait(self, deadline_s: float) -> Link:
        left_s = deadline_s - asyncio.get_running_loop().time()
        try:
            return await self._reconnecting.wait(min(max(left_s, 0.0), UNREACHABLE_S))
        except UnitLost as lost:
            raise Overloaded(
                f"the placement actor can't be reached: {lost.message}", retry_after_s=RETRY_AFTER_S
            ) from None

    async def _ask(self, link: Link, request: PlacementRequest, deadline_s: float) -> Decision:
        # A dry run lists every unit, so only the frame bounds an answer.
        stream = link.open(MAX_FRAME_BYTES)
        try:
            stream.send(Place(stream.id, request))
            async with asyncio.timeout_at(deadline_s):
                answer = (await stream.receive())[0]
        except UnitLost:
            raise
        except BaseException as error:
            if not request.dry_run:
                # It comes after the question on the same link, so it ends whatever became of it.
                link.send(Settle(0, request.reservation_id, "cancelled"))
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    "the placement actor did not answer in time", retry_after_s=RETRY_AFTER_S
                ) from None
            raise
        finally:
            stream.close()
        if isinstance(answer, Decided):
            return answer.decision
        if isinstance(answer, Refused):
            raise answer.error()
        raise InternalError(f"placement answered with {type(answer).__name__}")

    # --- hearing of the fleet ---------------------------------------------------------------

    def _take(self, fleet: Fleet) -> None:
        is_news = fleet.version != self._fleet.version
        self._fleet = fleet
        if not is_news:
            return
        for callback in self._callbacks:
            try:
                callback(fleet)
            except Exception:
                log.exception("a fleet callback failed")


class _Listener:
    """The link's handler: hands pushed views on."""

    def __init__(self, take: FleetCallback) -> None:
        self._take = take

    def connected(self, peer: Peer) -> None:
        log.info("connected to placement at %s:%d", peer.host, peer.port)

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Fleet):
            self._take(message)

    def disconnected(self, peer: Peer, reason: str) -> None:
        log.info("the link with placement ended: %s", reason)
