"""Stream control holds for any chunking of the input and any settings."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.pipeline.chunks import Chunker
from gateway.pipeline.events import Chunk

Piece = tuple[str, int, float]
"""Text, tokens, seconds after the piece before it."""
Settings = tuple[int, float, bool]

PIECES = st.lists(
    st.tuples(st.text(max_size=6), st.integers(0, 5), st.floats(0, 0.5)),
    max_size=25,
)
SETTINGS = st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.05, 0.2, 1.0, 60.0]), st.booleans())


class Sent(NamedTuple):
    at_s: float
    chunk: Chunk
    first_s: float
    """When the first of what the chunk holds arrived."""
    text_s: float
    """When its first character arrived."""
    ended: bool
    """It left after the end of the sequence."""


def play(pieces: list[Piece], settings: Settings) -> tuple[list[Sent], float]:
    """Drive a chunker as its shell does, ticking exactly when `due_s` asks; return what left, and the end."""
    chunker = Chunker(*settings)
    sent: list[Sent] = []
    now_s, first_s, text_s = 0.0, math.inf, math.inf
    ended = False

    def leave(chunk: Chunk | None, at_s: float) -> None:
        nonlocal first_s, text_s
        if chunk is not None:
            sent.append(Sent(at_s, chunk, first_s, text_s, ended))
            first_s = text_s = math.inf

    def tick_until(until_s: float) -> None:
        while (due_s := chunker.due_s) is not None and due_s <= until_s:
            chunk = chunker.tick(due_s)
            assert chunk is not None, "a tick that was asked for lets something go"
            leave(chunk, due_s)

    for text, tokens, wait_s in pieces:
        tick_until(now_s + wait_s)
        now_s += wait_s
        first_s = min(first_s, now_s) if text or tokens else first_s
        text_s = min(text_s, now_s) if text else text_s
        leave(chunker.push(text, tokens, now_s), now_s)
    ended = True
    leave(chunker.finish(), now_s)
    tick_until(math.inf)
    assert chunker.flush() is None, "nothing stays behind"
    return sent, now_s


@given(PIECES, SETTINGS)
@example([("a", 1, 0.0), ("", 1, 0.0)], (16, 0.2, False))
@example([("", 1, 0.0), ("", 1, 0.3)], (1, 0.05, True))
def test_nothing_is_lost_repeated_or_reordered(pieces: list[Piece], settings: Settings) -> None:
    chunks = [left.chunk for left in play(pieces, settings)[0]]
    assert "".join(chunk.text for chunk in chunks) == "".join(text for text, _, _ in pieces)
    index = 0
    for chunk in chunks:
        assert chunk.index == index
        assert chunk.text or chunk.tokens
        index += chunk.tokens
    assert index == sum(tokens for _, tokens, _ in pieces)


@given(PIECES, SETTINGS)
def test_timing_rules(pieces: list[Piece], settings: Settings) -> None:
    min_tokens, max_latency_s, flush_on_eos = settings
    sent, ended_s = play(pieces, settings)
    for at_s, chunk, first_s, text_s, ended in sent:
        if chunk.text:
            assert at_s <= max(first_s + max_latency_s, text_s), "held for longer than asked"
        if chunk.tokens < min_tokens and chunk.text and not (ended and flush_on_eos):
            assert at_s >= first_s + max_latency_s, "left early and small"
        if ended and (flush_on_eos or not chunk.text):
            assert at_s == ended_s


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=20))
def test_by_default_every_token_leaves_at_once(texts: list[str]) -> None:
    chunker = Chunker(1, 0.2, True)
    for index, text in enumerate(texts):
        assert chunker.push(text, 1, 0.0) == Chunk(index, text, 1)
        assert chunker.due_s is None
    assert chunker.finish() is None


def test_the_contract_s_example() -> None:
    chunker = Chunker(16, 0.2, True)
    assert [chunker.push("x", 1, 0.001 * n) for n in range(15)] == [None] * 15
    assert chunker.push("x", 1, 0.016) == Chunk(0, "x" * 16, 16)
    assert chunker.push("y", 1, 1.0) is None
    assert chunker.due_s == 1.2
    assert chunker.tick(1.19) is None
    assert chunker.tick(1.2) == Chunk(16, "y", 1)
    assert chunker.push("z", 1, 1.3) is None
    assert chunker.finish() == Chunk(17, "z", 1)


def test_the_tail_waits_without_flush_on_eos() -> None:
    chunker = Chunker(16, 0.2, False)
    chunker.push("z", 1, 1.0)
    assert chunker.finish() is None
    assert chunker.tick(1.1) is None
    assert chunker.tick(1.2) == Chunk(0, "z", 1)
