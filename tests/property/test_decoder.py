"""Text given out in pieces is the text of the whole, whatever the ids: the decoder's one promise."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import prepared
from tokenizers import Tokenizer, decoders, models

from grid.engines.decoder import Detokenizer
from grid.engines.models import SMOLLM2_TOKENIZER

VOCABULARY = 49_152

any_ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)
# Single bytes and their neighbours: nearly every one is a piece of a character, or an invalid one.
byte_ids = st.lists(st.integers(0, 300), max_size=60)
texts = st.text(max_size=60)


@cache
def real() -> tuple[Detokenizer, Tokenizer]:
    folder = prepared(SMOLLM2_TOKENIZER)
    return Detokenizer(folder / "tokenizer.json"), Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int], emitted: int = 0) -> list[str]:
    """Feed `ids` in runs that end at `cuts`; the first `emitted` come as already emitted."""
    said = len(detokenizer.stream([1, 2, 3]).feed(ids[:emitted]))
    stream = detokenizer.stream([1, 2, 3], ids[:emitted], said)
    bounds = [emitted, *sorted(cut for cut in cuts if emitted < cut < len(ids)), len(ids)]
    out = [stream.feed(ids[a:b]) for a, b in pairwise(bounds)]
    return [*out, stream.finish()]


@settings(deadline=None)
@given(ids=st.one_of(any_ids, byte_ids), cuts=st.lists(st.integers(0, 60)))
def test_pieces_join_to_the_whole(ids: list[int], cuts: list[int]) -> None:
    detokenizer, tokenizer = real()
    assert "".join(pieces(detokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(ids=st.one_of(any_ids, byte_ids), data=st.data())
def test_a_continued_stream_goes_on_where_it_was_cut(ids: list[int], data: st.DataObject) -> None:
    detokenizer, tokenizer = real()
    cut = data.draw(st.integers(0, len(ids)))
    first = detokenizer.stream([5]).feed(ids[:cut])
    rest = "".join(pieces(detokenizer, ids, list(range(len(ids))), emitted=cut))
    assert first + rest == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(texts)
def test_no_piece_of_valid_text_holds_half_a_character(text: str) -> None:
    detokenizer, tokenizer = real()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if "\ufffd" not in text and tokenizer.decode(ids) == text:
        stream = detokenizer.stream([])
        assert all("\ufffd" not in stream.feed([token]) for token in ids)
        assert stream.finish() == ""


def test_a_character_of_several_tokens_comes_out_once_and_whole() -> None:
    detokenizer, tokenizer = real()
    ids = tokenizer.encode("𓂀!", add_special_tokens=False).ids
    assert len(ids) > 2
    assert pieces(detokenizer, ids, list(range(len(ids))))[-3:] == ["𓂀", "!", ""]
    cut_off = pieces(detokenizer, ids[:2], [1])
    assert "".join(cut_off[:-1]) == ""
    assert set(cut_off[-1]) == {"\ufffd"}


def test_control_tokens_and_ids_beyond_the_tokenizer_have_no_text() -> None:
    detokenizer, _ = real()
    assert detokenizer.stream([]).feed([0, 1, 2, VOCABULARY + 5]) == ""


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Detokenizer:
    """A small tokenizer of the other family: words with a leading mark, bytes as fallback."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", ",", "▁"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Detokenizer(path)


def test_other_tokenizers_keep_blanks_between_words(sentencepiece_like: Detokenizer) -> None:
    stream = sentencepiece_like.stream([257])
    assert [stream.feed([token]) for token in (258, 259, 260, 257)] == [" cat", "s", ",", " the"]


def test_other_tokenizers_give_out_whole_characters(sentencepiece_like: Detokenizer) -> None:
    euro = [1 + byte for byte in "€".encode()]
    stream = sentencepiece_like.stream([257], [258, euro[0]], len(" cat"))
    assert [stream.feed([token]) for token in (euro[1], euro[2], 257)] == ["", "€", " the"]
    cut_off = sentencepiece_like.stream([257], [258], len(" cat"))
    assert cut_off.feed(euro[:2]) == ""
    assert set(cut_off.finish()) == {"\ufffd"}
