"""From an ended call to its explanation: what was decided and why, what was predicted and what happened.

Pure: `told` makes a story fit to be stored, in few microseconds and off the hot path, and `explanation` works
it out for whoever asks. Nothing of a prompt or an answer is in it: of the caller's own mistakes only code and
field are told, because their sentences may quote what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from gateway.observe.story import CELLS_OWN, RunStory, Story, outcome_of
from gateway.pipeline.events import StepTiming
from gateway.records import tenant_key
from grid.errors import GridError
from grid.words import Candidate, Decision, Precision, Usage

TOLD_DETAILS = ("rejected_by_code", "reasons")
TIMES = ("total_ms", "placement_ms", "embed_ms", "search_ms", "queue_ms", "prefill_ms", "decode_ms")


class _Error(NamedTuple):
    code: str
    param: str
    message: str
    """"" where it may quote what was sent."""
    details: dict[str, Any]


class _Attempt(NamedTuple):
    step_id: str
    outcome: str
    decision: Decision


class _Step(NamedTuple):
    timing: StepTiming
    error: _Error | None


class _Run(NamedTuple):
    finished: bool
    ttft_ms: float
    error: _Error | None
    usage: Usage
    attempts: tuple[_Attempt, ...]
    steps: tuple[_Step, ...]


class _Told(NamedTuple):
    """A story as it is stored. Fields are only appended, each with a default."""

    request_id: str
    ended_at: float
    route: str
    pipeline_id: str
    revision: int
    model: str
    status: int
    error: _Error | None
    total_ms: float
    usage: Usage
    runs: tuple[_Run, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Told)


def told(story: Story) -> bytes:
    """Return a story as it is stored."""
    return _ENCODER.encode(
        _Told(
            story.request_id,
            story.ended_at,
            story.route,
            story.pipeline_id,
            story.revision,
            story.model,
            story.status,
            _error(story.error),
            story.total_ms,
            story.usage,
            tuple(map(_run, story.runs)),
        )
    )


def _run(run: RunStory) -> _Run:
    return _Run(
        run.finished,
        run.ttft_ms,
        _error(run.error),
        run.usage,
        tuple(_Attempt(each.step_id, each.outcome, each.decision) for each in run.attempts),
        tuple(_Step(each.timing, _error(each.error)) for each in run.steps),
    )


def _error(error: GridError | None) -> _Error | None:
    if error is None:
        return None
    if not isinstance(error, CELLS_OWN):
        return _Error(error.code, error.param, "", {})
    details = {name: error.details[name] for name in TOLD_DETAILS if name in error.details}
    return _Error(error.code, error.param, error.message, details)


def explanation_key(tenant_id: str, request_id: str) -> str:
    return tenant_key(tenant_id, f"request:{request_id}")


def explanation(stored: bytes) -> dict[str, Any]:
    """Return all that is told of one call, as JSON values."""
    told = _DECODER.decode(stored)
    return {
        "request_id": told.request_id,
        "ended_at": _stamp(told.ended_at),
        "route": told.route,
        "pipeline_id": told.pipeline_id or None,
        "revision": told.revision,
        "model": told.model,
        "outcome": outcome_of(told.status).value,
        "status": told.status,
        "error": _error_view(told.error),
        "total_ms": round(told.total_ms, 3),
        "usage": _usage_view(told.usage),
        "runs": [_run_view(run) for run in told.runs],
    }


def candidate_view(candidate: Candidate) -> dict[str, Any]:
    """Return a unit with what was predicted for it."""
    return {
        "unit_id": candidate.unit_id,
        "model": candidate.model,
        "precision": Precision(candidate.precision).label,
        "region": candidate.region,
        "gpu_type": candidate.gpu_type,
        "simulated": candidate.simulated,
        "network_ms": round(candidate.network_ms, 3),
        "queue_ms": round(candidate.queue_ms, 3),
        "prefill_ms": round(candidate.prefill_ms, 3),
        "decode_ms": round(candidate.decode_ms, 3),
        "pressure_ms": round(candidate.pressure_ms, 3),
        "ttft_ms": round(candidate.ttft_ms, 3),
        "total_ms": round(candidate.total_ms, 3),
        "cu_seconds": round(candidate.cu_seconds, 6),
        "cached_tokens": candidate.cached_tokens,
        "others_ms": round(candidate.others_ms, 3),
    }


def _run_view(run: _Run) -> dict[str, Any]:
    ended = {step.timing.step_id: step for step in run.steps}
    step_ids = dict.fromkeys([attempt.step_id for attempt in run.attempts] + list(ended))
    return {
        "finished": run.finished,
        "ttft_ms": round(run.ttft_ms, 3) if run.finished else None,
        "error": _error_view(run.error),
        "usage": _usage_view(run.usage),
        "steps": [
            _step_view(step_id, ended.get(step_id), (a for a in run.attempts if a.step_id == step_id))
            for step_id in step_ids
        ],
    }


def _step_view(step_id: str, end: _Step | None, attempts: Iterable[_Attempt]) -> dict[str, Any]:
    """A step without an end was left in the middle."""
    return {
        "step_id": step_id,
        "type": end.timing.type if end is not None else None,
        "error": _error_view(end.error) if end is not None else None,
        "actual": _actual(end.timing) if end is not None else None,
        "placements": [_placement_view(attempt) for attempt in attempts],
    }


def _actual(timing: StepTiming) -> dict[str, Any]:
    times = {name: round(getattr(timing, name), 3) for name in TIMES}
    return {**times, "cu_seconds": round(timing.usage.cu_seconds, 6)}


def _placement_view(attempt: _Attempt) -> dict[str, Any]:
    decision = attempt.decision
    return {
        "outcome": attempt.outcome or None,
        "chosen": candidate_view(decision.chosen),
        "next_best": [candidate_view(candidate) for candidate in decision.next_best],
        "candidate_count": decision.candidates,
        "rejected_by_code": dict(decision.rejected_by_code),
        "decide_us": round(decision.decide_us, 1),
        "queued_ms": round(decision.queued_ms, 3),
        "fleet_version": decision.fleet_version,
        "stale_view": decision.stale_view,
    }


def _error_view(error: _Error | None) -> dict[str, Any] | None:
    if error is None:
        return None
    named = {"code": error.code, "param": error.param or None, "message": error.message or None}
    return {**named, "details": error.details}


def _usage_view(usage: Usage) -> dict[str, Any]:
    return {**usage._asdict(), "cu_seconds": round(usage.cu_seconds, 6)}


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
