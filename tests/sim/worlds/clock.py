"""The only clock of a simulated world: one heap of what will happen, in order of time and then of asking."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

MAX_EVENTS = 2_000_000
"""Of one world; more means that something asks for itself for ever."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self.checks: list[Callable[[], None]] = []
        """Called after every event."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + max(delay_s, 0.0), next(self._order), call))

    def run(self, until_s: float) -> None:
        """Let everything happen that is due until then."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._heap)
            self.events += 1
            assert self.events < MAX_EVENTS, "the world never comes to rest"
            call()
            for check in self.checks:
                check()
        self.now_s = until_s


class Process:
    """Whatever runs in one process: it can be frozen, and dies with everything that it was about to do."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.is_up = True
        self.is_frozen = False
        self._life = 0
        self._held: list[Callable[[], None]] = []

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        life = self._life
        self.clock.after(delay_s, lambda: self.run(call, life))

    def run(self, call: Callable[[], None], life: int | None = None) -> None:
        """Do something in this process: at once, when it thaws, or never."""
        if not self.is_up or (life is not None and life != self._life):
            return
        if self.is_frozen:
            self._held.append(lambda: self.run(call, life))
        else:
            call()

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        held, self._held = self._held, []
        for call in held:
            self.run(call)

    def die(self) -> None:
        self.is_up = self.is_frozen = False
        self._life += 1
        self._held.clear()

    def rise(self) -> None:
        self.is_up = True
