"""The example contracts are contracts of the cell that `grid up` starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.pipeline.contract import Contract, parse
from gateway.pipeline.resolution import check_models
from grid.config import Config

FOLDER = Path(__file__).parents[2] / "examples" / "contracts"
FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_a_contract_that_the_readme_tells_of(file: Path) -> None:
    contract = parse(Contract, file.read_bytes())
    check_models(contract, Config())
    assert file.name in (FOLDER / "README.md").read_text()


def test_the_examples_run_side_by_side_where_they_say_so() -> None:
    assert FILES
    parallel = parse(Contract, (FOLDER / "parallel.json").read_bytes()).pipeline
    assert parallel.uses == {"for": frozenset(), "against": frozenset(), "verdict": {"for", "against"}}
    searches = parse(Contract, (FOLDER / "search-two-sources.json").read_bytes()).pipeline
    assert searches.uses["tickets"] == frozenset()
