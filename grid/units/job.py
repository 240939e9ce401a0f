"""One request as its unit sees it, until the engine holds nothing of it, and the frames that tell of it.

Owned by `unit.py`, which alone changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from grid.engines.base import Generation, Prepared, Step
from grid.errors import GridError
from grid.wire.messages import Accepted, Done, Embed, Failed, Submit, Tokens

AttemptKey = tuple[str, str, int]
"""(request, reservation, attempt): a request can have several steps on one unit, one reservation each."""


class Phase(Enum):
    PREPARING = auto()
    WAITING = auto()
    RUNNING = auto()
    CLOSING = auto()
    """Its stream has ended; the engine has still to give the slot back."""


@dataclass(slots=True)
class Job:
    number: int
    """Never reused in a unit's life."""
    peer: int
    request: Submit | Embed
    arrived_s: float
    accepted_s: float
    deadline_s: float = math.inf
    phase: Phase = Phase.PREPARING
    prompt: Prepared | None = None
    """Set when a generation is accepted."""
    started_s: float = math.inf
    first_step_s: float = math.inf
    produced: int = 0
    said_s: float = math.inf
    """When its stream was last told something."""
    cached_tokens: int = 0
    step_seconds: float = 0.0
    """Share of the unit's scheduled step time."""
    share_mark_s: float = 0.0
    """The unit's clock of shared encode time when this embedding started."""

    @property
    def attempt_key(self) -> AttemptKey | None:
        """None for an embedding: it may be asked again, its answer is the same."""
        if isinstance(self.request, Embed):
            return None
        return attempt_key(self.request)

    @property
    def budget(self) -> int:
        """Output tokens that this attempt may produce; an embedding counts as one."""
        return self.request.sampling.max_output_tokens if isinstance(self.request, Submit) else 1

    @property
    def doing(self) -> str:
        """What `Progress.state` says of it."""
        if self.phase is Phase.WAITING:
            return "waiting"
        return "decode" if self.produced else "prefill"

    def take(self, step: Step, now_s: float) -> Tokens | None:
        """Account for one engine step and return its frame, if it says anything."""
        submit = self.request
        assert isinstance(submit, Submit)
        if self.first_step_s == math.inf:
            self.first_step_s = now_s
        self.cached_tokens = step.cached_tokens
        self.step_seconds += step.step_seconds
        if not step.ids and not step.text:
            return None
        self.said_s = now_s
        first_index = len(submit.emitted_ids) + self.produced
        self.produced += len(step.ids)
        return Tokens(submit.stream, submit.attempt, first_index, step.ids, step.text)


class Times(NamedTuple):
    """When a request came and how far it got; a stretch it never reached begins and ends at `ended_s`."""

    request: Submit | Embed
    arrived_s: float
    accepted_s: float
    started_s: float
    first_step_s: float
    ended_s: float


def times_of(job: Job, now_s: float) -> Times:
    # Until its prompt is there, a generation is not accepted.
    preparing = isinstance(job.request, Submit) and job.prompt is None
    return Times(
        job.request,
        job.arrived_s,
        now_s if preparing else job.accepted_s,
        min(job.started_s, now_s),
        min(job.first_step_s, now_s),
        now_s,
    )


def attempt_key(submit: Submit) -> AttemptKey:
    return (submit.request_id, submit.reservation_id, submit.attempt)


def _accepted(job: Job) -> tuple[Submit, Prepared]:
    assert isinstance(job.request, Submit)
    assert job.prompt is not None
    return job.request, job.prompt


def generation(job: Job) -> Generation:
    submit, prompt = _accepted(job)
    return Generation(
        engine_id=f"{submit.request_id}/{submit.attempt}/{job.number}",
        prompt=prompt,
        sampling=submit.sampling,
        tenant_salt=submit.tenant_salt,
        emitted_ids=submit.emitted_ids,
        emitted_code_points=submit.emitted_code_points,
        priority=submit.priority,
    )


def accepted_frame(job: Job, fingerprint: str) -> Accepted:
    submit, prompt = _accepted(job)
    return Accepted(
        stream=submit.stream,
        attempt=submit.attempt,
        prompt_tokens=len(prompt.prompt_ids),
        cached_tokens=0,
        prompt_hash=prompt.prompt_hash,
        fingerprint=fingerprint,
        documents_used=prompt.documents_used,
    )


def done_frame(job: Job, reason: str, cu_factor: float, now_s: float) -> Done:
    submit, prompt = _accepted(job)
    times = times_of(job, now_s)
    return Done(
        stream=submit.stream,
        attempt=submit.attempt,
        finish_reason=reason,
        input_tokens=len(prompt.prompt_ids),
        cached_tokens=job.cached_tokens,
        output_tokens=job.produced,
        cu_seconds=job.step_seconds * cu_factor,
        queue_ms=(times.started_s - times.accepted_s) * 1000,
        prefill_ms=(times.first_step_s - times.started_s) * 1000,
        decode_ms=(times.ended_s - times.first_step_s) * 1000,
    )


def failed_frame(job: Job, error: GridError, cu_factor: float) -> Failed:
    submit, prompt = _accepted(job)
    return Failed(
        stream=submit.stream,
        attempt=submit.attempt,
        code=error.code,
        message=error.message,
        input_tokens=len(prompt.prompt_ids),
        cached_tokens=job.cached_tokens,
        output_tokens=job.produced,
        cu_seconds=job.step_seconds * cu_factor,
    )
