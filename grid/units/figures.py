"""What a unit tells Ray's metrics of itself. Pure: samples and counters → values by name."""

from __future__ import annotations

from grid.units.unit import Counters
from grid.words import UnitCard, UnitLoad

TEXTS = {
    "zerogrid_unit_running": "Requests that the engine works on.",
    "zerogrid_unit_waiting": "Requests that were admitted and have not begun.",
    "zerogrid_unit_utilisation_ratio": "Share of the slots that are taken, 0 to 1.",
    "zerogrid_unit_kv_cache_usage_ratio": "Share of the KV cache that is taken, 0 to 1.",
    "zerogrid_unit_output_tokens": "Tokens that were generated since the unit started.",
    "zerogrid_unit_ttft_seconds": "Mean time from admission to the first token since the last figure.",
    "zerogrid_unit_admits": "Requests that it works on at once now; fewer under memory pressure.",
    "zerogrid_unit_chunk_tokens": "Prompt tokens that a step computes now; fewer under memory pressure.",
    "zerogrid_unit_preemptions": "Requests evicted for want of KV memory since the unit started.",
}


def tags(card: UnitCard) -> dict[str, str]:
    names = {"unit_id": card.unit_id, "model_name": card.model}
    return {**names, "region": card.region, "gpu_type": card.gpu_type}


class UnitFigures:
    """Remembers what it has told, for means over what is new."""

    def __init__(self) -> None:
        self._first_tokens = 0
        self._first_token_s = 0.0

    def read(self, card: UnitCard, load: UnitLoad, counters: Counters) -> dict[str, float]:
        values = {
            "zerogrid_unit_running": load.running,
            "zerogrid_unit_waiting": load.waiting,
            "zerogrid_unit_utilisation_ratio": load.running / card.max_running,
            "zerogrid_unit_output_tokens": counters.output_tokens,
        }
        values["zerogrid_unit_admits"] = load.admits or card.max_running
        if load.chunk_tokens:
            values["zerogrid_unit_chunk_tokens"] = load.chunk_tokens
            values["zerogrid_unit_preemptions"] = load.preemptions
        if load.kv_tokens_total > 0:
            values["zerogrid_unit_kv_cache_usage_ratio"] = 1 - load.kv_tokens_free / load.kv_tokens_total
        new = counters.first_tokens - self._first_tokens
        if new:
            values["zerogrid_unit_ttft_seconds"] = (counters.first_token_s - self._first_token_s) / new
            self._first_tokens, self._first_token_s = counters.first_tokens, counters.first_token_s
        return values
