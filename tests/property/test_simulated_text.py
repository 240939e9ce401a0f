from hypothesis import given
from hypothesis import strategies as st

from grid.engines import simulated_text as text
from grid.words import Message

words = st.text(st.characters(codec="utf-8"), max_size=200)


@given(words)
def test_text_survives_its_tokens(content: str) -> None:
    assert text.decode(text.encode(content)) == content


@given(st.integers(0, 2**64 - 1), st.integers(0, 500))
def test_an_answer_encodes_to_the_ids_it_was_made_of(key: int, length: int) -> None:
    ids = [text.answer_token(key, index) for index in range(length)]
    assert text.encode(text.decode(ids)) == ids
    assert all(0 <= token < len(text.VOCABULARY) for token in ids)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), min_size=1, max_size=6))
def test_no_text_can_become_a_role(turns: list[tuple[str, str]]) -> None:
    ids = text.render([Message(role, content) for role, content in turns])
    roles = [token for token in ids if len(text.VOCABULARY) <= token < 1024]
    assert len(roles) == len(turns) + 2


@given(st.lists(st.one_of(words, st.sampled_from(text.VOCABULARY)), max_size=30))
def test_no_token_is_longer_than_the_longest(parts: list[str]) -> None:
    content = "".join(parts)
    assert len(text.encode(content)) * text.LONGEST_TOKEN_CHARACTERS >= len(content)
