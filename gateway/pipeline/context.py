"""What earlier steps give to one prompt: documents, in which order and which of them it holds; outputs. Pure.

Documents are offered to the unit, which packs as many as fit. Outputs are part of the messages: a prompt that
has no room for them is refused with the counts, like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gateway.pipeline.events import Retrieved, StepDone
from gateway.records import RetrievedDocument
from grid.words import Message


@dataclass(frozen=True, slots=True)
class Found:
    """What one retrieval step found, best first."""

    step_id: str
    data_source_id: str
    documents: tuple[RetrievedDocument, ...]


class Context:
    """The documents offered to a prompt, best first.

    Scores of different sources can't be compared, so the steps take turns: the best of each, then the
    second best of each. A document that several steps found is offered once. `held` names those, by source
    and id, that the prompts of earlier steps held.
    """

    def __init__(
        self, found: Sequence[Found], uses: Collection[str], held: Collection[tuple[str, str]] = ()
    ) -> None:
        self._found = found
        self._held = held
        self._offered: dict[tuple[str, str], str] = {}
        using = [step for step in found if step.step_id in uses]
        for rank in zip_longest(*(step.documents for step in using)):
            for step, document in zip(using, rank, strict=True):
                if document is not None:
                    self._offered.setdefault((step.data_source_id, document.document_id), document.text)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._offered.values())

    def packed(self, documents_used: int) -> frozenset[tuple[str, str]]:
        """Return the documents of which a prompt holds the first `documents_used`, by source and id."""
        return frozenset(list(self._offered)[:documents_used])

    def retrieved(self, documents_used: int) -> list[Retrieved]:
        """Return one event a step, given that the prompt holds the first `documents_used` texts."""
        held = self.packed(documents_used).union(self._held)
        return [
            _retrieved(step, [d for d in step.documents if (step.data_source_id, d.document_id) in held])
            for step in self._found
        ]


def with_outputs(messages: tuple[Message, ...], outputs: Sequence[StepDone]) -> tuple[Message, ...]:
    """Return a conversation whose system message also holds what earlier steps wrote, each under its name."""
    blocks = [f"Output of {each.step_id}:\n\n{text}" for each in outputs if (text := each.output.strip())]
    if not blocks:
        return messages
    system, rest = "", messages
    if messages and messages[0].role == "system":
        system, rest = messages[0].text, messages[1:]
    return (Message("system", "\n\n".join((system, *blocks) if system else blocks)), *rest)


def all_retrieved(found: Sequence[Found]) -> list[Retrieved]:
    """Return one event a step for a pipeline that only retrieves: its documents are the answer."""
    return [_retrieved(step, step.documents) for step in found]


def _retrieved(step: Found, documents: Sequence[RetrievedDocument]) -> Retrieved:
    return Retrieved(step.step_id, tuple(documents), len(step.documents) - len(documents))
