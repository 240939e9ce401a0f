"""The client's event stream: whatever the pieces, the same events."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from grid.event_stream import EventParser

NAMES = st.text("abcdefgh-", min_size=1, max_size=8)
LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
EVENTS = st.lists(st.tuples(NAMES, st.lists(LINES, min_size=1, max_size=3)), max_size=6)
ENDINGS = st.sampled_from(["\n", "\r\n", "\r"])


@given(
    events=EVENTS,
    ending=ENDINGS,
    comments=st.booleans(),
    bom=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)
def test_events_survive_any_cut(
    events: list[tuple[str, list[str]]], ending: str, comments: bool, bom: bool, cuts: list[int]
) -> None:
    lines = []
    for name, data in events:
        lines += [": keep-alive", ""] if comments else []
        lines += [f"event: {name}", *(f"data: {line}" for line in data), ""]
    stream = (b"\xef\xbb\xbf" if bom else b"") + "".join(line + ending for line in lines).encode()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]

    parser = EventParser()
    seen = []
    for start, end in itertools.pairwise(edges):
        seen += parser.feed(stream[start:end])

    assert seen == [(name, "\n".join(data)) for name, data in events]


@given(st.binary(max_size=300), st.integers(1, 50))
def test_no_bytes_break_the_parser(stream: bytes, size: int) -> None:
    whole, pieces = EventParser(), EventParser()
    seen = []
    for start in range(0, len(stream), size):
        seen += pieces.feed(stream[start : start + size])
    assert seen == whole.feed(stream)
