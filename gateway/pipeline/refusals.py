"""Validation faults as sentences: where, what was given, what to do. Pure.

Texts are never quoted back, only numbers and the words of closed choices: a body may hold prompts and
secrets, and error messages end up in logs.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Sequence
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from grid.errors import InvalidRequest

MAX_FAULTS = 8
"""Faults listed for one body: enough to correct it in one go, without echoing a hostile one."""
MAX_QUOTED_CHARS = 64
"""Of a given word: a typing error still shows, a pasted text does not."""

MAX_KEYS = 512
"""Of one object: documents' metadata has the most fields, 256. Each unknown one costs a fault of 15 µs."""
MAX_VALUES = 200_000
"""Of one body: the largest batches of documents with full metadata. Taking them apart takes 50 ms."""
FEW_VALUES = 2_000
"""A body with no more commas than this can't hold enough values to be worth a look."""

MISFIT = "misfit"
"""Type of the faults that `misfit` makes."""

_UNIONS = {Union, types.UnionType}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_KINDS = {
    "datetime": "a moment such as 2026-01-31T12:00:00Z",
    "date": "a moment such as 2026-01-31T12:00:00Z",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}


def refusal(model: type[BaseModel], error: ValidationError) -> InvalidRequest:
    """Return the refusal of a body that failed to be `model`: unknown fields first, as they explain most
    missing ones."""
    faults = [fault for fault in error.errors(include_url=False) if not _hollow(fault)]
    faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")
    told = [_told(model, fault) for fault in faults[:MAX_FAULTS]]
    param, message = told[0]
    if len(faults) == 1:
        return InvalidRequest(message, param=param)
    return InvalidRequest(message, param=param, errors=[{"param": p, "message": m} for p, m in told])


def query_refusal(fault: ErrorDetails) -> InvalidRequest:
    """Return the refusal of a query parameter, whose value (unlike a body's) may be quoted back."""
    param = path(fault["loc"][1:])
    told = _sentence(fault, BaseModel).replace("got text", f"got {_quoted(fault['input'])}")
    return InvalidRequest(f"{param}: {told}", param=param)


def check_size(body: bytes) -> None:
    """Raise InvalidRequest for JSON with so many values that only to list its faults would take seconds.

    Nothing else in here stops early: every fault of an object is found before the first is told.
    """
    if body.count(b",") <= FEW_VALUES:
        return
    try:
        left = [from_json(body)]
    except ValueError:
        return  # whoever parses it says where it is broken
    values = 0
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if len(value) > MAX_KEYS:
                raise InvalidRequest(f"an object of the body has {len(value)} fields; {MAX_KEYS} are allowed")
            left += value.values()
        elif isinstance(value, list):
            left += value
        else:
            continue
        values += len(value)
        if values > MAX_VALUES:
            raise InvalidRequest(f"the body holds more than {MAX_VALUES} values; send it in parts")


def cut(text: str) -> str:
    """Return a word of the caller's as it may be quoted back."""
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"


def path(steps: Sequence[str | int]) -> str:
    """Return a location such as `pipeline.steps[0].top_k`."""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{cut(step)}" if text else cut(step)
    return text


def misfit(at: Sequence[str | int], reason: str) -> PydanticCustomError:
    """Return the fault of a validator that blames a place below its own, such as `(1, "uses")`."""
    return PydanticCustomError(MISFIT, "{reason}", {"at": list(at), "reason": reason})


def _told(model: type[BaseModel], fault: ErrorDetails) -> tuple[str, str]:
    """Return (param, message) of one fault."""
    steps, parent = _locate(model, fault["loc"])
    if fault["type"] == MISFIT:
        steps += fault["ctx"]["at"]
    elif fault["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        steps.append("type")
    param = path(steps)
    sentence = _sentence(fault, parent)
    return param, f"{param}: {sentence}" if param else sentence


def _sentence(fault: ErrorDetails, parent: type[BaseModel]) -> str:
    kind, context, given = fault["type"], fault.get("ctx", {}), fault["input"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {context.get('error', 'it cannot be read')}"
    if kind == "extra_forbidden":
        return _unknown(str(fault["loc"][-1]), parent)
    if kind == "missing":
        return "is missing, and has no default"
    if kind == MISFIT:
        return str(context["reason"])
    if kind == "value_error":
        return str(context["error"])
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "union_tag_invalid":
        supported = _choices(context["expected_tags"])
        return f"unsupported step type {_quoted(context['tag'])}; supported: {supported}"
    if kind == "union_tag_not_found":
        return "every step needs a type; supported: retrieval, generation"
    if kind in {"literal_error", "enum"}:
        return f"must be one of {_choices(str(context['expected']))}; got {_quoted(given)}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {context[key]}; got {_shown(given)}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}; got {_quoted(given)}"
    if kind in {"too_short", "string_too_short"}:
        return f"needs at least {_things(kind, context['min_length'])}; got {len(given)}"
    if kind in {"too_long", "string_too_long"}:
        return f"takes at most {_things(kind, context['max_length'])}; got {len(given)}"
    wanted = _KINDS.get(kind.split("_")[0])
    if wanted is not None:
        return f"must be {wanted}; got {_shown(given)}"
    return fault["msg"][:1].lower() + fault["msg"][1:]


def _unknown(name: str, parent: type[BaseModel]) -> str:
    return f"unknown field; {nearest(name, parent.model_fields, 'fields')}"


def nearest(name: str, known: Collection[str], things: str) -> str:
    """Return which of the known `things` somebody who wrote `name` may have meant, as a remedy."""
    # A field's name is short; comparing takes time with the square of the length.
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_QUOTED_CHARS else []
    return f"did you mean `{close[0]}`?" if close else f"known {things}: {', '.join(known)}"


def _hollow(fault: ErrorDetails) -> bool:
    """A list whose items failed is told to be short as well: true of what was left of it, not of the body."""
    return fault["type"] == "too_short" and len(fault["input"]) >= fault["ctx"]["min_length"]


def _things(kind: str, count: int) -> str:
    thing = "character" if kind.startswith("string") else "item"
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _choices(expected: str) -> str:
    return expected.replace("'", "").replace(" or ", ", ")


def _quoted(given: Any) -> str:
    if not isinstance(given, str):
        return _shown(given)
    return repr(cut(given))


def _shown(given: Any) -> str:
    if given is None:
        return "null"
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, int | float):
        return cut(repr(given))
    if isinstance(given, str):
        return "text"
    return "a list" if isinstance(given, list | tuple) else "an object"


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[int | str], type[BaseModel]]:
    """Return (path, model that holds the path's last step) of a pydantic location.

    A location names the member of a discriminated union by its tag, which is no part of the caller's path.
    """
    steps: list[int | str] = []
    parent = model
    at: Any = model
    for step in loc:
        if get_origin(at) in _UNIONS:
            at = _bare(next((option for option in get_args(at) if _tag(option) == step), None))
            continue
        steps.append(step)
        if _is_model(at):
            parent = at
            field = at.model_fields.get(str(step))
            at = _bare(field.annotation) if field is not None else None
        else:
            at = _bare(get_args(at)[0]) if get_args(at) else None
    return steps, parent


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _tag(option: Any) -> str | None:
    """Return what names a member of a discriminated union in a location."""
    if get_origin(option) is Annotated:
        return next((mark.tag for mark in option.__metadata__ if isinstance(mark, Tag)), None)
    return option.model_fields["type"].default if _is_model(option) else None


def _bare(annotation: Any) -> Any:
    """Return an annotation without `Annotated` and without `| None`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    options = get_args(annotation)
    if get_origin(annotation) in _UNIONS and type(None) in options:
        rest = [option for option in options if option is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007  built at run time
    return annotation
