"""The probe over real pynvml and a driver library of our own: five GPUs that change while it reads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from support.fake_nvml import A100, GIB, H100, H100_TOO, L4, L40S, UUIDS, FakeGpus

from grid.hardware.nvml import MEANINGS, Meaning, NoDriver, Probe, named
from grid.words import UNKNOWN, GpuSample

OURS = 100


@pytest.fixture
def probe(gpus: FakeGpus) -> Iterator[Probe]:
    one = Probe(lambda pid: None if pid > 1000 else pid <= OURS)
    yield one
    one.close()


def rounds(probe: Probe, count: int, began_s: float = 1.0) -> list[tuple[GpuSample, ...]]:
    return [probe.read(began_s + 0.1 * each) for each in range(count)]


def test_it_finds_gpus_and_how_they_are_joined(probe: Probe, gpus: FakeGpus) -> None:
    gpus.set(L40S, ancestors="50 50 50 0 10")
    found = probe.open()
    assert (found.driver, found.flaw) == ("575.57", "")
    assert [gpu.uuid for gpu in found.gpus] == list(UUIDS)
    assert found.gpus[H100].product == "NVIDIA H100 80GB HBM3"
    assert found.gpus[H100].memory_mb == 80 * 1024
    assert found.gpus[H100].nvlinks == (0, 18, 0, 0, 0)
    assert found.gpus[H100_TOO].nvlinks == (18, 0, 0, 0, 0)
    assert found.gpus[A100].nvlinks == ()
    assert found.gpus[L4].nvlinks == ()
    assert found.gpus[L40S].ancestors == (50, 50, 50, 0, 10)


def test_links_to_a_switch_reach_every_gpu_that_has_them(probe: Probe, gpus: FakeGpus) -> None:
    for index, links in ((H100, "s s s s"), (H100_TOO, "s s s -"), (A100, "s s")):
        gpus.set(index, nvlinks=links)
    found = probe.open().gpus
    assert found[H100].nvlinks == (0, 3, 2, 0, 0)
    assert found[A100].nvlinks == (2, 2, 0, 0, 0)
    assert found[L4].nvlinks == ()


def test_topology_that_the_driver_does_not_tell_is_unknown(probe: Probe, gpus: FakeGpus) -> None:
    gpus.set("*", ancestors=None)
    for index in range(5):
        gpus.set(index, ancestors=None)
    assert probe.open().gpus[L4].ancestors == (-1, -1, -1, -1, 0)


def test_readings_follow_the_hardware(probe: Probe, gpus: FakeGpus) -> None:
    probe.open()
    assert probe.read(1.0)[H100].bandwidth_utilisation == UNKNOWN  # the monitor needs two samples
    gpus.set(H100, utilisation=90, memory_used=3 * GIB, power_mw=650_000, throttle=4)
    gpus.set(H100, **{"gpm.2": 75.5, "gpm.10": 62.5, "gpm.20": 12, "gpm.60": 900, "gpm.61": 800})
    busy = probe.read(1.1)[H100]
    assert (busy.compute_utilisation, busy.memory_used_mb, busy.memory_free_mb) == (0.9, 3072, 77 * 1024)
    assert (busy.sm_utilisation, busy.bandwidth_utilisation) == (0.755, 0.625)
    assert (busy.pcie_sent_mb_per_s, busy.nvlink_received_mb_per_s, busy.nvlink_sent_mb_per_s) == (
        12,
        900,
        800,
    )
    assert (busy.power_w, busy.throttle, busy.temperature_c, busy.sm_clock_mhz) == (650, 4, 40, 1200)
    gpus.set(H100, utilisation=5)
    assert probe.read(1.2)[H100].compute_utilisation == 0.05


def test_older_gpus_count_bytes_instead(probe: Probe, gpus: FakeGpus) -> None:
    probe.open()
    gpus.set(A100, pcie_tx_kb=2048, pcie_rx_kb=4096)
    rounds(probe, 3)  # each of the three older GPUs has had its turn
    gpus.set(A100, **{"field.138": 10 * 1024, "field.139": 0})
    sample = probe.read(1.3)[A100]
    assert (sample.pcie_sent_mb_per_s, sample.pcie_received_mb_per_s) == (2.0, 4.0)
    assert sample.nvlink_sent_mb_per_s == pytest.approx(100.0)
    assert sample.nvlink_received_mb_per_s == 0
    assert sample.bandwidth_utilisation == sample.sm_utilisation == UNKNOWN
    assert probe.read(1.4)[L4].nvlink_sent_mb_per_s == UNKNOWN


READINGS = {
    "nvmlDeviceGetMemoryInfo": "memory_used_mb",
    "nvmlDeviceGetUtilizationRates": "compute_utilisation",
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetPowerUsage": "power_w",
    "nvmlDeviceGetClockInfo": "sm_clock_mhz",
    "nvmlDeviceGetCurrentClocksEventReasons": "throttle",
    "nvmlDeviceGetTotalEccErrors": "ecc_uncorrected",
    "nvmlGpmMetricsGet": "bandwidth_utilisation",
    "nvmlGpmSampleGet": "sm_utilisation",
}


@pytest.mark.parametrize("error", sorted(MEANINGS))
def test_every_error_of_every_call_leaves_unknown_readings_or_a_verdict(
    error: int, probe: Probe, gpus: FakeGpus
) -> None:
    probe.open()
    rounds(probe, 2)
    for function, field in READINGS.items():
        gpus.fail(H100, function, error)
        if MEANINGS[error] is Meaning.DRIVER_GONE:
            with pytest.raises(NoDriver):
                probe.read(2.0)
            gpus.fail(H100, function, 0)
            probe.close()
            probe.open()
            rounds(probe, 2)
            continue
        sample, other = probe.read(2.0)[:2]
        assert getattr(sample, field) == UNKNOWN, function
        assert bool(sample.fault) == (MEANINGS[error] is Meaning.GPU_GONE)
        assert getattr(other, field) != UNKNOWN
        gpus.fail(H100, function, 0)
        after = rounds(probe, 2, 3.0)[-1][H100]
        assert (getattr(after, field) != UNKNOWN) == (MEANINGS[error] is Meaning.NOT_NOW), function


def test_every_error_that_pynvml_knows_has_a_meaning() -> None:
    known = {code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_") and code != 0}
    assert known == set(MEANINGS)


def test_an_error_of_a_newer_driver_is_unknown_this_time(probe: Probe, gpus: FakeGpus) -> None:
    probe.open()
    gpus.fail(L4, "nvmlDeviceGetPowerUsage", 77)
    assert probe.read(1.0)[L4].power_w == UNKNOWN
    gpus.fail(L4, "nvmlDeviceGetPowerUsage", 0)
    assert probe.read(1.1)[L4].power_w == 70


def test_a_reading_that_is_not_supported_is_never_zero(probe: Probe, gpus: FakeGpus) -> None:
    for key in ("utilisation", "power_mw", "throttle", "ecc_uncorrected", "ecc_corrected", "temperature"):
        gpus.set(L4, **{key: None})
    probe.open()
    sample = probe.read(1.0)[L4]
    assert sample.compute_utilisation == sample.power_w == sample.temperature_c == UNKNOWN
    assert sample.throttle == sample.ecc_corrected == sample.ecc_uncorrected == UNKNOWN
    assert sample.memory_used_mb == 1024


def test_xids_arrive_once_and_a_fatal_one_is_a_fault(probe: Probe, gpus: FakeGpus) -> None:
    probe.open()
    assert [sample.xid for sample in probe.read(1.0)] == [0] * 5
    gpus.set(A100, xids="31")
    assert (probe.read(1.1)[A100].xid, probe.read(1.2)[A100].fault) == (31, "")
    gpus.set(A100, xids="31 79 154")
    samples = probe.read(1.3)
    assert "Xid 79" in samples[A100].fault
    assert samples[A100].xid == 154
    assert not any(sample.fault for sample in samples if sample.uuid != UUIDS[A100])


def test_without_events_xids_are_unknown(probe: Probe, gpus: FakeGpus) -> None:
    gpus.fail(A100, "nvmlDeviceRegisterEvents", 3)
    probe.open()
    assert [sample.xid for sample in probe.read(1.0)] == [0, 0, UNKNOWN, 0, 0]


def test_uncorrectable_errors_are_a_fault_and_corrected_ones_are_not(probe: Probe, gpus: FakeGpus) -> None:
    probe.open()
    gpus.set(H100, ecc_corrected=1000)
    gpus.set(H100_TOO, ecc_uncorrected=1)
    one, other = probe.read(1.0)[:2]
    assert (one.fault, one.ecc_corrected) == ("", 1000)
    assert "uncorrectable" in other.fault


def test_memory_of_strangers_is_seen(probe: Probe, gpus: FakeGpus) -> None:
    gpus.set(L4, processes=f"7:{2 * GIB} 500:{3 * GIB} 501:{GIB}")
    gpus.set(L40S, processes=f"5000:{GIB}")
    probe.open()
    samples = probe.read(1.0)
    assert samples[L4].memory_foreign_mb == 4096
    assert samples[L40S].memory_foreign_mb == UNKNOWN  # a process that can't be seen from here
    assert samples[H100].memory_foreign_mb == 0


def test_a_gpu_that_can_not_even_be_named_leaves_the_others(probe: Probe, gpus: FakeGpus) -> None:
    gpus.fail(A100, "nvmlDeviceGetHandleByIndex_v2", pynvml.NVML_ERROR_GPU_IS_LOST)
    found = probe.open()
    assert [gpu.number for gpu in found.gpus] == [0, 1, 3, 4]
    assert "GPU 2" in found.flaw
    assert len(probe.read(1.0)) == 4


def test_a_driver_that_comes_back_begins_anew(probe: Probe, gpus: FakeGpus) -> None:
    probe.open()
    gpus.set(L4, xids="79")
    assert probe.read(1.0)[L4].fault
    gpus.path.unlink()
    with pytest.raises(NoDriver) as lost:
        probe.read(1.1)
    assert not lost.value.is_final
    probe.close()
    with pytest.raises(NoDriver):
        probe.open()
    gpus.set(L4, xids=None)
    assert len(probe.open().gpus) == 5
    assert probe.read(1.2)[L4].fault == ""


def test_a_gpu_is_named_by_its_index_and_by_its_uuid(gpus: FakeGpus) -> None:
    assert named("2")[:2] == (UUIDS[A100], "NVIDIA A100-SXM4-80GB")
    assert named(UUIDS[L4])[:2] == (UUIDS[L4], "NVIDIA L4")
    with pytest.raises(NoDriver) as wrong:
        named("9")
    assert str(pickle.loads(pickle.dumps(wrong.value))) == str(wrong.value), "it crosses Ray"


def test_without_a_driver_library_it_says_so_for_good(tmp_path: Path) -> None:
    code = (
        "from grid.hardware.nvml import NoDriver, Probe\n"
        "try: Probe(lambda pid: True).open()\n"
        "except NoDriver as missing: print(missing.is_final, missing.message)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    if said == "":
        pytest.skip("this machine has a driver")
    assert said.startswith("True NVML can't be asked")
