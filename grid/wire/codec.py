"""Bytes to messages and back. Pure: no I/O, no clock, no state but the bytes of an unfinished frame.

A frame is one msgpack array `[kind, stream, …fields]`. The rules that let two releases talk live here: an
unknown kind is ignored and counted, fields that a newer peer appended are ignored, trailing fields that an
older peer lacks take their defaults. Anything else that does not fit the message is a ProtocolError.
"""

from __future__ import annotations

import itertools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from grid.wire.messages import KINDS, Tokens, WireMessage


class Limits(NamedTuple):
    """What one frame may ask of this process. Checked by the unpacker before it allocates."""

    frame_bytes: int
    array_items: int
    map_items: int
    text_bytes: int
    """Of one string or byte string."""


MAX_FRAME_BYTES = 16 * 1024 * 1024
"""The largest legitimate frames are batches of vectors: 2,000 of 1,536 float32 are 12 MiB."""

MAX_ARRAY_ITEMS = 1 << 17
"""The longest arrays are a continuation's emitted ids: up to a context of 128 Ki tokens."""

MAX_MAP_ITEMS = 4096
"""Maps are document metadata and error details; nothing that people write by hand is larger."""

MAX_NESTING = 32
"""Of lists and maps inside a JSON-like field: metadata rarely passes 5, and the walk over it recurses."""

AUTHENTICATED = Limits(MAX_FRAME_BYTES, MAX_ARRAY_ITEMS, MAX_MAP_ITEMS, MAX_FRAME_BYTES)

STRANGER = Limits(frame_bytes=4096, array_items=16, map_items=0, text_bytes=2048)
"""For a peer that has not proved itself: a hello is under 200 bytes, a close reason under 2,048."""

FEED_BYTES = 256 * 1024
"""Bytes handed to the unpacker at once: what one socket read gives, so a larger input is cut up."""


class ProtocolError(Exception):
    """The bytes are not frames of this protocol. `messages` came whole before the fault, in order."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.messages: list[WireMessage] = []


# --- encoding -------------------------------------------------------------------------------

_KIND_OF: dict[type[WireMessage], int] = {message: kind for kind, message in KINDS.items()}

_pack = msgpack.Packer(buf_size=4096).pack


def encode(message: WireMessage) -> bytes:
    """Return the frame of `message`. Raises TypeError or ValueError for a field that msgpack can't carry."""
    return _pack((_KIND_OF[type(message)], *message))  # type: ignore[no-any-return]


# --- checking fields ------------------------------------------------------------------------


class _Mismatch(Exception):
    """A field does not have its type. Carries where and why; becomes a ProtocolError."""


_Reader = Callable[[Any], Any]
"""Takes an unpacked value, returns the field's value; raises _Mismatch."""


def _exactly(kind: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"{kind.__name__} expected, {type(value).__name__} found")
        return value

    return read


def _read_float(value: Any) -> float:
    if type(value) is not float:
        if type(value) is not int:
            raise _Mismatch(f"float expected, {type(value).__name__} found")
        return float(value)
    if not math.isfinite(value):
        raise _Mismatch("the number is not finite")
    return value


def _read_json(value: Any, depth: int = 0) -> Any:
    """Return the JSON value that `value` is, with lists for arrays."""
    kind = type(value)
    if kind in (str, int, bool, types.NoneType):
        return value
    if kind is float:
        return _read_float(value)
    if depth == MAX_NESTING:
        raise _Mismatch(f"nested deeper than {MAX_NESTING}")
    if kind is tuple:
        return [_read_json(item, depth + 1) for item in value]
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise _Mismatch("a key is not a string")
        return {key: _read_json(item, depth + 1) for key, item in value.items()}
    raise _Mismatch(f"JSON-like value expected, {kind.__name__} found")


def _read_map(value: Any) -> Any:
    if type(value) is not dict:
        raise _Mismatch(f"map expected, {type(value).__name__} found")
    return _read_json(value)


def _optional(read_present: _Reader) -> _Reader:
    return lambda value: None if value is None else read_present(value)


def _many(read_item: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise _Mismatch(f"array expected, {type(value).__name__} found")
        return tuple([read_item(item) for item in value])

    return read


def _pair(readers: tuple[_Reader, ...]) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) != len(readers):
            raise _Mismatch(f"array of {len(readers)} expected")
        return tuple([read_item(item) for read_item, item in zip(readers, value, strict=True)])

    return read


def _record(record: Any) -> _Reader:
    """Return the reader of a NamedTuple, which takes the array of its fields."""
    hints = typing.get_type_hints(record)
    fields = tuple((name, _reader(hints[name])) for name in record._fields)
    required = len(fields) - len(record._field_defaults)
    defaults = tuple(record._field_defaults.values())

    def read(value: Any) -> Any:
        if type(value) is not tuple:
            raise _Mismatch(f"{record.__name__} expected, {type(value).__name__} found")
        if len(value) < required:
            raise _Mismatch(f"{record.__name__} has {len(value)} fields, at least {required} needed")
        values = []
        name = ""
        try:
            for (name, read_field), item in zip(fields, value, strict=False):  # noqa: B007
                values.append(read_field(item))
        except _Mismatch as mismatch:
            raise _Mismatch(f"{record.__name__}.{name}: {mismatch}") from None
        values.extend(defaults[len(values) - required :])
        return record._make(values)

    return read


_SCALARS: dict[Any, _Reader] = {
    int: _exactly(int),
    str: _exactly(str),
    bytes: _exactly(bytes),
    bool: _exactly(bool),
    float: _read_float,
}


def _reader(hint: Any) -> _Reader:
    """Return the reader for a field annotated `hint`: a scalar, `T | None`, a tuple, a record or a map."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType:
            (present,) = (argument for argument in arguments if argument is not types.NoneType)
            return _optional(_reader(present))
        case t if t is tuple:
            if arguments[-1] is Ellipsis:
                return _many(_reader(arguments[0]))
            return _pair(tuple(_reader(argument) for argument in arguments))
        case t if t is dict:
            return _read_map
    return _record(hint)


def _read_tokens(frame: tuple[Any, ...]) -> Tokens:
    """The general reader's checks, unrolled for the one message that is most of the traffic."""
    fields = frame[1:6]
    try:
        stream, attempt, first_index, ids, text = fields
    except ValueError:
        raise _Mismatch(f"Tokens has {len(fields)} fields, at least 5 needed") from None
    if (
        type(stream) is int
        and type(attempt) is int
        and type(first_index) is int
        and type(text) is str
        and type(ids) is tuple
    ):
        for token_id in ids:
            if type(token_id) is not int:
                raise _Mismatch("Tokens.ids: int expected")
        return tuple.__new__(Tokens, fields)
    raise _Mismatch("Tokens: a field has the wrong type")


def _frame_reader(message: type[WireMessage]) -> Callable[[tuple[Any, ...]], WireMessage]:
    read_fields = _record(message)
    return lambda frame: read_fields(frame[1:])


_READERS: dict[int, Callable[[tuple[Any, ...]], WireMessage]] = {
    kind: _read_tokens if message is Tokens else _frame_reader(message) for kind, message in KINDS.items()
}


# --- decoding -------------------------------------------------------------------------------


class Decoder:
    """Turns the bytes of one connection into messages, whatever the chunks that they arrive in.

    After a ProtocolError the connection is of no more use: the place of the next frame is unknown.
    """

    def __init__(self, limits: Limits = AUTHENTICATED) -> None:
        self.unknown_kinds = 0
        """Frames of a newer peer that were skipped."""
        self.sizes: list[int] = []
        """Bytes on the wire of each message that the last `feed` returned."""
        self._frame_bytes = limits.frame_bytes
        self._fed_bytes = 0
        self._unpacker = msgpack.Unpacker(
            use_list=False,
            max_buffer_size=limits.frame_bytes + FEED_BYTES,
            max_array_len=limits.array_items,
            max_map_len=limits.map_items,
            max_str_len=limits.text_bytes,
            max_bin_len=limits.text_bytes,
            max_ext_len=0,
        )

    def feed(self, data: bytes) -> list[WireMessage]:
        """Return the messages that `data` completes. Raises ProtocolError."""
        messages: list[WireMessage] = []
        self.sizes = []
        try:
            if len(data) <= FEED_BYTES:
                self._read(data, messages)
            else:
                for start in range(0, len(data), FEED_BYTES):
                    self._read(data[start : start + FEED_BYTES], messages)
        except ProtocolError as error:
            error.messages = messages
            raise
        return messages

    def first(self, data: bytes) -> WireMessage | None:
        """Return the first message only, or None while it is incomplete; `rest` has what follows it."""
        messages: list[WireMessage] = []
        self._read(data, messages, at_most=1)
        return messages[0] if messages else None

    def rest(self) -> bytes:
        """Return the bytes fed but not decoded, and forget them: for a successor with other limits."""
        return self._unpacker.read_bytes(self._frame_bytes + FEED_BYTES)  # type: ignore[no-any-return]

    def _read(self, data: bytes, messages: list[WireMessage], at_most: int | None = None) -> None:
        unpacker, sizes, tell = self._unpacker, self.sizes, self._unpacker.tell
        start = tell()
        self._fed_bytes += len(data)
        try:
            unpacker.feed(data)
            for frame in itertools.islice(unpacker, at_most):
                try:
                    read = _READERS[frame[0]]
                except (LookupError, TypeError):
                    self._skip(frame)
                    start = tell()
                    continue
                messages.append(read(frame))
                end = tell()
                sizes.append(end - start)
                start = end
        except _Mismatch as mismatch:
            raise ProtocolError(str(mismatch)) from None
        except (ValueError, msgpack.UnpackException) as fault:
            raise ProtocolError(f"not a frame: {_reason(fault)}") from None
        if at_most is None and self._fed_bytes - start > self._frame_bytes:
            raise ProtocolError(f"a frame is larger than {self._frame_bytes} bytes")

    def _skip(self, frame: Any) -> None:
        if type(frame) is not tuple or len(frame) < 2 or type(frame[0]) is not int:
            raise _Mismatch("a frame is not an array that begins with kind and stream")
        self.unknown_kinds += 1


def _reason(fault: Exception) -> str:
    """What is wrong, without quoting the peer's bytes: a UnicodeDecodeError's text holds them."""
    if isinstance(fault, UnicodeDecodeError):
        return "a string is not UTF-8"
    return str(fault) or type(fault).__name__
