"""The demo as `make demo` runs it, with the real model; then, on the same cell, what needs real vLLM.

The tests run in the order of the file: the first starts the cell that the others use.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway import launch
from gateway.demo import KEY_FILE, demo_config
from grid import AsyncGrid, Grid
from grid.errors import ContextOverflow
from grid.runs import Token

pytestmark = [
    pytest.mark.cell,
    pytest.mark.vllm,
    pytest.mark.timeout(580),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MODEL = "smollm2-135m-instruct"
PIPELINE = "customer-support-pipeline"
AT_ONCE = 20


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, Any]]:
    """Run the demo, keep its cell, and stop it after the last test of this file."""
    finished = subprocess.run(
        [sys.executable, "-m", "gateway.demo", "--json", "--keep"],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    try:
        assert finished.returncode == 0, finished.stderr
        yield json.loads(finished.stdout)
    finally:
        launch.down(demo_config(simulated=False))
    assert launch.processes(demo_config(simulated=False)) == []


@pytest.fixture(scope="module")
def connection(demo: dict[str, Any]) -> tuple[str, str]:
    config = demo_config(simulated=False)
    return launch.status(config)["base_url"], (config.cell.state_dir / "secrets" / KEY_FILE).read_text()


def test_the_three_answers_say_what_the_articles_say(demo: dict[str, Any]) -> None:
    assert demo["simulated"] is False
    assert len(demo["answers"]) == 3
    for answer in demo["answers"]:
        assert answer["expected"], "a demo question without an expectation checks nothing"
        assert [part for part in answer["expected"] if part not in answer["text"]] == [], answer


def test_the_answers_come_from_published_articles(demo: dict[str, Any]) -> None:
    for answer in demo["answers"]:
        assert answer["documents"]
        assert {document["metadata"]["status"] for document in answer["documents"]} == {"published"}


async def test_twenty_at_once_all_end_in_order_and_none_is_mixed_up(connection: tuple[str, str]) -> None:
    async with AsyncGrid(*connection) as grid:
        alone = await asked(grid, 0)
        answers = await asyncio.gather(*(asked(grid, index) for index in range(AT_ONCE)))
    for index, (text, tokens) in enumerate(answers):
        assert str(1000 + index) in text, f"answer {index} is another's: {text!r}"
        assert [token.index for token in tokens] == running_sum([token.tokens for token in tokens])
    assert answers[0][0] == alone[0], "a greedy answer does not depend on its neighbours"


async def asked(grid: AsyncGrid, index: int) -> tuple[str, list[Token]]:
    question = f"Repeat this number and nothing else: {1000 + index}"
    async with grid.pipeline(PIPELINE).stream(question) as run:
        tokens = [event async for event in run if isinstance(event, Token)]
    return run.answer().text, tokens


def running_sum(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def test_the_official_openai_client_holds_a_conversation(connection: tuple[str, str]) -> None:
    base_url, key = connection
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
        messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
        said = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=32, temperature=0
        ).choices[0]
        assert "Paris" in (said.message.content or "")
        messages += [said.message, {"role": "user", "content": "Which country is that city in?"}]
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=32, temperature=0, stream=True
            )
        )
    assert "France" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_prompt_beyond_the_context_is_refused_with_its_counts(connection: tuple[str, str]) -> None:
    with Grid(*connection) as grid, pytest.raises(ContextOverflow) as refused:
        grid.pipeline(PIPELINE).invoke("word " * 100_000)
    assert refused.value.details["context_tokens"] == 8192
