"""Calls with a list of inputs on a cell with two small units: outcomes, order, room, leaving."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.calls import declared, events, generation
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell

from gateway.http.shapes.runs import BatchAnswer, EndEvent, InputAnswer, InputError
from gateway.observe.recorder import Recorder
from gateway.observe.story import Outcome, Story

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
TOO_LONG = "word " * 5_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    config = cell_config(Path(tmp_path_factory.mktemp("cell")))
    chat, embedding = (model.model_dump() for model in config.models)
    small = {**chat, "max_running": 3, "max_waiting": 1, "min_units": 2, "max_units": 2}
    async with local_cell(
        type(config).model_validate({**config.model_dump(), "models": [small, embedding]})
    ) as it:
        yield it


async def test_outcomes_come_in_the_order_of_the_inputs_and_one_failure_is_one(cell: LocalCell) -> None:
    turns = [{"role": "user", "content": "third"}]
    inputs: list[Any] = ["first", TOO_LONG, turns, "first"]
    async with cell.client() as client:
        path = f"/v1/pipelines/{await declared(client, generation(temperature=0.0))}/invoke"
        answer = await client.post(path, json={"inputs": inputs, "stream": False})
        alone = await client.post(path, json={"input": "first", "stream": False})
        chat = await client.post(path, json={"messages": turns, "stream": False})
    assert answer.status_code == 200, answer.text
    batch = BatchAnswer.model_validate(answer.json())
    assert batch.request_id == answer.headers["x-request-id"]
    assert [result.input for result in batch.results] == [0, 1, 2, 3]
    assert [result.request_id for result in batch.results] == [f"{batch.request_id}.{n}" for n in range(4)]
    first, too_long, third, again = batch.results
    assert isinstance(first, InputAnswer)
    assert isinstance(third, InputAnswer)
    assert isinstance(again, InputAnswer)
    assert isinstance(too_long, InputError)
    assert too_long.error.code == "context_overflow"
    assert first.output == again.output == alone.json()["output"]
    assert third.output == chat.json()["output"]
    assert (batch.succeeded, batch.failed) == (3, 1)
    assert batch.usage.output_tokens == 48
    assert batch.usage.input_tokens == sum(r.usage.input_tokens for r in (first, third, again))
    assert first.placement
    await cell.until_idle()


async def test_a_stream_says_which_input_each_event_is_of(cell: LocalCell) -> None:
    async with cell.client() as client:
        path = f"/v1/pipelines/{await declared(client, generation())}/invoke"
        answer = await client.post(path, json={"inputs": ["a", TOO_LONG, "c"]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    said = events(answer.text)
    assert said[-1][0] == "end"
    end = EndEvent.model_validate(said[-1][1])
    assert (end.request_id, end.succeeded, end.failed) == (answer.headers["x-request-id"], 2, 1)
    for number in (0, 2):
        own = [(name, data) for name, data in said if data.get("input") == number]
        assert (own[0][0], own[-1][0]) == ("start", "done")
        index = 0
        for name, data in own[1:-1]:
            assert name == "token"
            assert data["index"] == index
            index += data["tokens"]
        assert index == own[-1][1]["usage"]["output_tokens"] == 16
    (refused,) = [(name, data) for name, data in said if data.get("input") == 1]
    assert refused[0] == "error"
    assert refused[1]["error"]["code"] == "context_overflow"
    assert refused[1]["request_id"] == f"{end.request_id}.1"


async def test_a_list_longer_than_the_cell_is_worked_off_over_its_units(
    cell: LocalCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories: list[Story] = []
    monkeypatch.setattr(Recorder, "take", lambda _, story: stories.append(story))
    async with cell.client() as client:
        path = f"/v1/pipelines/{await declared(client, generation(max_output_tokens=64))}/invoke"
        answer = await client.post(path, json={"inputs": [f"number {n}" for n in range(60)], "stream": False})
    batch = BatchAnswer.model_validate(answer.json())
    assert batch.succeeded == 60, "places for 8 at a time"
    units = Counter(
        result.placement[0].unit_id for result in batch.results if isinstance(result, InputAnswer)
    )
    assert set(units) == {f"{CHAT_MODEL}-0", f"{CHAT_MODEL}-1"}
    assert min(units.values()) > 10
    (story,) = stories
    assert story.outcome is Outcome.GOOD, "to wait for a place is no failure"
    assert story.usage.output_tokens == batch.usage.output_tokens == 60 * 64
    await cell.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_list_of_which_nothing_can_run_is_refused_with_a_status(
    cell: LocalCell, stream: bool
) -> None:
    async with cell.client() as client:
        path = f"/v1/pipelines/{await declared(client)}/invoke"
        answer = await client.post(path, json={"inputs": [TOO_LONG, TOO_LONG], "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_overflow"
    assert [(each["input"], each["code"]) for each in error["details"]["inputs"]] == [
        (0, "context_overflow"),
        (1, "context_overflow"),
    ]


async def test_a_client_that_leaves_frees_all(cell: LocalCell) -> None:
    async with cell.client() as client:
        path = f"/v1/pipelines/{await declared(client, generation(max_output_tokens=4000))}/invoke"
        body = {"inputs": [f"number {n}" for n in range(20)]}
        async with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and "text" in json.loads(line[6:]):
                    break
    await cell.until_idle()
    async with asyncio.timeout(5), cell.client() as client:
        answer = await client.post(
            path, json={"input": "x", "stream_control": {"min_tokens_per_chunk": 4000}}
        )
        assert answer.status_code == 200


async def test_a_one_shot_takes_a_list_too(cell: LocalCell) -> None:
    async with cell.client() as client:
        body = {"pipeline": {"steps": [generation()]}, "inputs": ["a", "b"], "stream": False}
        batch = BatchAnswer.model_validate((await client.post("/v1/pipeline", json=body)).json())
    assert (batch.succeeded, batch.pipeline_id, batch.revision) == (2, "", 0)
