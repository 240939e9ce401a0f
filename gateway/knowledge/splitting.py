"""Long texts into pieces that an embedding model reads whole. Pure.

The gateway has no tokenizer, so the length of a text is an estimate of its word pieces, made so that it is
rather too high than too low. Pieces overlap, because the sentence that answers a question may lie on a cut.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate

SPECIAL_PIECES = 2
"""A model puts a mark at either end of what it reads."""
OVERLAP_SHARE = 0.15
"""Of the window: a sentence or two."""
LOOK_BACK_SHARE = 0.4
"""A cut moves back at most this far to reach the end of a sentence or paragraph."""
LETTERS_PER_PIECE = 5
"""English: most words up to this length are one piece."""
FOREIGN_LETTERS_PER_PIECE = 3
"""Other languages in Latin script: their words are rare in the vocabulary and break into shorter pieces."""
FOREIGN_SHARE = 0.003
"""Of a text's letters: with more accented ones than this it is taken for another language than English."""
DIGITS_PER_PIECE = 2

_SPAN = re.compile(r"[A-Za-z]{1,20}|[^\W\d_]{1,20}|\d{1,8}|\S")
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f]['\")\]]*\s|\n")
_PARAGRAPH_END = re.compile(r"\n\s*\n")


def estimate_pieces(text: str) -> int:
    """Return about how many word pieces a tokenizer makes of `text`."""
    per_piece = _letters_per_piece(text)
    return sum(_weight(match.group(), per_piece) for match in _SPAN.finditer(text))


def split_text(text: str, window_pieces: int) -> tuple[str, ...]:
    """Return `text` in overlapping pieces, each within `window_pieces` by estimate; at least one.

    Cuts fall behind a paragraph, else behind a sentence, else between words.
    """
    spans = [(match.start(), match.end()) for match in _SPAN.finditer(text)]
    per_piece = _letters_per_piece(text)
    weights = [_weight(text[start:end], per_piece) for start, end in spans]
    upto = [0, *accumulate(weights)]
    room = max(window_pieces - SPECIAL_PIECES, max(weights, default=1))
    if upto[-1] <= room:
        return (text.strip(),)
    pieces: list[str] = []
    first = 0
    while first < len(spans):
        last = bisect_right(upto, upto[first] + room) - 1
        if last < len(spans):
            last = _cut(text, spans, upto, first, last, room)
        pieces.append(text[spans[first][0] : _end(text, spans, last)].strip())
        if last == len(spans):
            break
        back = bisect_left(upto, upto[last] - int(room * OVERLAP_SHARE))
        first = max(back, first + 1)
    return tuple(pieces)


def _cut(text: str, spans: list[tuple[int, int]], upto: list[int], first: int, last: int, room: int) -> int:
    """Return the number of the span before which to cut, at most `last` and always beyond `first`."""
    earliest = max(first + 1, bisect_left(upto, upto[last] - int(room * LOOK_BACK_SHARE)))
    start, end = spans[earliest - 1][1], spans[last][0]
    for pattern in (_PARAGRAPH_END, _SENTENCE_END):
        ends = [match.end() for match in pattern.finditer(text, max(start - 1, 0), end)]
        if ends:
            return max(earliest, bisect_left(spans, (ends[-1], 0)))
    for candidate in range(last, earliest - 1, -1):
        if spans[candidate][0] > spans[candidate - 1][1]:
            return candidate
    return last


def _end(text: str, spans: list[tuple[int, int]], last: int) -> int:
    return len(text) if last == len(spans) else spans[last][0]


def _letters_per_piece(text: str) -> int:
    accented = sum(1 for character in text if "\u00c0" <= character < "\u0250")
    return FOREIGN_LETTERS_PER_PIECE if accented > FOREIGN_SHARE * len(text) else LETTERS_PER_PIECE


def _weight(span: str, letters_per_piece: int) -> int:
    if span[0].isdigit():
        return -(-len(span) // DIGITS_PER_PIECE)
    if max(span) < "\u0250":
        return -(-len(span) // letters_per_piece)
    # Other scripts: a character is a piece of its own.
    return len(span)
