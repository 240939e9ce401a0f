"""The network of a simulated world. It carries real encoded bytes, in order on each connection, late, in
pieces, into black holes, and not at all.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Protocol

from sim.worlds.clock import Clock, Process

from grid.wire.codec import Decoder, encode
from grid.wire.messages import WireMessage

SHORTEST_S, LONGEST_S = 0.0001, 0.002
"""One way."""


class Handler(Protocol):
    def received(self, end: End, message: WireMessage) -> None: ...

    def lost(self, end: End) -> None: ...


class End:
    """One end of a connection, in one process."""

    def __init__(self, number: int, network: Network, process: Process, handler: Handler) -> None:
        self.number = number
        self.process = process
        self.handler = handler
        self.is_open = True
        self.heard = False
        self.other: End
        self._network = network
        self._decoder = Decoder()
        self._life = process._life
        self._arrives_s = 0.0
        self._kept: list[bytes] = []

    def send(self, message: WireMessage) -> None:
        if self.is_open:
            self._network.carry(self, encode(message))

    def close(self) -> None:
        """Both sides hear of it; what is on its way may still arrive, or not."""
        self._network.lose(self)

    def _take(self, data: bytes) -> None:
        if not self.is_open:
            return
        self.heard = True
        for message in self._decoder.feed(data):
            if self.is_open:
                self.handler.received(self, message)


class Network:
    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._ends: list[End] = []
        self._holes: set[frozenset[str]] = set()
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def digest(self) -> str:
        """Of every byte that arrived anywhere, and when."""
        return self._digest.hexdigest()

    def connect(
        self,
        process: Process,
        handler: Handler,
        there: Process,
        accept: Callable[[], Handler],
        done: Callable[[End | None], None],
    ) -> None:
        """Dial; `done` gets this side's end, or None where nobody listens. A frozen process and a black hole
        answer nothing until they are healed."""

        def answer() -> None:
            if frozenset((process.name, there.name)) in self._holes or there.is_frozen:
                process.after(0.1, answer)
            elif not there.is_up:
                process.run(lambda: done(None))
            else:
                near = End(len(self._ends), self, process, handler)
                far = End(len(self._ends) + 1, self, there, accept())
                near.other, far.other = far, near
                self._ends += [near, far]
                process.run(lambda: done(near))

        process.after(2 * self._delay_s(), answer)

    def carry(self, end: End, data: bytes) -> None:
        cut = self._rng.randrange(len(data)) if self._rng.random() < 0.1 else 0
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._carry(end.other, piece)

    def _carry(self, to: End, data: bytes) -> None:
        to._arrives_s = max(to._arrives_s, self._clock.now_s + self._delay_s())
        self._clock.after(to._arrives_s - self._clock.now_s, lambda: self._arrive(to, data))

    def _arrive(self, to: End, data: bytes) -> None:
        if to._kept or frozenset((to.process.name, to.other.process.name)) in self._holes:
            to._kept.append(data)
            return
        self._digest.update(b"%d %.9f " % (to.number, self._clock.now_s) + data)
        to.process.run(lambda: to._take(data), to._life)

    def lose(self, end: End) -> None:
        for each in (end, end.other):
            if each.is_open:
                self._clock.after(
                    self._delay_s(), lambda each=each: each.process.run(lambda: self._lost(each), each._life)
                )

    def _lost(self, end: End) -> None:
        if end.is_open:
            end.is_open = False
            end.handler.lost(end)

    def ends_of(self, process: Process) -> list[End]:
        return [end for end in self._ends if end.process is process and end.is_open]

    def died(self, process: Process) -> None:
        """All its connections are gone, as their other sides soon see."""
        for end in self.ends_of(process):
            end.is_open = False
            if frozenset((process.name, end.other.process.name)) not in self._holes:
                self.lose(end.other)

    def black_hole(self, one: Process, other: Process) -> None:
        self._holes.add(frozenset((one.name, other.name)))

    def heal(self, one: Process, other: Process) -> None:
        """What was kept arrives now; a side that died meanwhile is missed now."""
        self._holes.discard(frozenset((one.name, other.name)))
        for end in self._ends:
            if {end.process.name, end.other.process.name} == {one.name, other.name}:
                kept, end._kept = end._kept, []
                for data in kept:
                    self._arrive(end, data)
                if end.is_open and not end.other.is_open:
                    self._clock.after(
                        0.0, lambda end=end: end.process.run(lambda: self._lost(end), end._life)
                    )

    def _delay_s(self) -> float:
        return self._rng.uniform(SHORTEST_S, LONGEST_S)
