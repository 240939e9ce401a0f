"""Under any order of requests, ends, misses and restarts: nobody is taken to hold more than its cache has
room for, nor anything without what stands before it, and the index says the same as the units."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.pipeline.prefix import Prefix
from placement import prefixes as module
from placement.prefixes import END_TOKENS, MAX_BLOCKS, Prefixes, Reuse, UnitPrefixes

UNITS = 3
MOST = 60
"""Held by all together, here."""


def chain(tenant: str, turns: list[int]) -> tuple[int, ...]:
    """Hashes of a conversation of so many first blocks; equal only for equal beginnings."""
    made, above = [], hash(tenant)
    for one in turns:
        above = abs(hash((above, one)))
        made.append(above)
    return tuple(made)


conversations = st.builds(
    chain, st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1), min_size=0, max_size=12)
)


class Holdings(RuleBasedStateMachine):
    @initialize(capacities=st.lists(st.integers(0, 2_000), min_size=UNITS, max_size=UNITS))
    def begin(self, capacities: list[int]) -> None:
        self.prefixes = Prefixes()
        self.capacity = capacities
        self.units = [self.prefixes.join() for _ in range(UNITS)]
        self.open: list[tuple[int, UnitPrefixes, tuple[int, ...], Reuse]] = []

    @rule(index=st.integers(0, UNITS - 1), prefix=conversations, more=st.integers(0, 100))
    def place(self, index: int, prefix: tuple[int, ...], more: int) -> None:
        prompt_tokens = more + (END_TOKENS[len(prefix) - 1] if prefix else 0)
        match = self.prefixes.match(prefix, prompt_tokens)
        foretold = [0] * UNITS if match is None else [int(tokens) for tokens in match]
        assert all(0 <= tokens < max(prompt_tokens, 1) for tokens in foretold)
        assert match is None or any(prefix[0] in unit.blocks for unit in self.units)
        for unit, tokens in zip(self.units, foretold, strict=True):
            depth = next((i for i, key in enumerate(prefix) if key not in unit.blocks), len(prefix))
            assert tokens <= (END_TOKENS[depth - 1] if depth else 0)
        unit = self.units[index]
        reuse = self.prefixes.placed(unit, prefix, prompt_tokens, self.capacity[index])
        assert reuse.tokens == (foretold[index] if self.capacity[index] else 0)
        self.open.append((index, unit, prefix, reuse))

    @rule(pick=st.integers(0, 10), answer=st.lists(st.integers(2, 3), max_size=3), share=st.floats(0, 1))
    def end(self, pick: int, answer: list[int], share: float) -> None:
        if not self.open:
            return
        index, unit, prefix, reuse = self.open.pop(pick % len(self.open))
        if unit is not self.units[index]:
            return
        self.prefixes.found(unit, reuse, share)
        longer = prefix + tuple(abs(hash((prefix, *answer[: i + 1]))) for i in range(len(answer)))
        self.prefixes.ended(unit, longer, 50 + 64 * len(longer), self.capacity[index])

    @rule(pick=st.integers(0, 10))
    def withdraw(self, pick: int) -> None:
        if not self.open:
            return
        index, unit, prefix, reuse = self.open.pop(pick % len(self.open))
        if unit is self.units[index]:
            self.prefixes.withdrawn(unit, prefix, reuse)

    @rule(index=st.integers(0, UNITS - 1), capacity=st.integers(0, 2_000))
    def restart(self, index: int, capacity: int) -> None:
        """As in the view, the last row takes the place of one that leaves."""
        self.prefixes.leave(index, self.units[index])
        self.units[index], self.capacity[index] = self.units[-1], self.capacity[-1]
        self.units[-1], self.capacity[-1] = self.prefixes.join(), capacity
        self.open = [
            (index if at == UNITS - 1 else at, unit, *rest)
            for at, unit, *rest in self.open
            if unit in self.units
        ]
        assert not self.units[-1].blocks

    @invariant()
    def adds_up(self) -> None:
        held = 0
        for unit, capacity in zip(self.units, self.capacity, strict=True):
            assert unit.tokens <= capacity
            assert unit.tokens == sum(self.prefixes._blocks[key].tokens for key in unit.blocks)
            assert all(unit.number in self.prefixes._blocks[key].holders for key in unit.blocks)
            touches = list(unit.blocks.values())
            assert touches == sorted(touches)
            held += len(unit.blocks)
        assert held == self.prefixes.held <= MOST
        assert held == sum(len(block.holders) for block in self.prefixes._blocks.values())
        assert all(block.tokens > 0 and block.holders for block in self.prefixes._blocks.values())


class TestHoldings(Holdings.TestCase):
    settings = settings(max_examples=20, stateful_step_count=30, deadline=None)

    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_HELD", MOST)


@given(
    texts=st.lists(st.text(max_size=300), max_size=4), cut=st.integers(0, 1000), salts=st.permutations("ab")
)
def test_hashes_do_not_depend_on_how_text_comes_and_only_on_tenant_and_text(
    texts: list[str], cut: int, salts: list[str]
) -> None:
    whole = Prefix(salts[0])
    text = "".join(texts)
    added = whole.extend(text)
    assert added == whole.hashes
    assert len(added) == sum(1 for end in END_TOKENS if 4 * end <= len(text.encode("utf-8", "replace")))
    pieces = Prefix(salts[0])
    for piece in (text[:cut], text[cut:]):
        pieces.extend(piece)
    assert pieces.hashes == whole.hashes
    other = Prefix(salts[1])
    other.extend(text)
    assert not set(other.hashes) & set(whole.hashes)


def test_hashes_are_bounded_and_follow_each_other() -> None:
    long = Prefix("salt")
    long.extend("x" * (4 * END_TOKENS[-1] + 10_000))
    assert len(long.hashes) == MAX_BLOCKS == len(set(long.hashes))
    assert long.extend("more" * 1_000) == ()
    changed = Prefix("salt")
    changed.extend("x" * 1_000 + "y" + "x" * 4_000)
    assert changed.hashes[:3] == long.hashes[:3]
    assert not set(changed.hashes[3:]) & set(long.hashes)
