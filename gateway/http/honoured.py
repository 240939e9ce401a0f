"""What bodies of the compatible routes have in common: text in parts, and fields that can't be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from gateway.pipeline.contract import MAX_TEXT_CHARS, Part, Text
from grid.errors import InvalidRequest

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that the grid can't honour, with the values that ask for nothing beyond what it does anyway."""


def joined_text(value: Any) -> Any:
    """Join text parts; parts of other kinds are refused by their kind."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for position, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = repr(kind[:64]) if isinstance(kind, str) else "no type"
            raise ValueError(f"part {position} has {named}; this cell's models take parts of type 'text'")
        texts.append(part["text"])
    return "".join(texts)


PARTED_SCHEMA = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_TEXT_CHARS},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
PartedText = Annotated[Text, BeforeValidator(joined_text), WithJsonSchema(PARTED_SCHEMA)]
"""Text, or a list of text parts, together not empty."""


def refuse_unhonoured(part: Part, neutral: Neutral, prefix: str = "") -> None:
    """Raise InvalidRequest for the first field of `part` that asks for what the grid can't do."""
    # Most bodies name none of these, so only what was given is looked at.
    for name in part.model_fields_set & neutral.keys():
        value = getattr(part, name)
        if value is None or any(type(value) is type(same) and value == same for same in neutral[name]):
            continue
        accepted = " or ".join(repr(same) for same in neutral[name])
        remedy = f"leave it out, or send {accepted}" if accepted else "leave it out"
        raise InvalidRequest(f"{prefix}{name}: this cell can't honour it; {remedy}", param=prefix + name)
