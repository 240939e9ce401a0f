"""What policies remember of where prompts went: a prefix index made of their own dispatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from placement.simulator.kv import BLOCK_TOKENS
from placement.simulator.seen import Arrival


class PrefixIndex:
    """Which units were sent a block. Ids stand for whole prefixes, so a set of blocks is the tree of them."""

    def __init__(self, units: int) -> None:
        self._where: dict[int, set[int]] = {}
        self.tokens = [0] * units
        """Size of each unit's part: tokens that were new to it."""

    def matches(self, blocks: Sequence[int]) -> dict[int, int]:
        """Return for each unit that was sent the first block how many leading blocks it was sent."""
        found: dict[int, int] = {}
        alive: set[int] | None = None
        for depth, block in enumerate(blocks):
            where = self._where.get(block)
            alive = set() if where is None else (set(where) if alive is None else alive & where)
            if not alive:
                break
            for unit in alive:
                found[unit] = depth + 1
        return found

    def insert(self, arrival: Arrival, unit: int) -> None:
        old = 0
        for block in arrival.blocks:
            where = self._where.setdefault(block, set())
            if unit in where:
                old += 1
            else:
                where.add(unit)
        self.tokens[unit] += max(arrival.prompt_tokens - old * BLOCK_TOKENS, 0)

    def stored(self, unit: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._where.setdefault(block, set()).add(unit)

    def removed(self, unit: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            where = self._where.get(block)
            if where is not None:
                where.discard(unit)
                if not where:
                    del self._where[block]


def matched_tokens(arrival: Arrival, blocks: int) -> int:
    return min(blocks * BLOCK_TOKENS, arrival.prompt_tokens)
