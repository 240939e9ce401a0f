"""Our own policy: the very code that decides in production, driven by simulated time.

Reports become the samples of `placement.fleet.View`, arrivals its placement requests; `decide` picks, the
view reserves, and what ended requests tell is learned as the actor learns it. Nothing of placement is written
again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from grid.hardware import catalogue
from grid.words import Decision, PlacementRequest, Precision, Task, UnitCard, UnitLoad, UnitState
from placement.decide import decide
from placement.dispatch import Answer
from placement.dispatch import Dispatch as Dispatcher
from placement.fleet import View
from placement.freshness import TICK_S
from placement.prefixes import END_TOKENS, MAX_BLOCKS
from placement.queue import Limits
from placement.reports import Spent
from placement.rules import Rules
from placement.simulator.kv import BLOCK_TOKENS
from placement.simulator.policies.base import Policy, Setting
from placement.simulator.seen import Arrival, Dispatch, Ended, UnitReport

MODEL = "llama-3.1-8b"
PARAMETERS_B = 8.03
MAX_OUTPUT_TOKENS = 8_192
"""What every client asks for at most: far above most answers, so that it tells nothing of them."""

MAX_WAITING = 4_096
"""Units take all that comes, as vLLM does."""

LIMITS = Limits(most=10_000, most_per_tenant=10_000, wait_ms=30_000.0)
"""Of the queue; the cell's defaults but for one tenant, who is all traffic of some traces."""

LEASE_S = 300.0

LINK = 1
INCARNATION = "1"


def card(setting: Setting, unit: int) -> UnitCard:
    """Return the card that such a unit would announce: the catalogue's priors, nothing of the simulated
    truth."""
    info = setting.units[unit]
    gpu = catalogue.find(info.gpu)
    return UnitCard(
        unit_id=f"u{unit}",
        incarnation=INCARNATION,
        host="sim",
        port=1,
        node_id=f"n{unit}",
        region=info.region,
        task=int(Task.GENERATE),
        model=MODEL,
        precision=int(Precision.BF16),
        fingerprint="",
        context_tokens=info.context_tokens,
        gpu_type=gpu.name,
        gpus=1.0,
        memory_grant_mb=gpu.memory_mb,
        max_running=info.max_running,
        max_waiting=MAX_WAITING,
        cu_factor=gpu.cu_factor,
        simulated=True,
        prefill_tokens_per_s=catalogue.prefill_tokens_per_s(gpu.name, PARAMETERS_B, Precision.BF16),
        decode_ms_per_token=catalogue.decode_ms_per_token(gpu.name, PARAMETERS_B, Precision.BF16),
    )


def prefix(arrival: Arrival) -> tuple[int, ...]:
    """Return what the gateway's chained hashes would be: one for each end of a block of its own raster.

    Two prompts are known to be the same up to an end if the trace's block around it is the same.
    """
    whole_tokens = min(arrival.prompt_tokens // BLOCK_TOKENS, len(arrival.blocks)) * BLOCK_TOKENS
    return tuple(
        arrival.blocks[(end - 1) // BLOCK_TOKENS] * MAX_BLOCKS + place
        for place, end in enumerate(END_TOKENS)
        if end <= whole_tokens
    )


class Grid(Policy):
    name: ClassVar[str] = "grid"
    source: ClassVar[str] = "placement/decide.py, as the placement actor calls it"
    wants_reports: ClassVar[bool] = True
    wants_ended: ClassVar[bool] = True

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._view = View(self.rules(), 0.0)
        for info in setting.units:
            self._view.join(card(setting, info.unit), LINK)
        self._reservation: dict[int, str] = {}
        self._ticked_s = 0.0
        self._dispatch = Dispatcher(
            self._view, LIMITS, lambda request, now_s, among: decide(request, self._view, now_s, rng, among)
        )

    def rules(self) -> Rules:
        regions = {info.region for info in self.units}
        trip = self.setting.round_trip_ms
        return Rules(
            lease_s=LEASE_S,
            round_trip_ms={
                origin: {region: trip(origin, region) for region in regions}
                for origin in self.setting.origins
            },
        )

    def reported(self, reports: Sequence[UnitReport], now_s: float) -> Sequence[Dispatch]:
        self._tick(now_s)
        names = self._reservation
        self._view.report(
            (
                UnitLoad(
                    f"u{report.unit}",
                    INCARNATION,
                    int(UnitState.READY),
                    report.running,
                    report.waiting,
                    report.kv_tokens_free,
                    report.kv_tokens_total,
                    report.prefill_tokens_queued,
                    report.steps,
                    tuple(names[request] for request in report.held if request in names),
                    decode_ms_per_token=report.decode_step_ms,
                    prompt_tokens=report.prompt_tokens,
                    cached_tokens=report.cached_tokens,
                )
                for report in reports
            ),
            LINK,
            now_s,
        )
        return self._sent(self._dispatch.serve(now_s)) if len(self._dispatch.queue) else ()

    def _sent(self, answers: Sequence[Answer]) -> Sequence[Dispatch]:
        sent = []
        for answer in answers:
            if isinstance(answer.outcome, Decision):
                self._reservation[answer.stream] = answer.request.reservation_id
                sent.append(Dispatch(answer.stream, int(answer.outcome.chosen.unit_id[1:])))
        return sent

    def _tick(self, now_s: float) -> None:
        """Advance the view's clock as the actor's ticker does."""
        while now_s - self._ticked_s >= TICK_S:
            self._ticked_s += TICK_S
            self._view.tick(self._ticked_s)

    def request(self, arrival: Arrival) -> PlacementRequest:
        return PlacementRequest(
            request_id=str(arrival.request),
            step_id="s",
            attempt=1,
            tenant_id=arrival.tenant,
            task=int(Task.GENERATE),
            model=MODEL,
            prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=MAX_OUTPUT_TOKENS,
            prefix=prefix(arrival),
            origin_region=arrival.origin,
        )

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        self._tick(now_s)
        return self._sent(self._dispatch.place(self.request(arrival), LINK, arrival.request, now_s))

    def outcome(self, ended: Ended) -> str:
        return "done"

    def ended(self, ended: Ended, now_s: float) -> Sequence[Dispatch]:
        reservation = self._reservation.pop(ended.request, None)
        if reservation is not None:
            spent = Spent(
                *(ended.prompt_tokens, ended.output_tokens, ended.ttft_ms, ended.total_ms),
                ended.cached_tokens,
            )
            _, answers = self._dispatch.settle(reservation, self.outcome(ended), now_s, spent)
            return self._sent(answers)
        return ()
