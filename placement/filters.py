"""Which units may run a request, and for each that may not, why. Pure; every rule fails closed.

RULES is the whole table, in the order in which it is applied: a unit is rejected by the first rule that it
breaks. First what a unit is (waiting won't change it), then what state it is in, last whether it has room.
Each rule answers for all units at once; its sentence is made only for rejections that someone reads. What
the rules before the momentary ones answer is remembered on the view: requests of one step ask the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grid.engines.variants import choose
from grid.hardware import catalogue
from grid.words import PlacementRequest, Precision, Rejection, Task, UnitState
from placement.columns import Ints, Mask
from placement.fleet import View

_READY, _DRAINING = int(UnitState.READY), int(UnitState.DRAINING)
_STANDBY = int(UnitState.STANDBY)
"""Being on standby, asleep or not, is this or above.

Plain numbers: looking a member up in its enumeration costs as much as a comparison of 1,000 units."""

_VERSION = re.compile(r"[-_.:@/](v?\d.*|latest)", re.IGNORECASE | re.DOTALL)


def is_version_of(model: str, name: str) -> bool:
    """Return whether `model` is `name` itself or a version of it, whatever the case.

    A version is the name, a separator (one of `-_.:@/`), and then a part that begins with a digit, with
    `v` and a digit, or is `latest`: `model-x-2024-06`, `model-x:v2`, `model-x@latest` are versions of
    `model-x`; `model-xl` and `model-x-mini` are other models. A size looks like a version, so `llama-3-8b`
    counts as one of `llama-3`: to avoid too much is the safe side.
    """
    model, name = model.casefold(), name.casefold()
    return model == name or (model.startswith(name) and _VERSION.fullmatch(model, len(name)) is not None)


def avoided_names(avoid: Iterable[str], aliases: Mapping[str, str]) -> frozenset[str]:
    """Return the model names that `avoid` names: as given, and by the aliases that match."""
    names = {name for name in avoid if name}
    by_alias = {
        target for alias, target in aliases.items() if any(is_version_of(alias, name) for name in names)
    }
    return frozenset(names | by_alias)


def asks(request: PlacementRequest) -> Hashable:
    """Return all that rules which are not momentary may read of a request."""
    return (
        *(request.task, request.model, request.avoid_models, request.allowed_regions),
        *(request.lowest_precision, request.min_memory_mb, request.max_output_tokens, request.exclude_units),
    )


class Question:
    """One request against the view at one moment, with what several rules need worked out once."""

    def __init__(self, request: PlacementRequest, view: View, now_s: float) -> None:
        self.request = request
        self.view = view
        self.now_s = now_s
        self.model = view.rules.model(request.model)
        self.fresh, self.mass_stale = view.fresh(now_s)

    @cached_property
    def avoided(self) -> frozenset[str]:
        return avoided_names(self.request.avoid_models, self.view.rules.aliases)

    @property
    def standing(self) -> Hashable:
        return asks(self.request)


@dataclass(frozen=True, slots=True)
class Rule:
    summary: str
    passes: Callable[[Question], Mask | None]
    """Which units pass, shape (units,); None when all do, as when the request doesn't ask."""
    explain: Callable[[Question, int], str]
    """Why the unit at a row does not pass: the numbers, and what would have to change."""
    lasting: bool = False
    """About what the unit is: an idle fleet would answer the same."""
    momentary: bool = False
    """May change with time, a sample or a reservation. The others read no more than the view's cards,
    states, drains and faults, and of the request what `Question.standing` holds; they come first."""


def _avoids(question: Question, model: str) -> bool:
    return any(is_version_of(model, name) for name in question.avoided)


def avoided_by(avoid: Iterable[str], aliases: Mapping[str, str], model: str) -> str:
    """Return how the list covers `model`: the name that stands on it, and the alias that it means."""
    for name in avoid:
        if name and is_version_of(model, name):
            return repr(name)
    for name in avoid:
        for alias, target in sorted(aliases.items()):
            if name and is_version_of(alias, name) and is_version_of(model, target):
                return repr(name) if alias == name else f"{name!r} (which covers the alias {alias!r})"
    return "its list"


def _task(q: Question) -> Mask:
    passes: Mask = q.view.columns.task == q.request.task
    return passes


def _task_detail(q: Question, row: int) -> str:
    has, asked = Task(q.view.units[row].card.task).name.lower(), _task_name(q.request.task)
    return f"does {has}, the step needs {asked}: name a model that does {asked}"


def _task_name(task: int) -> str:
    return Task(task).name.lower() if task in set(Task) else f"task {task}"


def _model(q: Question) -> Mask:
    passes: Mask = q.view.columns.model == q.view.models.number(q.model)
    return passes


def _model_detail(q: Question, row: int) -> str:
    asked = f"{q.model!r}" if q.model == q.request.model else f"{q.model!r} (alias {q.request.model!r})"
    return f"runs {q.view.units[row].card.model!r}, not {asked}: start a unit with it, or name another model"


def _avoided(q: Question) -> Mask | None:
    if not q.avoided:
        return None
    allowed = q.view.models.where(lambda model: not _avoids(q, model))
    return allowed[q.view.columns.model]


def _avoided_detail(q: Question, row: int) -> str:
    model = q.view.units[row].card.model
    by = avoided_by(q.request.avoid_models, q.view.rules.aliases, model)
    return f"runs {model!r}, which avoid_models excludes by {by}: take that name off the list"


def _region(q: Question) -> Mask | None:
    if not q.request.allowed_regions:
        return None
    allowed = q.view.regions.where(lambda region: region in q.request.allowed_regions)
    return allowed[q.view.columns.region]


def _region_detail(q: Question, row: int) -> str:
    allowed = ", ".join(q.request.allowed_regions)
    return f"is in {q.view.units[row].card.region}; residency allows only {allowed}: start a unit there"


def _precision(q: Question) -> Mask | None:
    if not q.request.lowest_precision:
        return None
    passes: Mask = q.view.columns.precision >= q.request.lowest_precision
    return passes


def _precision_detail(q: Question, row: int) -> str:
    card, lowest = q.view.units[row].card, q.request.lowest_precision
    has = Precision(card.precision).label
    asked = Precision(lowest).label if lowest in set(Precision) else f"precision {lowest}"
    return (
        f"runs {has}; the request accepts {asked} or higher: start a unit with "
        f"{_served_there(card.gpu_type, lowest)}, or accept {has}"
    )


def _served_there(gpu_type: str, lowest: int) -> str:
    """Return what a unit on such a GPU could run that is not below `lowest`."""
    gpu = catalogue.GPUS.get(gpu_type)
    best = choose(gpu, lowest=lowest) if gpu is not None and lowest in set(Precision) else None
    return f"{best.label} on {gpu_type}" if isinstance(best, Precision) else "it"


def _memory(q: Question) -> Mask | None:
    if q.request.min_memory_mb <= 0:
        return None
    passes: Mask = q.view.columns.memory_grant_mb >= q.request.min_memory_mb
    return passes


def _memory_detail(q: Question, row: int) -> str:
    has, asked = q.view.units[row].card.memory_grant_mb, q.request.min_memory_mb
    return (
        f"is granted {has} MB; the request asks for {asked} MB: lower min_gpu_memory_mb or grant a unit more"
    )


def _context(q: Question) -> Mask | None:
    """Only what is certain: the prompt's length is an estimate, but it takes at least one token."""
    if q.request.task != Task.GENERATE:
        return None
    passes: Mask = q.view.columns.context_tokens > q.request.max_output_tokens
    return passes


def _context_detail(q: Question, row: int) -> str:
    has, asked = q.view.units[row].card.context_tokens, q.request.max_output_tokens
    return (
        f"has a context of {has} tokens; max_output_tokens {asked} leaves no room for a prompt: "
        f"ask for at most {has - 1}"
    )


def _excluded(q: Question) -> Mask | None:
    if not q.request.exclude_units:
        return None
    passes = np.ones(q.view.columns.size, np.bool_)
    for unit_id in q.request.exclude_units:
        row = q.view.row(unit_id)
        if row is not None:
            passes[row] = False
    return passes


def _excluded_detail(q: Question, row: int) -> str:
    return f"is excluded for attempt {q.request.attempt}, as an earlier one failed there: add another unit"


def _gpu(q: Question) -> Mask | None:
    gpus = q.view.gpus
    if not gpus.has_faults():
        return None
    return q.view.remembered(
        "sound", lambda: np.array([not gpus.fault(u.card) for u in q.view.units], np.bool_)
    )


def _gpu_detail(q: Question, row: int) -> str:
    return f"runs on a faulty GPU, {q.view.gpus.fault(q.view.units[row].card)}"


def _state(q: Question) -> Mask:
    state, never = q.view.columns.state, q.view.columns.sampled_s == -np.inf
    # A unit that never reported is judged by its silence, below, not by the state that it starts with.
    passes: Mask = (state == _READY) | (state == _DRAINING) | (state >= _STANDBY) | never
    return passes


def _state_detail(q: Question, row: int) -> str:
    if q.view.columns.state[row] == UnitState.FAILED:
        return "has failed: its engine died, and the supervisor replaces it"
    return "is still starting: it takes work once its canary has passed"


def _draining(q: Question) -> Mask:
    passes: Mask = (q.view.columns.state != _DRAINING) & ~q.view.columns.drained
    return passes


def _draining_detail(q: Question, row: int) -> str:
    if q.view.columns.drained[row]:
        return "is drained by an operator: resume it, or start another unit"
    return "is draining: it finishes what it runs and takes nothing new"


def _isolated(q: Question) -> Mask:
    passes: Mask = ~q.view.columns.isolated
    return passes


def _isolated_detail(q: Question, row: int) -> str:
    return f"is isolated: {q.view.isolated(q.view.units[row].card.unit_id)}"


def _in_service(q: Question) -> Mask:
    passes: Mask = (q.view.columns.state < _STANDBY) | q.view.columns.taken_in
    return passes


def _standby_detail(q: Question, row: int) -> str:
    return "is on standby: it is taken in when no unit that serves has room"


def _fresh(q: Question) -> Mask | None:
    return q.fresh


def _fresh_detail(q: Question, row: int) -> str:
    age_s = q.view.sample_age_s(row, q.now_s)
    if age_s == np.inf:
        return "has not reported yet: it takes work from its first sample on"
    limit_ms = 1e3 * q.view.rules.stale_after_s
    return f"last reported {1e3 * age_s:.0f} ms ago; after {limit_ms:.0f} ms a unit counts as saturated"


def _room(q: Question) -> Mask:
    return q.view.columns.load < q.view.columns.slots


def _room_detail(q: Question, row: int) -> str:
    load, slots = int(q.view.columns.load[row]), int(q.view.columns.slots[row])
    return f"holds {load} requests and has {slots} slots: try again when one ends, or start another unit"


RULES: dict[str, Rule] = {
    "task": Rule("the kind of work", _task, _task_detail, lasting=True),
    "model": Rule("the model, or the one that an alias names", _model, _model_detail, lasting=True),
    "avoided": Rule("avoided models, their aliases and versions", _avoided, _avoided_detail, lasting=True),
    "region": Rule("residency; never relaxed", _region, _region_detail, lasting=True),
    "precision": Rule("the lowest precision accepted", _precision, _precision_detail, lasting=True),
    "memory": Rule("the unit's own memory grant", _memory, _memory_detail, lasting=True),
    "context": Rule("room for any prompt beside the output", _context, _context_detail, lasting=True),
    "excluded": Rule("units that an earlier attempt failed on", _excluded, _excluded_detail),
    "gpu": Rule("a GPU without a fatal error", _gpu, _gpu_detail),
    "state": Rule("started, and not failed", _state, _state_detail),
    "draining": Rule("not draining", _draining, _draining_detail),
    "standby": Rule("not on standby", _in_service, _standby_detail),
    "isolated": Rule("not isolated for failing too often", _isolated, _isolated_detail),
    "stale": Rule("a sample that is fresh; else saturated", _fresh, _fresh_detail, momentary=True),
    "saturated": Rule("a free slot", _room, _room_detail, momentary=True),
}

REASONS: dict[str, str] = {code: rule.summary for code, rule in RULES.items()}
"""Every rejection code, and what a unit is asked for there."""

WAITING_HELPS = ("stale", "saturated")
"""A unit rejected by one of these passes every other rule: the request has only come too early."""

_CODES = tuple(RULES)
_STANDING = [(index, rule) for index, rule in enumerate(RULES.values()) if not rule.momentary]
_MOMENTARY = [(index, rule) for index, rule in enumerate(RULES.values()) if rule.momentary]


class Sifted(NamedTuple):
    """The outcome of all rules. Counts and rejections are by the first rule that a unit breaks."""

    rows: Ints
    """Units that pass, ascending."""
    broken: npt.NDArray[np.int8]
    """For every unit the index of the rule that it breaks, -1 for none; shape (units,)."""
    counts: tuple[tuple[str, int], ...]
    """Codes with at least one unit, in the table's order."""

    def rows_of(self, code: str) -> Ints:
        return np.flatnonzero(self.broken == _CODES.index(code))

    @property
    def ever(self) -> bool:
        """Whether some unit would pass in an idle, healthy fleet."""
        lasting = sum(rule.lasting for rule in RULES.values())
        return bool(((self.broken < 0) | (self.broken >= lasting)).any())


def sift(question: Question) -> Sifted:
    """Apply every rule to every unit. The arrays are shared between calls: write to none."""
    return _apply(_MOMENTARY, question, standing(question))


def standing(question: Question) -> Sifted:
    """Return the outcome of the rules that are not momentary, worked out once for all who ask the same."""
    size = question.view.columns.size
    return question.view.remembered(
        question.standing,
        lambda: _apply(_STANDING, question, Sifted(np.arange(size), np.full(size, -1, np.int8), ())),
    )


def _apply(rules: list[tuple[int, Rule]], question: Question, before: Sifted) -> Sifted:
    """Apply `rules` to the units that passed those before; return `before` itself if all still pass."""
    size = question.view.columns.size
    broken, counts = before.broken, list(before.counts)
    for index, rule in rules:
        passes = rule.passes(question)
        if passes is None or np.count_nonzero(passes) == size:
            continue
        failed = (broken < 0) & ~passes
        count = int(np.count_nonzero(failed))
        if count:
            broken = np.where(failed, np.int8(index), broken)
            counts.append((_CODES[index], count))
    if broken is before.broken:
        return before
    return Sifted(np.flatnonzero(broken < 0), broken, tuple(counts))


def rejections(question: Question, sifted: Sifted, limit: int) -> tuple[Rejection, ...]:
    """Explain the units that did not pass, up to `limit` of them, those nearest to being eligible first."""
    rows = np.flatnonzero(sifted.broken >= 0)
    nearest = rows[np.argsort(-sifted.broken[rows], kind="stable")][:limit]
    return tuple(_rejection(question, int(row), int(sifted.broken[row])) for row in nearest)


def reasons(question: Question, sifted: Sifted, limit: int) -> list[str]:
    """Return up to `limit` sentences, one a code, those nearest to being eligible first."""
    if not question.view.units:
        return ["the cell has no units: start one for the model, and see `grid units`"]
    sentences = []
    for code, count in reversed(sifted.counts):
        row = int(sifted.rows_of(code)[0])
        rejection = _rejection(question, row, int(sifted.broken[row]))
        more = f" (and {count - 1} more by the same rule)" if count > 1 else ""
        sentences.append(f"{rejection.unit_id} {rejection.detail}{more}")
    return sentences[:limit]


def _rejection(question: Question, row: int, rule: int) -> Rejection:
    code = _CODES[rule]
    return Rejection(question.view.units[row].card.unit_id, code, RULES[code].explain(question, row))
