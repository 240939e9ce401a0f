"""One unit without Ray: the real link, the simulated engine, and a placement server that listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grid.config import Cell, Config, Model, Simulated
from grid.engines import simulated_text
from grid.engines.base import EngineFacts, EngineLoad
from grid.engines.simulated import SimulatedEngine
from grid.errors import ContextOverflow, InternalError, InvalidRequest, Overloaded, UnitLost
from grid.hardware import catalogue
from grid.units.actor import Site, UnitActor
from grid.wire.link import Link, LinkServer, Peer, dial
from grid.wire.messages import (
    Accepted,
    Announce,
    Cancel,
    Done,
    Embed,
    Failed,
    Progress,
    Refused,
    Report,
    Submit,
    Tokens,
    Vectors,
    WireMessage,
)
from grid.words import Message, Precision, Sampling, UnitLoad, UnitState

SECRET = b"s" * 32
SLOW = Simulated(speed=0.1)
"""A tenth of a second a token: an answer that is still running whenever a test looks."""
FAST = Simulated(full_speed=True)


class Placement:
    """Keeps what units tell it, and lets a test wait for something in it."""

    def __init__(self) -> None:
        self.server = LinkServer(role="placement", peer_id="placement", secret=SECRET, handler=self)
        self.address = ("", 0)
        self.announced: list[Announce] = []
        self.load: UnitLoad | None = None
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def resolve(self) -> tuple[str, int]:
        return self.address

    def connected(self, peer: Peer) -> None: ...

    def disconnected(self, peer: Peer, reason: str) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Announce):
            self.announced.append(message)
        elif isinstance(message, Report):
            [self.load] = message.loads
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, holds: Callable[[UnitLoad], bool]) -> UnitLoad:
        """Wait for a report that `holds` and return it. Fails after ten seconds."""
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(lambda: self.load is not None and holds(self.load))
        assert self.load is not None
        return self.load


class UnitCell:
    """A unit, its placement server, and a gateway's link to it."""

    def __init__(self, folder: Path) -> None:
        (folder / "secrets").mkdir()
        (folder / "secrets" / "link.key").write_bytes(SECRET)
        self.config = Config(cell=Cell(state_dir=folder))
        self.placement = Placement()
        self.exits: list[int] = []
        self.exited = asyncio.Event()
        self._close: list[Callable[[], Awaitable[Any]]] = []

    async def unit(self, model: Model, engine: Any = None) -> UnitActor:
        self.placement.address = await self.placement.server.start("127.0.0.1")
        self._close.append(self.placement.server.close)
        actor = UnitActor(
            self.config,
            model,
            "unit-m-0",
            Site("node-1", "127.0.0.1", "local"),
            resolve_placement=self.placement.resolve,
            end_process=self._exit,
            engine=engine,
        )
        self._close.append(actor.stop)
        await actor.start()
        return actor

    async def link(self, actor: UnitActor) -> Link:
        link = await dial(*await actor.address(), role="gateway", peer_id="gw", secret=SECRET)

        async def close() -> None:
            link.close()
            await link.closed

        self._close.append(close)
        return link

    def _exit(self, status: int) -> None:
        self.exits.append(status)
        self.exited.set()

    async def close(self) -> None:
        for close in reversed(self._close):
            await close()


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[UnitCell]:
    cell = UnitCell(tmp_path)
    yield cell
    await cell.close()


def model(simulated: Simulated, **changes: Any) -> Model:
    return Model(
        **{
            "name": "m",
            "engine": "simulated",
            "precision": "fp16",
            "max_running": 2,
            "max_waiting": 1,
            "simulated": simulated,
            **changes,
        }
    )


class Stream:
    """One submitted generation."""

    numbers = 0

    def __init__(self, link: Link, tokens: int, text: str = "hello", **changes: Any) -> None:
        Stream.numbers += 1
        self.stream = link.open()
        request = f"req_{Stream.numbers}"
        submit = Submit(
            stream=self.stream.id,
            request_id=request,
            attempt=0,
            reservation_id=f"{request}/gen/0",
            model="m",
            messages=(Message("user", text),),
            documents=(),
            sampling=Sampling(tokens),
            tenant_salt="salt",
            deadline_ms=0.0,
        )
        self.submit = submit._replace(**changes)
        self.stream.send(self.submit)
        self.frames: list[WireMessage] = []

    async def until(self, *kinds: type) -> Any:
        """Return the first frame of one of these kinds."""
        async with asyncio.timeout(10):
            while True:
                for frame in self.frames:
                    if isinstance(frame, kinds):
                        return frame
                self.frames += await self.stream.receive()

    def cancel(self) -> None:
        self.stream.send(Cancel(self.stream.id))


async def test_card_and_reports(cell: UnitCell) -> None:
    actor = await cell.unit(model(FAST))
    load = await cell.placement.until(lambda load: load.state == UnitState.READY)
    [announce] = cell.placement.announced
    card = announce.card
    assert (card.unit_id, card.node_id, card.region, card.model) == ("unit-m-0", "node-1", "local", "m")
    assert (card.host, card.port) == await actor.address()
    assert (card.gpu_type, card.gpus, card.simulated) == ("H100", 1.0, True)
    assert card.memory_grant_mb == catalogue.GPUS["H100"].memory_mb
    assert card.cu_factor > 1.0
    assert card.decode_ms_per_token > 0
    assert load.incarnation == card.incarnation
    described = await actor.describe()
    assert described["card"]["unit_id"] == "unit-m-0"
    assert described["counters"]["accepted"] == 0, "the canary is no stream"


async def test_a_stream_from_submit_to_done(cell: UnitCell) -> None:
    link = await cell.link(await cell.unit(model(FAST)))
    stream = Stream(link, 40)
    done = await stream.until(Done, Failed, Refused)
    assert isinstance(done, Done)
    assert isinstance(stream.frames[0], Accepted)
    tokens = [frame for frame in stream.frames if isinstance(frame, Tokens)]
    ids = [each for frame in tokens for each in frame.ids]
    assert done.output_tokens == len(ids) == 40
    assert [frame.first_index for frame in tokens] == list(range(0, 40, len(tokens[0].ids)))
    assert done.cu_seconds > 0
    assert done.input_tokens == stream.frames[0].prompt_tokens > 0
    await cell.placement.until(lambda load: load.running == 0 and not load.reservations)


async def test_a_continuation_goes_on_where_the_first_attempt_stood(cell: UnitCell) -> None:
    link = await cell.link(await cell.unit(model(FAST)))
    first = Stream(link, 12)
    await first.until(Done)
    ids = [each for frame in first.frames if isinstance(frame, Tokens) for each in frame.ids]
    accepted = await first.until(Accepted)
    again = Stream(
        link,
        7,
        request_id=first.submit.request_id,
        attempt=1,
        emitted_ids=tuple(ids[:5]),
        emitted_code_points=len(simulated_text.decode(ids[:5])),
        prompt_hash=accepted.prompt_hash,
    )
    assert (await again.until(Accepted)).prompt_hash == accepted.prompt_hash
    assert (await again.until(Done)).output_tokens == 7
    frames = [frame for frame in again.frames if isinstance(frame, Tokens)]
    assert frames[0].first_index == 5
    assert [each for frame in frames for each in frame.ids] == ids[5:]


async def test_saturation_queue_and_cancel(cell: UnitCell) -> None:
    actor = await cell.unit(model(SLOW))
    link = await cell.link(actor)
    running = [Stream(link, 1000), Stream(link, 1000)]
    for stream in running:
        await stream.until(Tokens)
    waiting = Stream(link, 1000)
    assert (await waiting.until(Progress)).state == "waiting"
    load = await cell.placement.until(lambda load: load.waiting == 1)
    assert load.running == 2
    assert set(load.reservations) == {each.submit.reservation_id for each in [*running, waiting]}
    refused = await Stream(link, 1000).until(Refused)
    assert refused.code == Overloaded.code
    assert refused.retry_after_s > 1.0, "a tenth of a second a token, a thousand to go"

    running[0].cancel()
    failed = await running[0].until(Failed)
    assert failed.code == "cancelled"
    assert failed.output_tokens >= 1
    await waiting.until(Tokens)
    counters = (await actor.describe())["counters"]
    assert counters["cancelled"] == 1
    assert 0 < counters["cancel_to_free_ms"] < 5000
    assert actor._engine.load().running <= 2


async def test_a_client_that_leaves_frees_its_slots(cell: UnitCell) -> None:
    actor = await cell.unit(model(SLOW))
    leaver, stayer = await cell.link(actor), await cell.link(actor)
    await Stream(leaver, 1000).until(Tokens)
    stays = Stream(stayer, 1000)
    await stays.until(Tokens)
    leaver.close()
    load = await cell.placement.until(lambda load: load.running == 1)
    assert load.reservations == (stays.submit.reservation_id,)
    assert (await actor.describe())["counters"]["cancelled"] == 1


async def test_deadline_ends_a_running_stream(cell: UnitCell) -> None:
    link = await cell.link(await cell.unit(model(SLOW)))
    failed = await Stream(link, 1000, deadline_ms=200.0).until(Failed, Done)
    assert failed.code == "deadline_exceeded"
    await cell.placement.until(lambda load: load.running == 0)


async def test_refusals(cell: UnitCell) -> None:
    link = await cell.link(await cell.unit(model(FAST, context_tokens=128)))
    too_long = await Stream(link, 100, text="word " * 200).until(Refused)
    assert too_long.code == ContextOverflow.code
    assert too_long.details["context_tokens"] == 128
    assert too_long.details["max_output_tokens"] == 100
    assert too_long.details["prompt_tokens"] + 100 > 128
    first = Stream(link, 3)
    await first.until(Done)
    assert (
        await Stream(
            link, 3, request_id=first.submit.request_id, reservation_id=first.submit.reservation_id
        ).until(Refused)
    ).code == "conflict"
    assert (await Stream(link, 3, model="other").until(Refused)).param == "model"
    with pytest.raises(InvalidRequest, match="runs m"):
        await link.call(lambda stream: Embed(stream, "req_e", "", "m", ("x",), 0.0), 5.0)


async def test_drain_lets_running_streams_finish(cell: UnitCell) -> None:
    actor = await cell.unit(model(Simulated(speed=2.0)))
    link = await cell.link(actor)
    stream = Stream(link, 20)
    await stream.until(Tokens)
    await actor.drain()
    await cell.placement.until(lambda load: load.state == UnitState.DRAINING)
    assert (await Stream(link, 3).until(Refused)).code == "rejected"
    assert (await stream.until(Done)).output_tokens == 20
    await actor.drain(False)
    await Stream(link, 3).until(Done)


async def test_engine_death_fails_streams_and_ends_the_process(cell: UnitCell) -> None:
    engine = SimulatedEngine(model(SLOW))
    actor = await cell.unit(model(SLOW), engine)
    link = await cell.link(actor)
    stream = Stream(link, 1000)
    await stream.until(Tokens)
    engine.crash("killed by the test")
    failed = await stream.until(Failed)
    assert failed.code == "unit_lost"
    await cell.placement.until(lambda load: load.state == UnitState.FAILED)
    assert "killed by the test" in await actor.ended()
    async with asyncio.timeout(10):
        await cell.exited.wait()
    assert cell.exits == [1]


async def test_an_idle_engine_that_dies_is_noticed(cell: UnitCell) -> None:
    engine = SimulatedEngine(model(FAST))
    await cell.unit(model(FAST), engine)
    engine.crash("killed by the test")
    await cell.placement.until(lambda load: load.state == UnitState.FAILED)


async def test_registers_again_when_placement_comes_back(cell: UnitCell) -> None:
    await cell.unit(model(FAST))
    await cell.placement.until(lambda load: True)
    await cell.placement.server.close()
    cell.placement.load = None
    cell.placement.server = LinkServer(
        role="placement", peer_id="placement", secret=SECRET, handler=cell.placement
    )
    cell.placement.address = await cell.placement.server.start("127.0.0.1")
    cell._close.append(cell.placement.server.close)
    await cell.placement.until(lambda load: True)
    first, second = cell.placement.announced
    assert first == second


class Vectoriser:
    """An embedding engine with vectors of a given length, which can be held up."""

    def __init__(self, length: float = 1.0) -> None:
        self.length = length
        self.go = asyncio.Event()
        self.go.set()

    async def start(self) -> EngineFacts:
        return EngineFacts("m", Precision.INT8, "f", 256, dimension=4)

    async def embed(self, texts: Any) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        await self.go.wait()
        rows = np.zeros((len(texts), 4), np.float32)
        rows[:, 0] = self.length
        return rows, 3 * len(texts)

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 0, 0)

    async def close(self) -> None: ...


EMBEDDING = Model(
    name="m", engine="embedding", source="package:x", precision="int8", max_running=1, max_waiting=1
)


def embed(stream: int) -> Embed:
    return Embed(stream, "req_e", "req_e/emb/0", "m", ("a", "b"), 0.0)


async def test_embedding_with_bounded_admission(cell: UnitCell) -> None:
    engine = Vectoriser()
    actor = await cell.unit(EMBEDDING, engine)
    await cell.placement.until(lambda load: True)
    assert cell.placement.announced[0].card.dimension == 4
    link = await cell.link(actor)
    engine.go.clear()
    calls = [asyncio.create_task(link.call(embed, 10.0)) for _ in range(2)]
    await cell.placement.until(lambda load: (load.running, load.waiting) == (1, 1))
    with pytest.raises(Overloaded):
        await link.call(embed, 10.0)
    engine.go.set()
    for vectors in await asyncio.gather(*calls):
        assert isinstance(vectors, Vectors)
        rows = np.frombuffer(vectors.data, "<f4").reshape(-1, vectors.dimension)
        assert rows.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2
        assert vectors.input_tokens == 6
        assert vectors.cu_seconds > 0


async def test_the_canary_refuses_vectors_that_are_not_of_unit_length(cell: UnitCell) -> None:
    with pytest.raises(InternalError, match="length 2"):
        await cell.unit(EMBEDDING, Vectoriser(length=2.0))


async def test_nothing_answers_before_start(cell: UnitCell) -> None:
    actor = UnitActor(
        cell.config,
        model(FAST),
        "unit-m-0",
        Site("n", "127.0.0.1", "local"),
        resolve_placement=cell.placement.resolve,
        end_process=cell._exit,
    )
    with pytest.raises(UnitLost, match="not started"):
        await actor.address()
