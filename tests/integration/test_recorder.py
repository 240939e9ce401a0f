"""Figures in a real Redis: written once whatever happens on the way, kept while it is away, found again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError
from support.state import running_redis
from support.stories import story

from gateway.observe import recorder as recorder_module
from gateway.observe.figures import Figures
from gateway.observe.recorder import Recorder
from gateway.state import open_redis
from grid.config import Config
from grid.errors import NotFound, Rejected

NOW = 1_800_000_000.0


class ForgetfulLine:
    """A client whose answers get lost: each script is carried out, and its caller hears of nothing."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self.lose = 0
        self.scripts = 0

    def register_script(self, text: str) -> Any:
        script = self._client.register_script(text)

        async def run(keys: list[str], args: list[Any]) -> Any:
            self.scripts += 1
            answer = await script(keys=keys, args=args)
            if self.lose:
                self.lose -= 1
                raise ConnectionError("the answer is lost")
            return answer

        return run


async def calls_of(redis: Redis, pipeline_id: str = "pl-1") -> int:
    return (await Figures(redis, clock=lambda: NOW).window("acme", pipeline_id)).calls


async def test_a_batch_whose_answer_is_lost_is_not_added_twice(redis: Redis, config: Config) -> None:
    line = ForgetfulLine(redis)
    recorder = Recorder(line, config)  # type: ignore[arg-type]
    recorder.take(story(ended_at=NOW))
    line.lose = 2
    for _ in range(2):
        with pytest.raises(Rejected):
            await recorder.flush()
    recorder.take(story(ended_at=NOW))
    await recorder.flush()
    assert await calls_of(redis) == 2
    assert line.scripts == 4, "the lost one three times, then the next"
    await recorder.flush()
    assert line.scripts == 4, "nothing waits, nothing is written"


async def test_calls_are_counted_while_redis_is_away_and_after_it_restarts(config: Config) -> None:
    with running_redis(config.cell.state_dir):
        client = await open_redis(config)
        recorder = Recorder(client, config)
        recorder.take(story(ended_at=NOW))
        await recorder.flush()
    recorder.take(story(ended_at=NOW))
    with pytest.raises(Rejected):
        await recorder.flush()
    recorder.take(story(pipeline_id="", ended_at=NOW))
    with running_redis(config.cell.state_dir):
        await recorder.flush()
        assert await calls_of(client) == 2
        assert await calls_of(client, "") == 3
        hour = datetime.fromtimestamp(NOW, UTC).replace(minute=0, second=0)
        rows = await Figures(client).usage("acme", hour, hour + timedelta(hours=1))
        assert [(row.pipeline_id, row.used.calls, row.used.cu_micro) for row in rows] == [
            ("", 1, 250_000),
            ("pl-1", 2, 500_000),
        ]
        await client.aclose()


async def test_replicas_add_up_and_tenants_do_not_see_each_other(redis: Redis, config: Config) -> None:
    one, two = Recorder(redis, config), Recorder(redis, config)
    for recorder in (one, two):
        recorder.take(story(ended_at=NOW))
        recorder.take(story(tenant_id="other", ended_at=NOW))
        await recorder.flush()
    assert await calls_of(redis) == 2
    figures = Figures(redis, clock=lambda: NOW)
    assert (await figures.window("nobody")).calls == 0
    steps = await figures.steps("acme", "pl-1", 1)
    assert (steps["generation-1"].calls, steps["generation-1"].tokens) == (2, 32)
    assert await figures.steps("acme", "pl-1", 2) == {}


async def test_explanations_are_bounded_for_a_tenant_and_the_cell(
    redis: Redis, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_EXPLAINED_OF_TENANT", 3)
    monkeypatch.setattr(recorder_module, "MAX_EXPLAINED", 5)
    recorder = Recorder(redis, config)
    for number in range(6):
        recorder.take(replace(story(ended_at=NOW), request_id=f"req_{number}"))
    await recorder.flush()
    for number in range(3):
        recorder.take(replace(story(tenant_id="other", ended_at=NOW), request_id=f"req_{number}"))
    await recorder.flush()
    kept = sorted(key.decode() for key in await redis.keys("zg:*:request:*"))
    assert kept == [
        *(f"zg:{{acme}}:request:req_{number}" for number in (4, 5)),
        *(f"zg:{{other}}:request:req_{number}" for number in (0, 1, 2)),
    ]
    assert (await Figures(redis).explained("acme", "req_5"))["request_id"] == "req_5"
    with pytest.raises(NotFound):
        await Figures(redis).explained("acme", "req_0")


async def test_what_is_written_does_not_stay_for_ever(redis: Redis, config: Config) -> None:
    recorder = Recorder(redis, config)
    recorder.take(story(ended_at=NOW))
    await recorder.flush()
    lasting = [key for key in await redis.keys("zg:*") if await redis.ttl(key) < 0]
    assert sorted(lasting) == [b"zg:requests", b"zg:schema", b"zg:totals"]


async def test_what_waits_is_written_when_a_replica_stops(redis: Redis, config: Config) -> None:
    recorder = Recorder(redis, config)
    recorder.start()
    recorder.take(story(ended_at=NOW))
    await recorder.close()
    assert await calls_of(redis) == 1
