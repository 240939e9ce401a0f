"""Says to a cell's Ray cluster what has to run on it. Runs as a process of its own, started by `launch`.

The only place where actors and the Serve application are created. Standard output is JSON lines:
`{"progress": …}` any number of times, then one `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve

from gateway.knowledge.sources.embedded import VectorsActor
from gateway.replica import NAMESPACE, ON_HEAD, build_deployment
from gateway.state import open_redis
from gateway.trust.tenants import Tenants
from grid import heap
from grid.config import Config
from grid.errors import GridError, InternalError
from grid.ray_figures import RayFigures
from grid.units.supervisor import SupervisorActor
from placement.actor import PlacementActor

SERVE_APP = "gateway"
UNITS_TIMEOUT_S = 600.0
"""A large model on a cold disk takes minutes to load; after this the start is called failed."""
ACTOR_TIMEOUT_S = 60.0
"""A worker process takes 2 s to start on an idle core."""
CONTROL_RETRIES = 3
"""Of a lifecycle call whose actor restarted meanwhile; each of them can be repeated."""
NO_WAIT = "--no-wait"
"""Argument: don't wait for units, whose nodes may only be starting."""
CONTROL_CONCURRENCY = 1000
"""Calls that one actor takes at a time: lifecycle calls only, so this is never reached."""


PLACEMENT_FIGURES = {
    "zerogrid_placement_units": "Units in the view.",
    "zerogrid_placement_reservations": "Reservations that are held.",
    "zerogrid_placement_waiting": "Requests that wait in placement's queue for a free slot.",
    "zerogrid_placement_isolated": "Units that get no work because they fail.",
    "zerogrid_placement_canaries": "Canaries that were sent to units that failed.",
    "zerogrid_placement_canaries_failed": "Those of them that failed.",
    "zerogrid_placement_decide_us_p50": "Median computing time of the newest decisions, in microseconds.",
    "zerogrid_placement_decide_us_p99": "99th percentile of the same.",
}


class RayPlacement(PlacementActor):
    """The placement actor in a process of its own."""

    async def _start(self) -> tuple[str, int]:
        address = await super()._start()
        self._ray_figures = RayFigures(PLACEMENT_FIGURES, {}, self._read)
        self._ray_figures.start()
        heap.freeze()
        return address

    def _read(self) -> dict[str, float]:
        return {f"zerogrid_placement_{name}": value for name, value in self.figures().items()}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def up(config: Config, address: str, wait: bool) -> dict[str, Any]:
    """Start everything on the cluster; with `wait` return when every pool has its least number of units."""
    _join(address)
    # Other nodes find these here; on loopback the head's address is no other's business.
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    say(progress="starting placement, supervisor and vector store")
    placement = _detached(RayPlacement, "placement", config, host=host)
    addresses = [placement.address.remote()]
    if not config.vectors.qdrant_url:
        addresses.append(_detached(VectorsActor, "vectors", config, host=host).address.remote())
    supervisor = _detached(SupervisorActor, "supervisor", config)
    ray.get(addresses, timeout=ACTOR_TIMEOUT_S)
    ray.get(supervisor.start.remote(), timeout=ACTOR_TIMEOUT_S)

    say(progress="starting the gateway")
    serve.start(http_options={"host": config.gateway.host, "port": config.gateway.port})
    serve.run(build_deployment(config), name=SERVE_APP, route_prefix="/", blocking=False)
    keys = asyncio.run(_first_keys(config))
    return {"units": _await_units(supervisor) if wait else [], **keys}


def _join(address: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)


def _detached(actor: type, name: str, config: Config, **arguments: Any) -> Any:
    """Create an actor on the head that outlives this process and that Ray restarts whenever it dies."""
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": ON_HEAD,
        "max_restarts": -1,
        "max_task_retries": CONTROL_RETRIES,
        "max_concurrency": CONTROL_CONCURRENCY,
    }
    return ray.remote(actor).options(**options).remote(config, **arguments)


async def _first_keys(config: Config) -> dict[str, str]:
    """Create the operator's and the first tenant's key, once in the life of a cell."""
    redis = await open_redis(config)
    try:
        return await Tenants(redis, config).bootstrap()
    finally:
        await redis.aclose()


def _await_units(supervisor: Any) -> list[str]:
    """Wait until every model has its least number of ready units; progress says what is awaited."""
    deadline = time.monotonic() + UNITS_TIMEOUT_S
    said = ""
    while True:
        status = ray.get(supervisor.status.remote(), timeout=30)
        missing = [m for m in status["models"] if m["ready"] < m["wanted"]]
        if not missing:
            return sorted(unit for m in status["models"] for unit in m["units"])
        failures = [f"{_pool(m)}: {m['failures'][-1]}" for m in missing if m["failures"]]
        if any(m["gave_up"] for m in missing) or time.monotonic() > deadline:
            raise InternalError("units did not start: " + ("; ".join(failures) or f"{missing}"))
        line = "loading models: " + ", ".join(f"{_pool(m)} {m['ready']}/{m['wanted']}" for m in missing)
        if line != said:
            say(progress=line)
            said = line
        time.sleep(0.25)


def _pool(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["model"], row["pool"])))


def down(address: str) -> dict[str, Any]:
    _join(address)
    # Serve ends its proxy at once when it shuts down; deleting the application first lets streams finish.
    serve.delete(SERVE_APP)
    serve.shutdown()  # type: ignore[no-untyped-call]
    try:
        ray.get(ray.get_actor("supervisor").stop_all.remote(), timeout=20)
    except (ValueError, ray.exceptions.RayError) as error:
        say(progress=f"the supervisor did not answer ({type(error).__name__}); its units end with Ray")
    return {}


def main() -> int:
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        wait = NO_WAIT not in sys.argv
        result = up(config, sys.argv[3], wait) if sys.argv[2] == "up" else down(sys.argv[3])
    except GridError as error:
        say(error=error.message)
        return 1
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    say(result=result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
