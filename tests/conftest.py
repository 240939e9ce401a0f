"""Its folder is on the path of every test, so that what tests share is imported as `support.…`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import fake_nvml
from support.fake_nvml import FakeGpus

FAST = "not cell and not vllm and not slow"
"""What `make test-fast` selects."""
MARKED_WHOLE = re.compile(r"^pytestmark = (?:\[[^]]*)?pytest\.mark\.(?:cell|vllm|slow)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules of which the fast suite runs nothing: to import them, and the clients, engines and
    stores that they need, takes a third of the time that collecting does. What it selects is the same."""
    if config.option.markexpr != FAST or not collection_path.name.startswith("test_"):
        return None
    return True if MARKED_WHOLE.search(collection_path.read_text()) else None


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver, built and loaded: from now on pynvml finds no other in this process."""
    built = fake_nvml.build(tmp_path_factory.mktemp("driver"))
    fake_nvml.load(built)
    return built


@pytest.fixture
def gpus(driver_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Five GPUs, as long as the test lasts."""
    fake = FakeGpus(tmp_path / "gpus")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake
