"""What every shape is, and the answer to every deletion."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Deleted(Shape):
    deleted: bool
    id: str
