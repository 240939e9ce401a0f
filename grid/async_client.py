"""The asynchronous twin of `grid.client`, method by method. All I/O of the asynchronous side is here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from grid import calls
from grid.calls import Call
from grid.errors import GridError
from grid.exchange import (
    TIMEOUT,
    Step,
    Steps,
    connection_errors,
    json_of,
    key_headers,
    request_of,
    trusted,
)
from grid.operations import ACTIVE_TIMEOUT_S, Input, Json, OnProgress, Operation, Operations, Wait
from grid.runs import Answer, Event, RunState

R = TypeVar("R")


class AsyncGrid:
    """The asynchronous twin of `Grid`, with its arguments. `transport`, `sleep` and `clock` are for tests."""

    def __init__(
        self,
        url: str = calls.DEFAULT_URL,
        key: str = "",
        *,
        ca_file: Path | str | None = None,
        max_retries: int = calls.MAX_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=key_headers(key),
            timeout=TIMEOUT,
            verify=trusted(ca_file),
            transport=transport,
        )
        self._operations = Operations(max_retries)
        self._sleep = sleep
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    def pipeline(self, name_or_id: str) -> AsyncPipeline:
        """Return a handle; nothing is asked until it is used."""
        return AsyncPipeline(self, name_or_id)

    async def pipelines(self) -> list[Json]:
        return await self._run(self._operations.pipelines())

    async def create_pipeline(self, contract: Mapping[str, Any]) -> Json:
        """Store a contract; answers at once with `status: deploying`."""
        return await self._run(self._operations.create_pipeline(contract))

    async def apply_pipeline(self, contract: Mapping[str, Any], timeout_s: float = ACTIVE_TIMEOUT_S) -> Json:
        """Make this contract what its name stands for, and return it once it is active; its `unchanged` says
        whether it was that already."""
        return await self._run(self._operations.apply_pipeline(contract, timeout_s))

    async def plan(self, contract: Mapping[str, Any]) -> Json:
        """Say what a contract would do: where its steps would run and why, without running anything."""
        return await self._run(self._operations.plan(contract))

    async def run_once(self, contract: Mapping[str, Any], input: Input, **options: Any) -> Answer:
        """Run a contract without storing it; `options` as in `Pipeline.invoke`."""
        return await self._run(self._operations.run_once(contract, input, options))

    def stream_once(self, contract: Mapping[str, Any], input: Input, **options: Any) -> AsyncRun:
        """Run a contract without storing it, and return its events as they come."""
        return AsyncRun(self, self._operations.open_once(contract, input, options))

    async def sources(self) -> list[Json]:
        return await self._run(self._operations.sources())

    async def source(self, name_or_id: str) -> Json:
        return await self._run(self._operations.source(name_or_id))

    async def create_source(self, name: str, type: str = "qdrant", **options: Any) -> Json:
        """Create a data source; `options` are the fields of the route, such as `embedding_model`."""
        return await self._run(self._operations.create_source({"name": name, "type": type, **options}))

    async def ensure_source(self, name: str, type: str = "qdrant", **options: Any) -> Json:
        """Return the data source of that name, created if there is none."""
        return await self._run(self._operations.ensure_source({"name": name, "type": type, **options}))

    async def delete_source(self, name_or_id: str, *, force: bool = False) -> None:
        """Delete a data source. Raises Conflict while pipelines read it, unless `force`."""
        await self._run(self._operations.delete_source(name_or_id, force=force))

    async def add_documents(
        self, source: str, documents: Sequence[Mapping[str, Any]], on_progress: OnProgress | None = None
    ) -> Json:
        """Add or replace documents `{id, text, metadata}`, in batches; returns the counts."""
        return await self._run(self._operations.add_documents(source, documents, on_progress))

    async def models(self) -> list[Json]:
        return await self._run(self._operations.models())

    async def units(self) -> list[Json]:
        return await self._run(self._operations.units())

    async def drain(self, unit_id: str, *, draining: bool = True, restart: bool = False) -> Json:
        """Let a unit take no new work, or take it again (operators only); return the unit.

        With `restart`, its process is replaced by a new one once it has nothing left to do.
        """
        return await self._run(self._operations.drain(unit_id, draining, restart))

    async def metrics(self) -> Json:
        """Return how the tenant's calls went in the last minute."""
        return await self._run(self._operations.metrics())

    async def explanation(self, request_id: str) -> Json:
        """Return what was decided for an ended call, what was rejected, and how it went. Raises NotFound."""
        return await self._run(self._operations.explanation(request_id))

    async def gpus(self) -> list[Json]:
        return await self._run(self._operations.gpus())

    async def queues(self) -> list[Json]:
        """Return, for each model that somebody waits for, how many do and how long that takes."""
        return await self._run(self._operations.queues())

    async def readiness(self) -> Json:
        """Return `{"ready", "reasons"}`: whether the cell can run its models now, and if not, why."""
        return await self._run(self._operations.readiness())

    async def keys(self) -> list[Json]:
        return await self._run(self._operations.keys())

    async def create_key(self, tenant_id: str, *, label: str = "", operator: bool = False) -> Json:
        """Make a key (operators only); its answer is the only time that it is shown."""
        return await self._run(self._operations.create_key(tenant_id, label, operator))

    async def revoke_key(self, key_id: str) -> None:
        await self._run(self._operations.revoke_key(key_id))

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Json:
        """Send one call and return its JSON; the way to a route that has no method here."""
        return await self._run(self._operations.call(Call(method, path, body)))

    async def _run(self, operation: Operation[R]) -> R:
        steps = Steps(operation)
        while (step := steps.next()) is not None:
            try:
                steps.answer = await self._carry_out(step)
            except GridError as error:
                steps.error = error
        return steps.result

    async def _carry_out(self, step: Step) -> Any:
        if isinstance(step, Wait):
            if step.seconds > 0:
                await self._sleep(step.seconds)
            return self._clock()
        with connection_errors(self._http):
            if isinstance(step, Call):
                return json_of(await self._http.send(request_of(self._http, step)), step.answers)
            response = await self._http.send(request_of(self._http, step.call), stream=True)
            if response.is_success:
                return response
            try:
                await response.aread()
                return json_of(response)
            finally:
                await response.aclose()


class AsyncPipeline:
    """The asynchronous twin of `Pipeline`."""

    def __init__(self, grid: AsyncGrid, name_or_id: str) -> None:
        self._grid = grid
        self.name_or_id = name_or_id

    async def read(self) -> Json:
        return await self._grid._run(self._grid._operations.pipeline(self.name_or_id))

    async def wait_active(self, timeout_s: float = ACTIVE_TIMEOUT_S, revision: int = 0) -> Json:
        """Return the pipeline once its newest revision, at least `revision`, is active. Raises NoEligibleUnit
        with the reason if it failed."""
        return await self._grid._run(self._grid._operations.wait_active(self.name_or_id, timeout_s, revision))

    async def invoke(self, input: Input, **options: Any) -> Answer:
        """Run it and return the whole answer; `options` are `variables`, `execution_hints` and so on."""
        return await self._grid._run(self._grid._operations.invoke(self.name_or_id, input, options))

    async def invoke_all(self, inputs: Sequence[Input], **options: Any) -> list[Answer | GridError]:
        """Run each input, spread over the units; the outcomes, answers or errors, are in the inputs' order.

        Raises the first input's error where none could be run.
        """
        return await self._grid._run(self._grid._operations.invoke_all(self.name_or_id, inputs, options))

    async def dry_run(self, input: Input, **options: Any) -> Json:
        """Say what a call would do now: every step's units, times and reasons. Runs and charges nothing."""
        return await self._grid._run(self._grid._operations.dry_run(self.name_or_id, input, options))

    async def update(self, contract: Mapping[str, Any]) -> Json:
        """Make the contract the next revision; `wait_active` with its `revision` waits until it serves."""
        return await self._grid._run(self._grid._operations.update_pipeline(self.name_or_id, contract))

    def stream(self, input: Input, **options: Any) -> AsyncRun:
        """Run it and return its events as they come; a refusal raises at the first."""
        return AsyncRun(self._grid, self._grid._operations.open_run(self.name_or_id, input, options))

    async def delete(self) -> None:
        await self._grid._run(self._grid._operations.delete_pipeline(self.name_or_id))


class AsyncRun(RunState):
    """The asynchronous twin of `Run`."""

    def __init__(self, grid: AsyncGrid, opening: Operation[httpx.Response]) -> None:
        super().__init__()
        self._grid = grid
        self._opening = opening
        self._response: httpx.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._opening.close()
        if self._response is not None:
            await self._response.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._pieces is None:
            self._response = await self._grid._run(self._opening)
            self._pieces = self._response.aiter_bytes()
        while (event := self.take()) is None:
            try:
                with connection_errors(self._grid._http):
                    self.feed(await anext(self._pieces))
            except StopAsyncIteration:
                if self.done is not None:
                    raise
                self.end()
        return event

    async def read(self) -> Answer:
        """Read to the end and return the whole answer."""
        async with self:
            async for _ in self:
                pass
        return self.answer()
