"""Which documents can be stored, and how those that can't are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.knowledge.documents import MAX_DOCUMENT_CHARS, MAX_DOCUMENTS, MAX_TEXT_CHARS, check_documents
from gateway.knowledge.filters import MAX_METADATA_BYTES
from grid.errors import InvalidRequest


@dataclass(frozen=True)
class Doc:
    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


FULL = "x" * MAX_DOCUMENT_CHARS


@pytest.mark.parametrize(
    ("documents", "param"),
    [
        ([], "documents"),
        ([Doc(str(n), "x") for n in range(MAX_DOCUMENTS + 1)], "documents"),
        ([Doc("a", "x"), Doc("a", "y")], "documents[1].id"),
        ([Doc("", "x")], "documents[0].id"),
        ([Doc("a", " \n")], "documents[0].text"),
        ([Doc("a", FULL + "x")], "documents[0].text"),
        ([Doc("a", "x", {"b": {"c": object()}})], "documents[0].metadata.b.c"),
        ([Doc("a", "x"), Doc("b", "x", {"c": "x" * MAX_METADATA_BYTES})], "documents[1].metadata"),
        ([Doc(str(n), FULL) for n in range(MAX_TEXT_CHARS // MAX_DOCUMENT_CHARS + 1)], "documents"),
    ],
)
def test_documents_that_can_not_be_stored_are_named(documents: list[Doc], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_documents(documents)
    assert refused.value.param == param


def test_documents_at_the_bounds_are_taken() -> None:
    check_documents([Doc(str(n), "x", {"status": "published"}) for n in range(MAX_DOCUMENTS)])
    check_documents([Doc(str(n), FULL) for n in range(MAX_TEXT_CHARS // MAX_DOCUMENT_CHARS)])
