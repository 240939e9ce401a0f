"""The embedded Redis as a real process: private, persistent, one a folder; and the schema check on it."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import psutil
import pytest
import redis as plain_redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.state import config_at, running_redis

from gateway.redis_server import EmbeddedRedis, embedded_password, embedded_socket
from gateway.state import SCHEMA_KEY, SCHEMA_VERSION, Lease, open_redis
from grid.errors import InternalError, Rejected


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_what_was_written_survives_a_stop_and_a_kill(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with running_redis(tmp_path) as server:
        client = await open_redis(config)
        await client.set("kept", "by a stop")
        await client.aclose()
        assert server.stop()

        server.start()
        client = await open_redis(config)
        assert await client.get("kept") == b"by a stop"
        await client.set("kept", "by a kill")
        await client.aclose()
        pid = server.pid
        assert pid is not None
        process = psutil.Process(pid)
        process.kill()
        process.wait(10)

        server.start()
        client = await open_redis(config)
        assert await client.get("kept") == b"by a kill"
        await client.aclose()


def test_nobody_else_gets_in(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        pid = server.pid
        assert pid is not None
        process = psutil.Process(pid)
        assert process.net_connections(kind="inet") == []
        assert mode(server.socket) & 0o077 == 0
        assert mode(server.socket.parent) == 0o700
        assert mode(tmp_path / "redis" / "redis.conf") == 0o600
        password = embedded_password(tmp_path)
        assert password not in " ".join(process.cmdline())
        stranger = plain_redis.Redis(unix_socket_path=str(server.socket), retry=Retry(NoBackoff(), 0))
        with pytest.raises(plain_redis.AuthenticationError):
            stranger.get("anything")
        stranger.close()


def test_a_second_start_finds_the_first_and_a_stop_works_from_anywhere(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        assert EmbeddedRedis(tmp_path).start() == server.pid
        assert EmbeddedRedis(tmp_path).stop()
        assert server.pid is None
        assert not EmbeddedRedis(tmp_path).stop()


def test_a_reused_pid_is_not_taken_for_the_server(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        server.stop()
        stranger = subprocess.Popen(["sleep", "60"])
        try:
            (tmp_path / "redis" / "redis.pid").write_text(str(stranger.pid))
            assert server.pid is None
            assert not server.stop()
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


def test_a_deep_state_folder_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    path = embedded_socket(deep)
    assert len(os.fsencode(path)) <= 107  # what a Unix socket's address holds
    assert path == embedded_socket(deep)
    assert path != embedded_socket(tmp_path / ("e" * 100))
    with running_redis(deep) as server:
        assert server.socket == path
        assert mode(path.parent) == 0o700


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "redis" / "appendonly.aof"
    broken.parent.mkdir()
    broken.write_bytes(b"not an append-only file\r\n")
    with pytest.raises(InternalError, match="ended with code 1"), running_redis(tmp_path):
        pass
    embedded_socket(tmp_path).parent.rmdir()


async def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with running_redis(tmp_path):
        client = await open_redis(config)
        assert int(await client.get(SCHEMA_KEY)) == SCHEMA_VERSION
        await client.set(SCHEMA_KEY, SCHEMA_VERSION + 1)
        await client.aclose()
        with pytest.raises(InternalError, match="newer release"):
            await open_redis(config)


async def test_a_redis_that_is_away_is_a_call_to_repeat(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with running_redis(tmp_path):
        pass
    with pytest.raises(Rejected, match="does not answer") as refused:
        await open_redis(config)
    assert refused.value.retryable


async def test_a_url_takes_its_password_from_the_secrets_folder(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        url = f"unix://{server.socket}"
        config = config_at(tmp_path, redis={"url": url})
        with pytest.raises(Rejected):
            await open_redis(config)
        (tmp_path / "secrets" / "redis.password").write_text(embedded_password(tmp_path) + "\n")
        client = await open_redis(config)
        assert await client.ping()
        await client.aclose()


async def test_a_lease_has_one_holder_until_it_lets_go(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with running_redis(tmp_path):
        client = await open_redis(config)
        first, second = Lease(client, "work", 30.0), Lease(client, "work", 30.0)
        assert await first.hold()
        assert not await second.hold()
        assert await first.hold()
        await second.release()
        assert not await second.hold()
        await first.release()
        assert await second.hold()
        await client.delete("zg:lease:work")  # as if its time had run out
        assert await first.hold()
        assert not await second.hold()
        await client.aclose()
