"""Bytes to messages and back. Pure: no I/O, no clock, no state but the bytes of an unfinished frame.

A frame is `length (4 bytes, big-endian) · kind (1 byte) · run`, where the run is a msgpack array of messages
of that kind, each the array of its fields; `length` counts the run. Nearly every frame has a run of one; the
tokens that an engine step gives to all streams of a connection travel as one run.

The rules that let two releases talk live here: an unknown kind is skipped and counted, fields that a newer
peer appended are ignored, trailing fields that an older peer lacks take their defaults. Anything else that
does not fit the message is a ProtocolError.
"""

from __future__ import annotations

import math
import numbers
import struct
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgpack
import msgspec

from grid.errors import TooLarge
from grid.wire.messages import KINDS, WireMessage

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""The largest legitimate frames are batches of vectors: 2,000 of 1,536 float32 are 12 MiB."""

STRANGER_FRAME_BYTES = 4096
"""Before a peer has proved itself: a hello is under 700 bytes, a goodbye under 3,200."""

MAX_RUN = 512
"""Messages of one frame: enough to make the header's cost vanish, too few to fill a stream at once."""

MAX_NESTING = 32
"""Of lists and maps inside a JSON-like field: metadata rarely passes 5, and the walk over it recurses."""

_HEADER = struct.Struct(">IB")


class ProtocolError(Exception):
    """The bytes are not frames of this protocol. `messages` came whole before the fault, in order."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.messages: list[WireMessage] = []


# --- encoding -------------------------------------------------------------------------------


def _plain_number(value: Any) -> int | float:
    """Numbers that array code leaks, such as numpy's, travel as plain ones."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"a message can't carry {type(value).__name__}")


_KIND_OF: dict[type[WireMessage], int] = {message: kind for kind, message in KINDS.items()}
_encode_run = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode


def encode(*run: WireMessage) -> bytes:
    """Return one frame with `run`: one message, or up to `MAX_RUN` of one kind.

    Raises TooLarge above `MAX_FRAME_BYTES`, and TypeError or ValueError for a field that msgpack can't carry.
    """
    assert 0 < len(run) <= MAX_RUN
    body = _encode_run(run)
    if len(body) > MAX_FRAME_BYTES:
        raise TooLarge(f"{type(run[0]).__name__} has {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body), _KIND_OF[type(run[0])]) + body


# --- decoding -------------------------------------------------------------------------------


class Decoder:
    """Turns the bytes of one connection into messages, whatever the chunks that they arrive in.

    Holds at most one unfinished frame. After a ProtocolError the connection is of no more use.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.unknown_kinds = 0
        """Frames of a newer peer that were skipped."""
        self.decoded_bytes = 0
        """Of all frames that were complete."""
        self._max_frame_bytes = max_frame_bytes
        self._unfinished = bytearray()

    def feed(self, data: bytes) -> list[WireMessage]:
        """Return the messages that `data` completes. Raises ProtocolError."""
        return self._read(data)

    def first(self, data: bytes) -> list[WireMessage]:
        """Like `feed`, but stop after one frame; `rest` has what follows it."""
        return self._read(data, one_frame=True)

    def rest(self) -> bytes:
        """Return the bytes fed but not decoded, for a successor with another limit."""
        return bytes(self._unfinished)

    def _read(self, data: bytes, one_frame: bool = False) -> list[WireMessage]:
        source: bytes | bytearray = data
        if self._unfinished:
            self._unfinished += data
            source = self._unfinished
        messages: list[WireMessage] = []
        start = 0
        try:
            with memoryview(source) as view:
                while len(view) - start >= _HEADER.size and not (one_frame and messages):
                    length, kind = _HEADER.unpack_from(view, start)
                    if length > self._max_frame_bytes:
                        raise ProtocolError(
                            f"a frame of {length} bytes; the limit is {self._max_frame_bytes}"
                        )
                    end = start + _HEADER.size + length
                    if end > len(view):
                        break
                    with view[start + _HEADER.size : end] as run:
                        messages += self._decode(kind, run)
                    start = end
        except ProtocolError as error:
            error.messages = messages
            raise
        finally:
            self.decoded_bytes += start
        if source is data:
            self._unfinished += data[start:]
        else:
            del self._unfinished[:start]
        return messages

    def _decode(self, kind: int, run: memoryview) -> Sequence[WireMessage]:
        reader = _READERS.get(kind)
        if reader is None:
            self.unknown_kinds += 1
            return ()
        return reader(run)


_Reader = Callable[[memoryview], Sequence[WireMessage]]


def _reader(message: Any) -> _Reader:
    """Return what decodes a run of `message`. The types are checked as it decodes, in C."""
    run_type: Any = Annotated[list[message], msgspec.Meta(min_length=1, max_length=MAX_RUN)]
    decode = msgspec.msgpack.Decoder(run_type).decode
    json_fields = [
        index for index, hint in enumerate(_field_types(message)) if typing.get_origin(hint) is dict
    ]

    def read(run: memoryview) -> Sequence[WireMessage]:
        try:
            try:
                messages = decode(run)
            except msgspec.ValidationError as error:
                trimmed = _trimmed(run, message)
                if trimmed is None:
                    raise error
                messages = decode(trimmed)
            for index in json_fields:
                for each in messages:
                    _check_json(each[index], MAX_NESTING)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"{message.__name__}: {error}") from None
        return messages  # type: ignore[no-any-return]

    return read


def _check_json(value: Any, nesting: int) -> None:
    """Msgpack knows more than JSON does; raise for it here."""
    if isinstance(value, (dict, list)):
        if nesting == 0:
            raise msgspec.ValidationError(f"nested deeper than {MAX_NESTING}")
        for item in value.values() if isinstance(value, dict) else value:
            _check_json(item, nesting - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise msgspec.ValidationError("a number is not finite")
    elif value is not None and not isinstance(value, (str, int)):
        raise msgspec.ValidationError(f"{type(value).__name__} is not JSON-like")


# --- fields that a newer release appended -----------------------------------------------------


def _trimmed(run: memoryview, message: Any) -> bytes | None:
    """Return the run without the fields that we don't know, or None if it has none (or is no run at all)."""
    try:
        values = msgpack.unpackb(run, strict_map_key=False)
        known = [_known(item, message) for item in values]
        return None if known == values else msgpack.packb(known)
    except (ValueError, TypeError, OverflowError):
        return None


def _known(value: Any, hint: Any) -> Any:
    """Return `value`, an unchecked decoding of a `hint`, with each record cut to the fields that we know."""
    if not isinstance(value, list):
        return value
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return [_known(item, field) for item, field in zip(value, _field_types(hint), strict=False)]
    match typing.get_origin(hint), typing.get_args(hint):
        case origin, (item_hint, last) if origin is tuple and last is Ellipsis:
            return [_known(item, item_hint) for item in value]
    return value


def _field_types(record: Any) -> list[Any]:
    return list(typing.get_type_hints(record).values())


_READERS: dict[int, _Reader] = {kind: _reader(message) for kind, message in KINDS.items()}
