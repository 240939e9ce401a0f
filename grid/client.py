"""The Python client. `grid.operations` decides what is asked; all I/O of the synchronous side is here.

    grid = Grid("http://127.0.0.1:8000", key="zg-…")
    for event in grid.pipeline("support").stream("How do I reset my password?"):
        ...

Errors are those of `grid.errors`, revived from the gateway's answer, and `grid.calls.Unreachable`. What was
refused before it began is tried again (100 ms, growing by 1.5, longer where the gateway says so); nothing
is tried again once a stream has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
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


class Grid:
    """A connection to one gateway. Use it as a context manager, or call `close`.

    For https, `ca_file` names the certificates (PEM) to trust in place of the usual authorities.
    `transport`, `sleep` and `clock` are for tests.
    """

    def __init__(
        self,
        url: str = calls.DEFAULT_URL,
        key: str = "",
        *,
        ca_file: Path | str | None = None,
        max_retries: int = calls.MAX_RETRIES,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers=key_headers(key),
            timeout=TIMEOUT,
            verify=trusted(ca_file),
            transport=transport,
        )
        self._operations = Operations(max_retries)
        self._sleep = sleep
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def pipeline(self, name_or_id: str) -> Pipeline:
        """Return a handle; nothing is asked until it is used."""
        return Pipeline(self, name_or_id)

    def pipelines(self) -> list[Json]:
        return self._run(self._operations.pipelines())

    def create_pipeline(self, contract: Mapping[str, Any]) -> Json:
        """Store a contract; answers at once with `status: deploying`."""
        return self._run(self._operations.create_pipeline(contract))

    def apply_pipeline(self, contract: Mapping[str, Any], timeout_s: float = ACTIVE_TIMEOUT_S) -> Json:
        """Make this contract what its name stands for, and return it once it is active; its `unchanged` says
        whether it was that already."""
        return self._run(self._operations.apply_pipeline(contract, timeout_s))

    def plan(self, contract: Mapping[str, Any]) -> Json:
        """Say what a contract would do: where its steps would run and why, without running anything."""
        return self._run(self._operations.plan(contract))

    def run_once(self, contract: Mapping[str, Any], input: Input, **options: Any) -> Answer:
        """Run a contract without storing it; `options` as in `Pipeline.invoke`."""
        return self._run(self._operations.run_once(contract, input, options))

    def stream_once(self, contract: Mapping[str, Any], input: Input, **options: Any) -> Run:
        """Run a contract without storing it, and return its events as they come."""
        return Run(self, self._operations.open_once(contract, input, options))

    def sources(self) -> list[Json]:
        return self._run(self._operations.sources())

    def source(self, name_or_id: str) -> Json:
        return self._run(self._operations.source(name_or_id))

    def create_source(self, name: str, type: str = "qdrant", **options: Any) -> Json:
        """Create a data source; `options` are the fields of the route, such as `embedding_model`."""
        return self._run(self._operations.create_source({"name": name, "type": type, **options}))

    def ensure_source(self, name: str, type: str = "qdrant", **options: Any) -> Json:
        """Return the data source of that name, created if there is none."""
        return self._run(self._operations.ensure_source({"name": name, "type": type, **options}))

    def delete_source(self, name_or_id: str, *, force: bool = False) -> None:
        """Delete a data source. Raises Conflict while pipelines read it, unless `force`."""
        self._run(self._operations.delete_source(name_or_id, force=force))

    def add_documents(
        self, source: str, documents: Sequence[Mapping[str, Any]], on_progress: OnProgress | None = None
    ) -> Json:
        """Add or replace documents `{id, text, metadata}`, in batches; returns the counts."""
        return self._run(self._operations.add_documents(source, documents, on_progress))

    def models(self) -> list[Json]:
        return self._run(self._operations.models())

    def units(self) -> list[Json]:
        return self._run(self._operations.units())

    def drain(self, unit_id: str, *, draining: bool = True, restart: bool = False) -> Json:
        """Let a unit take no new work, or take it again (operators only); return the unit.

        With `restart`, its process is replaced by a new one once it has nothing left to do.
        """
        return self._run(self._operations.drain(unit_id, draining, restart))

    def metrics(self) -> Json:
        """Return how the tenant's calls went in the last minute."""
        return self._run(self._operations.metrics())

    def explanation(self, request_id: str) -> Json:
        """Return what was decided for an ended call, what was rejected, and how it went. Raises NotFound."""
        return self._run(self._operations.explanation(request_id))

    def gpus(self) -> list[Json]:
        """Return every GPU of the cell with its newest reading; None is what it can't tell."""
        return self._run(self._operations.gpus())

    def queues(self) -> list[Json]:
        """Return, for each model that somebody waits for, how many do and how long that takes."""
        return self._run(self._operations.queues())

    def readiness(self) -> Json:
        """Return `{"ready", "reasons"}`: whether the cell can run its models now, and if not, why."""
        return self._run(self._operations.readiness())

    def keys(self) -> list[Json]:
        return self._run(self._operations.keys())

    def create_key(self, tenant_id: str, *, label: str = "", operator: bool = False) -> Json:
        """Make a key (operators only); its answer is the only time that it is shown."""
        return self._run(self._operations.create_key(tenant_id, label, operator))

    def revoke_key(self, key_id: str) -> None:
        self._run(self._operations.revoke_key(key_id))

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Json:
        """Send one call and return its JSON; the way to a route that has no method here."""
        return self._run(self._operations.call(Call(method, path, body)))

    def _run(self, operation: Operation[R]) -> R:
        steps = Steps(operation)
        while (step := steps.next()) is not None:
            try:
                steps.answer = self._carry_out(step)
            except GridError as error:
                steps.error = error
        return steps.result

    def _carry_out(self, step: Step) -> Any:
        if isinstance(step, Wait):
            if step.seconds > 0:
                self._sleep(step.seconds)
            return self._clock()
        with connection_errors(self._http):
            if isinstance(step, Call):
                return json_of(self._http.send(request_of(self._http, step)), step.answers)
            response = self._http.send(request_of(self._http, step.call), stream=True)
            if response.is_success:
                return response
            with closing(response):
                response.read()
                return json_of(response)


class Pipeline:
    """A handle on one pipeline, by name (the newest active one of that name) or id."""

    def __init__(self, grid: Grid, name_or_id: str) -> None:
        self._grid = grid
        self.name_or_id = name_or_id

    def read(self) -> Json:
        return self._grid._run(self._grid._operations.pipeline(self.name_or_id))

    def wait_active(self, timeout_s: float = ACTIVE_TIMEOUT_S, revision: int = 0) -> Json:
        """Return the pipeline once its newest revision, at least `revision`, is active. Raises NoEligibleUnit
        with the reason if it failed."""
        return self._grid._run(self._grid._operations.wait_active(self.name_or_id, timeout_s, revision))

    def invoke(self, input: Input, **options: Any) -> Answer:
        """Run it and return the whole answer; `options` are `variables`, `execution_hints` and so on."""
        return self._grid._run(self._grid._operations.invoke(self.name_or_id, input, options))

    def invoke_all(self, inputs: Sequence[Input], **options: Any) -> list[Answer | GridError]:
        """Run each input, spread over the units; the outcomes, answers or errors, are in the inputs' order.

        Raises the first input's error where none could be run.
        """
        return self._grid._run(self._grid._operations.invoke_all(self.name_or_id, inputs, options))

    def dry_run(self, input: Input, **options: Any) -> Json:
        """Say what a call would do now: every step's units, times and reasons. Runs and charges nothing."""
        return self._grid._run(self._grid._operations.dry_run(self.name_or_id, input, options))

    def update(self, contract: Mapping[str, Any]) -> Json:
        """Make the contract the next revision; `wait_active` with its `revision` waits until it serves."""
        return self._grid._run(self._grid._operations.update_pipeline(self.name_or_id, contract))

    def stream(self, input: Input, **options: Any) -> Run:
        """Run it and return its events as they come; a refusal raises at the first."""
        return Run(self._grid, self._grid._operations.open_run(self.name_or_id, input, options))

    def delete(self) -> None:
        self._grid._run(self._grid._operations.delete_pipeline(self.name_or_id))


class Run(RunState):
    """A streamed run: iterate over its events. Leaving early (`close`, or the end of `with`) cancels it."""

    def __init__(self, grid: Grid, opening: Operation[httpx.Response]) -> None:
        super().__init__()
        self._grid = grid
        self._opening = opening
        self._response: httpx.Response | None = None
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._opening.close()
        if self._response is not None:
            self._response.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._response is None:
            self._response = self._grid._run(self._opening)
            self._pieces = self._response.iter_bytes()
        while (event := self.take()) is None:
            try:
                with connection_errors(self._grid._http):
                    self.feed(next(self._pieces))
            except StopIteration:
                if self.done is not None:
                    raise
                self.end()
        return event

    def read(self) -> Answer:
        """Read to the end and return the whole answer."""
        with self:
            for _ in self:
                pass
        return self.answer()
