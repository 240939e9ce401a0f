"""Which units start and stop where, event by event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grid.config import Cell, Config, Model, load
from grid.errors import InvalidRequest
from grid.units import planner_events as events
from grid.units.gpu_room import Gpu
from grid.units.nodes import GPU_LABEL, RAY_GPU_LABEL, Node, gpus_fit
from grid.units.planner import PLACE_LIMIT_S, REPLACE_GRACE_S, START_LIMIT_S, Planner
from grid.units.planner_events import SetRole, StartUnit, StopUnit
from grid.units.pools import (
    FAILURES_KEPT,
    FIRST_BACKOFF_S,
    GAVE_UP_AFTER,
    LAST_BACKOFF_S,
    STABLE_S,
    UNSATISFIED_AFTER_S,
    start_kind,
    unit_prefix,
)
from grid.units.scaling import SHRINK_AFTER_S, Role
from grid.words import Condemned, Demand, GpuCard, GpuSample, Outlook, UnitState

CELLS = Path(__file__).parents[2] / "examples/cells"
NODE = Node("n1", {}, cpus=4.0, gpus=0.0)


def model(name: str = "sim", engine: str = "simulated", **changes: Any) -> Model:
    fields: dict[str, Any] = {"name": name, "engine": engine, "precision": "fp16", **changes}
    if changes.get("precision") is ...:
        del fields["precision"]
    if engine != "simulated":
        fields.setdefault("source", "package:x")
    return Model.model_validate(fields)


def planner(*models: Model, nodes: tuple[Node, ...] = (NODE,)) -> tuple[Planner, list[events.Effect]]:
    made = Planner(Config(cell=Cell(region="eu"), models=models))
    return made, made.handle(events.NodesSeen(nodes), 0.0)


def starts(effects: list[events.Effect]) -> list[str]:
    return [effect.unit_id for effect in effects if isinstance(effect, StartUnit)]


def stops(effects: list[events.Effect]) -> list[str]:
    return [effect.unit_id for effect in effects if isinstance(effect, StopUnit)]


def row(made: Planner, now_s: float = 0.0) -> dict[str, Any]:
    return made.status(now_s)[0]


def test_starts_what_is_wanted_and_says_so() -> None:
    made, effects = planner(model(min_units=2, max_units=3))
    assert starts(effects) == ["unit-sim-0", "unit-sim-1"]
    [first, _] = effects
    assert isinstance(first, StartUnit)
    assert (first.node_id, first.region, first.region_label) == ("n1", "eu", "")
    assert (row(made)["wanted"], row(made)["ready"], row(made)["starting"]) == (2, 0, 2)
    made.handle(events.Placed("unit-sim-0"), 1.0)
    assert made.handle(events.Ready("unit-sim-0"), 2.0) == []
    assert (row(made)["units"], row(made)["starting"]) == (["unit-sim-0"], 1)


def condemned(unit_id: str, incarnation: str = "first", isolated: bool = True) -> events.Seen:
    return events.Seen(Outlook((Condemned(unit_id, incarnation, "failed 2 of 20 requests", isolated),)))


def two_ready() -> Planner:
    made, _ = planner(model(min_units=2, max_units=2))
    for unit_id in ("unit-sim-0", "unit-sim-1"):
        made.handle(events.Placed(unit_id), 1.0)
        made.handle(events.Ready(unit_id, (), "first"), 2.0)
    return made


def test_a_condemned_unit_is_replaced_and_what_runs_on_it_gets_time() -> None:
    made = two_ready()
    effects = made.handle(condemned("unit-sim-0"), 60.0)
    assert [e for e in effects if isinstance(e, StopUnit)] == [
        StopUnit("unit-sim-0", "failed 2 of 20 requests", REPLACE_GRACE_S)
    ]
    assert starts(effects) == ["unit-sim-2"]
    assert row(made, 60.0)["failures"] == ["unit-sim-0: failed 2 of 20 requests"]
    assert made.handle(condemned("unit-sim-0"), 61.0) == [], "it is being replaced already"
    assert made.handle(events.Ended("unit-sim-0", "stopped"), 62.0) == []


def test_the_process_that_took_a_condemned_units_place_is_left_alone() -> None:
    made = two_ready()
    assert made.handle(condemned("unit-sim-0", "an earlier one"), 60.0) == []
    assert made.handle(condemned("unit-other-0"), 60.0) == []


def test_units_that_fail_as_soon_as_they_start_are_replaced_ever_later() -> None:
    made = two_ready()
    effects = made.handle(condemned("unit-sim-0"), 3.0)
    assert (stops(effects), starts(effects)) == (["unit-sim-0"], [])
    assert starts(made.handle(events.Tick(), 3.0 + FIRST_BACKOFF_S)) == ["unit-sim-2"]


def test_condemned_units_that_still_serve_are_replaced_one_after_another() -> None:
    made = two_ready()
    assert stops(made.handle(condemned("unit-sim-0", isolated=False), 60.0)) == ["unit-sim-0"]
    assert made.handle(condemned("unit-sim-1", isolated=False), 61.0) == []
    made.handle(events.Ended("unit-sim-0", "stopped"), 62.0)
    made.handle(events.Placed("unit-sim-2"), 63.0)
    made.handle(events.Ready("unit-sim-2", (), "second"), 64.0)
    assert stops(made.handle(condemned("unit-sim-1", isolated=False), 65.0)) == ["unit-sim-1"]


def test_a_restart_that_was_asked_for_is_no_failure() -> None:
    made, _ = planner(model())
    made.handle(events.Ready("unit-sim-0"), 0.0)
    assert starts(made.handle(events.Ended("unit-sim-0", events.RESTART_REASON), 1.0)) == ["unit-sim-0"]
    assert row(made)["failures"] == []


def test_a_unit_that_served_is_replaced_at_once_under_its_name() -> None:
    made, _ = planner(model())
    made.handle(events.Ready("unit-sim-0"), 0.0)
    assert starts(made.handle(events.Ended("unit-sim-0", "killed"), STABLE_S)) == ["unit-sim-0"]
    assert row(made)["failures"] == ["unit-sim-0: killed"]


def test_failing_starts_are_tried_again_ever_later_up_to_a_bound() -> None:
    made, _ = planner(model())
    now_s, waits = 0.0, []
    for _ in range(10):
        assert made.handle(events.Ended("unit-sim-0", "broken"), now_s) == []
        waits.append(row(made, now_s)["retry_in_s"])
        assert starts(made.handle(events.Tick(), now_s + waits[-1] - 0.01)) == []
        now_s += waits[-1]
        assert starts(made.handle(events.Tick(), now_s)) == ["unit-sim-0"]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == LAST_BACKOFF_S
    assert len(row(made)["failures"]) == FAILURES_KEPT


def test_gave_up_after_failures_in_a_row_and_takes_it_back() -> None:
    made, _ = planner(model())
    now_s = 0.0
    for count in range(1, GAVE_UP_AFTER + 1):
        made.handle(events.Ended("unit-sim-0", "broken"), now_s)
        assert row(made, now_s)["gave_up"] is (count == GAVE_UP_AFTER)
        now_s += LAST_BACKOFF_S
        made.handle(events.Tick(), now_s)
    made.handle(events.Ready("unit-sim-0"), now_s)
    assert row(made, now_s)["gave_up"] is False


def test_an_engine_on_cpu_cores_starts_alone_and_light_ones_beside_it() -> None:
    made, effects = planner(
        model("big", "vllm", precision="fp32", cpus=1, min_units=2, max_units=2),
        model("words", "embedding"),
        model("sim", min_units=6, max_units=6),
    )
    assert starts(effects) == ["unit-big-0", "unit-words-0", "unit-sim-0", "unit-sim-1", "unit-sim-2"]
    made.handle(events.Placed("unit-big-0"), 1.0)
    assert starts(made.handle(events.Ready("unit-big-0"), 2.0)) == ["unit-big-1"]
    assert starts(made.handle(events.Ready("unit-words-0"), 2.0)) == ["unit-sim-3"]


def test_shares_of_gpus_start_one_at_a_time_on_a_node() -> None:
    node = Node("g", {}, cpus=8, gpus=2)
    made, effects = planner(model("m", "vllm", gpus=0.5, min_units=4, max_units=4), nodes=(node,))
    assert starts(effects) == ["unit-m-0"]
    assert starts(made.handle(events.Ready("unit-m-0"), 1.0)) == ["unit-m-1"]
    whole, effects = planner(model("m", "vllm", gpus=1, min_units=2, max_units=2), nodes=(node,))
    assert starts(effects) == ["unit-m-0", "unit-m-1"]
    assert row(whole)["starting"] == 2


def test_units_spread_over_nodes() -> None:
    nodes = (Node("a", {}, 4, 0), Node("b", {}, 4, 0))
    _, effects = planner(model(min_units=4, max_units=4), nodes=nodes)
    assert [e.node_id for e in effects if isinstance(e, StartUnit)] == ["a", "b", "a", "b"]


def test_a_region_is_a_label_where_nodes_carry_labels() -> None:
    nodes = (Node("a", {"region": "us"}, 4, 0), Node("b", {"region": "eu"}, 4, 0), Node("c", {}, 4, 0))
    _, effects = planner(model(), nodes=nodes)
    [start] = effects
    assert isinstance(start, StartUnit)
    assert (start.node_id, start.region, start.region_label) == ("b", "eu", "eu")


def test_a_region_without_a_node_is_said_at_once_and_fails_after_a_while() -> None:
    made, effects = planner(model(region="asia"), nodes=(Node("a", {"region": "us"}, 4, 0),))
    assert effects == []
    assert row(made)["waiting_for"] == "none carries region=asia (there are: us)"
    assert row(made)["gave_up"] is False
    made.handle(events.Tick(), UNSATISFIED_AFTER_S)
    made.handle(events.Tick(), UNSATISFIED_AFTER_S + 1)
    assert row(made, UNSATISFIED_AFTER_S)["gave_up"] is True
    assert row(made)["failures"] == ["no node for it: none carries region=asia (there are: us)"]
    joined = (Node("a", {"region": "us"}, 4, 0), Node("b", {"region": "asia"}, 4, 0))
    assert starts(made.handle(events.NodesSeen(joined), 40.0)) == ["unit-sim-0"]
    assert row(made, 40.0)["waiting_for"] == ""


def test_too_few_gpus_are_named() -> None:
    made, effects = planner(
        model("m", "vllm", gpus=1, min_units=3, max_units=3), nodes=(Node("g", {}, 8, 2),)
    )
    assert starts(effects) == ["unit-m-0", "unit-m-1"]
    assert row(made)["waiting_for"] == "it needs 0 CPU cores and 1 GPUs; no node has that free"


def test_what_ray_can_not_place_is_stopped_and_counted() -> None:
    made, _ = planner(model())
    assert stops(made.handle(events.Tick(), PLACE_LIMIT_S)) == []
    assert stops(made.handle(events.Tick(), PLACE_LIMIT_S + 1)) == ["unit-sim-0"]
    [failure] = row(made)["failures"]
    assert "no room" in failure
    # Its name is taken until it is gone; the next one has another.
    assert starts(made.handle(events.Tick(), PLACE_LIMIT_S + 2)) == ["unit-sim-1"]
    assert made.handle(events.Ended("unit-sim-0", "stopped"), PLACE_LIMIT_S + 3) == []
    assert len(row(made)["failures"]) == 1


def test_a_load_that_never_ends_is_stopped() -> None:
    made, _ = planner(model())
    made.handle(events.Placed("unit-sim-0"), 10.0)
    assert stops(made.handle(events.Tick(), 10.0 + START_LIMIT_S)) == []
    assert stops(made.handle(events.Tick(), 11.0 + START_LIMIT_S)) == ["unit-sim-0"]


def test_scaling_within_bounds_stops_the_newest() -> None:
    made, _ = planner(model(min_units=1, max_units=3))
    made.handle(events.Ready("unit-sim-0"), 1.0)
    assert starts(made.handle(events.Scale("sim", 9), 2.0)) == ["unit-sim-1", "unit-sim-2"]
    made.handle(events.Ready("unit-sim-1"), 3.0)
    assert stops(made.handle(events.Scale("sim", 2), 4.0)) == ["unit-sim-2"]
    assert stops(made.handle(events.Scale("sim", 0), 5.0)) == ["unit-sim-1"]
    assert row(made)["wanted"] == 1
    assert made.handle(events.Ended("unit-sim-1", "stopped"), 6.0) == []


def test_adopted_units_count_and_unknown_ones_stop() -> None:
    made = Planner(Config(models=(model(min_units=2, max_units=2),)))
    made.handle(events.Adopted("unit-sim-1", "sim", "n1"), 0.0)
    assert stops(made.handle(events.Adopted("unit-old-0", "old", "n1"), 0.0)) == ["unit-old-0"]
    assert starts(made.handle(events.NodesSeen((NODE,)), 0.0)) == ["unit-sim-0"]
    assert made.handle(events.Ended("unit-old-0", "stopped"), 1.0) == []


def test_stop_all_stops_everything_and_starts_nothing_again() -> None:
    made, _ = planner(model(min_units=2, max_units=2))
    made.handle(events.Ready("unit-sim-0"), 1.0)
    assert sorted(stops(made.handle(events.StopAll(), 2.0))) == ["unit-sim-0", "unit-sim-1"]
    for unit in ("unit-sim-0", "unit-sim-1"):
        assert made.handle(events.Ended(unit, "stopped"), 3.0) == []
    assert made.handle(events.Tick(), 100.0) == []
    assert (row(made)["wanted"], row(made)["ready"], row(made)["failures"]) == (0, 0, [])


def test_names_that_collide_get_ids_of_their_own() -> None:
    _, effects = planner(model("org/m"), model("org m"))
    first, second = starts(effects)
    assert first == "unit-org-m-0"
    assert second.startswith("unit-org-m-")
    assert first != second


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("smollm2-135m-instruct", "unit-smollm2-135m-instruct-"), ("Org/Model_1.5", "unit-org-model-1.5-")],
)
def test_unit_prefix(name: str, prefix: str) -> None:
    assert unit_prefix(name) == prefix


@pytest.mark.parametrize(
    ("total", "used", "wanted", "fits"),
    [
        (0, [], 0.0, True),
        (0, [], 0.5, False),
        (1, [0.5], 0.5, True),
        (1, [0.5], 1.0, False),
        (2, [0.6, 0.6], 0.6, False),
        (2, [0.6, 0.4], 1.0, True),
        (2, [0.3, 0.3, 0.3], 1.0, True),
        (4, [2.0, 1.0], 1.0, True),
        (4, [2.0, 1.0], 2.0, False),
        (1, [0.1] * 9, 0.1, True),
    ],
)
def test_gpus_fit(total: float, used: list[float], wanted: float, fits: bool) -> None:
    assert gpus_fit(total, used, wanted) is fits


def test_start_kinds() -> None:
    assert start_kind(model(gpus=1.0)) == "light", "a simulated GPU is no GPU"
    assert start_kind(model("e", "embedding")) == "light"
    assert start_kind(model("v", "vllm")) == "cpu"
    assert start_kind(model("v", "vllm", gpus=0.25)) == "gpu share"
    assert start_kind(model("v", "vllm", gpus=2)) == "gpu"


VARIANTS = [{"precision": name, "source": f"/m-{name}"} for name in ("bf16", "fp8", "int8")]


def on(gpu: str, node_id: str = "g", label: str = "") -> Node:
    return Node(node_id, {RAY_GPU_LABEL: gpu, GPU_LABEL: label}, cpus=8, gpus=1)


def test_each_gpu_gets_the_best_of_the_models_variants() -> None:
    nodes = (on("H100", "a"), on("A100", "b"), on("T4", "c"))
    made, effects = planner(
        model("m", "vllm", precision=..., variants=VARIANTS, gpus=1, min_units=3, max_units=3), nodes=nodes
    )
    found = {e.node_id: (e.model.precision, e.model.source) for e in effects if isinstance(e, StartUnit)}
    assert found == {"a": ("fp8", "/m-fp8"), "b": ("int8", "/m-int8"), "c": ("int8", "/m-int8")}
    assert row(made)["waiting_for"] == ""


def test_a_gpu_that_runs_no_variant_is_named_with_the_reason() -> None:
    int8_only = model("m", "vllm", precision="int8", gpus=1)
    made, effects = planner(int8_only, nodes=(on("B200"), NODE))
    assert effects == []
    assert row(made)["waiting_for"].startswith("no variant runs on B200: int8: W8A8 is broken")
    assert starts(made.handle(events.NodesSeen((on("B200"), on("L4", "h"))), 1.0)) == ["unit-m-0"]


def test_a_pool_waits_for_its_gpu_and_an_operators_label_counts_for_more() -> None:
    large = model("m", "vllm", gpus=1, gpu="A100-80")
    made, effects = planner(large, nodes=(on("A100"),))
    assert effects == []
    assert row(made)["waiting_for"] == "it needs A100-80; nodes have A100-40"
    assert starts(made.handle(events.NodesSeen((on("A100", label="A100-80"),)), 1.0)) == ["unit-m-0"]
    unsaid, effects = planner(large, nodes=(Node("g", {}, 8, 1),))
    assert effects == []
    assert row(unsaid)["waiting_for"].endswith("start Ray there with --labels=gpu=NAME")


def test_pools_of_one_model_are_kept_apart() -> None:
    pools = [
        {"gpu": "H100", "region": "us-east-1", "min_units": 2},
        {"gpu": "L4", "region": "eu-central-1", "precision": "int8"},
    ]
    made, effects = planner(model(precision=..., variants=VARIANTS, pools=pools))
    found = {e.unit_id: (e.region, e.model.gpu, e.model.precision) for e in effects}
    assert found == {
        "unit-sim-h100-us-east-1-0": ("us-east-1", "H100", "fp8"),
        "unit-sim-h100-us-east-1-1": ("us-east-1", "H100", "fp8"),
        "unit-sim-l4-eu-central-1-int8-0": ("eu-central-1", "L4", "int8"),
    }
    assert [(r["pool"], r["wanted"]) for r in made.status(0.0)] == [
        ("h100-us-east-1", 2),
        ("l4-eu-central-1-int8", 1),
    ]
    made.handle(events.Ready("unit-sim-h100-us-east-1-0"), 1.0)
    assert starts(made.handle(events.Ended("unit-sim-l4-eu-central-1-int8-0", "killed"), 1.0)) == []
    assert starts(made.handle(events.Tick(), 2.0)) == ["unit-sim-l4-eu-central-1-int8-0"]


def test_an_adopted_unit_is_its_pools_own() -> None:
    pools = [{"name": "a", "min_units": 1, "max_units": 2}, {"name": "a-1", "min_units": 1}]
    made = Planner(Config(models=(model(pools=pools),)))
    assert made.handle(events.Adopted("unit-sim-a-1-0", "sim", "n1"), 0.0) == []
    assert starts(made.handle(events.NodesSeen((NODE,)), 0.0)) == ["unit-sim-a-0"]
    assert starts(made.handle(events.Scale("sim", 2, "a"), 1.0)) == ["unit-sim-a-1"]
    with pytest.raises(InvalidRequest, match="there is no pool 'sim'; there are sim a, sim a-1"):
        made.handle(events.Scale("sim", 2), 1.0)
    assert stops(made.handle(events.Adopted("unit-sim-b-0", "sim", "n1"), 1.0)) == ["unit-sim-b-0"]


@pytest.mark.parametrize("example", ["simulated", "three-regions"])
def test_an_example_cell_starts_on_a_small_machine(example: str) -> None:
    config = load(CELLS / f"{example}.yaml")
    made = Planner(config)
    effects = made.handle(events.NodesSeen((Node("n1", {}, cpus=2.0, gpus=0.0),)), 0.0)
    while started := starts(effects):
        effects = [effect for unit_id in started for effect in made.handle(events.Ready(unit_id), 1.0)]
    assert [(r["ready"], r["waiting_for"]) for r in made.status(1.0)] == [
        (pool.min_units, "") for model in config.models for _, pool in model.split()
    ]
    names = {model.name for model in config.models}
    assert {alias.model for alias in config.aliases.values()} <= names


# --- GPUs that a probe tells of ---------------------------------------------------------------


def gpu(place: int, product: str = "NVIDIA L40S", free_mb: float = 45_000.0, **changes: Any) -> Gpu:
    uuid = f"GPU-{place}"
    card = GpuCard(uuid, place, product, 46_000.0)
    return Gpu(place, card, GpuSample(uuid, memory_free_mb=free_mb, **changes))


def probed(*gpus: Gpu, node_id: str = "g", **labels: str) -> Node:
    return Node(node_id, labels, cpus=64, gpus=len(gpus), hardware=gpus)


def started(effects: list[events.Effect]) -> list[tuple[str, tuple[int, ...]]]:
    return [(effect.unit_id, effect.gpus) for effect in effects if isinstance(effect, StartUnit)]


def test_units_get_gpus_of_their_own() -> None:
    node = probed(gpu(0), gpu(1), gpu(2, free_mb=1000.0, memory_foreign_mb=44_000.0))
    made, effects = planner(model("m", "vllm", gpus=1, min_units=3, max_units=3), nodes=(node,))
    assert started(effects) == [("unit-m-0", (0,)), ("unit-m-1", (1,))]
    assert (
        "GPU 2 has 1000 MB free of the 41400 MB it needs, and others use 44000 MB" in row(made)["waiting_for"]
    )
    free_again = probed(gpu(0, free_mb=500.0), gpu(1, free_mb=500.0), gpu(2))
    assert started(made.handle(events.NodesSeen((free_again,)), 1.0)) == [("unit-m-2", (2,))]


def test_a_grant_needs_no_more_than_itself() -> None:
    node = probed(gpu(0, free_mb=9000.0))
    granted = model("m", "vllm", gpus=0.25, memory_grant_mb=8000)
    assert started(planner(granted, nodes=(node,))[1]) == [("unit-m-0", (0,))]
    assert started(planner(model("m", "vllm", gpus=0.5), nodes=(node,))[1]) == []


def test_a_start_waits_until_the_probe_has_told() -> None:
    silent = Node("g", {}, cpus=8, gpus=1, hardware=None)
    made, effects = planner(model("m", "vllm", gpus=1), model("s"), nodes=(silent,))
    assert starts(effects) == ["unit-s-0"]
    assert "its probe has not told of the GPUs yet" in row(made)["waiting_for"]
    assert started(made.handle(events.NodesSeen((probed(gpu(0)),)), 1.0)) == [("unit-m-0", (0,))]


def test_a_gpu_that_the_catalogue_does_not_hold_runs_what_its_capability_serves() -> None:
    untold = gpu(0, "NVIDIA RTX 6000 Ada Generation")
    wanted = model("m", "vllm", precision=..., variants=VARIANTS, gpus=1)
    for capability, precision in (((8, 9), "fp8"), ((8, 6), "int8")):
        found = untold._replace(card=untold.card._replace(compute_capability=capability))
        _, effects = planner(wanted, nodes=(probed(found),))
        assert [e.model.precision for e in effects if isinstance(e, StartUnit)] == [precision]
    made, _ = planner(wanted, nodes=(probed(untold),))
    assert "its compute capability is unknown" in row(made)["waiting_for"]
    made, _ = planner(wanted, nodes=(probed(found, gpu="RTX6000"),))
    assert "unknown GPU model 'RTX6000'" in row(made)["waiting_for"]


def test_the_driver_names_each_gpu_of_a_mixed_node() -> None:
    node = probed(gpu(0, "NVIDIA H100 80GB HBM3", 80_000.0), gpu(1, "Tesla T4", 80_000.0))
    two = model("m", "vllm", precision=..., variants=VARIANTS, gpus=1, min_units=2, max_units=2)
    _, effects = planner(two, nodes=(node,))
    found = {e.gpus: e.model.precision for e in effects if isinstance(e, StartUnit)}
    assert found == {(0,): "fp8", (1,): "int8"}


def test_an_adopted_unit_keeps_its_gpus() -> None:
    made = Planner(
        Config(cell=Cell(region="eu"), models=(model("m", "vllm", gpus=1, min_units=2, max_units=2),))
    )
    made.handle(events.Adopted("unit-m-0", "m", "g", ("GPU-0",)), 0.0)
    effects = made.handle(events.NodesSeen((probed(gpu(0), gpu(1)),)), 0.0)
    assert started(effects) == [("unit-m-1", (1,))]


def test_a_unit_that_has_not_told_its_gpus_is_waited_for() -> None:
    by_ray = Node("g", {}, cpus=8, gpus=2)
    made, effects = planner(model("m", "vllm", gpus=1, min_units=1, max_units=2), nodes=(by_ray,))
    assert started(effects) == [("unit-m-0", ())]
    seen = events.NodesSeen((probed(gpu(0), gpu(1)),))
    made.handle(events.Scale("m", 2), 1.0)
    made.handle(events.Ended("unit-m-1", "killed"), 1.0)
    assert started(made.handle(seen, 2.0)) == []
    assert started(made.handle(events.Ready("unit-m-0", ("GPU-1",)), 10.0)) == [("unit-m-1", (0,))]


def test_units_of_a_faulty_gpu_are_ended_and_start_elsewhere() -> None:
    made, effects = planner(model("m", "vllm", gpus=1), nodes=(probed(gpu(0), gpu(1)),))
    assert started(effects) == [("unit-m-0", (0,))]
    made.handle(events.Ready("unit-m-0"), 1.0)
    broken = events.NodesSeen((probed(gpu(0, fault="Xid 79: it fell off the bus"), gpu(1)),))
    effects = made.handle(broken, 2.0)
    assert stops(effects) == ["unit-m-0"]
    assert started(effects) == [("unit-m-1", (1,))]
    assert row(made)["failures"] == ["unit-m-0: its GPU GPU-0 is faulty: Xid 79: it fell off the bus"]
    assert stops(made.handle(broken, 3.0)) == []


def test_a_lack_whose_figures_change_is_one_failure() -> None:
    made, _ = planner(model("m", "vllm", gpus=1), nodes=(probed(gpu(0, free_mb=1000.0)),))
    for second in range(100):
        made.handle(events.NodesSeen((probed(gpu(0, free_mb=1000.0 + second)),)), float(second))
    [failure] = row(made)["failures"]
    assert "has 1099 MB free" in failure


# --- demand and standby ----------------------------------------------------------------------


def seen(requests: int = 0, refused: int = 0, **states: UnitState) -> events.Seen:
    named = tuple((f"unit-sim-{name[1:]}", int(state)) for name, state in states.items())
    return events.Seen(Outlook((), (Demand("sim", requests, refused),), named))


def become_ready(made: Planner, *numbers: int, now_s: float = 1.0) -> list[events.Effect]:
    effects = []
    for number in numbers:
        made.handle(events.Placed(f"unit-sim-{number}"), now_s)
        effects += made.handle(events.Ready(f"unit-sim-{number}", (), "first"), now_s)
    return effects


def roles(effects: list[events.Effect]) -> list[tuple[str, Role]]:
    return [(effect.unit_id, effect.role) for effect in effects if isinstance(effect, SetRole)]


def test_units_on_standby_start_as_such_beside_those_that_serve() -> None:
    _, effects = planner(model(min_units=1, max_units=4, standby={"warm": 2}))
    assert [(effect.unit_id, effect.role) for effect in effects if isinstance(effect, StartUnit)] == [
        ("unit-sim-0", Role.SERVING),
        ("unit-sim-1", Role.WARM),
        ("unit-sim-2", Role.WARM),
    ]


def test_all_standby_comes_within_max_units() -> None:
    made, effects = planner(model(min_units=0, max_units=1, standby={"warm": 1}))
    assert starts(effects) == ["unit-sim-0"]
    become_ready(made, 0)
    effects = made.handle(seen(1, s0=UnitState.READY), 10.0)
    assert (starts(effects), roles(effects)) == ([], []), "it was taken in, and there is room for no other"
    assert row(made)["serving"] == 1


def test_who_is_ready_and_not_needed_falls_asleep() -> None:
    made, _ = planner(model(min_units=0, max_units=2, standby={"warm": 1, "asleep": 1}))
    assert roles(become_ready(made, 0, 1)) == [("unit-sim-1", Role.ASLEEP)]
    assert roles(made.handle(seen(s0=UnitState.STANDBY, s1=UnitState.STANDBY), 10.0)) == [
        ("unit-sim-1", Role.ASLEEP)
    ], "it did not fall asleep, so it is told again"


def test_a_unit_that_was_taken_in_serves_until_nobody_needs_it_for_long() -> None:
    made, _ = planner(model(min_units=1, max_units=3, standby={"warm": 1}))
    become_ready(made, 0, 1)
    effects = made.handle(seen(20, s0=UnitState.READY, s1=UnitState.READY), 10.0)
    assert (starts(effects), roles(effects)) == (["unit-sim-2"], []), "another one is put on standby"
    become_ready(made, 2, now_s=11.0)
    states = {"s0": UnitState.READY, "s1": UnitState.READY, "s2": UnitState.STANDBY}
    assert made.handle(seen(0, **states), 20.0) == []
    assert made.handle(seen(0, **states), 19.9 + SHRINK_AFTER_S) == []
    effects = made.handle(seen(0, **states), 20.0 + SHRINK_AFTER_S)
    assert stops(effects) == ["unit-sim-2"], "one on standby is enough"
    assert roles(effects) == [("unit-sim-1", Role.WARM)]


def test_demand_takes_in_who_is_warm_and_starts_another() -> None:
    made, _ = planner(model(min_units=1, max_units=4, standby={"warm": 1}, max_running=10))
    become_ready(made, 0, 1)
    effects = made.handle(seen(9, s0=UnitState.READY, s1=UnitState.STANDBY), 10.0)
    assert roles(effects) == [("unit-sim-1", Role.SERVING)]
    assert starts(effects) == ["unit-sim-2"]


def test_a_pool_without_standby_grows_and_shrinks_too() -> None:
    made, _ = planner(model(min_units=1, max_units=3, max_running=10))
    become_ready(made, 0)
    assert starts(made.handle(seen(17), 10.0)) == ["unit-sim-1", "unit-sim-2"]
    become_ready(made, 1, now_s=11.0)
    become_ready(made, 2, now_s=12.0)
    assert made.handle(seen(9), 13.0) == []
    assert made.handle(seen(3), 100.0) == []
    effects = made.handle(seen(3), 13.0 + SHRINK_AFTER_S)
    assert [effect for effect in effects if isinstance(effect, StopUnit)] == [
        StopUnit("unit-sim-2", "not wanted any more", REPLACE_GRACE_S)
    ], "two were needed at the beginning of that time"


def test_a_model_without_units_gets_one_when_a_request_was_refused() -> None:
    made, effects = planner(model(min_units=0, max_units=1))
    assert effects == []
    assert made.handle(seen(0, refused=0), 1.0) == []
    assert starts(made.handle(seen(0, refused=1), 2.0)) == ["unit-sim-0"]


def test_a_second_pool_takes_what_the_first_one_cannot() -> None:
    pools = [{"name": "a", "max_units": 2}, {"name": "b", "min_units": 0, "max_units": 2}]
    made, _ = planner(model(pools=pools, max_running=10))
    made.handle(events.Placed("unit-sim-a-0"), 1.0)
    made.handle(events.Ready("unit-sim-a-0"), 1.0)
    effects = made.handle(events.Seen(Outlook((), (Demand("sim", 20, 0),))), 2.0)
    assert starts(effects) == ["unit-sim-a-1", "unit-sim-b-0"]


def test_a_view_that_lacks_units_says_nothing_of_their_roles() -> None:
    made, _ = planner(model(min_units=0, max_units=1, standby={"warm": 1}))
    become_ready(made, 0)
    made.handle(seen(0), 10.0)
    assert row(made)["serving"] == 0, "a new placement actor has not heard of it yet"


def test_an_adopted_unit_keeps_its_role() -> None:
    made = Planner(Config(models=(model(min_units=0, max_units=1, standby={"warm": 1}),)))
    made.handle(events.Adopted("unit-sim-0", "sim", "n1", role=Role.WARM), 0.0)
    assert made.handle(events.NodesSeen((NODE,)), 0.0) == []
    assert row(made)["serving"] == 0
