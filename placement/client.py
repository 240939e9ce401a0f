"""The gateway's side of placement: ask for a unit, say when its use ended, hear of the fleet.

Owns one link to the placement actor. A caller may be cancelled at any moment: until `place` returns, the
reservation, or the place in the actor's queue, is this client's to end; from then on it is the caller's.

While the actor is away, and until a new one knows the fleet again, the client decides by the last view that
it was pushed (`fallback.py`). Where that is full, requests wait for the actor for a while: it has a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from grid.errors import InternalError, NotFound, Overloaded, UnitLost
from grid.wire.codec import MAX_FRAME_BYTES
from grid.wire.link import Link, Peer, Reconnecting, Resolve
from grid.wire.messages import Decided, DrainUnit, Fleet, Place, Refused, Settle, Watch, WireMessage
from grid.words import Decision, FleetUnit, PlacementRequest
from placement.fallback import LastView
from placement.rules import Rules

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""The actor is restarted within seconds; its clients are told to come back after one."""

UNREACHABLE_S = 5.0
"""The actor is back from a restart within it; a longer silence is the caller's to know."""

AWAY_S = 2.0
"""How long a request waits for the actor when no unit seems to have room: it is back from a crash by then."""

FleetCallback = Callable[[Fleet], None]


class PlacementClient:
    """`resolve` returns the placement actor's current address; it is asked before every dial. `rules` are the
    cell's; `rng` draws units while the actor is away."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        peer_id: str,
        secret: bytes,
        rules: Rules | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = Fleet(0, 0, ())
        self._rules = rules or Rules()
        self._rng = rng or random.Random()
        self._last: LastView | None = None
        """Of `_fleet`; made when it is first needed."""
        self._there = asyncio.Event()
        """The actor is connected, and knows the fleet."""
        self.decided_alone = 0
        self._callbacks: list[FleetCallback] = []
        self._reconnecting = Reconnecting(
            resolve,
            role="gateway",
            peer_id=peer_id,
            secret=secret,
            handler=_Listener(self._take, self._lose),
            on_connected=lambda link: link.send(Watch(0)),
        )

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        await self._reconnecting.start()

    async def close(self) -> None:
        """Leave. The actor releases what this client still holds and no unit reports."""
        await self._reconnecting.close()

    @property
    def able(self) -> bool:
        """Whether units can be found now, be it by the last view."""
        return self.connected or bool(self._fleet.units)

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
        reached or doesn't answer within `timeout_s`. When its link is lost meanwhile, the request is decided
        here or asked again: the actor released what the lost link held. Cancelling leaves no reservation, and
        nobody waiting.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        has_waited = False
        while True:
            link = self._reconnecting.link
            if link is None:
                self._there.clear()  # its end is heard only once its connection is closed
            if link is not None and (self._there.is_set() or not self._fleet.units):
                try:
                    return await self._ask(link, request, deadline_s)
                except UnitLost as lost:
                    log.info("placement was lost while deciding (%s)", lost.message)
            elif not self._fleet.units:
                await self._wait(deadline_s)
            else:
                try:
                    return self._decide_alone(request, even_full=has_waited)
                except Overloaded:
                    if has_waited:
                        raise
                has_waited = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(deadline_s, loop.time() + AWAY_S)):
                        await self._there.wait()

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
        if self._last is not None:
            self._last.settle(reservation_id)
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

    def _decide_alone(self, request: PlacementRequest, *, even_full: bool) -> Decision:
        if self._last is None:
            log.warning("placement is away: deciding on its view of %d units", len(self._fleet.units))
            self._last = LastView(self._fleet, self._rules)
        decision = self._last.decide(request, self._rng, even_full=even_full)
        self.decided_alone += 1
        return decision

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
        if fleet.gathering and not self._fleet.gathering and not _ids(self._fleet) <= _ids(fleet):
            return  # we know more than an actor that has only just started
        self._there.set()
        is_news = fleet.version != self._fleet.version
        self._fleet, self._last = fleet, None
        if not is_news:
            return
        for callback in self._callbacks:
            try:
                callback(fleet)
            except Exception:
                log.exception("a fleet callback failed")

    def _lose(self) -> None:
        self._there.clear()
        # What an actor that is gone had gathered is all that is known now.
        self._fleet = self._fleet._replace(gathering=False)


class _Listener:
    """The link's handler: hands pushed views on, and says when the actor is away."""

    def __init__(self, take: FleetCallback, away: Callable[[], None]) -> None:
        self._take = take
        self._away = away

    def connected(self, peer: Peer) -> None:
        log.info("connected to placement at %s:%d", peer.host, peer.port)

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Fleet):
            self._take(message)

    def disconnected(self, peer: Peer, reason: str) -> None:
        log.info("the link with placement ended: %s", reason)
        self._away()


def _ids(fleet: Fleet) -> set[str]:
    return {unit.card.unit_id for unit in fleet.units}
