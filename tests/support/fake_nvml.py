"""GPUs for tests: `fake_nvml.c`, built once and loaded before pynvml looks for the driver, and the file that
says what its GPUs read. Two H100 with NVLink between them, an A100, an L40S and an L4.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
STATE = "FAKE_NVML_STATE"
GIB = 1 << 30

H100, H100_TOO, A100, L40S, L4 = range(5)
PRODUCTS = (
    ("NVIDIA H100 80GB HBM3", 80 * GIB),
    ("NVIDIA H100 80GB HBM3", 80 * GIB),
    ("NVIDIA A100-SXM4-80GB", 80 * GIB),
    ("NVIDIA L40S", 45 * GIB),
    ("NVIDIA L4", 23 * GIB),
)
UUIDS = tuple(f"GPU-fake-{index}" for index in range(len(PRODUCTS)))


def build(folder: Path) -> Path:
    """Return the library, compiled into `folder`. Skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the fake driver library needs a C compiler (gcc)")
    library = folder / LIBRARY
    options = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *options, "-o", library, SOURCE], check=True, timeout=60)
    return library


def load(library: Path) -> None:
    """Make pynvml's own load of the driver find this one: the loader knows it by its soname."""
    ctypes.CDLL(str(library))


class FakeGpus:
    """What the GPUs read from now on, in every process that carries `environment`."""

    def __init__(self, path: Path, gpus: int = len(PRODUCTS)) -> None:
        self.path = path
        self._lines: dict[str, str] = {"*.driver": "575.57", "*.count": str(gpus)}
        for index, (name, memory) in enumerate(PRODUCTS[:gpus]):
            self._put(index, name=name, uuid=UUIDS[index], memory_total=memory, memory_used=GIB)
            self._put(index, utilisation=0, memory_busy=0, temperature=40, power_mw=70_000, throttle=1)
            self._put(index, sm_clock=1200, memory_clock=2600, ecc_corrected=0, ecc_uncorrected=0)
            self._put(index, ancestors=" ".join("0" if index == other else "50" for other in range(gpus)))
        for index, peer in ((H100, H100_TOO), (H100_TOO, H100)):
            self._put(index, nvlinks=" ".join([str(peer)] * 18), gpm=1)
            self._put(index, **{"gpm.2": 0, "gpm.10": 0, "gpm.20": 0, "gpm.21": 0, "gpm.60": 0, "gpm.61": 0})
        self._put(A100, nvlinks="- - - -", pcie_tx_kb=0, pcie_rx_kb=0, **{"field.138": 0, "field.139": 0})
        for index in (L40S, L4):
            self._put(index, pcie_tx_kb=0, pcie_rx_kb=0)
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        return {STATE: str(self.path)}

    def set(self, gpu: int | str, **readings: object) -> None:
        """Change readings of a GPU (or of all, `*`); None takes one away, so that it is not supported."""
        self._put(gpu, **readings)
        self._write()

    def fail(self, gpu: int | str, function: str, error: int) -> None:
        """Let an NVML function answer `error` from now on; 0 mends it."""
        self.set(gpu, **{f"fail.{function}": error})

    def _put(self, gpu: int | str, **readings: object) -> None:
        for key, value in readings.items():
            name = f"{gpu}.{key}"
            self._lines.pop(name, None)
            if value is not None:
                self._lines[name] = str(value)

    def _write(self) -> None:
        text = "".join(f"{name} {value}\n" for name, value in self._lines.items())
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)
