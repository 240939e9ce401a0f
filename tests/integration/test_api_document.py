"""The OpenAPI document against the cell that it describes: schemathesis makes calls from it.

No answer may be a 500, have a status or a shape that the document doesn't name, or be long in coming. Names
that only this cell knows (models, a pipeline, a data source) are put into the document first, so that calls
get past the look-ups. `ZEROGRID_API_EXAMPLES` asks for more calls of each operation than the whole suite has
time for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.local_cell import CHAT_MODEL, EMBEDDING_MODEL, LocalCell, cell_config, local_cell

EXAMPLES = int(os.environ.get("ZEROGRID_API_EXAMPLES", "0"))
FEW_EXAMPLES = 6
FEW_S, MANY_S = 15, 540
"""After which no new calls are made."""
ANSWER_S = 10
"""A call that takes longer hangs: this cell's models wait for nothing."""
SETTINGS = """\
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503, 504, 529]
"""
"""A cell of one small unit is asked for what it can't do now, and says so."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
)


async def tailored(cell: LocalCell) -> dict[str, Any]:
    """Return the cell's document, with what exists in the cell as the only names to try where it matters."""
    async with cell.client(cell.operator_key) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
        steps = [{"type": "generation", "model": CHAT_MODEL, "max_output_tokens": 4}]
        made = await client.post("/v1/pipelines", json={"pipeline": {"steps": steps}})
        source = await client.post("/v1/data-sources", json={"name": "kb", "type": "qdrant"})
    ids = {"pipeline_id": made.json()["pipeline_id"], "data_source_id": source.json()["data_source_id"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", []):
                if method != "delete" and path.startswith("/v1/") and parameter.get("name") in ids:
                    parameter["schema"] = {"type": "string", "enum": [ids[parameter["name"]]]}
    components = document["components"]
    components["parameters"]["residency"]["schema"] = {"enum": ["EU", "eu-central-1"]}
    models = {
        "ChatRequest": CHAT_MODEL,
        "MessagesRequest": CHAT_MODEL,
        "CountRequest": CHAT_MODEL,
        "GenerationStep": CHAT_MODEL,
        "EmbeddingsRequest": EMBEDDING_MODEL,
        "QueryEmbedding": EMBEDDING_MODEL,
    }
    for name, model in models.items():
        components["schemas"][name]["properties"]["model"] = {"enum": [model]}
    return document


@pytest.mark.slow
@pytest.mark.timeout(FEW_S + 60 if not EXAMPLES else MANY_S + 120)
async def test_the_cell_answers_as_its_document_says(tmp_path: Path) -> None:
    async with local_cell(cell_config(tmp_path / "cell")) as cell:
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(await tailored(cell)))
        (tmp_path / "schemathesis.toml").write_text(SETTINGS)
        arguments = {
            "url": cell.base_url,
            "header": f"x-api-key: {cell.operator_key}",
            "checks": ",".join(CHECKS),
            "phases": "coverage,fuzzing" if EXAMPLES else "fuzzing",
            "max-examples": EXAMPLES or FEW_EXAMPLES,
            "max-time": MANY_S if EXAMPLES else FEW_S,
            "request-timeout": ANSWER_S,
            "generation-database": "none",
            "seed": 1,
        }
        options = [f"--{name}={value}" for name, value in arguments.items()]
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", str(file), "--no-color", *options),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            told, _ = await run.communicate()
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
        report = told.decode()
        assert run.returncode == 0, report
        assert not re.search(r"\b0 generated", report), report
        await cell.until_idle()
