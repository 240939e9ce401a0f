"""From token ids to text, one stream at a time: the grid's only decoder.

It never gives out half a character, and what it gives out in pieces is what decoding the whole sequence
gives. Fed again with the ids that were emitted before, it stands where it stood, so a stream goes on in
the middle of a character as if nothing had happened. Special tokens have no text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from grid.engines.base import check_emitted

PRIME_TOKENS = 8
"""Prompt ids that a windowed decoder looks back on: enough for any rule that joins neighbours."""

UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """One stream."""

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; "" inside a character."""

    def finish(self) -> str:
        """Return what is left at the end of the sequence: U+FFFD for a character that stays cut off."""


class Detokenizer:
    """A tokenizer's decoding side. Built once for each engine, shared by all its streams."""

    def __init__(self, tokenizer_json: Path) -> None:
        text = tokenizer_json.read_text("utf-8")
        spec: dict[str, Any] = json.loads(text)
        self._tokenizer = Tokenizer.from_str(text)
        self._pieces: list[bytes] | None = None
        if (spec.get("decoder") or {}).get("type") == "ByteLevel":
            special = {token["id"] for token in spec.get("added_tokens", ()) if token["special"]}
            self._pieces = _byte_pieces(self._tokenizer, special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a whole sequence."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(
        self, prompt_ids: Sequence[int], emitted_ids: Sequence[int] = (), emitted_code_points: int = 0
    ) -> Decoder:
        """Return a decoder for what comes after the prompt and after what was emitted before.

        Raises Conflict where the emitted ids make a text of another length here.
        """
        decoder: Decoder = (
            _ByteDecoder(self._pieces)
            if self._pieces is not None
            else _WindowDecoder(self, prompt_ids[-PRIME_TOKENS:])
        )
        check_emitted(decoder.feed(emitted_ids), emitted_code_points)
        return decoder


class _ByteDecoder:
    """For byte-level tokenizers, where a token is bytes and nothing depends on its neighbours."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        # A model may be wider than its tokenizer; ids beyond it have no text.
        return self._utf8.decode(b"".join([pieces[token] for token in ids if token < len(pieces)]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For other tokenizers: decode a short window and give out how its text has grown.

    The window starts at the last id whose text was complete, so that joining rules see a neighbour.
    """

    def __init__(self, detokenizer: Detokenizer, prime: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._window = list(prime)
        self._known = len(prime)
        """Leading ids of the window whose text is given out."""

    def feed(self, ids: Sequence[int]) -> str:
        return "".join(self._feed_one(token) for token in ids)

    def _feed_one(self, token: int) -> str:
        self._window.append(token)
        before, after = self._texts()
        if after.endswith(UNFINISHED) or len(after) <= len(before):
            return ""
        self._window = self._window[max(0, self._known - 1) :] if self._known else self._window
        self._known = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._texts()
        self._known = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._detokenizer.decode
        return decode(self._window[: self._known]), decode(self._window)


def _byte_pieces(tokenizer: Tokenizer, special: set[int]) -> list[bytes]:
    """Return the bytes of each id: by the byte-level alphabet, else (added tokens) the token's own text."""
    to_byte = {character: byte for byte, character in _byte_alphabet().items()}
    pieces = [b""] * (1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))
    for token, position in tokenizer.get_vocab(with_added_tokens=True).items():
        if position in special:
            continue
        try:
            pieces[position] = bytes(to_byte[character] for character in token)
        except KeyError:
            pieces[position] = token.encode()
    return pieces


def _byte_alphabet() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on
    (Radford et al. 2019, the GPT-2 encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
