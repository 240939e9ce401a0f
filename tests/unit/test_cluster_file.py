"""`cluster.yaml` is what Ray's launcher accepts, and fits the cell that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from gateway.ray_head import command, on_loopback
from grid.config import Config, Ray, load
from grid.hardware import catalogue
from grid.units.nodes import Node
from grid.units.planner import Planner
from grid.units.planner_events import NodesSeen, StartUnit

ROOT = Path(__file__).parents[2]
SECRETS = "cloud-secrets"
"""Made by whoever starts the cluster, and never committed."""


@pytest.fixture
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture
def cell() -> Config:
    return load(ROOT / "examples/cells/cloud.yaml")


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    with pytest.raises(jsonschema.ValidationError, match="max_wrkers"):
        validate_config(prepare_config({**cluster, "max_wrkers": 1}))


def test_every_file_that_it_sends_is_there(cluster: dict[str, Any]) -> None:
    sources = set(cluster["file_mounts"].values())
    assert SECRETS in sources
    assert [source for source in sources - {SECRETS} if not (ROOT / source).exists()] == []
    assert f"/{SECRETS}/" in (ROOT / ".gitignore").read_text().splitlines()
    assert SECRETS in cluster["rsync_exclude"]


def test_nodes_find_and_trust_each_other(cluster: dict[str, Any], cell: Config) -> None:
    assert any(f"$RAY_HEAD_IP:{cell.ray.port} " in line for line in cluster["worker_start_ray_commands"])
    assert any("RAY_AUTH_MODE=token" in line for line in cluster["setup_commands"])
    secrets = next(target for target, source in cluster["file_mounts"].items() if source == SECRETS)
    assert secrets.endswith("/.zerogrid/secrets"), "below the state folder's default"
    assert cell.cell.state_dir == Config().cell.state_dir
    assert cluster["provider"]["region"] == cell.cell.region
    assert not on_loopback(cell.ray)


def test_the_cells_units_fit_on_the_least_number_of_nodes(cluster: dict[str, Any], cell: Config) -> None:
    """Nodes as the launcher would label them; their cores and GPUs are those of the instance types."""
    sizes = {"m7i.2xlarge": (8, 0), "g6.2xlarge": (8, 1)}
    nodes = []
    for name, kind in cluster["available_node_types"].items():
        cpus, gpus = sizes[kind["node_config"]["InstanceType"]]
        assert kind["labels"]["region"] == cell.cell.region
        if gpus:
            assert catalogue.find(kind["labels"]["gpu"]).name == kind["labels"]["gpu"]
        least = 1 if name == cluster["head_node_type"] else kind["min_workers"]
        nodes += [Node(f"{name}-{index}", dict(kind["labels"]), cpus, gpus) for index in range(least)]
    effects = Planner(cell).handle(NodesSeen(tuple(nodes)), 0.0)
    started = sorted(
        (effect.node_id, effect.model.precision) for effect in effects if isinstance(effect, StartUnit)
    )
    assert [pair for pair in started if pair[0].startswith("l4")] == [("l4-0", "fp8"), ("l4-1", "fp8")]
    assert len(started) == sum(model.least_units for model in cell.models)


def test_what_must_be_set_is_said(cluster: dict[str, Any]) -> None:
    guide = (ROOT / "docs/cloud.md").read_text(encoding="utf-8")
    for kind in cluster["available_node_types"].values():
        assert kind["node_config"]["ImageId"] == "ami-SET-ME"
    assert "SET-ME" in guide
    assert SECRETS in guide


def test_the_heads_command_line_follows_from_the_configuration(cell: Config) -> None:
    ports = {"port": cell.ray.port}
    shared = command(cell.ray, "10.0.0.7", "us-east-1", Path("/tmp/zg"), ports)
    assert {"--node-ip-address=10.0.0.7", "--port=6379", "--labels=region=us-east-1"} <= set(shared)
    assert any(argument.endswith("/ray_bootstrap_config.yaml") for argument in shared)
    assert "--dashboard-host=127.0.0.1" in shared
    alone = command(Ray(), "127.0.0.1", "local", Path("/tmp/zg"), ports)
    assert not [argument for argument in alone if argument.startswith(("--labels", "--autoscaling"))]
