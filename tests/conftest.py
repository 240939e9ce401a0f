"""Its folder is on the path of every test, so that helpers are imported as `support.…`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fake_nvml
from support.fake_nvml import FakeGpus


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
