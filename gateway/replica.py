"""The Serve application of a cell's gateway, and what Serve has no setting for in its replicas' processes.

A replica's inter-deployment gRPC port, which nothing of ours uses, is bound to loopback. HAProxy, which
stands in front of the replicas, is set up in `proxy.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.proxy import DEREGISTER_S
from grid import heap
from grid.config import Config

if TYPE_CHECKING:
    from ray.serve import Application

    from gateway.services import Services

NAMESPACE = "zerogrid"
DEPLOYMENT = "gateway"
DRAIN_MARGIN_S = 5.0
"""Between the end of the drain and Serve's kill."""
DECIDED_ALONE = "zerogrid_gateway_decided_alone"
SPARE_REQUESTS = 256
"""Above the cap of streams: cold routes, and refusals that must be ours and not Serve's queue."""
ON_HEAD = {"node:__internal_head__": 0.001}
"""Where Redis' private socket, HAProxy and the state folder are: what needs them runs there, too."""


def build_deployment(config: Config) -> Application:
    """Return the Serve application: `config.gateway.replicas` replicas of one raw ASGI callable."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from gateway.http.app import GatewayApp

    gateway = config.gateway
    app = GatewayApp(config, partial(build_replica_services, config))
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=gateway.replicas,
        max_ongoing_requests=gateway.max_streams_per_replica + SPARE_REQUESTS,
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
        graceful_shutdown_timeout_s=DEREGISTER_S + gateway.drain_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )(serve.ingress(app)())
    application: Application = deployment.bind()
    return application


async def build_replica_services(config: Config) -> Services:
    """Build the services of a replica, which finds its peers through Ray. Runs in the serving loop."""
    from gateway.observe.recorder import REPLICA_FIGURES
    from gateway.services import build_services
    from grid.ray_figures import RayFigures

    require_uvloop()
    services = await build_services(
        config,
        resolve_placement=partial(address_of, "placement"),
        resolve_vectors=partial(address_of, "vectors"),
    )
    texts = REPLICA_FIGURES | {DECIDED_ALONE: "Steps that this replica placed while placement was away."}
    figures = RayFigures(
        texts, {}, lambda: services.recorder.figures() | {DECIDED_ALONE: services.placement.decided_alone}
    )
    figures.start()
    heap.freeze()
    return replace(services, ray_figures=figures)


async def address_of(actor: str) -> tuple[str, int]:
    """Return where an actor of the cell listens for links."""
    import asyncio

    import ray

    handle = await asyncio.to_thread(ray.get_actor, actor, NAMESPACE)
    host, port = await handle.address.remote()
    return host, port


def require_uvloop() -> None:
    """Raise RuntimeError outside uvloop: on asyncio's own loop Serve's listener lacks TCP_NODELAY, and
    every answer waits 40 ms for an acknowledgement."""
    import asyncio

    loop = asyncio.get_running_loop()
    if "uvloop" not in type(loop).__module__:
        raise RuntimeError("the gateway needs uvloop; install the package `uvloop` in the cell's environment")


def middlewares() -> list[Any]:
    """Called by Serve in every process that listens for HTTP, before a replica opens its gRPC port."""
    from starlette.middleware import Middleware

    from gateway.http.front import FrontDoor

    close_grpc_port()
    return [Middleware(FrontDoor)]


def close_grpc_port() -> None:
    """Make a replica bind its inter-deployment gRPC port to loopback; Serve binds `[::]` and has no setting.

    Raises RuntimeError when this Ray does it differently, rather than leave a port open.
    """
    from ray.serve._private import replica

    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        raise RuntimeError("this Ray opens a replica's gRPC port in another way; the gateway knows Ray 2.60")
    if isinstance(bind, partial):
        return
    replica.add_port_to_grpc_server = partial(_on_loopback, bind)  # type: ignore[attr-defined]


def _on_loopback(bind: Any, server: Any, address: str) -> Any:
    return bind(server, address.replace("[::]", "127.0.0.1"))
