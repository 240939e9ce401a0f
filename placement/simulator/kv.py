"""The KV memory of one simulated unit: private tokens of sequences, and shared prompt blocks in an LRU. Pure.

A block holds BLOCK_TOKENS prompt tokens and is known by its id, which stands for the whole prefix up to its
end. Blocks that no sequence holds stay as long as there is room: they count as free, as in vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 512

PAGE_SLACK_TOKENS = 8
"""Half a page of 16: what the last page of a sequence leaves unused on average."""


class KvMemory:
    __slots__ = ("_held", "_idle", "capacity", "private", "removed", "stored", "tells")

    def __init__(self, capacity_tokens: int, tells: bool = False) -> None:
        self.capacity = capacity_tokens
        self.private = 0
        """Tokens that belong to one sequence each."""
        self._held: dict[int, int] = {}
        """Block to how many sequences hold it."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that nobody holds, the least recently used first."""
        self.tells = tells
        """Whether blocks that come and go are written down, for policies that are told of them."""
        self.stored: list[int] = []
        self.removed: list[int] = []

    @property
    def free(self) -> int:
        """Tokens that a sequence may get: idle blocks make room."""
        return self.capacity - self.private - BLOCK_TOKENS * len(self._held)

    def matched(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are here."""
        count = 0
        for block in blocks:
            if block not in self._held and block not in self._idle:
                break
            count += 1
        return count

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are here, so that they stay."""
        for block in blocks:
            if block in self._held:
                self._held[block] += 1
            else:
                del self._idle[block]
                self._held[block] = 1

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` hold no room of anybody yet: holding them takes from `free`."""
        return sum(block in self._idle for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks; the end of a prompt is forgotten before its beginning."""
        for block in reversed(blocks):
            count = self._held[block] - 1
            if count:
                self._held[block] = count
            else:
                del self._held[block]
                self._idle[block] = None

    def take(self, tokens: int) -> None:
        """Give a sequence private tokens; `free` must allow it."""
        self.private += tokens
        self._make_room()

    def give_back(self, tokens: int) -> None:
        self.private -= tokens

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Turn computed prompt blocks from private into shared ones; return those that were.

        A block that another sequence shared meanwhile stays double: this one's copy is private.
        """
        shared = []
        for block in blocks:
            if block in self._held or block in self._idle:
                continue
            self._held[block] = 1
            shared.append(block)
        self.private -= BLOCK_TOKENS * len(shared)
        if self.tells:
            self.stored += shared
        return shared

    def told(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the blocks stored and removed since the last call."""
        told = tuple(self.stored), tuple(self.removed)
        self.stored, self.removed = [], []
        return told

    def _make_room(self) -> None:
        room = self.capacity - self.private - BLOCK_TOKENS * len(self._held)
        while self._idle and len(self._idle) * BLOCK_TOKENS > room:
            block, _ = self._idle.popitem(last=False)
            if self.tells:
                self.removed.append(block)
