"""Chained hashes of the beginnings of one conversation, as placement compares them. Pure.

The gateway has no tokenizer: what is hashed is text, in the order in which the model's template shows it, and
blocks end after so many bytes. Equal beginnings of two conversations of one tenant give equal hashes; the
hash's key is the salt that also separates the prefix caches of tenants, so nothing else ever does.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from gateway.pipeline.plan import BYTES_PER_TOKEN, TOKENS_PER_MESSAGE
from grid.engines.packing import document_block, heading_block
from grid.words import Message
from placement.prefixes import END_TOKENS

FRAME_BYTES = BYTES_PER_TOKEN * TOKENS_PER_MESSAGE
"""What a template adds to a turn, in bytes of text: a hash's place then is about its place in tokens."""

HASH_BYTES = 8
"""Among the half million blocks that a cell remembers, a chance hit comes once in some forty years of a
thousand prompts a second, and costs one misjudged price."""

MAX_KEY_BYTES = 64
"""What BLAKE2b takes; salts have 32."""

_ENDS = tuple(tokens * BYTES_PER_TOKEN for tokens in END_TOKENS)


class Prefix:
    """Hashes of one conversation, which grows."""

    __slots__ = ("_chain", "_size", "hashes")

    def __init__(self, salt: str) -> None:
        self._chain = blake2b(key=salt.encode()[:MAX_KEY_BYTES], digest_size=HASH_BYTES)
        self._size = 0
        self.hashes: tuple[int, ...] = ()
        """One for each of placement's blocks that the conversation fills."""

    def extend(self, text: str) -> tuple[int, ...]:
        """Go on with `text`; return the hashes of the blocks that it fills."""
        ends, done = _ENDS, len(self.hashes)
        data = memoryview(text.encode("utf-8", "replace"))
        begins, size = 0, self._size + len(data)
        fresh = []
        while done < len(ends) and ends[done] <= size:
            stop = ends[done] - self._size
            self._chain.update(data[begins:stop])
            fresh.append(int.from_bytes(self._chain.digest()))
            begins, done = stop, done + 1
        if done < len(ends):
            self._chain.update(data[begins:])
        self._size = size
        self.hashes += (added := tuple(fresh))
        return added


def prompt_prefix(salt: str, messages: Sequence[Message], documents: Sequence[str]) -> Prefix:
    """Return the prefix of a prompt. `documents` come best first, and all are taken to fit."""
    turns = [turn(message.role, message.text) for message in messages]
    if documents:
        has_system = bool(messages) and messages[0].role == "system"
        system = messages[0].text if has_system else ""
        packed = "".join(map(document_block, reversed(documents)))
        turns[:has_system] = [turn("system", f"{system}{heading_block(system)}{packed}")]
    prefix = Prefix(salt)
    prefix.extend("".join(turns))
    return prefix


def system_prefix(salt: str, messages: Sequence[Message]) -> Prefix:
    """Return the prefix of a prompt of which nothing but its system message is known yet."""
    prefix = Prefix(salt)
    if messages and messages[0].role == "system":
        prefix.extend(turn("system", messages[0].text))
    return prefix


def turn(role: str, text: str) -> str:
    """Return how a turn is hashed."""
    return role.rjust(FRAME_BYTES) + text
