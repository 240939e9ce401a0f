"""From raw readings of a GPU to a typed sample, and whether it may still be used. Pure: time is an argument.

What a GPU can't tell is unknown, never zero, and so is whatever makes no sense: a share above one, a counter
that went back, the driver's own "not available". A fault stays until the probe opens the driver anew: memory
that was found wrong does not mend itself, and an operator who resets the GPU has to say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from grid.words import UNKNOWN, GpuSample

MIB = 1 << 20

RESET = "reset the GPU (nvidia-smi --gpu-reset) or restart the node"

FATAL_XIDS: Mapping[int, str] = {
    48: "an uncorrectable memory error",
    62: "its internal micro-controller halted",
    64: "a bad memory row could not be taken out of use",
    74: "an NVLink error",
    79: "it fell off the bus",
    95: "an uncontained memory error",
    109: "a context switch timed out",
    119: "its GSP did not answer",
    120: "its GSP failed",
    136: "its links could not be trained",
    140: "uncorrectable memory errors",
    142: "its NVENC failed",
    143: "its initialisation failed",
    151: "its key rotation failed",
    154: "it asks for a recovery",
}
"""After these (the driver's documentation calls for a reset, a restart or a repair) nothing may run on it.
Others, such as 13, 31, 43 and 94, end the process that caused them: its engine dies, and is replaced."""

THROTTLE_REASONS: Mapping[int, str] = {
    0x01: "idle",
    0x02: "clocks set by an operator",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "kept in step with other GPUs",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""NVML's bits (nvmlClocksEventReason…)."""

MOST_WATTS = 10_000
MOST_CELSIUS = 200
MOST_MHZ = 20_000
MOST_MB_PER_S = 10_000_000
"""Far above any hardware: what exceeds them is a broken reading."""

MOST_COUNT = 1 << 40
"""Of errors and megabytes. NVML's "not available" is all ones, above it."""


class Raw(NamedTuple):
    """One GPU's readings in NVML's own units; None for each that it did not give."""

    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_used_bytes: int | None = None
    foreign_bytes: int | None = None
    utilisation_percent: float | None = None
    memory_busy_percent: float | None = None
    gpm_sm_percent: float | None = None
    gpm_bandwidth_percent: float | None = None
    gpm_pcie_sent_mib_per_s: float | None = None
    gpm_pcie_received_mib_per_s: float | None = None
    gpm_nvlink_sent_mib_per_s: float | None = None
    gpm_nvlink_received_mib_per_s: float | None = None
    pcie_sent_kb_per_s: float | None = None
    pcie_received_kb_per_s: float | None = None
    nvlink_sent_kib: int | None = None
    """A counter since the driver was loaded, as the next."""
    nvlink_received_kib: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    unusable: str = ""
    """What the driver itself says of a GPU that it can't use any more; "" when it can."""


class Gauge:
    """One GPU's readings over time: it remembers the last counters, the newest Xid and the fault."""

    def __init__(self, uuid: str, *, hears_xids: bool) -> None:
        self.uuid = uuid
        self.fault = ""
        self._xid = 0 if hears_xids else int(UNKNOWN)
        self._counters: dict[str, tuple[int, float]] = {}

    def take(self, raw: Raw, now_s: float, xids: Iterable[int] = ()) -> GpuSample:
        """Return the sample at `now_s` (monotonic seconds); `xids` came since the last one, oldest first."""
        for xid in xids:
            self._xid = xid
            if xid in FATAL_XIDS:
                self._found(f"Xid {xid}: {FATAL_XIDS[xid]}; {RESET}")
        uncorrected = _count(raw.ecc_uncorrected)
        if uncorrected > 0:
            self._found(f"uncorrectable memory errors since its driver was loaded: {uncorrected}; {RESET}")
        if raw.unusable:
            self._found(f"{raw.unusable}; {RESET}")
        pcie_sent = _scaled(raw.gpm_pcie_sent_mib_per_s, 1, MOST_MB_PER_S)
        pcie_received = _scaled(raw.gpm_pcie_received_mib_per_s, 1, MOST_MB_PER_S)
        nvlink_sent = _scaled(raw.gpm_nvlink_sent_mib_per_s, 1, MOST_MB_PER_S)
        nvlink_received = _scaled(raw.gpm_nvlink_received_mib_per_s, 1, MOST_MB_PER_S)
        if pcie_sent == UNKNOWN:
            pcie_sent = _scaled(raw.pcie_sent_kb_per_s, 1 / 1024, MOST_MB_PER_S)
        if pcie_received == UNKNOWN:
            pcie_received = _scaled(raw.pcie_received_kb_per_s, 1 / 1024, MOST_MB_PER_S)
        if nvlink_sent == UNKNOWN:
            nvlink_sent = self._mb_per_s("sent", raw.nvlink_sent_kib, now_s)
        if nvlink_received == UNKNOWN:
            nvlink_received = self._mb_per_s("received", raw.nvlink_received_kib, now_s)
        return GpuSample(
            uuid=self.uuid,
            memory_used_mb=_scaled(raw.memory_used_bytes, 1 / MIB, MOST_COUNT),
            memory_free_mb=_scaled(raw.memory_free_bytes, 1 / MIB, MOST_COUNT),
            memory_foreign_mb=_scaled(raw.foreign_bytes, 1 / MIB, MOST_COUNT),
            compute_utilisation=_scaled(raw.utilisation_percent, 0.01, 1.0),
            sm_utilisation=_scaled(raw.gpm_sm_percent, 0.01, 1.0),
            bandwidth_utilisation=_scaled(raw.gpm_bandwidth_percent, 0.01, 1.0),
            memory_busy=_scaled(raw.memory_busy_percent, 0.01, 1.0),
            pcie_sent_mb_per_s=pcie_sent,
            pcie_received_mb_per_s=pcie_received,
            nvlink_sent_mb_per_s=nvlink_sent,
            nvlink_received_mb_per_s=nvlink_received,
            sm_clock_mhz=_scaled(raw.sm_clock_mhz, 1, MOST_MHZ),
            memory_clock_mhz=_scaled(raw.memory_clock_mhz, 1, MOST_MHZ),
            throttle=_count(raw.throttle),
            temperature_c=_scaled(raw.temperature_c, 1, MOST_CELSIUS),
            power_w=_scaled(raw.power_mw, 1e-3, MOST_WATTS),
            ecc_corrected=_count(raw.ecc_corrected),
            ecc_uncorrected=uncorrected,
            xid=self._xid,
            fault=self.fault,
        )

    def _found(self, fault: str) -> None:
        """The first fault is the cause; what follows is mostly its consequence."""
        self.fault = self.fault or fault

    def _mb_per_s(self, name: str, counter_kib: int | None, now_s: float) -> float:
        last = self._counters.pop(name, None)
        if counter_kib is None:
            return UNKNOWN
        self._counters[name] = (counter_kib, now_s)
        if last is None or now_s <= last[1]:
            return UNKNOWN
        return _scaled(counter_kib - last[0], 1 / 1024 / (now_s - last[1]), MOST_MB_PER_S)


def _scaled(reading: float | None, factor: float, most: float) -> float:
    """Return `reading` in the sample's unit; UNKNOWN where it is none, or none that can be true."""
    if reading is None:
        return UNKNOWN
    value = reading * factor
    return float(value) if math.isfinite(value) and 0 <= value <= most else UNKNOWN


def _count(reading: int | None) -> int:
    return reading if reading is not None and 0 <= reading < MOST_COUNT else int(UNKNOWN)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of what lowers the clocks; empty for none and for unknown."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits > 0 and bits & bit)
