"""What a metadata filter accepts, and how it names what it does not."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from gateway.knowledge.filters import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_LEAVES,
    MAX_METADATA_BYTES,
    MAX_QUOTED_CHARS,
    MAX_VALUES,
    AnyTerm,
    InRange,
    check_metadata,
    facets_of,
    parse_filter,
)
from grid.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"status": None}, "filter.status"),
        ({"status": []}, "filter.status"),
        ({"status": ["a", None]}, "filter.status[1]"),
        ({"status": ["a"] * (MAX_VALUES + 1)}, "filter.status"),
        ({"year": {}}, "filter.year"),
        ({"year": {"near": 3}}, "filter.year.near"),
        ({"year": {"gte": "2020"}}, "filter.year.gte"),
        ({"year": {"gte": True}}, "filter.year.gte"),
        ({"year": {"gte": float("nan")}}, "filter.year.gte"),
        ({"year": {"lte": float("inf")}}, "filter.year.lte"),
        ({"year": 2**63}, "filter.year"),
        ({"": "x"}, "filter."),
        ({"must": [{"key": "a"}]}, "filter.must[0]"),
        ({f"f{n}": 1 for n in range(MAX_CONDITIONS + 1)}, "filter"),
        ([], "filter"),
    ],
)
def test_what_it_can_not_mean_is_refused_by_path(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_filter(given)
    assert refused.value.param == param


def test_the_step_that_holds_the_filter_is_part_of_the_path() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_filter({"status": None}, "pipeline.steps[0].filter")
    assert refused.value.param == "pipeline.steps[0].filter.status"


def test_conditions_by_kind() -> None:
    (one,) = parse_filter({"status": "published"}).conditions
    (several,) = parse_filter({"status": ("published", "draft", "published")}).conditions
    (between,) = parse_filter({"year": {"gte": 2020, "lt": 2024}}).conditions
    assert isinstance(one, AnyTerm)
    assert isinstance(several, AnyTerm)
    assert one.terms == several.terms[:1]
    assert len(several.terms) == 2
    assert isinstance(between, InRange)
    assert (between.gte, between.gt, between.lte, between.lt) == (2020.0, None, None, 2024.0)


def test_a_field_is_told_from_a_value_wherever_the_border_lies() -> None:
    left, right = facets_of({"ab": "c"}), facets_of({"a": "bc"})
    assert set(left.terms).isdisjoint(right.terms)


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"a": object()}, "documents[3].metadata.a"),
        ({"a": [1, {"b": 2}]}, "documents[3].metadata.a[1]"),
        ({"a": {"b": float("nan")}}, "documents[3].metadata.a.b"),
        ({"a": 2**64}, "documents[3].metadata.a"),
        ({"": 1}, "documents[3].metadata."),
        ({"a": list(range(MAX_LEAVES + 1))}, "documents[3].metadata"),
    ],
)
def test_metadata_that_would_not_come_back_unchanged_is_refused(metadata: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_metadata(metadata, "documents[3].metadata")
    assert refused.value.param == param


def test_metadata_has_a_greatest_depth() -> None:
    nested: dict[str, Any] = {"leaf": 1}
    for _level in range(MAX_DEPTH - 1):
        nested = {"inner": nested}
    check_metadata(nested, "metadata")
    with pytest.raises(InvalidRequest, match="deep"):
        check_metadata({"inner": nested}, "metadata")


@pytest.mark.parametrize("letter", ["x", "\u00e9"])
def test_metadata_has_a_greatest_size_as_json(letter: str) -> None:
    room = (MAX_METADATA_BYTES - len('{"a":{"b":""}}')) // len(letter.encode())
    check_metadata(MappingProxyType({"a": MappingProxyType({"b": letter * room})}), "documents[3].metadata")
    with pytest.raises(InvalidRequest, match=str(MAX_METADATA_BYTES)) as refused:
        check_metadata({"a": {"b": letter * (room + 1)}}, "documents[3].metadata")
    assert refused.value.param == "documents[3].metadata"


LONG = "n" * 10_000


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({LONG: None}, f"filter.{LONG[:MAX_QUOTED_CHARS]}"),
        ({"year": {LONG: 1}}, f"filter.year.{LONG[:MAX_QUOTED_CHARS]}"),
        ({10**5_000: "x"}, "filter.int"),
    ],
)
def test_a_long_name_is_not_said_back_whole(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_filter(given)
    assert refused.value.param == param
    assert LONG[: MAX_QUOTED_CHARS + 1] not in refused.value.message


def test_a_long_name_of_metadata_is_not_said_back_whole() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_metadata({"a": {LONG: 1}}, "metadata")
    assert refused.value.param == f"metadata.a.{LONG[:MAX_QUOTED_CHARS]}"
