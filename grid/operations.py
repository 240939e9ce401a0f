"""Everything the client does, as conversations: generators that yield what to do and are told the outcome.

`grid.client` runs them, synchronously or asynchronously; nothing here does I/O, waits or reads a clock. An
operation yields a `Call` (answered with its JSON), an `Open` (answered with an open stream) or a `Wait`
(answered with the time afterwards, in seconds); a failed one raises inside the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from grid import calls
from grid.calls import Call
from grid.errors import DeadlineExceeded, GridError, InvalidRequest, NoEligibleUnit, NotFound, Rejected
from grid.runs import Answer, outcome_of
from grid.words import new_id

Json = dict[str, Any]
Input = str | Sequence[Mapping[str, str]]
"""Text, or a conversation of `{"role", "content"}` turns that ends with the user's."""
OnProgress = Callable[[int, int], None]
"""Called with (done, total) after each batch."""

ACTIVE_TIMEOUT_S = 120.0
"""How long a pipeline may take to become active before the wait is given up."""
ONE_SHOT_PATH = "/v1/pipeline"
POLL_S = 0.1
"""A deployment is a dry run of milliseconds; this is soon enough for a person, and costs next to nothing."""


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Open:
    """A call whose answer is read as it comes."""

    call: Call


R = TypeVar("R")
Operation = Generator[Call | Open | Wait, Any, R]


def ask(step: Call | Open, max_retries: int) -> Operation[Any]:
    """Carry out one step, again while it is refused before it began and the schedule allows."""
    retries = 0
    while True:
        try:
            return (yield step)
        except (Rejected, calls.Unreachable) as error:
            wait_s = calls.retry_wait_s(retries, error, max_retries)
            if wait_s is None:
                raise
        retries += 1
        yield Wait(wait_s)


class Operations:
    """One method an operation. Holds no state besides how often to try again."""

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries

    def call(self, call: Call) -> Operation[Json]:
        answer: Json = yield from ask(call, self._max_retries)
        return answer

    def _list(self, path: str, key: str) -> Operation[list[Json]]:
        items: list[Json] = (yield from self.call(Call("GET", path)))[key]
        return items

    def _make(self, method: str, path: str, body: Mapping[str, Any]) -> Operation[Json]:
        """The key makes a call that is tried again make one thing."""
        return self.call(Call(method, path, body, {"idempotency-key": new_id("")}))

    def models(self) -> Operation[list[Json]]:
        return self._list("/v1/models", "data")

    def units(self) -> Operation[list[Json]]:
        return self._list("/v1/units", "units")

    def drain(self, unit_id: str, draining: bool, restart: bool) -> Operation[Json]:
        return self.call(
            Call("POST", f"/v1/units/{_part(unit_id)}/drain", {"draining": draining, "restart": restart})
        )

    def metrics(self) -> Operation[Json]:
        return self.call(Call("GET", "/v1/metrics"))

    def explanation(self, request_id: str) -> Operation[Json]:
        """Raises NotFound."""
        return self.call(Call("GET", f"/v1/requests/{_part(request_id)}"))

    def gpus(self) -> Operation[list[Json]]:
        return self._list("/v1/units", "gpus")

    def queues(self) -> Operation[list[Json]]:
        return self._list("/v1/units", "queues")

    def readiness(self) -> Operation[Json]:
        """Asked once: a cell that isn't ready is an answer."""
        answer: Json = yield Call("GET", "/readyz", answers=(503,))
        return answer

    def keys(self) -> Operation[list[Json]]:
        return self._list("/v1/keys", "keys")

    def create_key(self, tenant_id: str, label: str, operator: bool) -> Operation[Json]:
        """Asked once: a second try could make a second key that nobody has seen."""
        answer: Json = yield Call(
            "POST", "/v1/keys", {"tenant_id": tenant_id, "label": label, "operator": operator}
        )
        return answer

    def revoke_key(self, key_id: str) -> Operation[Json]:
        return self.call(Call("DELETE", f"/v1/keys/{_part(key_id)}"))

    def sources(self) -> Operation[list[Json]]:
        return self._list("/v1/data-sources", "data_sources")

    def source(self, name_or_id: str) -> Operation[Json]:
        """Raises NotFound."""
        if name_or_id.startswith("ds-"):
            return (yield from self.call(Call("GET", f"/v1/data-sources/{_part(name_or_id)}")))
        found = yield from self._source_named(name_or_id)
        if found is None:
            raise NotFound(f"there is no data source named {name_or_id!r}", param="source")
        return found

    def _source_named(self, name: str) -> Operation[Json | None]:
        return next((source for source in (yield from self.sources()) if source["name"] == name), None)

    def create_source(self, body: Mapping[str, Any]) -> Operation[Json]:
        return self._make("POST", "/v1/data-sources", body)

    def ensure_source(self, body: Mapping[str, Any]) -> Operation[Json]:
        """Return the data source of that name, created if there is none."""
        found = yield from self._source_named(str(body["name"]))
        return found if found is not None else (yield from self.create_source(body))

    def delete_source(self, name_or_id: str, *, force: bool) -> Operation[Json]:
        source = yield from self.source(name_or_id)
        path = f"/v1/data-sources/{_part(source['data_source_id'])}{'?force=true' if force else ''}"
        return (yield from self.call(Call("DELETE", path)))

    def add_documents(
        self, source: str, documents: Sequence[Mapping[str, Any]], on_progress: OnProgress | None
    ) -> Operation[Json]:
        """Add or replace documents in batches; returns `added`, `replaced` and `document_count`."""
        source_id = (yield from self.source(source))["data_source_id"]
        counts = {"data_source_id": source_id, "added": 0, "replaced": 0, "document_count": 0}
        sent = 0
        for batch in calls.batches(documents):
            path = f"/v1/data-sources/{_part(source_id)}/documents"
            answer = yield from self.call(Call("POST", path, {"documents": batch}))
            counts["added"] += answer["added"]
            counts["replaced"] += answer["replaced"]
            counts["document_count"] = answer["document_count"]
            sent += len(batch)
            if on_progress is not None:
                on_progress(sent, len(documents))
        return counts

    def pipelines(self) -> Operation[list[Json]]:
        """Return all of them, page by page."""
        found: list[Json] = []
        after = ""
        while True:
            page = yield from self.call(Call("GET", f"/v1/pipelines{after}"))
            found += page["pipelines"]
            # A gateway of an earlier release answers with all at once.
            if not page.get("next"):
                return found
            after = f"?after={_part(page['next'])}"

    def pipeline(self, name_or_id: str) -> Operation[Json]:
        """Return a pipeline; of several with one name the newest active one. Raises NotFound."""
        if name_or_id.startswith("pl-"):
            return (yield from self.call(Call("GET", f"/v1/pipelines/{_part(name_or_id)}")))
        found = yield from self._pipeline_named(name_or_id)
        if found is None:
            raise NotFound(f"there is no pipeline named {name_or_id!r}", param="pipeline")
        return found

    def _pipeline_named(self, name: str) -> Operation[Json | None]:
        found = [record for record in (yield from self.pipelines()) if record["name"] == name]
        return max(found, key=lambda each: (each["status"] == "active", each["created_at"]), default=None)

    def create_pipeline(self, contract: Mapping[str, Any]) -> Operation[Json]:
        return self._make("POST", "/v1/pipelines", contract)

    def update_pipeline(self, name_or_id: str, contract: Mapping[str, Any]) -> Operation[Json]:
        """Make the contract the pipeline's next revision."""
        return (yield from self._revise((yield from self.pipeline(name_or_id)), contract))

    def _revise(self, record: Json, contract: Mapping[str, Any]) -> Operation[Json]:
        return self._make("PUT", f"/v1/pipelines/{_part(record['pipeline_id'])}", contract)

    def delete_pipeline(self, name_or_id: str) -> Operation[Json]:
        record = yield from self.pipeline(name_or_id)
        return (yield from self.call(Call("DELETE", f"/v1/pipelines/{_part(record['pipeline_id'])}")))

    def wait_active(self, name_or_id: str, timeout_s: float, revision: int = 0) -> Operation[Json]:
        """Return the pipeline once its newest revision, which is at least `revision`, is active.

        Raises NoEligibleUnit with the grid's reason when it failed, DeadlineExceeded after `timeout_s`.
        """
        record = yield from self.pipeline(name_or_id)
        started_s: float = yield Wait(0.0)
        # Another replica may not have heard of the revision yet.
        while record["status"] == "deploying" or record.get("revision", revision) < revision:
            now_s: float = yield Wait(POLL_S)
            if now_s - started_s > timeout_s:
                raise DeadlineExceeded(
                    f"pipeline {record['pipeline_id']} is still deploying after {timeout_s:g} s;"
                    " `grid status` shows which units are missing"
                )
            record = yield from self.pipeline(record["pipeline_id"])
        if record["status"] != "active":
            serving = record.get("serving_revision")
            goes_on = f"; revision {serving} goes on" if serving else ""
            raise NoEligibleUnit(
                f"pipeline {record['name'] or record['pipeline_id']} failed: {record['reason']}{goes_on}"
            )
        return record

    def apply_pipeline(self, contract: Mapping[str, Any], timeout_s: float) -> Operation[Json]:
        """Make this contract what its name stands for, and return it active.

        Where the name is taken the contract becomes that pipeline's next revision; until it is active, and if
        it fails, the one before serves. What is returned has `unchanged`: whether the contract was that
        pipeline's already, so that no revision was made.
        """
        name = contract.get("name")
        if not name:
            raise InvalidRequest("a contract needs a `name` to be applied under; add one", param="name")
        earlier = yield from self._pipeline_named(str(name))
        making = self.create_pipeline(contract) if earlier is None else self._revise(earlier, contract)
        made = yield from making
        active = yield from self.wait_active(made["pipeline_id"], timeout_s, made["revision"])
        unchanged = earlier is not None and earlier.get("revision") == made["revision"]
        return {**active, "unchanged": unchanged}

    def invoke(self, name_or_id: str, given: Input, options: Mapping[str, Any]) -> Operation[Answer]:
        call = yield from self._invocation(name_or_id, given, {**options, "stream": False})
        return Answer.of((yield from self.call(call)))

    def invoke_all(
        self, name_or_id: str, inputs: Sequence[Input], options: Mapping[str, Any]
    ) -> Operation[list[Answer | GridError]]:
        """Return what came of each input, in their order."""
        path = yield from self._path(name_or_id, "invoke")
        body = {"inputs": list(map(_plain, inputs)), **options, "stream": False}
        answer = yield from self.call(Call("POST", path, body))
        return [outcome_of(result) for result in answer["results"]]

    def dry_run(self, name_or_id: str, given: Input, options: Mapping[str, Any]) -> Operation[Json]:
        path = yield from self._path(name_or_id, "dry-run")
        return (yield from self.call(Call("POST", path, {**_said(given), **options})))

    def plan(self, contract: Mapping[str, Any]) -> Operation[Json]:
        return self.call(Call("POST", ONE_SHOT_PATH, contract))

    def run_once(
        self, contract: Mapping[str, Any], given: Input, options: Mapping[str, Any]
    ) -> Operation[Answer]:
        body = {**contract, **_said(given), **options, "stream": False}
        return Answer.of((yield from self.call(Call("POST", ONE_SHOT_PATH, body))))

    def open_once(
        self, contract: Mapping[str, Any], given: Input, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """Return what the runner makes of an open stream of a one-shot run."""
        body = {**contract, **_said(given), **options, "stream": True}
        return ask(Open(Call("POST", ONE_SHOT_PATH, body)), self._max_retries)

    def open_run(self, name_or_id: str, given: Input, options: Mapping[str, Any]) -> Operation[Any]:
        """Return what the runner makes of an open stream of this run."""
        call = yield from self._invocation(name_or_id, given, {**options, "stream": True})
        return (yield from ask(Open(call), self._max_retries))

    def _invocation(self, name_or_id: str, given: Input, options: Mapping[str, Any]) -> Operation[Call]:
        path = yield from self._path(name_or_id, "invoke")
        return Call("POST", path, {**_said(given), **options})

    def _path(self, name_or_id: str, what: str) -> Operation[str]:
        pipeline_id = name_or_id
        if not pipeline_id.startswith("pl-"):
            pipeline_id = (yield from self.pipeline(name_or_id))["pipeline_id"]
        return f"/v1/pipelines/{_part(pipeline_id)}/{what}"


def _said(given: Input) -> Json:
    return {"input" if isinstance(given, str) else "messages": _plain(given)}


def _plain(given: Input) -> str | list[dict[str, str]]:
    return given if isinstance(given, str) else [dict(turn) for turn in given]


def _part(text: str) -> str:
    return quote(text, safe="")
