"""Server-sent events as a client reads them: bytes in, names and data out. Pure."""

from __future__ import annotations

from grid.errors import InternalError

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""One event of a stream; far above any, so only a peer that isn't a gateway passes it."""


class EventParser:
    """Server-sent events from bytes that arrive in pieces of any size.

    Follows the HTML standard's event-stream grammar for `event` and `data`: lines end with LF, CR or CRLF,
    a blank line ends an event, lines that begin with a colon are comments, an unfinished event is dropped.
    Raises InternalError when one event passes `MAX_EVENT_BYTES`.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False
        self._first_line = True
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> list[tuple[str, str]]:
        """Return the events (name, data) that `piece` completes."""
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if piece.endswith(b"\r"):
            self._after_cr = True
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events = []
        for end in lines[:-1]:
            self._line += end
            event = self._take_line()
            if event is not None:
                events.append(event)
        self._line += lines[-1]
        if len(self._line) + self._data_bytes > MAX_EVENT_BYTES:
            raise InternalError(f"the gateway sent an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take_line(self) -> tuple[str, str] | None:
        raw = bytes(self._line)
        self._line.clear()
        if self._first_line:
            self._first_line = False
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw:
            return self._dispatch()
        name, _, value = raw.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"event":
            self._name = text
        elif name == b"data":
            self._data.append(text)
            self._data_bytes += len(value)
        return None

    def _dispatch(self) -> tuple[str, str] | None:
        name, data = self._name or "message", self._data
        self._name, self._data, self._data_bytes = "", [], 0
        return (name, "\n".join(data)) if data else None
