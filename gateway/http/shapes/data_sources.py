"""Data sources and their documents."""

from __future__ import annotations

from typing import Any

from gateway.http.shapes.shape import Shape


class DataSourceView(Shape):
    data_source_id: str
    name: str
    type: str
    config: dict[str, Any]
    region: str
    embedding_model: str
    dimension: int
    document_count: int
    created_at: str
    last_updated_at: str


class DataSourceList(Shape):
    data_sources: list[DataSourceView]


class DocumentsAnswer(Shape):
    data_source_id: str
    added: int
    replaced: int
    document_count: int
