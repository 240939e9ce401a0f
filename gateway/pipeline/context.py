"""Retrieved documents on their way into one prompt: in which order, and which of them it holds. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gateway.pipeline.events import Retrieved
from gateway.records import RetrievedDocument


@dataclass(frozen=True, slots=True)
class Found:
    """What one retrieval step found, best first."""

    step_id: str
    data_source_id: str
    documents: tuple[RetrievedDocument, ...]


class Context:
    """The documents offered to a prompt, best first.

    Scores of different sources can't be compared, so the steps take turns: the best of each, then the
    second best of each. A document that several steps found is offered once.
    """

    def __init__(self, found: Sequence[Found], uses: Collection[str]) -> None:
        self._found = found
        self._offered: dict[tuple[str, str], str] = {}
        using = [step for step in found if step.step_id in uses]
        for rank in zip_longest(*(step.documents for step in using)):
            for step, document in zip(using, rank, strict=True):
                if document is not None:
                    self._offered.setdefault((step.data_source_id, document.document_id), document.text)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._offered.values())

    def retrieved(self, documents_used: int) -> list[Retrieved]:
        """Return one event a step, given that the prompt holds the first `documents_used` texts."""
        held = set(list(self._offered)[:documents_used])
        return [
            _retrieved(step, [d for d in step.documents if (step.data_source_id, d.document_id) in held])
            for step in self._found
        ]


def all_retrieved(found: Sequence[Found]) -> list[Retrieved]:
    """Return one event a step for a pipeline that only retrieves: its documents are the answer."""
    return [_retrieved(step, step.documents) for step in found]


def _retrieved(step: Found, documents: Sequence[RetrievedDocument]) -> Retrieved:
    return Retrieved(step.step_id, tuple(documents), len(step.documents) - len(documents))
