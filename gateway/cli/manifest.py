"""What `grid apply` reads: a pipeline contract, or a manifest of a data source, its documents and a pipeline.

    {"data_source": {"name": …, "type": "qdrant", …},
     "documents": "articles.jsonl" or [{"id", "text", "metadata", "title"?}, …],
     "pipeline": "pipeline.json" or {…}}

Every part may be left out; paths are relative to the manifest. A document's `title` becomes its text's first
line and the metadata field `title`, so that it is embedded and shown. The gateway checks what parts say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grid.errors import InvalidRequest

PARTS = ("data_source", "documents", "pipeline")
CONTRACT_KEY = "steps"
"""A contract's `pipeline` holds this; a manifest's is a path, or a whole contract."""


@dataclass(frozen=True, slots=True)
class Manifest:
    data_source: Mapping[str, Any] | None
    documents: tuple[dict[str, Any], ...]
    pipeline: Mapping[str, Any] | None


def load_manifest(path: Path) -> Manifest:
    """Return what the file at `path` declares. Raises InvalidRequest that names file, place and remedy."""
    data = _json(path, _read(path))
    if not isinstance(data, dict):
        raise InvalidRequest(f"{path}: holds no JSON object; it should be a pipeline contract or a manifest")
    pipeline = data.get("pipeline")
    if isinstance(pipeline, dict) and CONTRACT_KEY in pipeline:
        return Manifest(None, (), data)
    unknown = sorted(set(data) - set(PARTS))
    if unknown or not data:
        said = f"unknown part {unknown[0]!r}" if unknown else "empty"
        raise InvalidRequest(
            f"{path}: {said}; a manifest has {', '.join(PARTS)}", param=unknown[0] if unknown else ""
        )
    source = data.get("data_source")
    if source is not None and not (isinstance(source, dict) and isinstance(source.get("name"), str)):
        raise InvalidRequest(f"{path}: data_source: should be an object with a `name`", param="data_source")
    documents = _documents(path, data.get("documents"))
    if documents and source is None:
        raise InvalidRequest(f"{path}: documents need a `data_source` to go into", param="data_source")
    if isinstance(pipeline, str):
        beside = path.parent / pipeline
        pipeline = _json(beside, _read(beside))
    if pipeline is not None and not isinstance(pipeline, dict):
        raise InvalidRequest(f"{path}: pipeline: should be a contract, or the path of one", param="pipeline")
    return Manifest(source, documents, pipeline)


def load_documents(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the documents in a file of JSON lines. Raises InvalidRequest that names file and line."""
    lines = _read(path).splitlines()
    return tuple(
        _document(f"{path}:{number}", _json(path, line, number))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def _documents(path: Path, given: Any) -> tuple[dict[str, Any], ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        return load_documents(path.parent / given)
    if isinstance(given, list):
        return tuple(_document(f"{path}: documents[{index}]", item) for index, item in enumerate(given))
    raise InvalidRequest(
        f"{path}: documents: should be a list, or the path of a JSON-lines file", param="documents"
    )


def _document(place: str, item: Any) -> dict[str, Any]:
    if (
        not isinstance(item, dict)
        or not isinstance(item.get("id"), str)
        or not isinstance(item.get("text"), str)
    ):
        raise InvalidRequest(
            f"{place}: a document is an object with the texts `id` and `text`", param="documents"
        )
    document = dict(item)
    title = document.pop("title", None)
    if title:
        document["text"] = f"{title}\n{item['text']}"
        document["metadata"] = {**(item.get("metadata") or {}), "title": title}
    return document


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path}: can't be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: is not UTF-8 text; save it as UTF-8") from error


def _json(path: Path, text: str, line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{line + error.lineno - 1}:{error.colno}"
        raise InvalidRequest(f"{place}: is not valid JSON: {error.msg}") from error
