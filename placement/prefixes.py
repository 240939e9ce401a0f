"""Which beginnings of prompts each unit should still have in its prefix cache: estimated, and corrected.

A request brings chained hashes of its prompt: hash i stands for everything up to END_TOKENS[i], salted by its
tenant, so that none is ever equal to another tenant's. A unit is taken to hold the beginnings of what it was
given, as an engine does: least recently used tokens leave first, of one prompt the last ones first, and no
more is held than its KV cache has room for. So whoever holds a beginning holds every shorter one, which makes
a look-up one walk from the shortest on that ends where nobody holds the next. What a finished request really
found in the cache is believed over the estimate. Pure; a prompt's tokens are the gateway's estimate, what a
unit holds is in its own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from placement.columns import FIRST_CAPACITY, Floats, Ints

FIRST_TOKENS = 64
"""Of the first blocks: four of an engine's own; less is not worth a detour."""

GROWTH = 8
"""A block is an eighth of what stands before it: a prefix is known to an eighth, whatever its length."""

MAX_BLOCKS = 64
"""Hashes of one request: with these blocks they reach 370,000 tokens, and take 0.6 KB on the link."""

MAX_HELD = 1 << 19
"""Blocks that all units together are known to hold: 160 MB, at 300 bytes each. It is the KV caches of some
hundred large GPUs; beyond it the units that were longest without a request are forgotten first."""

MAX_FILLER_TOKENS = 1_024
"""Tokens that no later prompt can begin with (answers, ends of prompts) are counted together up to here."""

FAR_FEWER = 0.5
"""A request that found less than this share of what was expected has found an emptier cache."""

TRUST_STEP = 0.1
"""How fast expectations of a unit follow what its requests really found: half way within seven of them."""

FEW = 16
"""Of so many holders each is quicker seen to by itself than all by numpy."""


def _ends() -> tuple[int, ...]:
    ends = [FIRST_TOKENS]
    while len(ends) < MAX_BLOCKS:
        ends.append(ends[-1] + max(FIRST_TOKENS, ends[-1] // GROWTH))
    return tuple(ends)


END_TOKENS = _ends()
"""Where the blocks of a prompt end, in tokens from its beginning."""


class Reuse(NamedTuple):
    """What one request was expected to find on its unit."""

    tokens: int = 0
    share: float = 0.0
    """Of the prompt, what is held by the estimate alone, whatever it has proved to be worth so far."""
    blocks: int = 0
    """Of its hashes, so many were held."""
    touch: int = 0
    """Its number among what touched the unit's cache."""
    earlier: int = 0
    """When the last of those blocks was touched before."""
    scale: float = 1.0
    """How many of the unit's tokens a token of the estimate is."""


NO_REUSE = Reuse()


class UnitPrefixes:
    """What one unit holds; its `Prefixes` alone writes to it."""

    __slots__ = ("blocks", "number", "tokens", "touches")

    def __init__(self, number: int) -> None:
        self.number = number
        """Stays while the unit lives; rows move."""
        self.blocks: OrderedDict[int, int] = OrderedDict()
        """Hash to touch, least recently used first. Fillers have negative keys."""
        self.tokens = 0
        self.touches = 0


class _Block:
    __slots__ = ("holders", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.holders = array("i")
        """Numbers of units, in no order."""


class Prefixes:
    """All units' holdings, and the index from a hash to who holds it."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._recent: OrderedDict[UnitPrefixes, None] = OrderedDict()
        """Units that hold anything, the one that was longest without a request first."""
        self._free: list[int] = []
        self._fillers = 0
        self.held = 0
        """Blocks and fillers of all units together."""
        self._number_at: Ints = np.zeros(FIRST_CAPACITY, np.int64)
        """By row; `_units` of them."""
        self._units = 0
        # By number.
        self._trust: Floats = np.ones(FIRST_CAPACITY, np.float64)
        self._found: Floats = np.zeros(FIRST_CAPACITY, np.float64)

    # --- units ------------------------------------------------------------------------------

    def join(self) -> UnitPrefixes:
        """Take in a unit, which holds nothing, as the last row."""
        number = self._free.pop() if self._free else self._units
        if self._units == len(self._number_at):
            self._number_at, self._trust, self._found = (
                np.concatenate([column, np.zeros_like(column)])
                for column in (self._number_at, self._trust, self._found)
            )
        self._number_at[self._units], self._trust[number] = number, 1.0
        self._units += 1
        return UnitPrefixes(number)

    def leave(self, row: int, unit: UnitPrefixes) -> None:
        """Forget the unit at `row` and all that it holds; the last row takes its number."""
        while unit.blocks:
            self._evict(unit)
        self._units -= 1
        self._number_at[row] = self._number_at[self._units]
        self._free.append(unit.number)

    # --- asking -----------------------------------------------------------------------------

    def match(self, prefix: Sequence[int], prompt_tokens: int) -> Floats | None:
        """Return how many tokens of a prompt each unit should find in its cache, by row; None for none.

        Never the whole prompt: an engine always computes the last token.
        """
        levels: list[tuple[int, array[int]]] = []
        blocks, holding = self._blocks, 0
        for end, key in zip(END_TOKENS, prefix, strict=False):
            block = blocks.get(key)
            if block is None:
                break
            holders = block.holders
            # As many holders are the same holders, since all of these hold the shorter ones as well.
            if len(holders) == holding:
                levels[-1] = end, holders
            else:
                levels.append((end, holders))
                holding = len(holders)
        if not holding:
            return None
        found, most = self._found, max(prompt_tokens - 1, 0)
        found.fill(0.0)
        for end, holders in levels:
            tokens = min(end, most)
            if len(holders) > FEW:
                found[np.frombuffer(holders, np.int32)] = tokens
            else:
                for number in holders:
                    found[number] = tokens
        found *= self._trust
        return found[self._number_at[: self._units]]

    # --- telling ----------------------------------------------------------------------------

    def placed(
        self,
        unit: UnitPrefixes,
        prefix: Sequence[int],
        prompt_tokens: int,
        capacity_tokens: int,
        scale: float = 1.0,
    ) -> Reuse:
        """Take in that a unit was given a prompt; return what it should find of it in its cache.

        `scale` is that of `Reuse`.

        A prompt that comes a moment later finds this one's blocks: engines share them from the first step on.
        """
        if not prefix or capacity_tokens <= 0:
            return NO_REUSE
        blocks = 0
        for key in prefix[:MAX_BLOCKS]:
            if key not in unit.blocks:
                break
            blocks += 1
        held_tokens = min(END_TOKENS[blocks - 1], max(prompt_tokens - 1, 0)) if blocks else 0
        earlier = unit.blocks[prefix[blocks - 1]] if blocks else 0
        self._touch(unit, prefix, capacity_tokens, scale)
        tokens = int(held_tokens * self._trust.item(unit.number))
        share = held_tokens / max(prompt_tokens, 1)
        return Reuse(tokens, share, blocks, unit.touches, earlier, scale)

    def withdrawn(self, unit: UnitPrefixes, prefix: Sequence[int], reuse: Reuse) -> None:
        """Take back what `placed` took in: the prompt was never computed."""
        for key in reversed(prefix[reuse.blocks : MAX_BLOCKS]):
            if unit.blocks.get(key) == reuse.touch:
                self._drop(unit, key)

    def ended(
        self,
        unit: UnitPrefixes,
        prefix: Sequence[int],
        tokens: int,
        capacity_tokens: int,
        scale: float = 1.0,
    ) -> None:
        """Take in that a request has ended, which is when its tokens become the most recently used.

        `prefix` may have become longer by the answer. `tokens` are those of prompt and answer; what of them
        has no hash takes room all the same.
        """
        if capacity_tokens <= 0:
            return
        hashed = min(len(prefix), MAX_BLOCKS)
        more_tokens = tokens - int(END_TOKENS[hashed - 1] * scale if hashed else 0)
        if more_tokens > 0:
            self._fill(unit, more_tokens)
        self._touch(unit, prefix, capacity_tokens, scale)

    def found(self, unit: UnitPrefixes, reuse: Reuse, real_share: float) -> None:
        """Correct the estimate by what share of its prompt a request found in the cache.

        Of a unit that has lost what was touched last at `reuse.earlier`, all that is as old is gone, too.
        """
        if not reuse.share:
            return
        ratio = min(real_share / reuse.share, 1.0)
        self._trust[unit.number] += TRUST_STEP * (ratio - self._trust.item(unit.number))
        if ratio < FAR_FEWER:
            while unit.blocks and next(iter(unit.blocks.values())) <= reuse.earlier:
                self._evict(unit)

    # --- one unit's blocks ------------------------------------------------------------------

    def _touch(self, unit: UnitPrefixes, prefix: Sequence[int], capacity_tokens: int, scale: float) -> None:
        unit.touches += 1
        held, touch = unit.blocks, unit.touches
        # The last ones first, so that they leave first.
        for at in range(min(len(prefix), MAX_BLOCKS) - 1, -1, -1):
            key = prefix[at]
            if key in held:
                held[key] = touch
                held.move_to_end(key)
            else:
                tokens = END_TOKENS[at] - (END_TOKENS[at - 1] if at else 0)
                self._hold(unit, key, max(round(tokens * scale), 1))
        if not held:
            return
        self._recent[unit] = None
        self._recent.move_to_end(unit)
        while unit.tokens > capacity_tokens:
            self._evict(unit)
        while self.held > MAX_HELD:
            self._evict(next(iter(self._recent)))

    def _fill(self, unit: UnitPrefixes, tokens: int) -> None:
        last = next(reversed(unit.blocks), 0)
        if last < 0 and self._blocks[last].tokens + tokens <= MAX_FILLER_TOKENS:
            self._blocks[last].tokens += tokens
            unit.tokens += tokens
        else:
            self._fillers += 1
            self._hold(unit, -self._fillers, tokens)

    def _hold(self, unit: UnitPrefixes, key: int, tokens: int) -> None:
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(tokens)
        block.holders.append(unit.number)
        unit.blocks[key] = unit.touches
        unit.tokens += block.tokens
        self.held += 1

    def _evict(self, unit: UnitPrefixes) -> None:
        """Drop the unit's least recently used block."""
        self._drop(unit, next(iter(unit.blocks)))

    def _drop(self, unit: UnitPrefixes, key: int) -> None:
        block = self._blocks[key]
        holders = block.holders
        if len(holders) == 1:
            del self._blocks[key]
        else:
            last = holders.pop()
            if last != unit.number:
                holders[_place(holders, unit.number)] = last
        del unit.blocks[key]
        unit.tokens -= block.tokens
        self.held -= 1
        if not unit.blocks:
            self._recent.pop(unit, None)


def _place(holders: array[int], number: int) -> int:
    if len(holders) <= FEW:
        return holders.index(number)
    return int(np.flatnonzero(np.frombuffer(holders, np.int32) == number)[0])
