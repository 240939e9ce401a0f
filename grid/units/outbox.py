"""What waits for a peer whose connection is paused: held here instead of piling up in the transport, with the
tokens of each stream joined into one frame. Pure; `server.py` owns one a peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from grid.wire.messages import Tokens, Vectors, WireMessage

MAX_HELD_BYTES = 32 * 1024 * 1024
"""For one peer: the answers of two thousand streams of 2,000 tokens. A peer that lets more pile up does not
read at all, and its connection is closed."""

FRAME_BYTES = 64
"""What a frame costs here beside its text, ids and vectors."""

ID_BYTES = 4


@dataclass(slots=True)
class _Joined:
    """Consecutive Tokens frames of one attempt."""

    first: Tokens
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, tokens: Tokens) -> None:
        self.ids += tokens.ids
        self.texts.append(tokens.text)

    def message(self) -> Tokens:
        return self.first._replace(ids=tuple(self.ids), text="".join(self.texts))


class Outbox:
    """Held messages, in order within each stream."""

    def __init__(self) -> None:
        self._streams: dict[int, list[WireMessage | _Joined]] = {}
        self.held_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._streams)

    @property
    def is_full(self) -> bool:
        return self.held_bytes > MAX_HELD_BYTES

    def hold(self, message: WireMessage) -> None:
        held = self._streams.setdefault(message.stream, [])
        last = held[-1] if held else None
        self.held_bytes += FRAME_BYTES
        if isinstance(message, Tokens):
            self.held_bytes += len(message.text) + ID_BYTES * len(message.ids)
            if isinstance(last, _Joined) and last.first.attempt == message.attempt:
                last.add(message)
                return
            joined = _Joined(message)
            joined.add(message)
            held.append(joined)
            return
        if isinstance(message, Vectors):
            self.held_bytes += len(message.data)
        held.append(message)

    def take(self) -> list[WireMessage]:
        """Return everything held, and hold nothing."""
        messages = [
            entry.message() if isinstance(entry, _Joined) else entry
            for held in self._streams.values()
            for entry in held
        ]
        self._streams.clear()
        self.held_bytes = 0
        return messages
