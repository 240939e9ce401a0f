"""Placement, links and retrieval that play a script, and plans for them: a runner without a cell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from gateway.knowledge.retrieval import RetrievalRequest, RetrievalResult
from gateway.pipeline.contract import Contract, parse
from gateway.pipeline.events import RunEvent, StepPlacement, StepTiming
from gateway.pipeline.invocation import Invocation
from gateway.pipeline.plan import Plan, plan_invocation
from gateway.pipeline.runner import Runner
from gateway.records import DataSourceRecord, RetrievedDocument, Tenant
from grid.config import Config
from grid.errors import GridError
from grid.wire.messages import Accepted, Done, Tokens, WireMessage
from grid.words import Candidate, Decision, PlacementRequest, Usage

CONFIG = Config.model_validate(
    {
        "models": [
            {"name": "m", "engine": "simulated"},
            {"name": "e", "engine": "embedding", "source": "package:p"},
        ]
    }
)
SOURCE = DataSourceRecord("ds-1", "acme", "kb", "qdrant", {}, "local", "e", 3, 0, "", "")
DOCUMENTS = tuple(RetrievedDocument(f"d{n}", f"text {n}", 1.0 - n / 10) for n in range(3))
ANSWER: list[WireMessage] = [
    Accepted(1, 1, 7, 0, b"", "f", 2),
    Tokens(1, 1, 0, (1, 2), "Hello"),
    Done(1, 1, "length", 7, 0, 2, 0.5),
]


def candidate(unit_id: str) -> Candidate:
    return Candidate(unit_id, "i", "host", 1, "local", "m", 32, "CPU", True, 0, 0, 1, 1, 0)


class Placing:
    """Answers each request with what `answers` holds, then with units."""

    def __init__(self, *answers: GridError) -> None:
        self.answers = list(answers)
        self.asked: list[PlacementRequest] = []
        self.settled: list[tuple[str, str, int]] = []
        self.hold: asyncio.Event | None = None

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision:
        self.asked.append(request)
        if self.hold is not None:
            await self.hold.wait()
        if self.answers:
            raise self.answers.pop(0)
        chosen = candidate(f"unit-{request.attempt}")
        return Decision(request.reservation_id, chosen, (), (), (), "m", 1.0, 1, 1.0)

    def settle(self, reservation_id: str, outcome: str, **figures: Any) -> None:
        self.settled.append((reservation_id, outcome, figures["output_tokens"]))


class Stream:
    """A link stream that plays one batch after another, and then waits for what the test brings."""

    id = 1

    def __init__(self, script: Sequence[list[WireMessage] | GridError]) -> None:
        self._script = list(script)
        self.sent: list[WireMessage] = []
        self.is_closed = False
        self.is_read = False
        """Somebody waits for more than the script holds."""
        self.times_lost = 0
        """How often a reader was told that the stream is lost: it stays so."""
        self.on_silent: Callable[[], None] | None = None
        self._brought = asyncio.Event()

    def bring(self, batch: list[WireMessage]) -> None:
        self._script.append(batch)
        self._brought.set()

    def send(self, message: WireMessage) -> None:
        self.sent.append(message)

    async def receive(self) -> list[WireMessage]:
        if not self._script:
            self.is_read = True
            await self._brought.wait()
            self._brought.clear()
        batch = self._script.pop(0)
        if isinstance(batch, GridError):
            self._script.append(batch)
            self.times_lost += 1
            raise batch
        return batch

    def close(self) -> None:
        self.is_closed = True


class Links:
    """Plays a script for each stream that is opened; a script that is an error fails the dial."""

    def __init__(self, *scripts: Sequence[list[WireMessage] | GridError] | GridError) -> None:
        self._scripts = list(scripts)
        self.streams: list[Stream] = []
        self.hold: asyncio.Event | None = None

    async def get(self, host: str, port: int) -> Any:
        if self.hold is not None:
            await self.hold.wait()
        script = self._scripts.pop(0)
        if isinstance(script, GridError):
            raise script
        self.streams.append(Stream(script))
        return self

    def open(self, max_bytes: int) -> Stream:
        return self.streams[-1]


class Searching:
    def __init__(self, *answers: tuple[RetrievedDocument, ...] | GridError) -> None:
        self._answers = list(answers)
        self.asked: list[RetrievalRequest] = []

    async def search(self, request: RetrievalRequest) -> RetrievalResult:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, GridError):
            raise answer
        step = request.step_id
        placement = StepPlacement(step, "unit-e", "e", "local", "CPU", True, 1.0, "the only one")
        return RetrievalResult(
            answer,
            Usage(4, 0, 0, 0.25),
            placement,
            StepTiming(step, "retrieval", 1.0, usage=Usage(4, 0, 0, 0.25)),
        )


def planned(*steps: str) -> Plan:
    contract = parse(Contract, f'{{"pipeline": {{"steps": [{", ".join(steps)}]}}}}'.encode())
    return plan_invocation(
        contract,
        parse(Invocation, b'{"input": "How?"}'),
        request_id="req_1",
        pipeline_id="pl-1",
        revision=2,
        tenant=Tenant("acme", "key-1", False, "salt"),
        config=CONFIG,
        sources={step.id or "": SOURCE for step in contract.pipeline.retrievals},
    )


GENERATE = '{"type": "generation", "model": "m", "max_output_tokens": 4}'
FIND = '{"type": "retrieval", "source": "kb", "id": "find"}'
TRY_TO_FIND = '{"type": "retrieval", "source": "kb", "id": "find", "on_failure": "skip"}'


async def run(plan: Plan, placing: Placing, links: Links, *found: Any) -> list[RunEvent]:
    runner = Runner(placement=placing, links=links, retrieval=Searching(*found))
    return [event async for events in runner.run(plan) for event in events]


async def until(condition: Callable[[], object]) -> None:
    """Let everything that can run do so until `condition` holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")
