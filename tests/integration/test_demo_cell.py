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
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Hungary": "Budapest",
    "Sweden": "Stockholm",
    "Norway": "Oslo",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Peru": "Lima",
}
"""Twenty questions whose answers can't be taken for one another."""


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
    base_url, key = connection
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0) as client:
        answers = await asyncio.gather(*(capital(client, country) for country in CAPITALS))
    right = 0
    for (country, city), text in zip(CAPITALS.items(), answers, strict=True):
        right += country in text or city in text
        others = [other for other in (*CAPITALS, *CAPITALS.values()) if other not in (country, city)]
        assert [other for other in others if other in text] == [], f"{country}: {text!r}"
    assert right >= AT_ONCE * 0.8, answers  # a model of this size errs, but not in most of them


async def capital(client: openai.AsyncOpenAI, country: str) -> str:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
        max_tokens=10,
        temperature=0,
        stream=True,
    )
    parts = [chunk async for chunk in stream]
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    return "".join(part.choices[0].delta.content or "" for part in parts)


async def test_twenty_pipelines_at_once_deliver_every_token_once(connection: tuple[str, str]) -> None:
    async with AsyncGrid(*connection) as grid:
        await asyncio.gather(
            *(ask_and_check(grid, f"How do I add SSH key number {n}?") for n in range(AT_ONCE))
        )


async def ask_and_check(grid: AsyncGrid, question: str) -> None:
    """Ask, and assert that the tokens are contiguous and make up the answer."""
    async with grid.pipeline(PIPELINE).stream(question) as run:
        tokens = [event async for event in run if isinstance(event, Token)]
    answer = run.answer()
    assert [token.index for token in tokens] == running_sum([token.tokens for token in tokens])
    assert answer.usage.output_tokens == sum(token.tokens for token in tokens) > 0
    assert answer.text == "".join(token.text for token in tokens)


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
