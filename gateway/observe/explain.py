"""From an ended call to its explanation: what was decided and why, what was predicted and what happened.

Pure, and made off the hot path. Nothing of a prompt or an answer is in it: of the caller's own mistakes only
code and field are told, because their sentences may quote what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from gateway.observe.story import Attempt, RunStory, StepEnd, Story
from gateway.pipeline.events import StepTiming
from grid.errors import GridError, InternalError, Interrupted, Rejected
from grid.words import Candidate, Precision, Usage

CELLS_OWN = (Rejected, Interrupted, InternalError)
"""Errors whose sentences the cell makes of what it knows itself."""
TOLD_DETAILS = ("rejected_by_code", "reasons")
TIMES = ("total_ms", "placement_ms", "embed_ms", "search_ms", "queue_ms", "prefill_ms", "decode_ms")


def explanation(story: Story) -> dict[str, Any]:
    """Return all that is told of one call, as JSON values."""
    return {
        "request_id": story.request_id,
        "ended_at": _stamp(story.ended_at),
        "route": story.route,
        "pipeline_id": story.pipeline_id or None,
        "revision": story.revision,
        "model": story.model,
        "outcome": story.outcome.value,
        "status": story.status,
        "error": _error(story.error),
        "total_ms": round(story.total_ms, 3),
        "usage": _usage(story.usage),
        "runs": [_run(run) for run in story.runs],
    }


def explanation_key(tenant_id: str, request_id: str) -> str:
    return f"zg:{{{tenant_id}}}:request:{request_id}"


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
    }


def _run(run: RunStory) -> dict[str, Any]:
    ended = {end.timing.step_id: end for end in run.steps}
    step_ids = dict.fromkeys([attempt.step_id for attempt in run.attempts] + list(ended))
    return {
        "finished": run.finished,
        "ttft_ms": round(run.ttft_ms, 3) if run.finished else None,
        "error": _error(run.error),
        "usage": _usage(run.usage),
        "steps": [
            _step(step_id, ended.get(step_id), (a for a in run.attempts if a.step_id == step_id))
            for step_id in step_ids
        ],
    }


def _step(step_id: str, end: StepEnd | None, attempts: Iterable[Attempt]) -> dict[str, Any]:
    """A step without an end was left in the middle."""
    return {
        "step_id": step_id,
        "type": end.timing.type if end is not None else None,
        "error": _error(end.error) if end is not None else None,
        "actual": _actual(end.timing) if end is not None else None,
        "placements": [_placement(attempt) for attempt in attempts],
    }


def _actual(timing: StepTiming) -> dict[str, Any]:
    times = {name: round(getattr(timing, name), 3) for name in TIMES}
    return {**times, "cu_seconds": round(timing.usage.cu_seconds, 6)}


def _placement(attempt: Attempt) -> dict[str, Any]:
    decision = attempt.decision
    return {
        "outcome": attempt.outcome or None,
        "chosen": candidate_view(decision.chosen),
        "next_best": [candidate_view(candidate) for candidate in decision.next_best],
        "candidate_count": decision.candidates,
        "rejected_by_code": dict(decision.rejected_by_code),
        "decide_us": round(decision.decide_us, 1),
        "fleet_version": decision.fleet_version,
        "stale_view": decision.stale_view,
    }


def _error(error: GridError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    own = isinstance(error, CELLS_OWN)
    return {
        "code": error.code,
        "param": error.param or None,
        "message": error.message if own else None,
        "details": {name: error.details[name] for name in TOLD_DETAILS if own and name in error.details},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {**usage._asdict(), "cu_seconds": round(usage.cu_seconds, 6)}


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
