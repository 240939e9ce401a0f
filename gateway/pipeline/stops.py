"""Stop strings over the whole text of an answer, however it is cut into pieces. Pure.

The match that is complete first ends the answer, before its own first character; of several that are
complete at the same character, the longest. Text that could still become a stop string is held back, so
nothing that has left is ever taken back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    text: str
    tokens: int
    """Tokens that begin with this text. A token counts once, with its first character; one that made no
    text counts as soon as everything before it was released."""
    stop: str = ""
    """The stop string that is complete; nothing is released after it."""

    @property
    def stopped(self) -> bool:
        return bool(self.stop)


class StopFilter:
    """Stands between the tokens of one stream and its chunks."""

    __slots__ = ("_held", "_parts", "_starts", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops, "without stop strings there is nothing to filter"
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._starts = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]")
        self._held = ""
        self._parts: deque[tuple[int, int]] = deque()
        """What is held, as (characters, tokens that begin with them), oldest first."""

    def push(self, text: str, tokens: int) -> Released:
        """Take the next piece and return what can no longer be part of a stop string."""
        if not self._held and not self._starts.search(text):
            return Released(text, tokens)
        self._parts.append((len(text), tokens))
        self._held += text
        match = self._first_match()
        if match is not None:
            start, stop = match
            return self._release(start, stop)
        return self._release(len(self._held) - self._open_characters())

    def finish(self) -> Released:
        """Return all that is held: the sequence is over, so it begins no stop string."""
        return self._release(len(self._held))

    def _first_match(self) -> tuple[int, str] | None:
        """Return where the match starts that is complete first, and of which stop string."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else best[1:]

    def _open_characters(self) -> int:
        """Return the length of the longest ending of the held text that begins a stop string."""
        held = self._held
        longest = 0
        for stop in self._stops:
            start = held.find(stop[0], max(0, len(held) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(held[start:]):
                    longest = max(longest, len(held) - start)
                    break
                start = held.find(stop[0], start + 1)
        return longest

    def _release(self, characters: int, stop: str = "") -> Released:
        text, self._held = self._held[:characters], self._held[characters:]
        tokens = 0
        left = characters
        while self._parts:
            size, begun = self._parts[0]
            if size > 0 and left == 0:
                break
            tokens += begun
            if size > left:
                self._parts[0] = (size - left, 0)
                break
            left -= size
            self._parts.popleft()
        if stop:
            self._held = ""
            self._parts.clear()
        return Released(text, tokens, stop)
