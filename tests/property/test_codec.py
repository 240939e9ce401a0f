"""The codec under any messages, any bytes and any chunking: messages or ProtocolError, nothing else."""

from __future__ import annotations

import itertools
import types
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grid.errors import TooLarge
from grid.wire import codec
from grid.wire.codec import MAX_NESTING, MAX_RUN, Decoder, ProtocolError, encode
from grid.wire.messages import KINDS, StoreReply, Tokens, Watch, WireMessage

HEADER_BYTES = 5

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
"""Without surrogates: text hygiene is done where text enters the grid."""

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    str: TEXT,
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    if hint in SCALARS:
        return SCALARS[hint]
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return st.one_of(st.none(), values(arguments[0]))
    if origin is dict:
        return st.dictionaries(TEXT, JSON, max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    return records(hint)


def records(record: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(record)
    return st.builds(record, *(values(hint) for hint in hints.values()))


MESSAGES: st.SearchStrategy[WireMessage] = st.one_of(*map(records, KINDS.values()))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def outcome(chunks: list[bytes]) -> tuple[list[WireMessage], str, int]:
    """What one connection makes of its bytes: the messages, the reason of the fault, the frames skipped."""
    decoder = Decoder(max_frame_bytes=4096)
    messages: list[WireMessage] = []
    reason = ""
    for chunk in chunks:
        try:
            messages += decoder.feed(chunk)
        except ProtocolError as error:
            messages += error.messages
            reason = error.reason or "no reason"
            break
        assert len(decoder.rest()) < 4096 + HEADER_BYTES
    return messages, reason, decoder.unknown_kinds


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(0, 10_000), max_size=6))
def test_messages_come_back_as_they_were_whatever_the_chunks(
    messages: list[WireMessage], cuts: list[int]
) -> None:
    decoder = Decoder()
    data = b"".join(map(encode, messages))
    decoded = [message for chunk in cut(data, cuts) for message in decoder.feed(chunk)]
    assert decoded == messages
    assert [type(message) for message in decoded] == [type(message) for message in messages]
    assert decoder.decoded_bytes == len(data)


@given(st.lists(records(Tokens), min_size=1, max_size=20))
def test_a_run_comes_back_as_its_messages(run: list[Tokens]) -> None:
    assert Decoder().feed(encode(*run)) == run


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_any_bytes_are_messages_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    assert outcome(cut(data, cuts)) == outcome([data])


@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=4))
def test_any_run_of_a_known_kind_is_messages_or_a_protocol_error(
    kind: int, run: bytes, cuts: list[int]
) -> None:
    data = len(run).to_bytes(4, "big") + bytes([kind]) + run
    assert outcome(cut(data, cuts)) == outcome([data])


@given(
    st.lists(MESSAGES, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.lists(st.integers(0, 10_000), max_size=4),
)
def test_damaged_frames_are_messages_or_a_protocol_error(
    messages: list[WireMessage], damage: list[tuple[int, int]], cuts: list[int]
) -> None:
    data = bytearray(b"".join(map(encode, messages)))
    for place, byte in damage:
        data[place % len(data)] = byte
    assert outcome(cut(bytes(data), cuts)) == outcome([bytes(data)])


def frame(kind: int, run: bytes) -> bytes:
    return len(run).to_bytes(4, "big") + bytes([kind]) + run


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (b"", "Tokens: "),
        (b"\x90", "Tokens: Expected `array` of length >= 1"),
        (b"\x91\x94\x01\x01\x01\x90", "Tokens: Expected `array` of at least length 5"),
        (b"\x91\x95\x01\xc3\x01\x90\xa0", "Tokens: Expected `int`, got `bool`"),
        (b"\x91\x95\x01\x01\x01\x91\xa1a\xa0", "Tokens: Expected `int`, got `str`"),
        (b"\x91\x95\x01\x01\x01\x90\xa1\xff", "Tokens: Invalid UTF-8"),
        (b"\x91\x95\x01\x01\x01\xdd\x7f\xff\xff\xff\x01", "Tokens: Input data was truncated"),
        (b"\x91\x95\x01\x01\x01\x90\xa0\x00", "Tokens: MessagePack data is malformed: trailing"),
        (b"\xdd\x00\x01\x00\x00" + b"\x95" * 9, "Tokens: Expected `array` of length <= 512"),
        (b"\xdd\xff\xff\xff\xff", "Tokens: "),
    ],
)
def test_a_malformed_frame_says_what_is_wrong(run: bytes, reason: str) -> None:
    good = Tokens(1, 1, 0, (1,), "a")
    with pytest.raises(ProtocolError) as raised:
        Decoder().feed(encode(good) + frame(23, run) + encode(good))
    assert raised.value.reason.startswith(reason)
    assert raised.value.messages == [good]


def test_an_unknown_kind_is_skipped_and_counted() -> None:
    decoder = Decoder()
    assert decoder.feed(encode(Watch(1)) + frame(250, b"\x91\x91\x01") + encode(Watch(2))) == [
        Watch(1),
        Watch(2),
    ]
    assert decoder.unknown_kinds == 1


def test_a_frame_above_the_limit_is_refused_by_its_header_alone() -> None:
    with pytest.raises(ProtocolError, match="the limit is 4096"):
        Decoder(max_frame_bytes=4096).feed((4097).to_bytes(4, "big") + b"\x17")


def test_a_message_above_the_limit_is_refused_to_its_sender() -> None:
    with pytest.raises(TooLarge, match="Tokens has"):
        encode(Tokens(1, 1, 0, (), "a" * codec.MAX_FRAME_BYTES))


def test_the_first_frame_can_be_read_alone() -> None:
    decoder = Decoder()
    second = encode(Tokens(1, 1, 0, (), "x"))
    assert decoder.first(encode(Watch(1))[:3]) == []
    assert decoder.first(encode(Watch(1))[3:] + second) == [Watch(1)]
    assert decoder.rest() == second


def nested(levels: int) -> bytes:
    """A StoreReply whose result is that many maps inside each other."""
    return frame(41, b"\x91\x92\x01" + b"\x81\xa1a" * (levels - 1) + b"\x80")


def test_json_like_fields_nest_to_a_limit() -> None:
    assert len(Decoder().feed(nested(MAX_NESTING))) == 1
    with pytest.raises(ProtocolError, match=f"nested deeper than {MAX_NESTING}"):
        Decoder().feed(nested(MAX_NESTING + 1))
    with pytest.raises(ProtocolError, match="StoreReply"):
        Decoder().feed(nested(1_000_000))


@pytest.mark.parametrize("value", [b"\xd4\x05\x01", b"\xd6\xff\x00\x00\x00\x01", b"\xc4\x01a"])
def test_what_json_does_not_know_is_refused_in_json_like_fields(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="not JSON-like"):
        Decoder().feed(frame(41, b"\x91\x92\x01\x81\xa1a" + value))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_in_json_like_fields_are_finite(number: float) -> None:
    with pytest.raises(ProtocolError, match="not finite"):
        Decoder().feed(encode(StoreReply(1, {"score": number})))


def test_numbers_of_array_code_travel_as_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    sent = StoreReply(1, {"score": numpy.float32(0.5), "n": numpy.int64(3)})
    assert Decoder().feed(encode(sent)) == [StoreReply(1, {"score": 0.5, "n": 3})]


def test_a_run_is_no_longer_than_its_limit() -> None:
    run = [Watch(n) for n in range(MAX_RUN)]
    assert Decoder().feed(encode(*run)) == run
