"""A run as the client hears it: event bytes in, typed events and the whole answer out. Pure.

Answers are parsed leniently: a field that a newer gateway adds is ignored, and one that an older gateway
lacks has its default.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grid.calls import Unreachable, error_of
from grid.errors import GridError, InternalError
from grid.event_stream import EventParser
from grid.words import Usage


@dataclass(frozen=True, slots=True)
class Document:
    document_id: str
    text: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Document:
        score = float(data.get("score", 0.0))
        return cls(data.get("id", ""), data.get("text", ""), score, data.get("metadata") or {})


@dataclass(frozen=True, slots=True)
class StepRun:
    """Where one step ran, why there, and how long it took in milliseconds."""

    step_id: str
    unit_id: str = ""
    model: str = ""
    region: str = ""
    gpu_type: str = ""
    simulated: bool = False
    predicted_ttft_ms: float = 0.0
    why: str = ""
    moves: int = 0
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    """`total`, and those of `placement`, `embed`, `search`, `queue`, `prefill`, `decode` that it has."""


@dataclass(frozen=True, slots=True)
class Started:
    """The first step was accepted; from here on the status is 200."""

    request_id: str
    pipeline_id: str
    revision: int
    model: str
    steps: tuple[str, ...]
    warnings: tuple[str, ...]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Retrieved:
    step_id: str
    documents: tuple[Document, ...]
    """The documents that the prompt holds, best first."""
    dropped: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a generation step before the answer wrote."""

    step_id: str
    text: str
    finish_reason: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> StepOutput:
        return cls(data.get("step_id", ""), data.get("output") or "", data.get("finish_reason") or "")


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    """Of the first token in the chunk, over the whole answer."""
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    finish_reason: str
    usage: Usage
    ttft_ms: float
    total_ms: float
    steps: tuple[StepRun, ...]
    exact: bool
    """Greedy text is the same as an undisturbed run's."""


Event = Started | Retrieved | StepOutput | Token | Done


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole run: what it said, from which documents, at what cost, and where."""

    request_id: str
    text: str
    finish_reason: str
    documents: tuple[Document, ...]
    usage: Usage
    ttft_ms: float
    total_ms: float
    steps: tuple[StepRun, ...]
    warnings: tuple[str, ...]
    revision: int = 0
    """Of the pipeline that answered; 0 for a one-shot contract."""
    earlier: tuple[StepOutput, ...] = ()
    """What generation steps before the answer wrote."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Answer:
        """Return the answer in the JSON body of an invocation without a stream."""
        done = _done(data)
        documents = tuple(document for step in _retrievals(data) for document in step.documents)
        return cls(
            request_id=data.get("request_id", ""),
            text=data.get("output") or "",
            finish_reason=done.finish_reason,
            documents=documents,
            usage=done.usage,
            ttft_ms=done.ttft_ms,
            total_ms=done.total_ms,
            steps=done.steps,
            warnings=tuple(data.get("warnings") or ()),
            revision=data.get("revision", 0),
            earlier=tuple(StepOutput.of(item) for item in data.get("earlier") or ()),
        )


def outcome_of(data: Mapping[str, Any]) -> Answer | GridError:
    """Return what came of one input of a list: its answer, or its error."""
    return error_of(200, data) if "error" in data else Answer.of(data)


def event_of(name: str, text: str) -> Event | None:
    """Return the typed event; None for a kind that this client doesn't know. Raises the error of `error`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InternalError(f"the gateway sent an event {name!r} that is not JSON") from error
    if name == "token":
        return Token(data.get("index", 0), data.get("text", ""), data.get("tokens", 0))
    if name == "start":
        return Started(
            request_id=data.get("request_id", ""),
            pipeline_id=data.get("pipeline_id", ""),
            revision=data.get("revision", 0),
            model=data.get("model", ""),
            steps=tuple(data.get("steps") or ()),
            warnings=tuple(data.get("warnings") or ()),
            input_tokens=data.get("input_tokens", 0),
        )
    if name == "retrieval":
        return _retrieved(data)
    if name == "step":
        return StepOutput.of(data)
    if name == "done":
        return _done(data)
    if name == "error":
        raise error_of(200, data)
    return None


def _retrieved(data: Mapping[str, Any]) -> Retrieved:
    documents = tuple(Document.of(item) for item in data.get("documents") or ())
    return Retrieved(data.get("step_id", ""), documents, data.get("dropped", 0))


def _retrievals(data: Mapping[str, Any]) -> list[Retrieved]:
    return [_retrieved(item) for item in data.get("retrieval") or ()]


def _done(data: Mapping[str, Any]) -> Done:
    usage = data.get("usage") or {}
    return Done(
        finish_reason=data.get("finish_reason") or "",
        usage=Usage(*(usage.get(name, 0) for name in Usage._fields)),
        ttft_ms=float(data.get("ttft_ms", 0.0)),
        total_ms=float(data.get("total_ms", 0.0)),
        steps=_steps(data.get("placement") or (), data.get("timing") or ()),
        exact=bool(data.get("exact", True)),
    )


def _steps(
    placement: Sequence[Mapping[str, Any]], timing: Sequence[Mapping[str, Any]]
) -> tuple[StepRun, ...]:
    times = {
        item.get("step_id", ""): {
            name.removesuffix("_ms"): float(value) for name, value in item.items() if name.endswith("_ms")
        }
        for item in timing
    }
    return tuple(
        StepRun(
            step_id=item.get("step_id", ""),
            unit_id=item.get("unit_id", ""),
            model=item.get("model", ""),
            region=item.get("region", ""),
            gpu_type=item.get("gpu_type", ""),
            simulated=bool(item.get("simulated", False)),
            predicted_ttft_ms=float(item.get("predicted_ttft_ms", 0.0)),
            why=item.get("why", ""),
            moves=item.get("moves", 0),
            timing_ms=times.get(item.get("step_id", ""), {}),
        )
        for item in placement
    )


class RunState:
    """What is known of one streamed run so far: bytes go in, events come out, the sum is kept."""

    def __init__(self) -> None:
        self._parser = EventParser()
        self._ready: deque[Event] = deque()
        self._failure: GridError | None = None
        self._texts: list[str] = []
        self.started: Started | None = None
        self.documents: tuple[Document, ...] = ()
        """Of all retrieval steps so far."""
        self.earlier: tuple[StepOutput, ...] = ()
        self.done: Done | None = None

    @property
    def text(self) -> str:
        """The answer so far, up to the last event that was taken."""
        return "".join(self._texts)

    def feed(self, piece: bytes) -> None:
        for name, data in self._parser.feed(piece):
            if self._failure is not None:
                return
            try:
                event = event_of(name, data)
            except GridError as error:
                self._failure = error
                return
            if event is not None:
                self._ready.append(event)

    def end(self) -> None:
        """Say that no more bytes come: an answer that isn't whole by now never will be."""
        whole = self.done is not None or any(isinstance(event, Done) for event in self._ready)
        if not whole and self._failure is None:
            self._failure = Unreachable("the connection ended in mid-answer")

    def take(self) -> Event | None:
        """Return the next event, or None until more is fed. Raises what the run failed with, in its turn."""
        if not self._ready:
            if self._failure is not None:
                raise self._failure
            return None
        event = self._ready.popleft()
        if isinstance(event, Token):
            self._texts.append(event.text)
        elif isinstance(event, Started):
            self.started = event
        elif isinstance(event, Retrieved):
            self.documents += event.documents
        elif isinstance(event, StepOutput):
            self.earlier += (event,)
        else:
            self.done = event
        return event

    def answer(self) -> Answer:
        """Return the whole answer, once `done` was taken."""
        assert self.done is not None, "the run has not ended"
        return Answer(
            request_id=self.started.request_id if self.started else "",
            text=self.text,
            finish_reason=self.done.finish_reason,
            documents=self.documents,
            usage=self.done.usage,
            ttft_ms=self.done.ttft_ms,
            total_ms=self.done.total_ms,
            steps=self.done.steps,
            warnings=self.started.warnings if self.started else (),
            revision=self.started.revision if self.started else 0,
            earlier=self.earlier,
        )
