"""Ports for what a test starts on loopback."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port on which nothing listened a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
