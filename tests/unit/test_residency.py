"""Where a request may run: rules, and marks that contradict them."""

from __future__ import annotations

import pytest

from gateway.trust.jurisdictions import COUNTRIES, COUNTRY_BY_REGION, EEA, EU, REGIONS_BY_COUNTRY
from gateway.trust.residency import ANYWHERE, check_marks, parse_rule
from grid.errors import Forbidden, InvalidRequest


def test_the_table_is_consistent() -> None:
    assert len(EU) == 27
    assert EEA > EU
    assert set(REGIONS_BY_COUNTRY) <= COUNTRIES
    assert len(COUNTRY_BY_REGION) == sum(map(len, REGIONS_BY_COUNTRY.values())), (
        "a region lies in one country"
    )
    assert not [region for region in COUNTRY_BY_REGION if region.startswith("-") or region.endswith("-")]


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ("EU", "eu-central-1", "us-east-1"),
        ("EU", "europe-west1", "eu-west-2"),  # London is not in the EU, whatever its name says
        ("eu", "westeurope", "europe-west6"),
        ("EU", "swedencentral", "norwayeast"),
        ("EEA", "norwayeast", "eu-central-2"),
        ("US", "us-gov-east-1", "ca-central-1"),
        ("DE", "europe-west3", "eu-west-3"),
        ("FR, us-east-1", "us-east-1", "us-east-2"),
        ("local", "local", "eu-central-1"),
    ],
)
def test_rules(rule: str, inside: str, outside: str) -> None:
    residency = parse_rule(rule)
    assert residency.allows(inside)
    assert not residency.allows(outside)
    assert inside in residency.allowed_regions


def test_an_unlisted_region_matches_only_its_own_name() -> None:
    assert not parse_rule("EU").allows("local")
    assert not parse_rule("US").allows("us-west-99")


def test_blank_is_anywhere() -> None:
    assert parse_rule(" ") is ANYWHERE
    assert ANYWHERE.allows("anything")
    assert ANYWHERE.allowed_regions == ()


@pytest.mark.parametrize("rule", ["Europe!", "ZZ", "EU,", "a b", "x" * 3000])
def test_what_names_no_place_is_refused(rule: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_rule(rule)
    assert error.value.param == "x-data-residency"


def test_a_country_without_regions_is_never_anywhere() -> None:
    with pytest.raises(Forbidden):
        parse_rule("MT")


@pytest.mark.parametrize("text", ["region:US", "see Region:us-east-1 now", "a (region:cn)", "x\nregion:RU"])
def test_conflicting_marks(text: str) -> None:
    with pytest.raises(Forbidden) as error:
        check_marks(parse_rule("EU"), ["fine", text])
    assert "region:" in error.value.message


@pytest.mark.parametrize(
    "text",
    [
        "region:EU",
        "region:FR",
        "region:eu-central-1",
        "region:north",
        "subregion:US",
        "region: US",
        "in the US",
    ],
)
def test_marks_that_agree_or_are_none(text: str) -> None:
    check_marks(parse_rule("EU"), [text])


def test_a_bloc_s_mark_agrees_with_a_country_in_it() -> None:
    check_marks(parse_rule("FR"), ["region:EU"])
    check_marks(parse_rule("eu-west-3"), ["region:FR"])
    with pytest.raises(Forbidden):
        check_marks(parse_rule("FR"), ["region:DE"])


def test_no_restriction_no_conflict() -> None:
    check_marks(ANYWHERE, ["region:US", "region:EU"])
