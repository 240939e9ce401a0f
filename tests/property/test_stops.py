"""Stop strings against a naive reading of the whole text, for any way to cut it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.pipeline.stops import Released, StopFilter

ALPHABET = "ab\n"
"""Few letters, so that stop strings begin, nearly complete and overlap all the time."""
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=8)
PIECES = st.lists(st.tuples(st.text(ALPHABET, max_size=4), st.integers(0, 3)), max_size=12)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Grow the text by a character at a time until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


def play(pieces: list[tuple[str, int]], stops: list[str]) -> list[Released]:
    filter_ = StopFilter(stops)
    released = []
    for text, tokens in pieces:
        released.append(filter_.push(text, tokens))
        if released[-1].stopped:
            assert filter_.finish() == Released("", 0), "nothing is left behind a stop string"
            return released
    return [*released, filter_.finish()]


@given(PIECES, STOPS)
@example([("abc", 1), ("d", 1)], ["abcd", "bc"])
@example([("ba", 1)], ["a", "b"])
@example([("aab", 1)], ["ab", "aab"])
@example([("a", 1), ("", 1), ("b", 1)], ["ab"])
def test_same_text_as_a_naive_search(pieces: list[tuple[str, int]], stops: list[str]) -> None:
    released = play(pieces, stops)
    expected, stopped = naive("".join(text for text, _ in pieces), stops)
    assert "".join(piece.text for piece in released) == expected
    assert released[-1].stopped == stopped


@given(PIECES, STOPS)
def test_nothing_is_held_without_need(pieces: list[tuple[str, int]], stops: list[str]) -> None:
    filter_ = StopFilter(stops)
    whole, out = "", ""
    for text, tokens in pieces:
        whole += text
        piece = filter_.push(text, tokens)
        out += piece.text
        if piece.stopped:
            return
        held = whole[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops), "held text begins a stop string"
        assert not any(stop in out for stop in stops)


@given(PIECES, STOPS)
def test_a_token_counts_with_its_first_character(pieces: list[tuple[str, int]], stops: list[str]) -> None:
    released = play(pieces, stops)
    cut = sum(len(piece.text) for piece in released)
    if not released[-1].stopped:
        assert sum(piece.tokens for piece in released) == sum(tokens for _, tokens in pieces)
        return
    begins, expected = 0, 0
    for text, tokens in pieces[: len(released)]:
        if begins < cut or (not text and begins == cut):
            expected += tokens
        elif text:
            break
        begins += len(text)
    assert sum(piece.tokens for piece in released) == expected


def test_characters_that_mean_something_in_a_pattern_are_plain_text() -> None:
    filter_ = StopFilter(["]", "^x", "\\d", "-"])
    assert filter_.push("a5^", 1) == Released("a5", 1)
    assert filter_.push("y\\", 1) == Released("^y", 1)
    assert filter_.push("d after", 1) == Released("", 0, "\\d")
