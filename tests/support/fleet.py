"""Cards, samples, requests and views with sensible values, each changed by what a test is about."""

from __future__ import annotations

from typing import Any

from grid.words import PlacementRequest, Precision, Task, UnitCard, UnitLoad, UnitState
from placement.fleet import View
from placement.rules import Rules


def make_card(unit_id: str = "u0", **changes: Any) -> UnitCard:
    base = UnitCard(
        unit_id=unit_id,
        incarnation=f"{unit_id}-first",
        host="10.0.0.1",
        port=4000,
        node_id="node",
        region="eu-central-1",
        task=int(Task.GENERATE),
        model="model-x",
        precision=int(Precision.FP16),
        fingerprint="f",
        context_tokens=2048,
        gpu_type="A100-80",
        gpus=1.0,
        memory_grant_mb=80_000,
        max_running=4,
        max_waiting=4,
        cu_factor=1.0,
        prefill_tokens_per_s=1000.0,
        decode_ms_per_token=10.0,
    )
    return base._replace(**changes)


def make_load(card: UnitCard, **changes: Any) -> UnitLoad:
    idle = UnitLoad(
        unit_id=card.unit_id,
        incarnation=card.incarnation,
        state=int(UnitState.READY),
        running=0,
        waiting=0,
        kv_tokens_free=100_000,
        kv_tokens_total=100_000,
        prefill_tokens_queued=0,
        steps=0,
    )
    return idle._replace(**changes)


def make_request(request_id: str = "req_1", **changes: Any) -> PlacementRequest:
    base = PlacementRequest(
        request_id=request_id,
        step_id="s",
        attempt=0,
        tenant_id="t",
        task=int(Task.GENERATE),
        model="model-x",
        prompt_tokens=100,
        max_output_tokens=50,
    )
    return base._replace(**changes)


def make_view(*cards: UnitCard, now_s: float = 0.0, **rules: Any) -> View:
    """A view of idle units that have all reported at `now_s`; unit i came by link i + 1."""
    view = View(Rules(**rules), now_s)
    for link, card in enumerate(cards, start=1):
        view.join(card, link)
        view.report([make_load(card)], link, now_s)
    return view
