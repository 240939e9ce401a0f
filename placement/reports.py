"""What a unit may say of itself: every card and sample passes here before it touches the view. Pure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from grid.words import UNKNOWN, Precision, Task, UnitCard, UnitLoad, UnitState

MAX_COUNT = 1 << 40
"""Of tokens, requests, megabytes: nothing real comes near, and sums of 10,000 of them fit 64 bits."""

MAX_NAME_CHARS = 256

_TASKS = frozenset(int(task) for task in Task)
_PRECISIONS = frozenset(int(precision) for precision in Precision)
_STATES = frozenset(int(state) for state in UnitState)


def card_flaw(card: UnitCard) -> str:
    """Return what makes `card` unusable, in one sentence; "" when nothing does."""
    for field in ("unit_id", "incarnation", "host", "model", "region"):
        text = getattr(card, field)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME_CHARS:
            return f"{field} must be a text of 1 to {MAX_NAME_CHARS} characters"
    if card.task not in _TASKS:
        return f"task {card.task!r} is unknown"
    if card.precision not in _PRECISIONS:
        return f"precision {card.precision!r} is unknown"
    counts = ("port", "context_tokens", "memory_grant_mb", "max_running", "max_waiting", "dimension")
    flaw = _count_flaw(card, counts) or _reading_flaw(card, ("prefill_tokens_per_s", "decode_ms_per_token"))
    if flaw:
        return flaw
    if card.max_running < 1:
        return f"max_running is {card.max_running}; at least 1 is needed"
    for field in ("gpus", "cu_factor"):
        if not 0 <= getattr(card, field) < MAX_COUNT:
            return f"{field} is {getattr(card, field)!r}; a finite number of at least 0 is needed"
    return ""


_COUNTS = ("running", "waiting", "kv_tokens_free", "kv_tokens_total", "prefill_tokens_queued", "steps")
_LATER_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "sequence",
    "held_since",
    "admits",
    "chunk_tokens",
    "preemptions",
)
_READINGS = ("prefill_tokens_per_s", "decode_ms_per_token", "memory_used_mb", "compute_utilisation")


def _slice(names: tuple[str, ...]) -> slice:
    """Return where fields lie in a sample that follow each other in it."""
    first = UnitLoad._fields.index(names[0])
    assert UnitLoad._fields[first : first + len(names)] == names
    return slice(first, first + len(names))


_COUNTS_AT, _LATER_COUNTS_AT, _READINGS_AT = _slice(_COUNTS), _slice(_LATER_COUNTS), _slice(_READINGS)


def load_flaw(load: UnitLoad) -> str:
    """Return what makes the sample `load` unusable, in one sentence; "" when nothing does."""
    if load.state not in _STATES:
        return f"state {load.state!r} is unknown"
    fields: tuple[Any, ...] = load
    counts = (*fields[_COUNTS_AT], *fields[_LATER_COUNTS_AT])
    # Asked ten times a second for each unit of the cell: built-ins first, the sentence only if there is one.
    if type(sum(counts)) is not int or min(counts) < 0 or max(counts) >= MAX_COUNT:
        return _count_flaw(load, _COUNTS + _LATER_COUNTS)
    if not are_readings(fields[_READINGS_AT], MAX_COUNT):
        return _reading_flaw(load, _READINGS)
    return ""


def are_readings(numbers: tuple[float, ...], most: float) -> bool:
    """Whether each is UNKNOWN, or from 0 to below `most`: of the sorted, those below 0 are all unknown."""
    total = sum(numbers)
    if total - total != 0:  # a NaN or an infinity is among them
        return False
    ordered = sorted(numbers)
    unknown = numbers.count(UNKNOWN)
    return ordered[-1] < most and (unknown == len(numbers) or ordered[unknown] >= 0)


class Spent(NamedTuple):
    """A gateway's figures of a finished request, times since it was placed."""

    input_tokens: int
    output_tokens: int
    ttft_ms: float
    """0 for work that has no first token."""
    total_ms: float
    cached_tokens: int = 0
    """Of the input tokens."""


NOTHING_SPENT = Spent(0, 0, 0.0, 0.0)


def spent_flaw(spent: Spent) -> str:
    """Return what makes `spent` unusable, in one sentence; "" when nothing does."""
    flaw = _count_flaw(spent, ("input_tokens", "output_tokens", "cached_tokens")) or _reading_flaw(
        spent, ("ttft_ms", "total_ms")
    )
    if not flaw and spent.cached_tokens > spent.input_tokens:
        return f"cached_tokens is {spent.cached_tokens} of {spent.input_tokens} input tokens"
    return flaw


def _count_flaw(record: UnitCard | UnitLoad | Spent, fields: tuple[str, ...]) -> str:
    for field in fields:
        count = getattr(record, field)
        if not isinstance(count, int) or not 0 <= count < MAX_COUNT:
            return f"{field} is {count!r}; a whole number from 0 to {MAX_COUNT - 1} is needed"
    return ""


def _reading_flaw(record: UnitCard | UnitLoad | Spent, fields: tuple[str, ...]) -> str:
    for field in fields:
        reading = getattr(record, field)
        if reading == UNKNOWN:
            continue
        if not (math.isfinite(reading) and 0 <= reading < MAX_COUNT):
            return (
                f"{field} is {reading!r}; a finite number of at least 0, or {UNKNOWN} for unknown, is needed"
            )
    return ""
