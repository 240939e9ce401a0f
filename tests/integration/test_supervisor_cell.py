"""The supervisor on a real Ray head of its own: units start, are replaced, adopted and stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import launch
from grid.config import Cell, Config, Model, Simulated

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.cell
@pytest.mark.timeout(300)
def test_units_are_started_replaced_adopted_and_stopped(tmp_path: Path) -> None:
    config = Config(
        cell=Cell(state_dir=tmp_path),
        models=(
            Model(
                name="sim",
                engine="simulated",
                precision="fp16",
                min_units=2,
                max_units=2,
                simulated=Simulated(full_speed=True),
            ),
            Model(name="impossible", engine="vllm", source="package:none", gpus=8, cpus=1),
        ),
    )
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    with launch.ray_head(config) as (address, environment):
        driver = subprocess.run(
            [sys.executable, str(SUPPORT / "supervisor_driver.py"), address, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert driver.returncode == 0, driver.stderr
    seen = json.loads(driver.stdout.splitlines()[-1])

    assert sorted(seen["first"]) == ["unit-sim-0", "unit-sim-1"]
    assert seen["libraries"] == [], "a simulated unit loads no model library"
    assert sorted(seen["after_kill"]) == ["unit-sim-0", "unit-sim-1"]
    assert seen["after_kill"]["unit-sim-0"] != seen["first"]["unit-sim-0"]
    assert seen["after_kill"]["unit-sim-1"] == seen["first"]["unit-sim-1"]
    assert seen["failures"][0].startswith("unit-sim-0: ")
    assert seen["after_restart"] == seen["after_kill"], "a new supervisor takes over what runs"
    assert seen["impossible"]["waiting_for"] == ("it needs 1 CPU cores and 8 GPUs; no node has that free")
    assert seen["left"] == []
