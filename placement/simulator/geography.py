"""Where requests come from and how far regions are from each other. Pure but for the two files that it
reads."""

from __future__ import annotations

import bisect
import csv
import itertools
import random
from collections.abc import Iterable
from pathlib import Path

from grid.errors import InvalidRequest

COUNTRY_REGION = {
    "China": "ap-east-1",
    "United States": "us-east-1",
    "Russia": "eu-north-1",
    "Canada": "ca-central-1",
    "Hong Kong": "ap-east-1",
    "France": "eu-west-3",
    "India": "ap-south-1",
    "United Kingdom": "eu-west-2",
    "Germany": "eu-central-1",
    "New Zealand": "ap-southeast-2",
    "Singapore": "ap-southeast-1",
    "Japan": "ap-northeast-1",
    "Spain": "eu-south-2",
    "Italy": "eu-south-1",
    "Turkiye": "eu-south-1",
}
"""The region through which a country's clients come in: the nearest one of the round-trip matrix."""

UTC_OFFSET_H = {
    "ap-east-1": 8,
    "us-east-1": -5,
    "eu-north-1": 3,
    "ca-central-1": -5,
    "eu-west-3": 1,
    "ap-south-1": 5,
    "eu-west-2": 0,
    "eu-central-1": 1,
    "ap-southeast-2": 12,
    "ap-southeast-1": 8,
    "ap-northeast-1": 9,
    "eu-south-2": 1,
    "eu-south-1": 1,
}
"""Hours by which the day of those clients begins before (+) or after UTC's, to the whole hour."""


class RoundTrips:
    """Round-trip times in ms between regions."""

    def __init__(self, table: dict[tuple[str, str], float]) -> None:
        self._table = table

    def ms(self, here: str, there: str) -> float:
        return self._table[here, there]

    def check(self, regions: Iterable[str], where: str) -> None:
        known = {region for region, _ in self._table}
        for region in regions:
            if region not in known:
                raise InvalidRequest(
                    f"{where}: region {region!r} is not in the round-trip matrix; it knows "
                    f"{', '.join(sorted(known))}",
                    param="region",
                )


def read_round_trips(data: Path) -> RoundTrips:
    path = data / "latency" / "aws_p50_matrix.csv"
    table = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            here = row.pop("from")
            table.update({(here, there): float(ms) for there, ms in row.items()})
    return RoundTrips(table)


class Origins:
    """Draws the region of a request's client by the countries' shares."""

    def __init__(self, shares: Iterable[tuple[str, float]]) -> None:
        pairs = list(shares)
        self._regions = [region for region, _ in pairs]
        self._sums = list(itertools.accumulate(share for _, share in pairs))

    def draw(self, rng: random.Random) -> str:
        return self._regions[bisect.bisect(self._sums, rng.random() * self._sums[-1])]


def read_origins(data: Path) -> Origins:
    path = data / "traces" / "wildchat_country_shares.csv"
    with path.open(newline="") as lines:
        return Origins(
            [(COUNTRY_REGION[row["country"]], float(row["count"])) for row in csv.DictReader(lines)]
        )
