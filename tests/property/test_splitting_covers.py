"""Splitting loses nothing, keeps the order, and never makes a piece that the model can't read whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.knowledge.splitting import SPECIAL_PIECES, estimate_pieces, split_text

texts = st.text(
    alphabet=st.sampled_from("abcdefghij ABC.,!?\n\n  0123456789äé密码€"), min_size=1, max_size=1_500
)


@given(text=texts, window=st.integers(min_value=20, max_value=120))
def test_pieces_cover_the_text_in_order(text: str, window: int) -> None:
    pieces = split_text(text, window)
    stripped = text.strip()
    start, covered = 0, 0
    for piece in pieces:
        found = stripped.find(piece, start)
        assert found != -1
        assert stripped[covered:found].strip() == ""
        start, covered = found + 1 if piece else found, max(covered, found + len(piece))
    assert covered == len(stripped)


@given(text=texts, window=st.integers(min_value=20, max_value=120))
def test_every_piece_fits_the_window(text: str, window: int) -> None:
    pieces = split_text(text, window)
    # A piece by itself may look like another language than the whole text, and then weighs up to 5/3 as much.
    assert all(estimate_pieces(piece) <= window * 5 / 3 for piece in pieces)
    if estimate_pieces(text) <= window - SPECIAL_PIECES:
        assert len(pieces) == 1
