"""What one call did: written down while it happens, read once when it has ended. Nothing here awaits.

Whoever does a part of the work writes its part: `http/app.py` the call and its end, `runner.py` and
`delivery.py` the runs, `embedder.py` its placements. Writing is a few assignments, because it happens on the
hot path; everything that is made of a story (`ledger.py`, `explain.py`) is made afterwards. A story holds no
prompt and no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gateway.pipeline.events import NOTHING_USED, Finished, RunEvent, RunFailed, StepTiming
from grid.errors import GridError, InternalError, Interrupted, Rejected
from grid.words import Decision, Usage

CLIENT_LEFT = 499
"""The status of a call whose client was gone before its answer was complete, as nginx has it."""

CELLS_OWN = (Rejected, Interrupted, InternalError)
"""Failures of the cell and not of its caller: their sentences quote nothing of what was sent, and a step may
be skipped for them."""


class Outcome(StrEnum):
    GOOD = "good"
    REFUSED = "refused"
    """4xx: the caller's to change, or to try later."""
    CANCELLED = "cancelled"
    """The client left."""
    FAILED = "failed"
    """5xx, or an answer that broke after it had begun."""


def outcome_of(status: int) -> Outcome:
    if status == CLIENT_LEFT:
        return Outcome.CANCELLED
    if status >= 500:
        return Outcome.FAILED
    return Outcome.REFUSED if status >= 400 else Outcome.GOOD


@dataclass(slots=True)
class Attempt:
    """One placement of one step."""

    step_id: str
    decision: Decision
    outcome: str = ""
    """As its reservation was settled: `done`, `refused`, `failed` or `cancelled`."""


class StepEnd(NamedTuple):
    timing: StepTiming
    error: GridError | None = None


@dataclass(slots=True)
class RunStory:
    """One run of a pipeline or model: one a call, or one for each of a call's inputs."""

    attempts: list[Attempt] = field(default_factory=list)
    steps: list[StepEnd] = field(default_factory=list)
    usage: Usage = NOTHING_USED
    ttft_ms: float = 0.0
    """From the start of the run to its first token; 0 where none came."""
    gaps_s: list[float] = field(default_factory=list)
    """For each time that an answer went on on another unit: how long no token came."""
    finished: bool = False
    error: GridError | None = None
    late: Callable[[float], None] | None = None
    """Told of compute that becomes known after the call was counted."""

    def decided(self, step_id: str, decision: Decision) -> None:
        self.attempts.append(Attempt(step_id, decision))

    def settled(self, reservation_id: str, outcome: str) -> None:
        for attempt in reversed(self.attempts):
            if attempt.decision.reservation_id == reservation_id:
                attempt.outcome = outcome
                return

    def step(self, timing: StepTiming, error: GridError | None = None) -> None:
        """A step has ended; what it took is charged however the run ends."""
        self.steps.append(StepEnd(timing, error))
        self.charge(timing.charged)

    def charge(self, usage: Usage) -> None:
        """Add work that is no step's end: vectors for a caller, or what was made for one that has left."""
        self.usage = self.usage + usage

    def charge_late(self, cu_seconds: float) -> None:
        """The unit says what a stream took that its client has left."""
        self.charge(Usage(cu_seconds=cu_seconds))
        if self.late is not None:
            self.late(cu_seconds)

    def hear(self, event: RunEvent) -> None:
        """Take the last one of the events that a run yields together."""
        if isinstance(event, Finished):
            self.usage, self.ttft_ms, self.finished = event.usage, event.ttft_ms, True
        elif isinstance(event, RunFailed):
            self.usage, self.error = event.usage, event.error

    def fail(self, error: GridError) -> None:
        self.error = error


@dataclass(slots=True)
class Story:
    """`began_s` is monotonic, `began_at` in Unix seconds."""

    request_id: str
    began_s: float
    began_at: float
    tenant_id: str = ""
    """"" where nobody was authenticated."""
    route: str = ""
    """The path's template; "" for a request that runs nothing, which is not counted."""
    pipeline_id: str = ""
    """Of a pipeline that exists; "" for a call of a model itself, or one refused before it was looked up."""
    revision: int = 0
    model: str = ""
    """That the generation step's name resolved to."""
    runs: list[RunStory] = field(default_factory=list)
    error: GridError | None = None
    """What the call as a whole was refused or ended with."""
    status: int = 0
    """What the client saw; for an answer that broke later, the status that its error has."""
    total_ms: float = 0.0
    ended_at: float = 0.0

    def of(self, pipeline_id: str, revision: int) -> None:
        self.pipeline_id, self.revision = pipeline_id, revision

    def run(self, model: str) -> RunStory:
        """Begin one more run."""
        self.model = model
        run = RunStory()
        self.runs.append(run)
        return run

    def end(self, status: int, error: GridError | None, now_s: float) -> None:
        self.status, self.error = status, error
        self.total_ms = (now_s - self.began_s) * 1000
        self.ended_at = self.began_at + (now_s - self.began_s)

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.status)

    @property
    def usage(self) -> Usage:
        if len(self.runs) == 1:
            return self.runs[0].usage
        return sum((run.usage for run in self.runs), NOTHING_USED)
