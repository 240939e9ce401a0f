"""Stream control: which tokens leave together, and when. Pure: time is an argument, in seconds.

Tokens are held until `min_tokens` are there or `max_latency_s` has passed since the first of them was
held. Whatever the settings, the chunks' texts joined are the pushed texts joined, and the indices run on
without a gap. Tokens that made no text yet (inside a character) wait for the text they belong to.
"""

from __future__ import annotations

from gateway.pipeline.events import Chunk


class Chunker:
    """Holds tokens of one stream. `due_s` says when `tick` has to be called next, None: not at all."""

    __slots__ = (
        "_flush_on_eos",
        "_held_since_s",
        "_index",
        "_max_latency_s",
        "_min_tokens",
        "_texts",
        "_tokens",
    )

    def __init__(self, min_tokens: int, max_latency_s: float, flush_on_eos: bool) -> None:
        self._min_tokens = min_tokens
        self._max_latency_s = max_latency_s
        self._flush_on_eos = flush_on_eos
        self._index = 0
        self._texts: list[str] = []
        self._tokens = 0
        self._held_since_s = 0.0

    @property
    def due_s(self) -> float | None:
        return self._held_since_s + self._max_latency_s if self._texts else None

    def push(self, text: str, tokens: int, now_s: float) -> Chunk | None:
        """Hold `text`, made by `tokens` more tokens, and return what may leave."""
        if not self._texts and not self._tokens:
            if text and tokens >= self._min_tokens:
                chunk = Chunk(self._index, text, tokens)
                self._index += tokens
                return chunk
            self._held_since_s = now_s
        if text:
            self._texts.append(text)
        self._tokens += tokens
        if self._texts and (
            self._tokens >= self._min_tokens or now_s >= self._held_since_s + self._max_latency_s
        ):
            return self.flush()
        return None

    def tick(self, now_s: float) -> Chunk | None:
        """Return what has been held for long enough."""
        due_s = self.due_s
        return self.flush() if due_s is not None and now_s >= due_s else None

    def finish(self) -> Chunk | None:
        """End of sequence: return the tail, or None where it is empty or, without `flush_on_eos`, has to
        wait for its latency bound (`due_s` is set then, and `tick` returns it)."""
        if self._texts and not self._flush_on_eos:
            return None
        return self.flush()

    def flush(self) -> Chunk | None:
        """Return all that is held, whatever the settings; None if that is nothing."""
        if not self._texts and not self._tokens:
            return None
        chunk = Chunk(self._index, "".join(self._texts), self._tokens)
        self._index += self._tokens
        self._texts.clear()
        self._tokens = 0
        return chunk
