"""From raw readings to a sample: unknown is never zero, nonsense is unknown, a fault stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grid.hardware.telemetry import FATAL_XIDS, Gauge, Raw, throttle_reasons
from grid.words import UNKNOWN, GpuSample
from placement.gpus import sample_flaw


def gauge() -> Gauge:
    return Gauge("GPU-0", hears_xids=True)


def test_a_gpu_that_tells_nothing_is_unknown_in_everything() -> None:
    sample = Gauge("GPU-0", hears_xids=False).take(Raw(), 1.0)
    assert sample == GpuSample("GPU-0")
    assert set(sample[1:-1]) == {UNKNOWN}


def test_readings_come_in_the_units_of_the_sample() -> None:
    raw = Raw(
        memory_free_bytes=3 << 30,
        memory_used_bytes=1 << 30,
        foreign_bytes=0,
        utilisation_percent=80,
        gpm_bandwidth_percent=62.5,
        pcie_sent_kb_per_s=2048,
        power_mw=512_500,
        throttle=4,
        ecc_uncorrected=0,
    )
    sample = gauge().take(raw, 1.0)
    assert (sample.memory_free_mb, sample.memory_used_mb, sample.memory_foreign_mb) == (3072, 1024, 0)
    assert (sample.compute_utilisation, sample.bandwidth_utilisation) == (0.8, 0.625)
    assert (sample.pcie_sent_mb_per_s, sample.pcie_received_mb_per_s) == (2.0, UNKNOWN)
    assert (sample.power_w, sample.ecc_uncorrected, sample.xid) == (512.5, 0, 0)
    assert throttle_reasons(sample.throttle) == ("power cap",)


def test_the_performance_monitor_is_believed_before_the_older_counters() -> None:
    sample = gauge().take(Raw(gpm_pcie_sent_mib_per_s=7.0, pcie_sent_kb_per_s=1024), 1.0)
    assert sample.pcie_sent_mb_per_s == 7.0


def test_nvlink_counters_become_rates_by_the_observers_own_clock() -> None:
    one = gauge()
    sent = [
        one.take(Raw(nvlink_sent_kib=kib), now_s).nvlink_sent_mb_per_s
        for kib, now_s in ((10_240, 1.0), (20_480, 1.5), (20_480, 1.5), (30_720, 1.4), (5, 2.0), (1029, 3.0))
    ]
    # First reading; 10 MB in 0.5 s; no time passed; a clock and a counter that jumped back; 1 MB in 1 s.
    assert sent == [UNKNOWN, 20.0, UNKNOWN, UNKNOWN, UNKNOWN, 1.0]


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"utilisation_percent": 101}, "compute_utilisation"),
        ({"gpm_sm_percent": math.nan}, "sm_utilisation"),
        ({"gpm_bandwidth_percent": -3.0}, "bandwidth_utilisation"),
        ({"memory_used_bytes": (1 << 64) - 1}, "memory_used_mb"),
        ({"temperature_c": 4_294_967_295}, "temperature_c"),
        ({"power_mw": 4_294_967_295}, "power_w"),
        ({"gpm_nvlink_sent_mib_per_s": math.inf}, "nvlink_sent_mb_per_s"),
        ({"ecc_uncorrected": (1 << 64) - 1}, "ecc_uncorrected"),
    ],
)
def test_what_can_not_be_true_is_unknown(raw: dict[str, Any], field: str) -> None:
    sample = gauge().take(Raw(**raw), 1.0)
    assert getattr(sample, field) == UNKNOWN
    assert sample.fault == ""


@pytest.mark.parametrize("xid", [48, 79, 95, 119])
def test_a_fatal_xid_is_a_fault_that_stays(xid: int) -> None:
    one = gauge()
    assert FATAL_XIDS[xid] in one.take(Raw(), 1.0, [xid]).fault
    after = one.take(Raw(), 2.0, [31])
    assert f"Xid {xid}" in after.fault
    assert after.xid == 31


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 92, 94])
def test_an_xid_of_an_application_is_no_fault_of_the_gpu(xid: int) -> None:
    sample = gauge().take(Raw(), 1.0, [xid])
    assert (sample.fault, sample.xid) == ("", xid)


def test_the_first_fault_is_the_one_that_is_told() -> None:
    one = gauge()
    assert "uncorrectable memory errors" in one.take(Raw(ecc_uncorrected=2), 1.0).fault
    assert "uncorrectable memory errors" in one.take(Raw(unusable="the driver lost it"), 2.0).fault


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {name: st.none() | st.integers() | st.floats() for name in Raw._fields if name != "unusable"}
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
)
def test_whatever_the_driver_says_the_sample_can_be_believed(
    raws: list[dict[str, Any]], clock_s: list[float]
) -> None:
    one = gauge()
    for raw, now_s in zip(raws, clock_s, strict=False):
        counters = {
            name: None if isinstance(value, float) else value
            for name, value in raw.items()
            if name
            in ("nvlink_sent_kib", "nvlink_received_kib", "ecc_corrected", "ecc_uncorrected", "throttle")
        }
        assert sample_flaw(one.take(Raw(**{**raw, **counters}), now_s)) == ""
