"""Talks to a Ray cluster for `test_supervisor_cell`, because one process can talk to one cluster only.

Arguments: the cluster's address and the configuration's file. Writes one JSON object: what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util import list_named_actors

from grid.config import Config
from grid.units.ray_unit import NAMESPACE, PLACEMENT, PROBE_PREFIX
from grid.units.supervisor import SupervisorActor
from grid.words import Condemned, Demand, Outlook, UnitState

LIMIT_S = 60.0


def until(what: str, holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_S} s")
        time.sleep(0.05)
    return found


class ToldPlacement:
    """Stands for the placement actor: the supervisor is told what a test wants it to see."""

    def __init__(self) -> None:
        self._outlook = Outlook()

    async def address(self) -> tuple[str, int]:
        raise ValueError("no unit can register here")

    async def outlook(self) -> Outlook:
        return self._outlook

    async def tell(self, outlook: Outlook) -> None:
        self._outlook = outlook


def main() -> None:
    config = Config.model_validate_json(Path(sys.argv[2]).read_text())
    ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    options: dict[str, Any] = {"lifetime": "detached", "num_cpus": 0, "max_concurrency": 100}
    restarts = {"max_restarts": -1, "max_task_retries": 3}
    supervisor = ray.remote(SupervisorActor).options(name="supervisor", **options, **restarts).remote(config)
    seen: dict[str, Any] = {}

    def rows() -> dict[str, Any]:
        status = ray.get(supervisor.status.remote(), timeout=LIMIT_S)
        return {row["model"]: row for row in status["models"]}

    def pids(*others: dict[str, int]) -> dict[str, int] | None:
        """The ready units' processes, once both are ready and at least one is new."""
        units = rows()["sim"]["units"]
        if len(units) < 2:
            return None
        try:
            described = [ray.get(ray.get_actor(unit).describe.remote(), timeout=5) for unit in units]
        except (ray.exceptions.RayError, ValueError):
            return None
        found = {each["card"]["unit_id"]: each["pid"] for each in described}
        return None if found in others else found

    ray.get(supervisor.start.remote(), timeout=LIMIT_S)
    first = seen["first"] = until("two units", pids)
    victim = min(first)
    seen["libraries"] = sorted(
        {
            name
            for pid in first.values()
            for name in ("libtorch", "onnxruntime", "transformers")
            if name in Path(f"/proc/{pid}/maps").read_text()
        }
    )

    os.kill(first[victim], signal.SIGKILL)
    seen["after_kill"] = until("a replacement", lambda: pids(first))
    seen["failures"] = rows()["sim"]["failures"]

    before = ray.get(supervisor.process.remote(), timeout=LIMIT_S)
    ray.kill(supervisor, no_restart=False)
    until("another supervisor", lambda: ray.get(supervisor.process.remote(), timeout=LIMIT_S) != before)
    until("two units adopted", lambda: rows()["sim"]["ready"] == 2)
    seen["after_restart"] = pids()

    def told(unit_id: str) -> dict[str, Any]:
        described: dict[str, Any] = ray.get(ray.get_actor(unit_id).describe.remote(), timeout=LIMIT_S)
        return described

    placement = ray.remote(ToldPlacement).options(name=PLACEMENT, **options).remote()
    incarnation = told(victim)["card"]["incarnation"]
    condemned = Condemned(victim, incarnation, "failed 2 of its newest 20 requests", is_isolated=True)
    ray.get(placement.tell.remote(Outlook((condemned,))), timeout=LIMIT_S)
    seen["after_condemnation"] = until("another unit in its place", lambda: pids(seen["after_restart"]))
    seen["why"] = rows()["sim"]["failures"][-1]

    [spare] = until("a unit on standby", lambda: rows()["spare"]["units"])
    seen["spare"] = [told(spare)["load"]["state"]]
    ray.get(placement.tell.remote(Outlook(demand=(Demand("spare", 1, 0),))), timeout=LIMIT_S)
    until("it serves", lambda: told(spare)["load"]["state"] == UnitState.READY)
    seen["spare"].append(rows()["spare"]["serving"])

    pair = until("a unit on two GPUs", lambda: rows()["pair"]["units"] or rows()["pair"]["failures"])
    described = ray.get(ray.get_actor(pair[0]).describe.remote(), timeout=LIMIT_S)
    seen["gpu_uuids"] = described["card"]["gpu_uuids"]
    [node] = ray.nodes()
    _, samples = ray.get(ray.get_actor(f"{PROBE_PREFIX}{node['NodeID']}").hardware.remote(), timeout=LIMIT_S)
    seen["foreign_mb"] = [sample.memory_foreign_mb for sample in samples]
    seen["parents"] = sorted(
        {psutil.Process(pid).parent().name() for pid in seen["after_condemnation"].values()}
    )

    seen["impossible"] = rows()["impossible"]
    ray.get(supervisor.stop_all.remote(), timeout=LIMIT_S)
    seen["left"] = [name for name in list_named_actors() if name.startswith(("unit-", PROBE_PREFIX))]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
