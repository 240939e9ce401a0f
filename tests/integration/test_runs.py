"""Runs over real links: placement actor, simulated units and the runner in one loop, nothing mocked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.state import config_at

from gateway.knowledge.retrieval import RetrievalRequest, RetrievalResult
from gateway.pipeline import session
from gateway.pipeline.contract import GenerationStep, StreamControl
from gateway.pipeline.events import Chunk, Finished, RunEvent, RunFailed, Started
from gateway.pipeline.invocation import ChatMessage
from gateway.pipeline.plan import Plan, plan_chat
from gateway.pipeline.runner import Runner
from gateway.records import Tenant
from gateway.trust.keyfiles import read_secret, secret_path
from grid.config import Config
from grid.engines.base import Generation, steps_of
from grid.engines.simulated import SimulatedEngine
from grid.errors import ContextOverflow, DeadlineExceeded, InvalidRequest, Overloaded, UnitLost
from grid.units.actor import Site, UnitActor
from grid.wire.link import Link, LinkPool
from grid.words import Message, Sampling
from placement.actor import PlacementActor
from placement.client import PlacementClient

MODEL = "sim-8b"
TENANT = Tenant("acme", "key-1", False, "salt-of-acme")


class NoSearch:
    async def search(self, request: RetrievalRequest) -> RetrievalResult:
        raise AssertionError("these plans retrieve nothing")


@dataclass(slots=True)
class Cell:
    config: Config
    placement: PlacementActor
    units: list[UnitActor]
    client: PlacementClient
    links: LinkPool

    @property
    def runner(self) -> Runner:
        return Runner(placement=self.client, links=self.links, retrieval=NoSearch())

    async def held(self) -> int:
        """Return how much is running, waiting or reserved anywhere."""
        loads = [(await unit.describe())["load"] for unit in self.units]
        return (
            sum(load["running"] + load["waiting"] for load in loads)
            + (await self.placement.stats())["reservations"]
        )

    async def until_idle(self) -> None:
        async with asyncio.timeout(5):
            while await self.held():  # noqa: ASYNC110  units and placement tell nobody when they fall idle
                await asyncio.sleep(0.005)


@asynccontextmanager
async def cell(
    tmp_path: Path, *, units: int = 2, queue_wait_ms: float = 60_000, **model: Any
) -> AsyncIterator[Cell]:
    config = config_at(
        tmp_path,
        models=[{"name": MODEL, "engine": "simulated", "precision": "bf16", "context_tokens": 4096, **model}],
        aliases={"gpt-4o-mini": MODEL},
        placement={"queue_wait_ms": queue_wait_ms},
    )
    secret = read_secret(secret_path(tmp_path, "link.key"))
    placement = PlacementActor(config)
    client = PlacementClient(placement.address, peer_id="gateway-1", secret=secret)
    complete = asyncio.Event()
    client.on_fleet(lambda fleet: complete.set() if len(fleet.units) == units else None)
    links = LinkPool(role="gateway", peer_id="gateway-1", secret=secret)
    actors = [
        UnitActor(
            config,
            config.models[0],
            f"unit-{number}",
            Site("node-1", "127.0.0.1", "local"),
            resolve_placement=placement.address,
            end_process=lambda _status: None,
        )
        for number in range(units)
    ]
    try:
        await placement.start()
        await client.start()
        for actor in actors:
            await actor.start()
        async with asyncio.timeout(5):
            await complete.wait()
        yield Cell(config, placement, actors, client, links)
    finally:
        await links.close()
        await client.close()
        for actor in actors:
            await actor.stop()
        await placement.close()


def plan(config: Config, request_id: str, text: str = "Hello", **step: Any) -> Plan:
    fields = {"model": MODEL, "max_output_tokens": 16, "temperature": 0.0, **step}
    return plan_chat(
        GenerationStep(**fields),
        [ChatMessage(role="user", content=text)],
        request_id=request_id,
        tenant=TENANT,
        config=config,
    )


async def collect(runner: Runner, planned: Plan) -> list[RunEvent]:
    return [event async for events in runner.run(planned) for event in events]


def answer(events: list[RunEvent]) -> str:
    """Check the order of one run's events and return its text."""
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished), events[-1]
    index = 0
    for event in events[1:-1]:
        assert isinstance(event, Chunk)
        assert event.index == index
        index += event.tokens
    assert index == events[-1].usage.output_tokens
    return "".join(event.text for event in events[1:-1] if isinstance(event, Chunk))


async def undisturbed(config: Config, text: str, tokens: int) -> str:
    """Return what the engine itself answers."""
    engine = SimulatedEngine(config.models[0])
    await engine.start()
    prompt = await engine.prepare([Message("user", text)], [], tokens)
    generation = Generation("oracle", prompt, Sampling(tokens, temperature=0.0), "salt")
    parts = [step.text async for step in steps_of(engine, generation)]
    await engine.close()
    return "".join(parts)


async def test_two_hundred_runs_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    async with cell(tmp_path, max_running=64, max_waiting=128, simulated={"full_speed": True}) as c:
        texts = [f"question number {number}" for number in range(200)]
        runs = await asyncio.gather(
            *(collect(c.runner, plan(c.config, f"req_{text}", text, model="gpt-4o-mini")) for text in texts)
        )
        for text, events in zip(texts, runs, strict=True):
            started = events[0]
            assert isinstance(started, Started)
            assert started.request_id == f"req_{text}"
            assert started.model == MODEL
            assert answer(events) == await undisturbed(c.config, text, 16)
        await c.until_idle()


async def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with cell(tmp_path, max_running=8, max_waiting=200, gpu="H100") as c:

        async def leave_by_closing(number: int, after: int) -> None:
            run = c.runner.run(plan(c.config, f"req_close_{number}", max_output_tokens=500))
            async for _ in run:
                after -= 1
                if after < 0:
                    break
            await run.aclose()

        async def leave_by_cancelling(number: int, after_turns: int) -> None:
            task = asyncio.create_task(
                collect(c.runner, plan(c.config, f"req_cancel_{number}", max_output_tokens=500))
            )
            for _ in range(after_turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        await asyncio.gather(
            *(leave_by_closing(number, rng.randrange(6)) for number in range(30)),
            *(leave_by_cancelling(number, rng.randrange(60)) for number in range(60)),
        )
        await c.until_idle()
        assert answer(await collect(c.runner, plan(c.config, "req_after")))
        await c.until_idle()


async def test_a_client_that_leaves_mid_stream_frees_the_slot_at_once(tmp_path: Path) -> None:
    async with cell(tmp_path, units=1, queue_wait_ms=0, max_running=1) as c:
        run = c.runner.run(plan(c.config, "req_1", max_output_tokens=2000))
        got = await anext(run)
        assert isinstance(got[0], Started)
        while not isinstance(got[-1], Chunk):
            got = await anext(run)
        with pytest.raises(Overloaded):
            await collect(c.runner, plan(c.config, "req_2"))
        await run.aclose()
        await c.until_idle()
        counters = (await c.units[0].describe())["counters"]
        assert counters["cancelled"] == 1
        assert answer(await collect(c.runner, plan(c.config, "req_3")))


async def test_refusals_are_raised_before_anything_starts(tmp_path: Path) -> None:
    async with cell(tmp_path, simulated={"full_speed": True}) as c:
        with pytest.raises(ContextOverflow) as overflow:
            await collect(c.runner, plan(c.config, "req_1", "word " * 5000))
        assert overflow.value.details["context_tokens"] == 4096
        with pytest.raises(InvalidRequest) as too_long:
            await collect(c.runner, plan(c.config, "req_2", max_output_tokens=5000))
        assert too_long.value.param == "max_output_tokens"
        await c.until_idle()


async def test_stop_strings_end_the_answer_and_the_unit_s_work(tmp_path: Path) -> None:
    async with cell(tmp_path, units=1) as c:
        whole = await undisturbed(c.config, "Hello", 16)
        word = whole.split()[5]
        events = await collect(c.runner, plan(c.config, "req_1", max_output_tokens=2000, stop=(word,)))
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.finish_reason == "stop"
        assert finished.usage.cu_seconds > 0
        text = "".join(event.text for event in events if isinstance(event, Chunk))
        assert text == whole[: whole.index(word)]
        await c.until_idle()


async def test_the_deadline_ends_a_run_with_what_there_is(tmp_path: Path) -> None:
    async with cell(tmp_path, units=1, simulated={"speed": 0.2}) as c:
        config = c.config.model_copy(
            update={"gateway": c.config.gateway.model_copy(update={"default_deadline_s": 0.5})}
        )
        events = await collect(c.runner, plan(config, "req_1", max_output_tokens=3000))
        failed = events[-1]
        assert isinstance(failed, RunFailed)
        assert isinstance(failed.error, DeadlineExceeded)
        assert failed.output_so_far == "".join(event.text for event in events if isinstance(event, Chunk))
        assert failed.usage.output_tokens > 0
        await c.until_idle()


async def test_a_lost_unit_ends_its_streams_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CONTINUE_WITHIN_S", 0.3)  # nobody comes to go on with it
    async with cell(tmp_path) as c:
        run = c.runner.run(plan(c.config, "req_1", max_output_tokens=3000))
        assert isinstance((await anext(run))[0], Started)
        for unit in c.units:
            await unit.stop()
        events = [event async for events in run for event in events]
        failed = events[-1]
        assert isinstance(failed, RunFailed)
        assert failed.error.code == "unit_lost"
        assert failed.output_so_far == "".join(event.text for event in events if isinstance(event, Chunk))


async def test_a_unit_that_cannot_be_reached_is_passed_over(tmp_path: Path) -> None:
    class HalfBroken:
        """Reaches every unit but the one that is asked for first."""

        broken: tuple[str, int] | None = None

        async def get(self, host: str, port: int) -> Link:
            self.broken = self.broken or (host, port)
            if (host, port) == self.broken:
                raise UnitLost("connection refused")
            return await c.links.get(host, port)

    async with cell(tmp_path, simulated={"full_speed": True}) as c:
        runner = Runner(placement=c.client, links=HalfBroken(), retrieval=NoSearch())
        assert answer(await collect(runner, plan(c.config, "req_1")))
        await c.until_idle()


@pytest.mark.slow
async def test_stream_control_holds_on_the_way(tmp_path: Path) -> None:
    async with cell(tmp_path, units=1) as c:
        planned = plan(c.config, "req_1", max_output_tokens=100)
        assert planned.generation is not None
        control = StreamControl(min_tokens_per_chunk=16, max_latency_ms=60_000, flush_on_eos=True)
        planned = replace(planned, steps=(replace(planned.generation, stream_control=control),))
        events = await collect(c.runner, planned)
        sizes = [event.tokens for event in events if isinstance(event, Chunk)]
        assert all(size >= 16 for size in sizes[:-1])
        assert answer(events) == await undisturbed(c.config, "Hello", 100)

        planned = plan(c.config, "req_2", max_output_tokens=100)
        assert planned.generation is not None
        control = StreamControl(min_tokens_per_chunk=4_096, max_latency_ms=20, flush_on_eos=False)
        planned = replace(planned, steps=(replace(planned.generation, stream_control=control),))
        events = await collect(c.runner, planned)
        assert len([event for event in events if isinstance(event, Chunk)]) > 1
        assert answer(events) == await undisturbed(c.config, "Hello", 100)
