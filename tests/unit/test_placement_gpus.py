"""GPUs in placement's view: what is believed, what takes units out, what gateways see of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleet import make_card, make_request, make_view

from grid.errors import InvalidRequest
from grid.words import UNKNOWN, GpuCard, GpuSample, NodeCard, UnitState
from placement.filters import Question, sift
from placement.fleet import View

LINK = 50
FAULT = "Xid 79: it fell off the bus"


def node(node_id: str = "node", *uuids: str, incarnation: str = "first") -> NodeCard:
    names = uuids or ("GPU-0", "GPU-1")
    gpus = tuple(GpuCard(uuid, index, "NVIDIA L4", 23_552.0) for index, uuid in enumerate(names))
    return NodeCard(node_id, incarnation, "575.57", gpus)


def sample(uuid: str = "GPU-0", **changes: Any) -> GpuSample:
    return GpuSample(uuid, memory_used_mb=1024.0, compute_utilisation=0.5)._replace(**changes)


def view_of_two() -> View:
    """u0 on GPU-0, u1 on both GPUs, u2 on none."""
    view = make_view(
        make_card("u0", gpu_uuids=("GPU-0",)),
        make_card("u1", gpu_uuids=("GPU-0", "GPU-1")),
        make_card("u2"),
    )
    view.join_node(node(), LINK)
    return view


def eligible(view: View) -> set[str]:
    sifted = sift(Question(make_request(), view, 0.0))
    return {view.units[row].card.unit_id for row in sifted.rows}


def report(view: View, *samples: GpuSample, incarnation: str = "first", link: int = LINK) -> bool:
    return view.report_node("node", incarnation, samples, link, 0.0)


def test_a_fault_takes_the_gpus_units_out_at_once_and_stays() -> None:
    view = view_of_two()
    assert eligible(view) == {"u0", "u1", "u2"}
    version = view.version
    assert report(view, sample("GPU-1", fault=FAULT))
    assert view.version > version
    assert eligible(view) == {"u0", "u2"}
    assert not report(view, sample("GPU-1"))
    assert eligible(view) == {"u0", "u2"}
    states = {unit.card.unit_id: UnitState(unit.load.state) for unit in view.snapshot(0.0)}
    assert states == {"u0": UnitState.READY, "u1": UnitState.FAILED, "u2": UnitState.READY}
    assert view.gpus.faults() == {"node/GPU-1": FAULT}


def test_a_unit_that_joins_on_a_faulty_gpu_gets_nothing() -> None:
    view = view_of_two()
    report(view, sample("GPU-0", fault=FAULT))
    view.join(make_card("u3", gpu_uuids=("GPU-0",)), 7)
    assert "u3" not in eligible(view)
    assert "u2" in eligible(view)


def test_the_same_gpu_name_on_another_node_is_another_gpu() -> None:
    view = view_of_two()
    view.join(make_card("u0", node_id="elsewhere", gpu_uuids=("GPU-0",)), 1)
    report(view, sample("GPU-0", fault=FAULT))
    row = view.row("u0")
    assert row is not None
    assert view.gpus.fault(view.units[row].card) == ""


def test_a_fault_outlives_the_probes_link_and_ends_with_a_new_driver() -> None:
    view = view_of_two()
    report(view, sample("GPU-0", fault=FAULT))
    view.leave(LINK)
    assert eligible(view) == {"u2"}
    assert view.gpu_snapshot(0.0) == ()
    view.join_node(node(), LINK + 1)
    assert eligible(view) == {"u2"}
    view.join_node(node(incarnation="second"), LINK + 2)
    assert eligible(view) == {"u0", "u1", "u2"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"samples": [sample("GPU-9", fault=FAULT)]}, "foreign_gpu"),
        ({"samples": [sample(fault=FAULT)], "link": 7}, "foreign_node"),
        ({"samples": [sample(fault=FAULT)], "node_id": "stranger"}, "unknown_node"),
        ({"samples": [sample(fault=FAULT)], "incarnation": "old"}, "wrong_incarnation"),
        ({"samples": [sample(memory_used_mb=math.nan)]}, "bad_gpu_sample"),
        ({"samples": [sample(power_w=math.inf)]}, "bad_gpu_sample"),
        ({"samples": [sample(ecc_uncorrected=-7)]}, "bad_gpu_sample"),
        ({"samples": [sample(temperature_c=1e300)]}, "bad_gpu_sample"),
        ({"samples": [sample(compute_utilisation=1.5)]}, "bad_gpu_sample"),
        ({"samples": [sample(fault="x" * 1001)]}, "bad_gpu_sample"),
    ],
)
def test_what_can_not_be_believed_is_counted_and_dropped(message: dict[str, Any], reason: str) -> None:
    view = view_of_two()
    told = {"node_id": "node", "incarnation": "first", "link": LINK, "now_s": 0.0} | message
    assert not view.report_node(**told)
    assert view.gpus.dropped == {reason: 1}
    assert eligible(view) == {"u0", "u1", "u2"}
    assert {gpu.sample_age_ms for gpu in view.gpu_snapshot(0.0)} == {UNKNOWN}


@pytest.mark.parametrize(
    "card",
    [
        node("")._replace(node_id=""),
        node("node", "GPU-0", "GPU-0"),
        node("node", ""),
        node("node", *(f"GPU-{index}" for index in range(65))),
        node()._replace(gpus=(GpuCard("GPU-0", 0, "L4", math.nan),)),
    ],
)
def test_a_node_that_makes_no_sense_is_refused(card: NodeCard) -> None:
    view = make_view()
    with pytest.raises(InvalidRequest):
        view.join_node(card, LINK)
    assert view.gpu_snapshot(0.0) == ()


def test_gateways_see_every_gpu_with_its_units_and_the_age_of_its_sample() -> None:
    view = view_of_two()
    report(view, sample("GPU-0"))
    view.tick(0.1)
    first, second = view.gpu_snapshot(0.1)
    assert (first.node_id, first.card.uuid, first.units) == ("node", "GPU-0", ("u0", "u1"))
    assert (first.sample, first.sample_age_ms) == (sample("GPU-0"), pytest.approx(100.0))
    assert (second.units, second.sample, second.sample_age_ms) == (("u1",), GpuSample("GPU-1"), UNKNOWN)


NUMBERS = [name for name in GpuSample._fields if name not in ("uuid", "fault")]


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            lambda uuid, fault, numbers: GpuSample(uuid, fault=fault)._replace(**numbers),
            st.sampled_from(["GPU-0", "GPU-1", "GPU-7", ""]),
            st.sampled_from(["", FAULT]),
            st.dictionaries(st.sampled_from(NUMBERS), st.floats() | st.integers()),
        ),
        max_size=5,
    ),
    st.sampled_from(["node", "other"]),
    st.sampled_from([LINK, 3]),
)
def test_no_batch_raises_and_only_believed_samples_are_kept(
    batch: list[GpuSample], node_id: str, link: int
) -> None:
    view = view_of_two()
    view.report_node(node_id, "first", batch, link, 0.0)
    for gpu in view.gpu_snapshot(0.0):
        assert gpu.card.uuid == gpu.sample.uuid
        for name in NUMBERS:
            value = getattr(gpu.sample, name)
            assert value == UNKNOWN or 0 <= value < 1e12
    faulty = {uuid.removeprefix("node/") for uuid in view.gpus.faults()}
    assert faulty <= {"GPU-0", "GPU-1"}
    assert ("u0" in eligible(view)) == ("GPU-0" not in faulty)
