"""Who holds a place on which unit, until when. The ledger only; what a reservation weighs is `fleet.py`'s.

Leases all have the same length, so the order of renewal is the order of expiry, and looking for expired
ones costs nothing while there are none. Bounded from outside: a unit takes no reservation beyond its
slots, and what a departed unit leaves behind expires.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
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
    """To compute: without what its unit's prefix cache should hold."""
    kv_tokens: int
    made_s: float
    expires_s: float
    lesson: Lesson
    prefix: tuple[int, ...] = ()
    reuse: Reuse = NO_REUSE
    seen: bool = False
    """The unit's newest sample held it, so that sample's counts include it."""


class Ledger:
    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Reservation] = OrderedDict()
        self._by_unit: dict[str, dict[str, Reservation]] = {}
        self._by_holder: dict[int, dict[str, Reservation]] = {}

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

    def get(self, reservation_id: str) -> Reservation | None:
        return self._by_id.get(reservation_id)

    def pop(self, reservation_id: str) -> Reservation | None:
        reservation = self._by_id.pop(reservation_id, None)
        if reservation is not None:
            _forget(self._by_unit, reservation.unit_id, reservation_id)
            _forget(self._by_holder, reservation.holder, reservation_id)
        return reservation

    def renew(self, reservation: Reservation, expires_s: float) -> None:
        reservation.expires_s = expires_s
        self._by_id.move_to_end(reservation.reservation_id)

    def expired(self, now_s: float) -> Iterator[Reservation]:
        """Yield those whose lease is over. Each must be popped before the next is asked for."""
        while self._by_id:
            first = next(iter(self._by_id.values()))
            if first.expires_s > now_s:
                return
            yield first

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
