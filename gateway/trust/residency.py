"""Where a request may run: a set of regions, and the location marks that contradict it. Pure.

Fails closed: a restriction that leaves no region refuses the request; it never means "anywhere".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gateway.trust.jurisdictions import COUNTRIES, COUNTRY_BY_REGION, EEA, EU, REGIONS_BY_COUNTRY
from grid.errors import Forbidden, InvalidRequest

HEADER = "x-data-residency"
MAX_RULE_CHARS = 2_048
"""Room for every region that a provider names."""
REGION = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MARK = re.compile(r"(?<![\w-])region:([A-Za-z0-9][A-Za-z0-9_-]{0,63})", re.IGNORECASE)
BLOCS = {"EU": EU, "EEA": EEA}


@dataclass(frozen=True, slots=True)
class Residency:
    """A restriction. `regions` None: anywhere; `countries` are those that it names as wholes."""

    rule: str = ""
    """As it was given, for messages."""
    regions: frozenset[str] | None = None
    countries: frozenset[str] = frozenset()

    @property
    def allowed_regions(self) -> tuple[str, ...]:
        """For a PlacementRequest: empty means anywhere."""
        return () if self.regions is None else tuple(sorted(self.regions))

    def allows(self, region: str) -> bool:
        return self.regions is None or region in self.regions


ANYWHERE = Residency()


def parse_rule(rule: str) -> Residency:
    """Return the restriction that a header or policy names: `EU`, `EEA`, a country's two-letter code, a
    region such as `eu-central-1` (also one that no table lists, such as a cell's own `local`), or a list of
    these with commas. Blank: anywhere.

    Raises InvalidRequest for what is none of them, Forbidden for a country without a known region.
    """
    if not rule.strip():
        return ANYWHERE
    if len(rule) > MAX_RULE_CHARS:
        raise InvalidRequest(
            f"{HEADER} has at most {MAX_RULE_CHARS} characters, not {len(rule)}", param=HEADER
        )
    regions: set[str] = set()
    countries: set[str] = set()
    for part in (part.strip() for part in rule.split(",")):
        named = _countries(part)
        if named:
            countries |= named
            regions.update(region for country in named for region in REGIONS_BY_COUNTRY.get(country, ()))
        elif REGION.fullmatch(part) and len(part) > 2:
            regions.add(part)
        else:
            raise InvalidRequest(
                f"{HEADER}: {part[:64]!r} is neither EU, EEA, a two-letter country code nor a region's name",
                param=HEADER,
            )
    if not regions:
        raise Forbidden(
            f"{HEADER}: no known region lies in {rule[:64]!r}; name the allowed regions themselves",
            param=HEADER,
        )
    return Residency(rule.strip(), frozenset(regions), frozenset(countries))


def check_marks(residency: Residency, texts: Iterable[str]) -> None:
    """Raises Forbidden if a text carries a location mark, such as `region:US`, outside `residency`.

    A mark agrees when it shares a country or a region with the restriction; words that name no place that
    we know (`region:north`) are no marks.
    """
    if residency.regions is None:
        return
    for text in texts:
        for mark in MARK.findall(text):
            if not _agrees(residency, mark):
                raise Forbidden(
                    f"the payload is marked `region:{mark}`, against its residency {residency.rule!r}",
                    param=HEADER,
                )


def texts_within(value: Any, key: str = "") -> Iterator[str]:
    """Yield every text of a JSON value for `check_marks`; one that stands under a key as `key:text`, so that
    the pair `{"region": "US"}` is a mark as well."""
    if isinstance(value, str):
        yield f"{key}:{value.strip()}" if key else value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_within(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_within(inner, key)


def _agrees(residency: Residency, mark: str) -> bool:
    assert residency.regions is not None
    countries = _countries(mark)
    if not countries:
        region = mark.lower()
        return region not in COUNTRY_BY_REGION or region in residency.regions
    within = residency.countries | {COUNTRY_BY_REGION[r] for r in residency.regions if r in COUNTRY_BY_REGION}
    return bool(countries & within)


def _countries(word: str) -> frozenset[str]:
    """Return the countries that a bloc's or country's name stands for; empty for any other word."""
    code = word.upper()
    if code in BLOCS:
        return BLOCS[code]
    return frozenset((code,)) if code in COUNTRIES else frozenset()
