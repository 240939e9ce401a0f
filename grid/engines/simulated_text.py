"""The simulated model's words: its vocabulary, its tokenizer and what it answers. Pure.

Every answer begins with `[simulated]` and goes on with words of `VOCABULARY`, so that nobody takes it for
a model's. A token of other text is up to four bytes of it, as with a real tokenizer about four
characters; roles are ids that no text can produce. Token ids and text turn into each other exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from grid.engines.packing import split_system
from grid.words import Message

MARK = "[simulated]"

_WORDS = """
alfa bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec
romeo sierra tango uniform victor whiskey xray yankee zulu
amber azure bronze coral crimson ebony emerald golden indigo ivory jade lilac maroon olive pearl ruby saffron
scarlet silver teal turquoise violet
north south east west spring summer autumn winter dawn noon dusk
"""

VOCABULARY: tuple[str, ...] = (MARK, *(f" {word}" for word in _WORDS.split()))
"""Text of token 0, 1, 2 …; all but the mark begin with a blank."""

LONGEST_TOKEN_CHARACTERS = max(map(len, VOCABULARY))

_IDS = {text: token for token, text in enumerate(VOCABULARY)}
_ROLE_IDS = {role: len(VOCABULARY) + i for i, role in enumerate(("system", "user", "assistant"))}
_FIRST_BYTES_ID = 1024
"""From here on an id is packed bytes: the bytes with a leading 1, so that their number is kept."""
_BYTES_PER_TOKEN = 4
_WORD_CHARACTERS = 32
"""Longer pieces are no words that come again, and not remembered."""
_PIECE = re.compile(r"\s?\S+|\s")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for piece in _PIECE.findall(text):
        ids += _word_ids(piece) if len(piece) <= _WORD_CHARACTERS else _packed(piece)
    return ids


@lru_cache(maxsize=8192)
def _word_ids(word: str) -> tuple[int, ...]:
    token = _IDS.get(word)
    return _packed(word) if token is None else (token,)


def _packed(piece: str) -> tuple[int, ...]:
    data = piece.encode("utf-8", "surrogatepass")
    return tuple(
        _FIRST_BYTES_ID + int.from_bytes(b"\1" + data[at : at + _BYTES_PER_TOKEN])
        for at in range(0, len(data), _BYTES_PER_TOKEN)
    )


def decode(ids: Iterable[int]) -> str:
    """Return the text of `ids`; roles are silent, and bytes cut inside a character become U+FFFD."""
    parts = bytearray()
    for token in ids:
        if token < len(VOCABULARY):
            parts += VOCABULARY[token].encode()
        elif token >= _FIRST_BYTES_ID:
            packed = token - _FIRST_BYTES_ID
            parts += packed.to_bytes((packed.bit_length() + 7) // 8)[1:]
    return parts.decode("utf-8", "replace")


def render(messages: Sequence[Message]) -> list[int]:
    """Return the ids of a conversation without documents; the answer's role comes last."""
    system, turns = split_system(messages)
    ids = [_ROLE_IDS["system"], *encode(system)]
    for turn in turns:
        ids.append(_ROLE_IDS[turn.role])
        ids += encode(turn.text)
    ids.append(_ROLE_IDS["assistant"])
    return ids


def with_context(prompt: Sequence[int], context: Sequence[int]) -> list[int]:
    """Return `prompt` with the context at the end of its system message, which always comes first."""
    end = next(i for i in range(1, len(prompt)) if len(VOCABULARY) <= prompt[i] < _FIRST_BYTES_ID)
    return [*prompt[:end], *context, *prompt[end:]]


def answer_key(seed: int, prompt_hash: bytes, sampling_seed: int | None) -> int:
    """Return the number that an answer is made from. Greedy answers pass None as `sampling_seed`."""
    sampled = 0 if sampling_seed is None else (sampling_seed * 2 + 1)
    return _mix(int.from_bytes(prompt_hash[:8]) ^ _mix(seed & _MASK) ^ _mix(sampled & _MASK))


def answer_token(key: int, index: int) -> int:
    """Return token number `index` of the answer; the first is the mark."""
    if index == 0:
        return 0
    return 1 + _mix(key + index * _GOLDEN & _MASK) % (len(VOCABULARY) - 1)


def answer_tokens(key: int, mean: int) -> int:
    """Return the length of the whole answer: evenly from half the mean to one and a half times it."""
    return max(1, mean // 2 + _mix(key ^ _GOLDEN) % (mean + 1))


def _mix(value: int) -> int:
    """Return a well-spread 64-bit number (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
