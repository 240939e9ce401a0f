"""Both clients against a gateway that is a function: what they ask, what they make of the answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from support.gateway import FINISH, LISTED, RETRIEVAL, START, STEP, refusal, sse

from grid import AsyncGrid, Grid
from grid.calls import FIRST_RETRY_S, MAX_RETRIES, RETRY_GROWTH, Unreachable, error_of, retry_wait_s
from grid.errors import (
    Conflict,
    ContextOverflow,
    DeadlineExceeded,
    GridError,
    InternalError,
    InvalidRequest,
    NoEligibleUnit,
    NotFound,
    Saturated,
    UnitLost,
)
from grid.event_stream import MAX_EVENT_BYTES, EventParser
from grid.runs import Answer, Done, Retrieved, Started, StepOutput, Token

Handler = Callable[[httpx.Request], httpx.Response]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds


def grid_of(handler: Handler, clock: Clock | None = None, **options: Any) -> Grid:
    clock = clock or Clock()
    return Grid(
        "http://cell:8000",
        "zg-key",
        transport=httpx.MockTransport(handler),
        sleep=clock.sleep,
        clock=clock,
        **options,
    )


class Script:
    """Answers in turn, and keeps what was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def body(self, index: int) -> Any:
        return json.loads(self.asked[index].content)


def test_a_run_is_typed_events_and_their_sum() -> None:
    script = Script(
        httpx.Response(200, json={"pipelines": [LISTED]}),
        httpx.Response(
            200,
            content=sse(
                ("start", START),
                ("retrieval", RETRIEVAL),
                ("token", {"index": 0, "text": "Hé", "tokens": 1}),
                ("news", {}),
                ("token", {"index": 1, "text": "llo", "tokens": 1}),
                ("done", FINISH),
            ),
        ),
    )
    run = grid_of(script).pipeline("support").stream("Hi?", variables={"a": "b"})
    events = list(run)
    assert [type(event) for event in events] == [Started, Retrieved, Token, Token, Done]
    assert run.text == "Héllo"
    answer = run.answer()
    assert (answer.request_id, answer.finish_reason, answer.warnings) == ("req_1", "stop", ("no cache here",))
    assert answer.usage.output_tokens == 2
    assert answer.documents[0].document_id == "d1"
    assert answer.steps[0].timing_ms == {"total": 30.0, "prefill": 9.0}
    assert script.asked[1].url.path == "/v1/pipelines/pl-1/invoke"
    assert script.body(1) == {"input": "Hi?", "stream": True, "variables": {"a": "b"}}
    assert script.asked[1].headers["x-api-key"] == "zg-key"


def test_a_whole_answer_has_the_same_shape() -> None:
    body = {**START, **FINISH, "output": "Hello", "retrieval": [RETRIEVAL]}
    script = Script(httpx.Response(200, json=body))
    answer = grid_of(script).pipeline("pl-1").invoke([{"role": "user", "content": "Hi"}])
    assert (answer.text, answer.ttft_ms, answer.steps[0].unit_id) == ("Hello", 10.0, "unit-m-0")
    assert answer.documents[0].metadata == {"status": "published"}
    assert script.body(0) == {"messages": [{"role": "user", "content": "Hi"}], "stream": False}


def test_an_error_in_mid_stream_comes_after_the_text_before_it() -> None:
    envelope = {"error": {"code": "unit_lost", "message": "gone", "output": "He"}, "request_id": "req_1"}
    stream = sse(("start", START), ("token", {"index": 0, "text": "He", "tokens": 1}), ("error", envelope))
    script = Script(httpx.Response(200, content=stream))
    run = grid_of(script).pipeline("pl-1").stream("Hi")
    with pytest.raises(UnitLost, match="gone") as caught:
        list(run)
    assert run.text == "He"
    assert caught.value.details["request_id"] == "req_1"
    assert len(script.asked) == 1


def test_a_connection_that_ends_early_is_no_answer_and_is_not_tried_again() -> None:
    def broken() -> Iterator[bytes]:
        yield sse(("start", START), ("token", {"index": 0, "text": "He", "tokens": 1}))
        raise httpx.ReadError("reset")

    for content in (broken(), sse(("start", START))):
        script = Script(httpx.Response(200, content=content))
        with pytest.raises(Unreachable):
            grid_of(script).pipeline("pl-1").stream("Hi").read()
        assert len(script.asked) == 1


def test_refusals_before_the_start_wait_100_ms_growing_by_half() -> None:
    clock = Clock()
    script = Script(*[refusal(503, "no_eligible_unit") for _ in range(MAX_RETRIES + 1)])
    with pytest.raises(NoEligibleUnit) as caught:
        grid_of(script, clock).pipeline("pl-1").stream("Hi").read()
    assert clock.waits == pytest.approx([0.1, 0.15, 0.225, 0.3375, 0.50625])
    assert caught.value.details == {"status": 503, "request_id": "req_9"}


def test_retry_after_is_honoured_and_an_unreachable_gateway_is_tried_again() -> None:
    clock = Clock()
    script = Script(
        httpx.ConnectError("refused"),
        refusal(429, "saturated", {"retry-after": "3"}),
        httpx.Response(200, json={"units": [{"unit_id": "u"}]}),
    )
    assert grid_of(script, clock).units() == [{"unit_id": "u"}]
    assert clock.waits == pytest.approx([0.1, 3.0])


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", InvalidRequest),
        (400, "a_code_of_tomorrow", InvalidRequest),
        (404, "not_found", NotFound),
        (409, "conflict", Conflict),
        (500, "internal_error", InternalError),
        (504, "deadline_exceeded", DeadlineExceeded),
    ],
)
def test_what_can_not_get_better_is_not_tried_again(status: int, code: str, kind: type[GridError]) -> None:
    clock = Clock()
    script = Script(refusal(status, code))
    with pytest.raises(kind, match=f"it is {code}"):
        grid_of(script, clock).models()
    assert clock.waits == []


def test_the_retry_schedule() -> None:
    error = Saturated("full", status=429)
    assert [retry_wait_s(n, error) for n in range(3)] == [
        pytest.approx(FIRST_RETRY_S * RETRY_GROWTH**n) for n in range(3)
    ]
    assert retry_wait_s(MAX_RETRIES, error) is None
    assert retry_wait_s(0, Saturated("full", retry_after_s=3600, status=429)) is None
    assert retry_wait_s(0, error, max_retries=0) is None
    assert retry_wait_s(0, UnitLost("in mid-answer", status=200)) is None


def test_an_answer_that_is_not_a_gateways() -> None:
    assert isinstance(error_of(502, None), InternalError)
    with pytest.raises(InternalError, match="is this a gateway"):
        grid_of(Script(httpx.Response(200, text="<html>"))).models()
    with pytest.raises(InternalError, match="without an error of the grid's"):
        grid_of(Script(httpx.Response(404, text="<html>"))).models()
    with pytest.raises(InternalError, match="more than"):
        EventParser().feed(b"data: " + b"x" * MAX_EVENT_BYTES)


def test_error_details_come_along_and_never_clash_with_fixed_fields() -> None:
    envelope = {
        "code": "context_overflow",
        "message": "m",
        "param": "input",
        "details": {"prompt_tokens": 9, "status": "x"},
    }
    error = error_of(400, {"error": envelope, "request_id": "req_2"})
    assert (error.code, error.param) == ("context_overflow", "input")
    assert error.details == {"prompt_tokens": 9, "status": 400, "request_id": "req_2"}


def test_documents_go_in_batches_with_progress() -> None:
    script = Script(
        httpx.Response(200, json={"data_sources": [{"name": "help", "data_source_id": "ds-1"}]}),
        httpx.Response(200, json={"added": 16, "replaced": 0, "document_count": 16}),
        httpx.Response(200, json={"added": 3, "replaced": 1, "document_count": 19}),
    )
    seen: list[tuple[int, int]] = []
    documents = [{"id": str(n), "text": "x"} for n in range(20)]
    counts = grid_of(script).add_documents("help", documents, lambda done, total: seen.append((done, total)))
    assert counts == {"data_source_id": "ds-1", "added": 19, "replaced": 1, "document_count": 19}
    assert seen == [(16, 20), (20, 20)]
    assert [len(script.body(n)["documents"]) for n in (1, 2)] == [16, 4]


def test_a_create_that_is_tried_again_carries_one_idempotency_key() -> None:
    script = Script(httpx.ReadError("reset"), httpx.Response(201, json={"pipeline_id": "pl-1"}))
    grid_of(script).create_pipeline({"name": "support"})
    keys = {request.headers["idempotency-key"] for request in script.asked}
    assert len(script.asked) == 2
    assert len(keys) == 1


def test_apply_makes_the_next_revision_of_a_name_that_is_taken() -> None:
    new = {**LISTED, "revision": 2, "status": "deploying"}
    script = Script(
        httpx.Response(200, json={"pipelines": [LISTED]}),
        httpx.Response(200, json=new),
        httpx.Response(200, json=LISTED),  # a replica that has not heard of it
        httpx.Response(200, json=new),
        httpx.Response(200, json={**new, "status": "active", "serving_revision": 2}),
    )
    record = grid_of(script).apply_pipeline({"name": "support"})
    assert (record["pipeline_id"], record["revision"], record["status"]) == ("pl-1", 2, "active")
    assert record["unchanged"] is False
    assert [(r.method, r.url.path) for r in script.asked] == [
        ("GET", "/v1/pipelines"),
        ("PUT", "/v1/pipelines/pl-1"),
        *[("GET", "/v1/pipelines/pl-1")] * 3,
    ]
    assert script.asked[1].headers["idempotency-key"]


def test_apply_says_so_where_the_contract_is_what_is_there() -> None:
    script = Script(
        httpx.Response(200, json={"pipelines": [LISTED]}),
        httpx.Response(200, json=LISTED),
        httpx.Response(200, json=LISTED),
    )
    assert grid_of(script).apply_pipeline({"name": "support"})["unchanged"] is True


def test_apply_creates_what_has_no_name_yet() -> None:
    script = Script(
        httpx.Response(200, json={"pipelines": [{**LISTED, "name": "other"}], "next": "2025~pl 1"}),
        httpx.Response(200, json={"pipelines": [], "next": None}),
        httpx.Response(201, json=LISTED),
        httpx.Response(200, json=LISTED),
    )
    assert grid_of(script).apply_pipeline({"name": "support"})["status"] == "active"
    assert [r.method for r in script.asked] == ["GET", "GET", "POST", "GET"]
    assert script.asked[1].url.params["after"] == "2025~pl 1"


def test_a_name_that_looks_like_an_id_is_a_name_where_only_names_are_taken() -> None:
    pipeline = {**LISTED, "name": "pl-help"}
    script = Script(
        httpx.Response(200, json={"pipelines": [pipeline]}),
        httpx.Response(200, json=pipeline),
        httpx.Response(200, json=pipeline),
        httpx.Response(200, json={"data_sources": [{"name": "ds-help", "data_source_id": "ds-1"}]}),
    )
    grid = grid_of(script)
    assert grid.apply_pipeline({"name": "pl-help"})["pipeline_id"] == "pl-1"
    assert grid.ensure_source("ds-help")["data_source_id"] == "ds-1"
    assert [r.method for r in script.asked] == ["GET", "PUT", "GET", "GET"]


def test_apply_shows_why_a_revision_failed_and_that_the_last_one_goes_on() -> None:
    failed = {**LISTED, "revision": 2, "status": "failed", "reason": "no unit runs model-x"}
    script = Script(
        httpx.Response(200, json={"pipelines": [LISTED]}),
        httpx.Response(200, json=failed),
        httpx.Response(200, json=failed),
    )
    with pytest.raises(NoEligibleUnit, match="no unit runs model-x; revision 1 goes on"):
        grid_of(script).apply_pipeline({"name": "support"})


def test_update_waits_for_nothing() -> None:
    new = {**LISTED, "revision": 2, "status": "deploying"}
    script = Script(httpx.Response(200, json=LISTED), httpx.Response(200, json=new))
    assert grid_of(script).pipeline("pl-1").update({"name": "support"}) == new


def test_one_shot_runs_plans_and_lists() -> None:
    contract = {"pipeline": {"steps": []}}
    body = {**START, **FINISH, "output": "Hello", "earlier": [STEP]}
    stream = sse(("start", START), ("step", STEP), ("done", FINISH))
    results = [{**body, "input": 0}, {"input": 1, "error": {"code": "context_overflow", "message": "long"}}]
    script = Script(
        httpx.Response(200, json=body),
        httpx.Response(200, content=stream),
        httpx.Response(200, json={"runnable": True}),
        httpx.Response(200, json={"runnable": False}),
        httpx.Response(200, json={"results": results}),
    )
    grid = grid_of(script)
    answer = grid.run_once(contract, "Hi", variables={"a": "b"})
    assert (answer.text, answer.revision) == ("Hello", 1)
    assert answer.earlier == (StepOutput("draft", "A draft", "stop"),)
    assert grid.stream_once(contract, "Hi").read().earlier == answer.earlier
    assert grid.plan(contract) == {"runnable": True}
    assert grid.pipeline("pl-1").dry_run("Hi") == {"runnable": False}
    first, second = grid.pipeline("pl-1").invoke_all(["a", [{"role": "user", "content": "b"}]])
    assert isinstance(first, Answer)
    assert isinstance(second, ContextOverflow)
    assert [request.url.path for request in script.asked] == [
        *["/v1/pipeline"] * 3,
        "/v1/pipelines/pl-1/dry-run",
        "/v1/pipelines/pl-1/invoke",
    ]
    assert script.body(0) == {**contract, "input": "Hi", "variables": {"a": "b"}, "stream": False}
    assert script.body(1)["stream"] is True
    assert script.body(2) == contract
    assert script.body(4) == {"inputs": ["a", [{"role": "user", "content": "b"}]], "stream": False}


def test_waiting_for_a_pipeline_is_bounded() -> None:
    clock = Clock()
    deploying = {**LISTED, "status": "deploying"}
    with pytest.raises(DeadlineExceeded, match="still deploying after 2 s"):
        grid_of(lambda _: httpx.Response(200, json=deploying), clock).pipeline("pl-1").wait_active(2.0)
    assert sum(clock.waits) == pytest.approx(2.0, abs=0.2)


def test_of_several_pipelines_with_one_name_the_newest_active_one_is_meant() -> None:
    listed = [
        LISTED,
        {**LISTED, "pipeline_id": "pl-2", "created_at": "2025-01-02T00:00:00Z"},
        {**LISTED, "pipeline_id": "pl-3", "created_at": "2025-01-03T00:00:00Z", "status": "failed"},
    ]
    script = Script(httpx.Response(200, json={"pipelines": listed}))
    assert grid_of(script).pipeline("support").read()["pipeline_id"] == "pl-2"


def test_leaving_a_run_early_closes_its_connection() -> None:
    closed = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield sse(("start", START))
            yield sse(("token", {"index": 0, "text": "a", "tokens": 1}))

        def close(self) -> None:
            closed.append(True)

    grid = grid_of(Script(httpx.Response(200, stream=Endless())))
    with grid, grid.pipeline("pl-1").stream("Hi") as run:
        assert isinstance(next(run), Started)
    assert closed


async def test_the_asynchronous_twin_says_the_same() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    async def pieces() -> AsyncIterator[bytes]:
        yield sse(("start", START), ("token", {"index": 0, "text": "Hello", "tokens": 1}))
        yield sse(("done", FINISH))

    script = Script(
        refusal(503, "saturated"),
        httpx.Response(200, content=pieces()),
        httpx.Response(200, json={**START, **FINISH, "output": "Hello"}),
        refusal(404, "not_found"),
    )
    transport = httpx.MockTransport(script)
    async with AsyncGrid("http://cell", "zg-key", transport=transport, sleep=sleep) as grid:
        pipeline = grid.pipeline("pl-1")
        async with pipeline.stream("Hi") as run:
            events = [event async for event in run]
        assert [type(event) for event in events] == [Started, Token, Done]
        assert run.text == (await pipeline.invoke("Hi")).text == "Hello"
        with pytest.raises(NotFound):
            await pipeline.read()
    assert waits == [FIRST_RETRY_S]


def test_the_twins_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Grid) == public(AsyncGrid)
