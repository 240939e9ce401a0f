"""The text of one answer, whichever units it comes from: what was received, and what of it may leave. Pure.

Owns every token id that was received, the stop strings and the chunks. What a continuation starts from is
`ids` and `code_points`: both count what was received, also while stop strings or chunks still hold it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.pipeline.chunks import Chunker
from gateway.pipeline.events import Chunk
from gateway.pipeline.stops import StopFilter


class Answer:
    __slots__ = (
        "_chunker",
        "_fresh",
        "_fresh_tokens",
        "_stops",
        "code_points",
        "first_token_s",
        "ids",
        "newest_s",
        "stop",
    )

    def __init__(self, stops: tuple[str, ...], chunker: Chunker) -> None:
        self.ids: list[int] = []
        """Every output id, in order."""
        self.code_points = 0
        self.first_token_s = self.newest_s = math.nan
        """When the first token came, and the newest."""
        self.stop = ""
        """The stop string that is complete: the answer ends before it."""
        self._stops = StopFilter(stops) if stops else None
        self._chunker = chunker
        self._fresh: list[str] = []
        self._fresh_tokens = 0

    @property
    def due_s(self) -> float | None:
        """When what is held must leave; None where nothing with text is held."""
        return self._chunker.due_s

    def take(self, ids: Sequence[int], text: str, now_s: float) -> None:
        """Take the next tokens; after this, look at `stop`."""
        if not self.ids:
            self.first_token_s = now_s
        self.newest_s = now_s
        self.ids.extend(ids)
        self.code_points += len(text)
        tokens = len(ids)
        if self._stops is not None:
            text, tokens, self.stop = self._stops.push(text, tokens)
        self._fresh.append(text)
        self._fresh_tokens += tokens

    def let_go(self, now_s: float) -> Chunk | None:
        """Return what may leave of all that was taken since, as one piece."""
        if not self._fresh and not self._fresh_tokens:
            return None
        text = self._fresh[0] if len(self._fresh) == 1 else "".join(self._fresh)
        chunk = self._chunker.push(text, self._fresh_tokens, now_s)
        self._fresh.clear()
        self._fresh_tokens = 0
        return chunk

    def tick(self, now_s: float) -> Chunk | None:
        """Return what was held for long enough."""
        return self._chunker.tick(now_s)

    def finish(self, now_s: float) -> list[Chunk]:
        """The sequence is over: return what leaves now. While `due_s` says so, a tail is still held."""
        self._release_held()
        return [chunk for chunk in (self.let_go(now_s), self._chunker.finish()) if chunk is not None]

    def flush(self, now_s: float) -> list[Chunk]:
        """Return all that was received, whatever holds it: nothing more comes."""
        self._release_held()
        return [chunk for chunk in (self.let_go(now_s), self._chunker.flush()) if chunk is not None]

    def _release_held(self) -> None:
        if self._stops is not None and not self.stop:
            held = self._stops.finish()
            self._fresh.append(held.text)
            self._fresh_tokens += held.tokens
