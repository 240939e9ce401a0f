"""The probe of one node's GPUs: all that the grid asks of NVML, and the only file that names `pynvml`.

One probe reads all GPUs in one go, ten times a second, from one thread. Any call may answer any error, so
each has a meaning (`MEANINGS`): ask again next round, never ask again, the GPU is gone, the driver is gone.
Readings that take the driver milliseconds are taken in turns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import pynvml as nv

from grid.errors import InternalError
from grid.hardware.telemetry import MIB, Gauge, Raw
from grid.words import UNKNOWN, GpuCard, GpuSample

MAX_GPUS = 64
"""Of one node; the largest machines have 16."""

PROCESS_ROUNDS = 10
"""Processes are listed once in so many rounds: once a second. Intruders stay longer than that."""

MAX_EVENTS_A_ROUND = 64
"""A failing GPU may pour out events; the rest is read in the next round."""


class Meaning(Enum):
    """What an NVML error says about asking again."""

    NOT_NOW = "unknown this time"
    NEVER = "unknown for good"
    GPU_GONE = "the GPU can't be used any more"
    DRIVER_GONE = "nothing can be read before the driver is opened anew"


MEANINGS: dict[int, Meaning] = {
    nv.NVML_ERROR_UNINITIALIZED: Meaning.DRIVER_GONE,
    nv.NVML_ERROR_INVALID_ARGUMENT: Meaning.NEVER,
    nv.NVML_ERROR_NOT_SUPPORTED: Meaning.NEVER,
    nv.NVML_ERROR_NO_PERMISSION: Meaning.NEVER,
    nv.NVML_ERROR_ALREADY_INITIALIZED: Meaning.NOT_NOW,
    nv.NVML_ERROR_NOT_FOUND: Meaning.NOT_NOW,
    nv.NVML_ERROR_INSUFFICIENT_SIZE: Meaning.NOT_NOW,
    nv.NVML_ERROR_INSUFFICIENT_POWER: Meaning.GPU_GONE,
    nv.NVML_ERROR_DRIVER_NOT_LOADED: Meaning.DRIVER_GONE,
    nv.NVML_ERROR_TIMEOUT: Meaning.NOT_NOW,
    nv.NVML_ERROR_IRQ_ISSUE: Meaning.NOT_NOW,
    nv.NVML_ERROR_LIBRARY_NOT_FOUND: Meaning.DRIVER_GONE,
    nv.NVML_ERROR_FUNCTION_NOT_FOUND: Meaning.NEVER,
    nv.NVML_ERROR_CORRUPTED_INFOROM: Meaning.NEVER,
    nv.NVML_ERROR_GPU_IS_LOST: Meaning.GPU_GONE,
    nv.NVML_ERROR_RESET_REQUIRED: Meaning.GPU_GONE,
    nv.NVML_ERROR_OPERATING_SYSTEM: Meaning.NOT_NOW,
    nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Meaning.DRIVER_GONE,
    nv.NVML_ERROR_IN_USE: Meaning.NOT_NOW,
    nv.NVML_ERROR_MEMORY: Meaning.NOT_NOW,
    nv.NVML_ERROR_NO_DATA: Meaning.NOT_NOW,
    nv.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: Meaning.NEVER,
    nv.NVML_ERROR_INSUFFICIENT_RESOURCES: Meaning.NOT_NOW,
    nv.NVML_ERROR_FREQ_NOT_SUPPORTED: Meaning.NEVER,
    nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: Meaning.NEVER,
    nv.NVML_ERROR_DEPRECATED: Meaning.NEVER,
    nv.NVML_ERROR_NOT_READY: Meaning.NOT_NOW,
    nv.NVML_ERROR_GPU_NOT_FOUND: Meaning.GPU_GONE,
    nv.NVML_ERROR_INVALID_STATE: Meaning.NOT_NOW,
    nv.NVML_ERROR_RESET_TYPE_NOT_SUPPORTED: Meaning.NEVER,
    nv.NVML_ERROR_UNKNOWN: Meaning.NOT_NOW,
}
"""Of a newer driver's code, which is not here, nothing is known: NOT_NOW."""

_GONE = {
    nv.NVML_ERROR_INSUFFICIENT_POWER: "its power cables are not attached",
    nv.NVML_ERROR_GPU_IS_LOST: "the driver lost it",
    nv.NVML_ERROR_RESET_REQUIRED: "the driver asks for its reset",
    nv.NVML_ERROR_GPU_NOT_FOUND: "the driver can't find it any more",
}

_GPM = {
    "gpm_sm_percent": nv.NVML_GPM_METRIC_SM_UTIL,
    "gpm_bandwidth_percent": nv.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "gpm_pcie_sent_mib_per_s": nv.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "gpm_pcie_received_mib_per_s": nv.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "gpm_nvlink_received_mib_per_s": nv.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
    "gpm_nvlink_sent_mib_per_s": nv.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
}
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_FIELDS = [
    (nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
    (nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
]

IsOurs = Callable[[int], bool | None]
"""Whether a process is the cell's; None where it can't be seen from here."""


class NoDriver(InternalError):
    """NVML can't be used here, or not any more; says why and what to do."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """There is no driver; it won't come while this process lives."""


def _no_driver(error: nv.NVMLError) -> NoDriver:
    return NoDriver(
        f"NVML can't be asked ({error}): check the driver with nvidia-smi",
        error.value == nv.NVML_ERROR_LIBRARY_NOT_FOUND,
    )


class _Gpu:
    """One GPU's handle, and what was learnt about asking it."""

    def __init__(self, handle: Any, gauge: Gauge, gpm: _Gpm | None) -> None:
        self.handle = handle
        self.gauge = gauge
        self.gpm = gpm
        self.never: set[Any] = set()
        self.unusable = ""
        self.pcie: tuple[int | None, int | None] = (None, None)
        self.foreign_bytes: int | None = None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what NVML answers, None for what it can't. Raises NoDriver."""
        asked = (function, *(argument for argument in arguments if isinstance(argument, int)))
        if self.unusable or asked in self.never:
            return None
        try:
            return function(self.handle, *arguments)
        except nv.NVMLError as error:
            self._failed(asked, error)
            return None

    def _failed(self, asked: Any, error: nv.NVMLError) -> None:
        meaning = MEANINGS.get(error.value, Meaning.NOT_NOW)
        if meaning is Meaning.DRIVER_GONE:
            raise _no_driver(error) from None
        if meaning is Meaning.GPU_GONE:
            self.unusable = _GONE[error.value]
        elif meaning is Meaning.NEVER:
            self.never.add(asked)


class _Gpm:
    """A GPU's performance monitor: metrics are the difference of two samples."""

    def __init__(self) -> None:
        self._samples = [nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()]
        self._taken = 0
        self._asked = nv.c_nvmlGpmMetricsGet_t()
        self._asked.version = nv.NVML_GPM_METRICS_GET_VERSION
        self._asked.numMetrics = len(_GPM)
        for place, metric in enumerate(_GPM.values()):
            self._asked.metrics[place].metricId = metric

    def read(self, gpu: _Gpu) -> dict[str, float]:
        newest = self._samples[self._taken % 2]
        if gpu.ask(nv.nvmlGpmSampleGet, newest) is None:
            self._taken = 0
            return {}
        self._taken += 1
        if self._taken < 2:
            return {}
        self._asked.sample1, self._asked.sample2 = self._samples[self._taken % 2], newest
        if gpu.ask(_gpm_metrics, self._asked) is None:
            return {}
        metrics = zip(_GPM, self._asked.metrics, strict=False)
        return {name: metric.value for name, metric in metrics if metric.nvmlReturn == nv.NVML_SUCCESS}

    def close(self) -> None:
        for sample in self._samples:
            nv.nvmlGpmSampleFree(sample)


def _gpm_metrics(_handle: Any, asked: Any) -> Any:
    return nv.nvmlGpmMetricsGet(asked)


class Found(NamedTuple):
    driver: str
    gpus: tuple[GpuCard, ...]
    flaw: str
    """Which GPUs can't even be named; "" when all can."""


class Probe:
    """Reads one node's GPUs. `open` first; every call from one thread at a time."""

    def __init__(self, is_ours: IsOurs) -> None:
        self._is_ours = is_ours
        self._gpus: list[_Gpu] = []
        self._by_address: dict[int | None, _Gpu] = {}
        self._events: Any = None
        self._round = 0

    def open(self) -> Found:
        """Find the node's GPUs. Raises NoDriver, and may be called again after `close`."""
        try:
            nv.nvmlInit()
            driver = str(nv.nvmlSystemGetDriverVersion())
            named = [_identity(index) for index in range(min(int(nv.nvmlDeviceGetCount()), MAX_GPUS))]
        except nv.NVMLError as error:
            raise _no_driver(error) from None
        known = [each for each in named if isinstance(each, _Identity)]
        self._events = _or_none(nv.nvmlEventSetCreate)
        self._gpus = [self._gpu(each) for each in known]
        self._by_address = {_address(gpu.handle): gpu for gpu in self._gpus}
        self._round = 0
        return Found(driver, _cards(known), "; ".join(each for each in named if isinstance(each, str)))

    def read(self, now_s: float) -> tuple[GpuSample, ...]:
        """Return one sample a GPU, by index. Raises NoDriver when the driver went away."""
        xids = self._new_xids()
        slow = [gpu for gpu in self._gpus if gpu.gpm is None]
        if slow:
            # NVML counts bytes for 20 ms in each of these calls.
            gpu = slow[self._round % len(slow)]
            gpu.pcie = (
                gpu.ask(nv.nvmlDeviceGetPcieThroughput, nv.NVML_PCIE_UTIL_TX_BYTES),
                gpu.ask(nv.nvmlDeviceGetPcieThroughput, nv.NVML_PCIE_UTIL_RX_BYTES),
            )
        if self._round % PROCESS_ROUNDS == 0:
            for gpu in self._gpus:
                gpu.foreign_bytes = self._foreign_bytes(gpu)
        self._round += 1
        return tuple(gpu.gauge.take(_raw(gpu), now_s, xids.get(gpu.gauge.uuid, ())) for gpu in self._gpus)

    def close(self) -> None:
        try:
            for gpu in self._gpus:
                if gpu.gpm is not None:
                    gpu.gpm.close()
            if self._events is not None:
                nv.nvmlEventSetFree(self._events)
            nv.nvmlShutdown()
        except nv.NVMLError:
            pass  # a driver that went away took all of it along
        self._gpus, self._events = [], None

    def _gpu(self, identity: _Identity) -> _Gpu:
        handle, uuid = identity.handle, identity.uuid
        hears_xids = False
        if self._events is not None:
            wanted = nv.nvmlEventTypeXidCriticalError
            supported = _or_none(nv.nvmlDeviceGetSupportedEventTypes, handle) or 0
            hears_xids = bool(supported & wanted) and (
                _succeeds(nv.nvmlDeviceRegisterEvents, handle, wanted, self._events)
            )
        support = _or_none(nv.nvmlGpmQueryDeviceSupport, handle)
        gpm = _or_none(_Gpm) if support is not None and support.isSupportedDevice else None
        return _Gpu(handle, Gauge(uuid, hears_xids=hears_xids), gpm)

    def _new_xids(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        if self._events is None:
            return found
        for _ in range(MAX_EVENTS_A_ROUND):
            try:
                event = nv.nvmlEventSetWait_v2(self._events, 0)
            except nv.NVMLError as error:
                if MEANINGS.get(error.value) is Meaning.DRIVER_GONE:
                    raise _no_driver(error) from None
                break  # none left; or a GPU is lost, which its own readings tell
            gpu = self._by_address.get(_address(event.device))
            if gpu is not None and event.eventType == nv.nvmlEventTypeXidCriticalError:
                found.setdefault(gpu.gauge.uuid, []).append(int(event.eventData))
        return found

    def _foreign_bytes(self, gpu: _Gpu) -> int | None:
        processes = gpu.ask(nv.nvmlDeviceGetComputeRunningProcesses)
        if processes is None:
            return None
        total = 0
        for process in processes:
            ours = self._is_ours(process.pid)
            if ours is None or (not ours and process.usedGpuMemory is None):
                return None
            total += 0 if ours else process.usedGpuMemory
        return total


class Named(NamedTuple):
    """What a process is told of a GPU that it may use."""

    uuid: str
    product: str
    memory_mb: float
    """`UNKNOWN` where the driver can't tell."""
    compute_capability: tuple[int, int]
    """(0, 0) where the driver can't tell."""


def named(visible: str) -> Named:
    """Return a GPU by its index or UUID. Raises NoDriver."""
    try:
        nv.nvmlInit()
        by = nv.nvmlDeviceGetHandleByIndex if visible.isdigit() else nv.nvmlDeviceGetHandleByUUID
        handle = by(int(visible) if visible.isdigit() else visible)
        uuid, product = str(nv.nvmlDeviceGetUUID(handle)), str(nv.nvmlDeviceGetName(handle))
    except nv.NVMLError as error:
        raise _no_driver(error) from None
    return Named(uuid, product, _memory_mb(handle), _compute_capability(handle))


def _memory_mb(handle: Any) -> float:
    memory = _or_none(nv.nvmlDeviceGetMemoryInfo, handle)
    return memory.total / MIB if memory is not None else UNKNOWN


def _compute_capability(handle: Any) -> tuple[int, int]:
    major, minor = _or_none(nv.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0)
    return int(major), int(minor)


def _raw(gpu: _Gpu) -> Raw:
    ask = gpu.ask
    memory, rates = ask(nv.nvmlDeviceGetMemoryInfo), ask(nv.nvmlDeviceGetUtilizationRates)
    sent, received = _nvlink_kib(gpu) if gpu.gpm is None else (None, None)
    ecc = (nv.nvmlDeviceGetTotalEccErrors, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED)
    ecc_uncorrected = (nv.nvmlDeviceGetTotalEccErrors, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    return Raw(
        memory_total_bytes=memory and memory.total,
        memory_free_bytes=memory and memory.free,
        memory_used_bytes=memory and memory.used,
        foreign_bytes=gpu.foreign_bytes,
        utilisation_percent=rates and rates.gpu,
        memory_busy_percent=rates and rates.memory,
        pcie_sent_kb_per_s=gpu.pcie[0],
        pcie_received_kb_per_s=gpu.pcie[1],
        nvlink_sent_kib=sent,
        nvlink_received_kib=received,
        sm_clock_mhz=ask(nv.nvmlDeviceGetClockInfo, nv.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nv.nvmlDeviceGetClockInfo, nv.NVML_CLOCK_MEM),
        throttle=ask(nv.nvmlDeviceGetCurrentClocksEventReasons),
        temperature_c=ask(nv.nvmlDeviceGetTemperature, nv.NVML_TEMPERATURE_GPU),
        power_mw=ask(nv.nvmlDeviceGetPowerUsage),
        ecc_corrected=ask(*ecc, nv.NVML_VOLATILE_ECC),
        ecc_uncorrected=ask(*ecc_uncorrected, nv.NVML_VOLATILE_ECC),
        **(gpu.gpm.read(gpu) if gpu.gpm is not None else {}),
        unusable=gpu.unusable,
    )


def _nvlink_kib(gpu: _Gpu) -> tuple[int | None, int | None]:
    fields = gpu.ask(nv.nvmlDeviceGetFieldValues, _NVLINK_FIELDS)
    if fields is None:
        return None, None
    sent, received = (
        int(field.value.ullVal) if field.nvmlReturn == nv.NVML_SUCCESS else None for field in fields
    )
    return sent, received


# --- once: what the GPUs are and how they are joined ------------------------------------------


class _Identity(NamedTuple):
    number: int
    handle: Any
    uuid: str
    product: str


def _identity(index: int) -> _Identity | str:
    """Return what names a GPU, or a sentence on why nothing does. Raises NVMLError if the driver is gone."""
    try:
        handle = nv.nvmlDeviceGetHandleByIndex(index)
        uuid, product = str(nv.nvmlDeviceGetUUID(handle)), str(nv.nvmlDeviceGetName(handle))
    except nv.NVMLError as error:
        if MEANINGS.get(error.value) is Meaning.DRIVER_GONE:
            raise
        return f"GPU {index} can't be named ({error})"
    return _Identity(index, handle, uuid, product)


def _cards(found: list[_Identity]) -> tuple[GpuCard, ...]:
    handles = [each.handle for each in found]
    buses, ends = [_bus(handle) for handle in handles], [_link_ends(handle) for handle in handles]
    cards = []
    for place, each in enumerate(found):
        mine = ends[place]
        shared = [min(mine.get(_SWITCH, 0), theirs.get(_SWITCH, 0)) for theirs in ends]
        to_each = [mine.get(bus, 0) + through for bus, through in zip(buses, shared, strict=True)]
        to_each[place] = 0
        card = GpuCard(
            uuid=each.uuid,
            number=each.number,
            product=each.product,
            memory_mb=_memory_mb(each.handle),
            nvlinks=tuple(to_each) if mine else (),
            ancestors=tuple(_ancestor(each.handle, other) for other in handles),
            compute_capability=_compute_capability(each.handle),
        )
        cards.append(card)
    return tuple(cards)


def _ancestor(handle: Any, other: Any) -> int:
    if handle is other:
        return int(nv.NVML_TOPOLOGY_INTERNAL)
    level = _or_none(nv.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    return int(UNKNOWN) if level is None else int(level)


_SWITCH = "switch"


def _link_ends(handle: Any) -> dict[str, int]:
    """Return how many active NVLinks lead where: to a PCI address, or to a switch."""
    ends: dict[str, int] = {}
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            is_active = nv.nvmlDeviceGetNvLinkState(handle, link)
        except nv.NVMLError:
            break  # no such link, so none above it
        if not is_active:
            continue
        if (
            _or_none(nv.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            == nv.NVML_NVLINK_DEVICE_TYPE_SWITCH
        ):
            end = _SWITCH
        else:
            remote = _or_none(nv.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if remote is None:
                continue
            end = str(remote.busId)
        ends[end] = ends.get(end, 0) + 1
    return ends


def _bus(handle: Any) -> str:
    info = _or_none(nv.nvmlDeviceGetPciInfo, handle)
    return "" if info is None else str(info.busId)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except nv.NVMLError:
        return None


def _succeeds(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        function(*arguments)
    except nv.NVMLError:
        return False
    return True
