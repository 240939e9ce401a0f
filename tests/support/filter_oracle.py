"""What a metadata filter means, in plain Python, and random metadata and filters to try it on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

VALUES: list[Any] = [
    *("published", "1", "true", "True", "", "Ü"),
    *(True, False, 0, 1, 2, 1.0, 0.5, -0.5, -0.0, 1e300, 2**53, 2**53 + 1, 2**63 - 1),
]
"""Values of which several nearly match each other."""
LIMITS = (-1, -0.5, 0, 0.5, 1, 2, 2**53)
RANGES: list[dict[str, Any]] = [
    *({bound: limit} for bound in ("gte", "gt", "lte", "lt") for limit in LIMITS),
    *({"gte": 0.5, "lt": limit} for limit in LIMITS),
    *({"gt": -0.5, "lte": limit} for limit in LIMITS),
]

FIELDS = ("status", "x.y", 'q"uo te')

scalars = st.sampled_from(VALUES)
values = st.one_of(
    scalars,
    st.none(),
    st.lists(st.one_of(st.none(), scalars), max_size=3),
    st.dictionaries(st.sampled_from(("y", "inner")), scalars, min_size=1, max_size=2),
)
metadata = st.dictionaries(st.sampled_from((*FIELDS, "x")), values, min_size=1, max_size=4)
conditions = st.one_of(scalars, st.lists(scalars, min_size=1, max_size=6), st.sampled_from(RANGES))
filters = st.dictionaries(st.sampled_from((*FIELDS, "x.inner")), conditions, min_size=1, max_size=2)


def matches(document: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(_holds(list(_values(document, field)), condition) for field, condition in where.items())


def _values(metadata: dict[str, Any], path: str) -> Iterator[Any]:
    """Every value that `path` can mean: dots are part of a name, or lead into an object."""
    for name, value in metadata.items():
        if name == path:
            yield from value if isinstance(value, list) else [value]
        elif path.startswith(f"{name}.") and isinstance(value, dict):
            yield from _values(value, path.removeprefix(f"{name}."))


def _holds(values: list[Any], condition: Any) -> bool:
    scalar = [value for value in values if value is not None and not isinstance(value, dict)]
    if isinstance(condition, dict):
        numbers = [float(value) for value in scalar if not isinstance(value, str | bool)]
        return any(_within(number, condition) for number in numbers)
    wanted = condition if isinstance(condition, list) else [condition]
    return any(_same(value, other) for value in scalar for other in wanted)


def _within(number: float, limits: dict[str, float]) -> bool:
    return (
        number >= limits.get("gte", number)
        and number <= limits.get("lte", number)
        and ("gt" not in limits or number > limits["gt"])
        and ("lt" not in limits or number < limits["lt"])
    )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)
