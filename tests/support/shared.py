"""Where evaluation data and requests from the field lie: beside the checkout, and no part of it. Tests that
need them skip where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).resolve().parents[3] / "shared"


def data_file(name: str) -> Path:
    """Return a file of evaluation data, such as `gpu/gpu_specs.csv`. Skips the test where it is absent."""
    path = data_folder() / name
    if not path.exists():
        pytest.skip(f"{path} is absent: name the folder of evaluation data by GRID_DATA")
    return path


def data_folder() -> Path:
    """Return the folder with evaluation data: GRID_DATA, or `shared/data` beside the checkout."""
    named = os.environ.get("GRID_DATA")
    return Path(named) if named else BESIDE / "data"


def contract_folder() -> Path:
    """Return the folder with requests that people send to services of this kind, beside the data."""
    return data_folder().parent / "contract"
