"""What a metadata filter means, the same on every store. Pure.

A filter is `{field: condition}`; all conditions must hold. A condition is a value (equal to it), a list
(equal to any of it) or a range such as `{"gte": 2020, "lt": 2024}`. A field of nested metadata is named by
its path, `author.name`. A field that holds a list matches when any of its elements does. Equality knows
types: `true` is not `1` and `"1"` is not `1`, while `1` and `1.0` are one number.

Stores differ in what they can match (the embedded engine has no booleans and no equality on fractions), so
equality is turned into one term a (field, type, value), and a document carries the terms of its metadata:
every store only has to match keywords. Ranges work on numbers kept under a safe name a field.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grid.errors import InvalidRequest

MAX_CONDITIONS = 16
MAX_VALUES = 64
"""Alternatives of one condition."""
MAX_FIELD_CHARS = 256
MAX_VALUE_CHARS = 1_024
"""A filter matches short values, not text."""
MAX_DEPTH = 8
"""Of nested metadata."""
MAX_LEAVES = 256
"""Values in one document's metadata; each becomes a term, in every piece of the document."""
MAX_METADATA_BYTES = 16 * 1024
"""Of one document's metadata as JSON. Each piece's row holds a copy, hundreds in a long document, and
each hit brings one: a hundred of them and their texts stay well within a frame."""
MAX_QUOTED_CHARS = 64
"""Of a caller's own word in what is said back: enough to find it by, too little to flood a log."""
MAX_INTEGER = 2**63 - 1
"""What every store keeps exactly."""
TERM_BYTES = 16
"""128 bits: two different values never share a term."""
NAME_BYTES = 8
BOUNDS = ("gte", "gt", "lte", "lt")

Scalar = str | bool | int | float


@dataclass(frozen=True, slots=True)
class AnyTerm:
    """The document carries one of these terms."""

    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InRange:
    """A number of the document under `name` lies within the bounds that are given."""

    name: str
    gte: float | None = None
    gt: float | None = None
    lte: float | None = None
    lt: float | None = None


Condition = AnyTerm | InRange


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that must all hold; without any, everything matches."""

    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Facets:
    """What a document's metadata offers to filters."""

    terms: tuple[str, ...]
    numbers: dict[str, list[float]]


def parse_filter(given: Mapping[str, Any], param: str = "filter") -> Filter:
    """Return the filter that `given` means. Raises InvalidRequest whose `param` is the field's path."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            'a filter is an object of conditions, such as {"status": "published"}', param=param
        )
    if len(given) > MAX_CONDITIONS:
        raise InvalidRequest(
            f"a filter has at most {MAX_CONDITIONS} conditions, not {len(given)}", param=param
        )
    return Filter(
        tuple(_condition(field, condition, f"{param}.{_quoted(field)}") for field, condition in given.items())
    )


def facets_of(metadata: Mapping[str, Any]) -> Facets:
    """Return the terms and numbers of one document's metadata, which `check_metadata` has accepted."""
    terms: dict[str, None] = {}
    numbers: dict[str, list[float]] = {}
    for field, value in _leaves(metadata, ""):
        terms[_term(field, value)] = None
        if not isinstance(value, bool | str):
            numbers.setdefault(_name(field), []).append(float(value))
    return Facets(tuple(terms), numbers)


def check_metadata(metadata: Mapping[str, Any], param: str) -> None:
    """Raises InvalidRequest, naming the field's path, for what can't be stored and given back unchanged."""
    _check_map(metadata, param, 1)
    leaves = sum(1 for _leaf in _leaves(metadata, ""))
    if leaves > MAX_LEAVES:
        raise InvalidRequest(f"metadata holds at most {MAX_LEAVES} values, not {leaves}", param=param)
    text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"), default=dict)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"metadata has at most {MAX_METADATA_BYTES} bytes as JSON, not {size}; what is to be searched by "
            "its meaning belongs in the text",
            param=param,
        )


def _condition(field: str, condition: Any, param: str) -> Condition:
    if not isinstance(field, str) or not 0 < len(field) <= MAX_FIELD_CHARS:
        raise InvalidRequest(f"a metadata field's name has 1 to {MAX_FIELD_CHARS} characters", param=param)
    if isinstance(condition, Mapping):
        return _range(field, condition, param)
    if isinstance(condition, list | tuple):
        if not 0 < len(condition) <= MAX_VALUES:
            raise InvalidRequest(
                f"a list of values has 1 to {MAX_VALUES} of them, not {len(condition)}", param=param
            )
        values = [_value(value, f"{param}[{position}]") for position, value in enumerate(condition)]
        return AnyTerm(tuple(dict.fromkeys(_term(field, value) for value in values)))
    return AnyTerm((_term(field, _value(condition, param)),))


def _range(field: str, bounds: Mapping[str, Any], param: str) -> InRange:
    if not bounds:
        raise InvalidRequest(f"a range needs at least one of {', '.join(BOUNDS)}", param=param)
    limits: dict[str, float] = {}
    for bound, value in bounds.items():
        path = f"{param}.{_quoted(bound)}"
        if bound not in BOUNDS:
            raise InvalidRequest(
                f"unknown condition {_quoted(bound)!r}: a condition is a value, a list of values, or a range "
                f"made of {', '.join(BOUNDS)}",
                param=path,
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not _storable_number(value):
            raise InvalidRequest("the bound of a range is a finite number", param=path)
        limits[bound] = float(value)
    return InRange(_name(field), **limits)


def _value(value: Any, param: str) -> Scalar:
    if isinstance(value, str):
        if len(value) > MAX_VALUE_CHARS:
            raise InvalidRequest(f"a filter value has at most {MAX_VALUE_CHARS} characters", param=param)
        return value
    if isinstance(value, bool) or (isinstance(value, int | float) and _storable_number(value)):
        return value
    raise InvalidRequest("a filter value is text, a finite number, true or false", param=param)


def _quoted(name: Any) -> str:
    return name[:MAX_QUOTED_CHARS] if isinstance(name, str) else type(name).__name__


def _storable_number(value: int | float) -> bool:
    return abs(value) <= MAX_INTEGER if isinstance(value, int) else math.isfinite(value)


def _check_map(given: Mapping[str, Any], param: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"metadata is nested at most {MAX_DEPTH} deep", param=param)
    for field, value in given.items():
        path = f"{param}.{_quoted(field)}"
        if not isinstance(field, str) or not 0 < len(field) <= MAX_FIELD_CHARS:
            raise InvalidRequest(f"a metadata field's name has 1 to {MAX_FIELD_CHARS} characters", param=path)
        if isinstance(value, Mapping):
            _check_map(value, path, depth + 1)
        elif isinstance(value, list | tuple):
            for position, element in enumerate(value):
                _check_scalar(element, f"{path}[{position}]")
        else:
            _check_scalar(value, path)


def _check_scalar(value: Any, param: str) -> None:
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int | float) and _storable_number(value):
        return
    raise InvalidRequest(
        "metadata is text, finite numbers, true, false, null, lists of these, and objects of all these",
        param=param,
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, Mapping):
        for field, inner in value.items():
            yield from _leaves(inner, f"{path}.{field}" if path else field)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for element in value:
            yield from _leaves(element, path)
    elif value is not None:
        yield path, value


def _term(field: str, value: Scalar) -> str:
    if isinstance(value, str):
        kind, text = "s", value
    elif isinstance(value, bool):
        kind, text = "b", str(value)
    else:
        whole = isinstance(value, int) or (value.is_integer() and abs(value) <= MAX_INTEGER)
        kind, text = "n", str(int(value)) if whole else repr(value)
    field_bytes = field.encode("utf-8", "surrogatepass")
    content = b"%d:%b%b%b" % (
        len(field_bytes),
        field_bytes,
        kind.encode(),
        text.encode("utf-8", "surrogatepass"),
    )
    return hashlib.blake2b(content, digest_size=TERM_BYTES).hexdigest()


def _name(field: str) -> str:
    """A name that is safe in every store's path syntax, whatever the field is called."""
    return "n" + hashlib.blake2b(field.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).hexdigest()
