"""One decision: filter, price, order, pick. A pure function of request, view, now and a random source.

The order is (region tier, cost). Tiers follow `prefer_regions` strictly: the first named region, then the
second, …, then every other region; a unit whose predicted wait passes the bound leaves its tier for the
last, where only cost counts. Before all that, a greedy answer that goes on prefers the variant that it began
on, where its text is sure to be the same. Ties are broken at random, so that deciders do not all favour the
first row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from grid.errors import GridError, InvalidRequest, NoEligibleUnit, Overloaded
from grid.words import Candidate, Decision, PlacementRequest
from placement import cost
from placement.columns import Floats, Ints, Mask
from placement.filters import WAITING_HELPS, Question, Sifted, reasons, rejections, sift
from placement.fleet import View
from placement.lengths import Forecast
from placement.prefixes import MAX_BLOCKS
from placement.reports import MAX_COUNT

NEXT_BEST = 3
"""Enough to explain a choice and to try elsewhere; a longer list is made only for who asks to explain."""

MAX_LISTED = 500
"""Candidates, and rejections, of one explained decision, the best of each: beyond it people search, not read.
Listing that many of both takes about 5 ms, in which nobody else is placed, and 140 KB on the link."""

FEW = 2 * NEXT_BEST
"""Up to so many, finding the least again and again is quicker than putting all in order."""

MAX_REASONS = 8
"""Sentences in an error that people read."""

TIE_MS = 1e-6
"""Costs this close are equal: far below what any prediction means, far above rounding."""

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
"""A client told to stay away longer would miss units that come back."""


Among = Callable[[Question, Sifted], Ints]
"""Which of a view's rows are priced, ascending."""


def eligible(question: Question, sifted: Sifted) -> Ints:
    """Return those with room."""
    if len(sifted.rows) or not question.request.dry_run:
        return sifted.rows
    return sifted.rows_of("standby")  # a call would take one in; a question about it doesn't


def decide(
    request: PlacementRequest, view: View, now_s: float, rng: random.Random, among: Among = eligible
) -> Decision:
    """Choose a unit for `request`; reserve nothing (that is the caller's next step, unless a dry run).

    Raises InvalidRequest for counts that make no sense, and for an output that would leave no unit's context
    any room; Overloaded when units could run it but are full or silent; else NoEligibleUnit. All but the
    first carry `rejected_by_code`, `reasons` and `ever`, and where the request asks to explain `rejections`,
    each a list of a `Rejection`'s fields.
    """
    check(request)
    question = Question(request, view, now_s)
    sifted = sift(question)
    rows = among(question, sifted)
    if not len(rows):
        raise _refusal(question, sifted)
    forecast = view.forecast(request)
    costs = price(request, view, forecast, rows)
    listed = MAX_LISTED if request.explain else NEXT_BEST + 1
    order = _best_first(_keys(question, rows, costs), listed, rng)
    candidates = tuple(_candidate(view, rows.item(index), costs, index) for index in order)
    return Decision(
        reservation_id=request.reservation_id,
        chosen=candidates[0],
        next_best=candidates[1:],
        rejected_by_code=sifted.counts,
        rejections=rejections(question, sifted, MAX_LISTED) if request.explain else (),
        model=question.model,
        lease_ms=1e3 * view.rules.lease_s,
        fleet_version=view.version,
        decide_us=0.0,
        stale_view=question.mass_stale,
        candidates=max(len(sifted.rows), len(rows)),
        expected_output_tokens=cost.output_tokens(request, forecast),
        output_tokens_p90=max(1, min(request.max_output_tokens, forecast.p90_tokens)),
    )


def price(request: PlacementRequest, view: View, forecast: Forecast, rows: Ints) -> cost.Costs:
    """Return what the request would cost on the units at `rows` as they are now."""
    cached_tokens = view.prefixes.match(request.prefix, request.prompt_tokens) if request.prefix else None
    return cost.predict(
        *(request, forecast, view.columns, rows, cached_tokens),
        round_trip_ms=view.round_trip_ms(request),
        targets=view.rules.targets,
    )


def check(request: PlacementRequest) -> None:
    """Raise InvalidRequest for counts that make no sense."""
    for field in ("prompt_tokens", "max_output_tokens", "min_memory_mb"):
        count = getattr(request, field)
        if not 0 <= count < MAX_COUNT:
            raise InvalidRequest(f"{field} is {count!r}; 0 to {MAX_COUNT - 1} is allowed", param=field)
    if request.prefix and (len(request.prefix) > MAX_BLOCKS or min(request.prefix) < 0):
        raise InvalidRequest(f"prefix must be up to {MAX_BLOCKS} hashes of at least 0", param="prefix")


def _keys(question: Question, rows: Ints, costs: cost.Costs) -> Floats:
    """Return what to order rows by: the variant, the region tier, lower first, and in a tier the cost."""
    request, view, total_ms = question.request, question.view, costs.total_ms
    preferred, fingerprint = request.prefer_regions, request.prefer_fingerprint
    if not preferred and not fingerprint:
        return total_ms
    tier = region_tiers(view, preferred)[rows]
    wait_ms, longest_ms = costs.queue_ms + costs.network_ms, view.rules.prefer_region_wait_ms
    if preferred and np.maximum.reduce(wait_ms) > longest_ms:
        tier[wait_ms > longest_ms] = len(preferred) + 1
    if fingerprint:
        tier[other_variants(view, fingerprint)[rows]] += len(preferred) + 2
    tier *= costs.most_ms + 1.0
    tier += total_ms
    return tier


def other_variants(view: View, fingerprint: str) -> Mask:
    """Return which units' greedy text may differ from that of a variant. Shared: write to none."""
    return view.remembered(
        ("variant", fingerprint),
        lambda: np.array([unit.card.fingerprint != fingerprint for unit in view.units], bool),
    )


def region_tiers(view: View, preferred: tuple[str, ...]) -> Floats:
    """Return every unit's place in `preferred`, the earliest of a region that is named twice. Shared: write
    to none."""
    return view.remembered(("tiers", preferred), lambda: _region_tiers(view, preferred))


def _region_tiers(view: View, preferred: tuple[str, ...]) -> Floats:
    tier = np.full(view.columns.size, float(len(preferred)))
    for index in reversed(range(len(preferred))):
        tier[view.columns.region == view.regions.number(preferred[index])] = index
    return tier


def _best_first(key: Floats, count: int, rng: random.Random) -> list[int]:
    """Return up to `count` indices into `key`, lowest first: the pick, then the next best. Uses `key` up."""
    ties = (key <= key[key.argmin()] + TIE_MS).nonzero()[0]
    pick = ties.item(int(rng.random() * len(ties)))
    left = min(count, len(key)) - 1
    key[pick] = np.inf
    if left > FEW:
        shortlist = key.argpartition(left - 1)[:left].tolist()
        return [pick, *sorted(shortlist, key=key.item)]
    best = [pick]
    for _ in range(left):
        index = int(key.argmin())
        best.append(index)
        key[index] = np.inf
    return best


def _candidate(view: View, row: int, costs: cost.Costs, index: int) -> Candidate:
    card, load = view.units[row].card, view.columns.load.item(row)
    network_ms, queue_ms, prefill_ms, decode_ms, pressure_ms, others_ms = costs.parts_ms(index)
    # Units split a step's time evenly over its batch.
    share_ms = (prefill_ms + decode_ms) / min(load + 1, card.max_running)
    return Candidate(
        card.unit_id,
        card.incarnation,
        card.host,
        card.port,
        card.region,
        card.model,
        card.precision,
        card.gpu_type,
        card.simulated,
        network_ms,
        queue_ms,
        prefill_ms,
        decode_ms,
        pressure_ms,
        card.cu_factor,
        share_ms * card.cu_factor / 1e3,
        0 if costs.cached_tokens is None else int(costs.cached_tokens[index]),
        others_ms,
    )


def _refusal(question: Question, sifted: Sifted) -> GridError:
    rejected = dict(sifted.counts)
    sentences = reasons(question, sifted, MAX_REASONS)
    details: dict[str, Any] = {"rejected_by_code": rejected, "reasons": sentences, "ever": sifted.ever}
    if question.request.explain:
        details["rejections"] = [list(each) for each in rejections(question, sifted, MAX_LISTED)]
    asked = f"{question.request.model!r}" if question.request.model else "the step"
    if not sifted.ever and "context" in rejected:
        return InvalidRequest(_too_much_output(question, sifted), param="max_output_tokens", **details)
    if not any(code in rejected for code in WAITING_HELPS):
        return NoEligibleUnit(f"no unit can run {asked}: {sentences[0]}", **details)
    return Overloaded(
        f"every unit that can run {asked} is full or silent: {sentences[0]}",
        retry_after_s=_retry_after_s(question, sifted),
        **details,
    )


def _too_much_output(question: Question, sifted: Sifted) -> str:
    """Units that fit but for their context: waiting changes nothing, and the caller can."""
    view, request = question.view, question.request
    largest = int(view.columns.context_tokens[sifted.rows_of("context")].max())
    return (
        f"max_output_tokens: {request.max_output_tokens} leaves no room for a prompt on any unit that may "
        f"run {request.model!r}, whose largest context has {largest} tokens; ask for at most {largest - 1}"
    )


def _retry_after_s(question: Question, sifted: Sifted) -> float:
    full = sifted.rows_of("saturated")
    if not len(full):
        return question.view.rules.stale_after_s
    request, view = question.request, question.view
    costs = price(request, view, view.forecast(request), full)
    slot_s = 1e-3 * float(costs.queue_ms.min())
    return min(max(slot_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
