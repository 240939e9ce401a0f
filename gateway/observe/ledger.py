"""From ended calls to sums that replicas can add together. Pure: no clock, no Redis.

A call is added to one series of its tenant, pipeline and moment, which is all that the hot path pays; `take`
works out from the series which hashes of Redis they belong to. Only whole numbers are added, so that two
replicas give what one count of all calls gives; compute is counted in millionths of a `cu_second`.

For tenant T and pipeline P (`-` for calls of a model itself, `*` for all of the tenant's):

    zg:{T}:live:P:SLOT            what `/v1/metrics` shows, in slots of LIVE_SLOT_S
    zg:{T}:pace:P:BLOCK           calls by slot, for the burst detector
    zg:{T}:steps:P:REVISION:SLOT  what `step_metrics` shows, in slots of STEP_SLOT_S
    zg:{T}:usage:P:DAY            tokens and compute by hour
    zg:{T}:used:DAY               set of the pipelines that have usage on that day
    zg:totals                     the cell's own, for Prometheus: never reset
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from gateway.observe.histogram import bucket
from gateway.observe.story import Outcome, Story
from gateway.observe.totals import TOTALS, Sums, Totals, Work, add_sums
from gateway.records import tenant_key
from grid.words import Usage

LIVE_SLOT_S = 5
"""Twelve of them are a minute: the newest calls are never waited for, the oldest leave in small pieces."""
LIVE_KEPT_S = 150
"""The window of `/v1/metrics`, and some more."""
PACE_BLOCK_S = 600
PACE_KEPT_S = 3 * PACE_BLOCK_S
STEP_SLOT_S = 300
STEP_KEPT_S = 3_600 + 3 * STEP_SLOT_S
HOUR_S = 3_600
DIRECT = "-"
"""Calls of a model itself, and those refused before their pipeline was looked up."""
ALL = "*"
MAX_SERIES = 8_192
"""Series that wait to be written, at about 1 KB each. A flush empties them twice a second. While Redis is
away those of one hour are added up; beyond the bound calls are not counted any more, but how many is."""


class Hash(NamedTuple):
    """A hash of Redis, and for how long after its last addition it is kept (0: for ever)."""

    name: str
    kept_s: int


@dataclass(slots=True)
class Batch:
    """What is added in one go: sums to hashes, members to sets."""

    sums: dict[Hash, Sums] = field(default_factory=dict)
    members: dict[Hash, set[str]] = field(default_factory=dict)

    def add(self, to: Hash, fields: Mapping[str, int]) -> None:
        add_sums(self.sums.setdefault(to, {}), fields)


class _At(NamedTuple):
    """Which series: the calls of a tenant and pipeline that ended in a slot of LIVE_SLOT_S."""

    tenant_id: str
    pipeline: str
    slot: int


class _StepsAt(NamedTuple):
    tenant_id: str
    pipeline: str
    revision: int
    slot: int


@dataclass(slots=True)
class _Calls:
    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    times: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    work: Work = field(default_factory=Work)

    def merge(self, other: _Calls) -> None:
        add_sums(self.outcomes, other.outcomes)
        add_sums(self.times, other.times)
        self.work.merge(other.work)


@dataclass(slots=True)
class _Step:
    calls: int = 0
    errors: int = 0
    tokens: int = 0
    times: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class Ledger:
    """What one replica has not written yet. `usage_kept_s` is how long usage stays in Redis."""

    def __init__(self, usage_kept_s: int) -> None:
        self._usage_kept_s = usage_kept_s
        self._calls: dict[_At, _Calls] = {}
        self._steps: dict[_StepsAt, dict[str, _Step]] = {}
        self._totals = Totals()
        self._folded_slot = 0
        self.dropped = 0
        """Calls that found no room."""

    def add(self, story: Story) -> None:
        """Count one ended call. Latency is of good calls only: a refusal is quick and no answer."""
        outcome = story.outcome
        self._totals.add(story, outcome)
        if not story.tenant_id:
            return
        at = int(story.ended_at)
        calls = self._series(story.tenant_id, story.pipeline_id or DIRECT, at)
        if calls is None:
            self.dropped += 1
            return
        calls.outcomes[outcome] += 1
        if outcome is Outcome.GOOD:
            calls.times[bucket(story.total_ms)] += 1
        if story.runs:
            calls.work.add(story.usage)
            if story.pipeline_id:
                self._add_steps(story, at)

    def charge(self, tenant_id: str, pipeline_id: str, model: str, cu_seconds: float, at: int) -> None:
        """Add compute of a call that was counted before its unit had said what it took."""
        late = Usage(cu_seconds=cu_seconds)
        self._totals.charge(model, late)
        calls = self._series(tenant_id, pipeline_id or DIRECT, at)
        if calls is not None:
            calls.work.add(late)

    def take(self, most: int) -> Batch | None:
        """Take up to `most` series of each kind out; None when nothing waits."""
        batch = Batch()
        for at in list(self._calls)[:most]:
            self._spread(at, self._calls.pop(at), batch)
        for steps_at in list(self._steps)[:most]:
            tenant_id, pipeline, revision, slot = steps_at
            name = tenant_key(tenant_id, f"steps:{pipeline}:{revision}:{slot}")
            batch.add(Hash(name, STEP_KEPT_S), _step_sums(self._steps.pop(steps_at)))
        if totals := self._totals.sums():
            batch.add(Hash(TOTALS, 0), totals)
            self._totals = Totals()
        return batch if batch.sums else None

    def _spread(self, at: _At, calls: _Calls, batch: Batch) -> None:
        of_tenant, at_s = partial(tenant_key, at.tenant_id), at.slot * LIVE_SLOT_S
        count, work = sum(calls.outcomes.values()), calls.work.sums()
        live = {"calls": count, **{str(name): n for name, n in calls.outcomes.items()}, **work}
        live |= {f"ms{index}": n for index, n in calls.times.items()}
        for pipeline in (at.pipeline, ALL):
            batch.add(Hash(of_tenant(f"live:{pipeline}:{at.slot}"), LIVE_KEPT_S), live)
            pace = Hash(of_tenant(f"pace:{pipeline}:{at_s // PACE_BLOCK_S}"), PACE_KEPT_S)
            batch.add(pace, {str(at.slot): count})
        moment = datetime.fromtimestamp(at_s, UTC)
        day = f"{moment:%Y%m%d}"
        hourly = {f"{moment:%H}:{name}": n for name, n in (("calls", count), *work.items())}
        batch.add(Hash(of_tenant(f"usage:{at.pipeline}:{day}"), self._usage_kept_s), hourly)
        used = Hash(of_tenant(f"used:{day}"), self._usage_kept_s)
        batch.members.setdefault(used, set()).add(at.pipeline)

    def _series(self, tenant_id: str, pipeline: str, at: int) -> _Calls | None:
        """Return the series to add to; None where there is no room for one more."""
        key = _At(tenant_id, pipeline, at // LIVE_SLOT_S)
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= MAX_SERIES:
                self._fold(key.slot)
            if len(self._calls) >= MAX_SERIES:
                return None
            calls = self._calls[key] = _Calls()
        return calls

    def _fold(self, slot: int) -> None:
        """Add up the series of each earlier hour and of this one, once a slot: nobody will see them live."""
        if self._folded_slot == slot:
            return
        self._folded_slot = slot
        waiting, self._calls = self._calls, {}
        for key, calls in waiting.items():
            hour_slot = key.slot * LIVE_SLOT_S // HOUR_S * HOUR_S // LIVE_SLOT_S
            self._calls.setdefault(key._replace(slot=hour_slot), _Calls()).merge(calls)

    def _add_steps(self, story: Story, at: int) -> None:
        key = _StepsAt(story.tenant_id, story.pipeline_id, story.revision, at // STEP_SLOT_S)
        steps = self._steps.get(key)
        if steps is None:
            if len(self._steps) >= MAX_SERIES:
                del self._steps[next(iter(self._steps))]  # the oldest: nobody looks back that far
            steps = self._steps[key] = {}
        for run in story.runs:
            for timing, error in run.steps:
                step = steps.get(timing.step_id)
                if step is None:
                    step = steps[timing.step_id] = _Step()
                step.calls += 1
                step.tokens += timing.usage.input_tokens + timing.usage.output_tokens
                if error is not None:
                    step.errors += 1
                else:
                    step.times[bucket(timing.total_ms)] += 1


def _step_sums(steps: Mapping[str, _Step]) -> Sums:
    sums: Sums = {}
    for step_id, step in steps.items():
        counts = {"calls": step.calls, "errors": step.errors, "tokens": step.tokens}
        counts |= {f"ms{index}": count for index, count in step.times.items()}
        sums |= {f"{step_id}:{name}": count for name, count in counts.items() if count}
    return sums
