"""OpenAI-compatible embeddings: the body, and the route (raw ASGI). Vectors have unit length."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema

from gateway.http.call import Call
from gateway.http.data_sources import embedding_model, known_dimension
from gateway.http.exchange import JSON, unless_client_leaves
from gateway.knowledge.embedder import BATCH_TEXTS, EmbedOrder
from gateway.observe.story import RunStory
from gateway.pipeline.contract import MAX_DIMENSION, Name, Part, clean_text, parse
from gateway.trust.residency import check_marks
from grid.errors import GridError, InvalidRequest, NotFound

MAX_TEXTS = 2_048
"""Of one call, what OpenAI's clients know: some seconds of a CPU unit's work, in batches of its own."""

MAX_TEXT_CHARS = 30_000
"""Of one text, about 7,500 tokens: beyond the window of the usual embedding models."""


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and any(isinstance(item, int | list) for item in value[:1]):
        raise ValueError("holds token ids, which belong to one model's vocabulary; send the text itself")
    return value


EmbedText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARS}


class EmbeddingsRequest(Part):
    model: Name
    """An embedding model of the cell, or one of its aliases."""
    input: Annotated[
        tuple[EmbedText, ...],
        Field(min_length=1, max_length=MAX_TEXTS, strict=False, fail_fast=True),
        BeforeValidator(_texts),
        WithJsonSchema(
            {
                "anyOf": [
                    _TEXT_SCHEMA,
                    {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_TEXTS},
                ]
            }
        ),
    ]
    """One text or several. Of one beyond the model's window, the beginning is read."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    """Only checked; the model decides."""
    user: Any = None
    """Changes nothing."""


async def create_embeddings(call: Call) -> None:
    """Return the vectors of texts."""
    request = parse(EmbeddingsRequest, await call.body())
    await unless_client_leaves(call.exchange, _answer(call, request))


async def _answer(call: Call, request: EmbeddingsRequest) -> None:
    config = call.services.config
    try:
        model = embedding_model(request.model, config, "model")
    except InvalidRequest as unknown:
        raise NotFound(unknown.message, param="model") from None
    known = known_dimension(call, model)
    if known:
        check_length(request.dimensions, model, known)
    texts = tuple(map(clean_text, request.input))
    check_marks(call.residency, texts)
    noted = call.story.run(model)
    try:
        rows = await _rows(call, request.dimensions, model, texts, noted)
    except GridError as error:
        noted.fail(error)
        raise
    noted.finished = True
    tokens = noted.usage.input_tokens
    encode = _base64 if request.encoding_format == "base64" else _same
    payload = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(row)}
            for index, row in enumerate(rows)
        ],
        "model": request.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    answer = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    await call.exchange.start(200, [JSON, (b"content-length", b"%d" % len(answer))])
    await call.exchange.finish(answer)


async def _rows(
    call: Call, dimensions: int | None, model: str, texts: tuple[str, ...], noted: RunStory
) -> list[npt.NDArray[np.float32]]:
    """Embed `texts` batch by batch, so that a long call leaves room between its batches for others."""
    deadline_s = asyncio.get_running_loop().time() + call.services.config.gateway.default_deadline_s
    rows: list[npt.NDArray[np.float32]] = []
    for start in range(0, len(texts), BATCH_TEXTS):
        embedded = await call.services.embedder.embed(
            EmbedOrder(
                tenant_id=call.tenant.tenant_id,
                request_id=call.request_id,
                step_id=f"embedding-{start // BATCH_TEXTS + 1}",
                model=model,
                texts=texts[start : start + BATCH_TEXTS],
                allowed_regions=call.residency.allowed_regions,
                deadline_s=deadline_s,
                noted=noted,
            )
        )
        noted.charge(embedded.usage)
        check_length(dimensions, model, embedded.vectors.shape[1])
        rows += list(embedded.vectors)
    return rows


def check_length(asked: int | None, model: str, length: int) -> None:
    """Raises InvalidRequest where a caller wants vectors of another length than its model's."""
    if asked is not None and asked != length:
        raise InvalidRequest(
            f"dimensions: {model} makes vectors of {length} numbers, not {asked}; leave it out",
            param="dimensions",
        )


def _base64(row: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode()


def _same(row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(row)
