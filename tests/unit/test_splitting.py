"""Long documents in pieces: examples. The general rules are in tests/property."""

from __future__ import annotations

from gateway.knowledge.splitting import estimate_pieces, split_text


def test_a_short_text_is_one_piece() -> None:
    assert split_text("  How do I reset my password?\n", 256) == ("How do I reset my password?",)


def test_cuts_fall_behind_sentences() -> None:
    sentence = "The router blinks twice when it has found the network."
    pieces = split_text(" ".join([sentence] * 40), 100)
    assert len(pieces) > 3
    assert all(piece.endswith("network.") for piece in pieces)


def test_paragraphs_come_before_sentences() -> None:
    paragraph = "One short sentence. Another short one. And a third of them."
    pieces = split_text("\n\n".join([paragraph] * 12), 60)
    assert all(piece.endswith("a third of them.") for piece in pieces)


def test_a_text_without_blanks_is_cut_all_the_same() -> None:
    pieces = split_text("x" * 5_000, 100)
    assert len(pieces) > 1
    assert all(estimate_pieces(piece) <= 100 for piece in pieces)


def test_other_languages_and_scripts_count_for_more() -> None:
    english, german, chinese = "password " * 20, "Schlüsselwörter " * 20, "密码重置页面 " * 20
    per_character = [estimate_pieces(text) / len(text) for text in (english, german, chinese)]
    assert per_character == sorted(per_character)
