"""Who holds a place on which unit, until when. The ledger only; what a reservation weighs is `fleet.py`'s.

Whether a lease was renewed is asked when it is over, because what renews it comes ten times a second. Bounded
from outside: a unit takes no reservation beyond its slots, and what a departed unit leaves behind expires.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from placement.learning import Lesson
from placement.prefixes import NO_REUSE, Reuse


@dataclass(slots=True)
class Reservation:
    reservation_id: str
    unit_id: str
    incarnation: str
    holder: int
    """Link of the gateway that it was made for."""
    prompt_tokens: int
    """To compute, as `speeds.prompt_work`: without what its unit's prefix cache should hold."""
    kv_tokens: int
    made_s: float
    expires_s: float
    lesson: Lesson
    prefix: tuple[int, ...] = ()
    reuse: Reuse = NO_REUSE
    network_ms: float = 0.0
    """The way there and back, which its figures hold."""
    seen: bool = False
    """The unit's newest sample held it, so that sample's counts include it."""


class Ledger:
    def __init__(self) -> None:
        self._by_id: dict[str, Reservation] = {}
        self._by_unit: dict[str, dict[str, Reservation]] = {}
        self._by_holder: dict[int, dict[str, Reservation]] = {}
        self._numbers = itertools.count()
        self._leases: list[tuple[float, int, Reservation]] = []
        """A heap. Reservations that end earlier stay on it for the rest of their lease."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, reservation_id: object) -> bool:
        return reservation_id in self._by_id

    def add(self, reservation: Reservation) -> None:
        key = reservation.reservation_id
        assert key not in self._by_id, key
        self._by_id[key] = reservation
        self._by_unit.setdefault(reservation.unit_id, {})[key] = reservation
        self._by_holder.setdefault(reservation.holder, {})[key] = reservation
        self._lease(reservation)

    def _lease(self, reservation: Reservation) -> None:
        heapq.heappush(self._leases, (reservation.expires_s, next(self._numbers), reservation))

    def get(self, reservation_id: str) -> Reservation | None:
        return self._by_id.get(reservation_id)

    def pop(self, reservation_id: str) -> Reservation | None:
        reservation = self._by_id.pop(reservation_id, None)
        if reservation is not None:
            _forget(self._by_unit, reservation.unit_id, reservation_id)
            _forget(self._by_holder, reservation.holder, reservation_id)
        return reservation

    def expired(self, now_s: float, renewed_until_s: Callable[[Reservation], float]) -> Iterator[Reservation]:
        """Take out and yield those whose lease is over, also as `renewed_until_s` tells of each."""
        while self._leases and self._leases[0][0] <= now_s:
            reservation = heapq.heappop(self._leases)[2]
            if self._by_id.get(reservation.reservation_id) is not reservation:
                continue
            reservation.expires_s = max(reservation.expires_s, renewed_until_s(reservation))
            if reservation.expires_s > now_s:
                self._lease(reservation)
            else:
                self.pop(reservation.reservation_id)
                yield reservation

    def of_unit(self, unit_id: str) -> list[Reservation]:
        return list(self._by_unit.get(unit_id, {}).values())

    def count_of_unit(self, unit_id: str) -> int:
        return len(self._by_unit.get(unit_id, {}))

    def of_holder(self, holder: int) -> list[Reservation]:
        return list(self._by_holder.get(holder, {}).values())


def _forget(index: dict[Any, dict[str, Reservation]], key: str | int, reservation_id: str) -> None:
    held = index[key]
    del held[reservation_id]
    if not held:
        del index[key]
