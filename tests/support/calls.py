"""Contracts and answers over HTTP, for tests on a local cell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from support.local_cell import CHAT_MODEL

from gateway.http.shapes.pipelines import PipelineView


def generation(**fields: Any) -> dict[str, Any]:
    return {"type": "generation", "model": CHAT_MODEL, "max_output_tokens": 16, **fields}


async def declared(client: httpx.AsyncClient, *steps: dict[str, Any], **contract: Any) -> str:
    answer = await client.post(
        "/v1/pipelines", json={"name": "p", "pipeline": {"steps": steps or [generation()]}, **contract}
    )
    assert answer.status_code == 201, answer.text
    PipelineView.model_validate(answer.json())
    pipeline_id: str = answer.json()["pipeline_id"]
    return pipeline_id


async def settled(client: httpx.AsyncClient, pipeline_id: str) -> dict[str, Any]:
    """Return a pipeline once it is no longer deploying. Fails after ten seconds."""
    view: dict[str, Any] = {"status": "deploying"}
    async with asyncio.timeout(10):
        while view["status"] == "deploying":
            view = (await client.get(f"/v1/pipelines/{pipeline_id}")).json()
            PipelineView.model_validate(view)
    return view


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and data of each server-sent event; comment lines are left out."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            assert lines[0].startswith("event: ")
            assert lines[1].startswith("data: ")
            found.append((lines[0][7:], json.loads(lines[1][6:])))
    return found
