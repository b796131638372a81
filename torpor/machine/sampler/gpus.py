"""How busy the machine's GPUs are, by NVML's buffer of samples, or its current rate; and what
metrics show of each GPU: memory, temperature, power, PCIe.

NVML's rate is the share of the last 1/6 to 1 s in which some kernel ran. The buffer holds several
of them a second, so that a burst between two looks is not missed. A GPU in MIG mode has neither:
its instances are read by GPM, which needs Hopper or newer.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from torpor.shared.values import MIB
from torpor.shared.wire.activity import (
    GPU_LOST,
    GPUS_FINE,
    GPUS_UNREADABLE,
    MOST_GPUS,
    NO_GPU,
    UNKNOWN,
    GpuFigures,
)
from torpor.shared.wire.request import MOST

DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg")
"""One of these exists wherever an NVIDIA driver does: on Linux, and in WSL."""
RETRY_S: Final = 30.0
"""Seconds for which a driver that failed is not asked."""
ROUND: Final = 10
"""Calls, one a second, within which the figures of all GPUs are read once."""
_SECONDS: Final = 60
"""Seconds of activity that are kept for the next figures. Activity is read more often than
figures."""


class GpuLook(NamedTuple):
    """``percent`` of the busiest GPU whose activity could be read."""

    number: int
    state: int
    percent: int


class Gpus:
    """The GPUs of this machine; ``look`` never raises, whatever NVML answers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nvml: Any = None
        self._devices: list[_Device] = []
        self._failed = GpuLook(0, NO_GPU, UNKNOWN)
        self._again_s = -math.inf
        self._figures: dict[int, GpuFigures] = {}  # by the number of the GPU
        self._call = 0  # the position in the round of figures

    def look(self) -> GpuLook:
        """The GPUs' activity since the last look."""
        if self._nvml is None and self._clock() >= self._again_s:
            self._open()
        nvml = self._nvml
        if nvml is None:
            return self._failed
        state, percents = GPUS_FINE, []
        for device in self._devices:
            try:
                percents.append(device.look())
            except nvml.NVMLError as error:
                lost = error.value == nvml.NVML_ERROR_GPU_IS_LOST
                state = max(state, GPU_LOST if lost else GPUS_UNREADABLE)
        look = GpuLook(len(self._devices), state, max(percents, default=UNKNOWN))
        if state != GPUS_FINE and self._clock() >= self._again_s:
            self._close(nvml)  # a handle that failed stays invalid
            self._open()
        return look

    def figures(self) -> list[GpuFigures] | None:
        """What metrics show of each GPU, at the call of ROUND that has read the last of them; None
        at the others. NVML measures the PCIe rate of each GPU for 40 ms, and may use a core
        meanwhile, so each call reads a tenth of the GPUs."""
        devices = self._devices[:MOST_GPUS]
        call, self._call = self._call, (self._call + 1) % ROUND
        for number in range(call, len(devices), ROUND):
            self._figures[number] = devices[number].figures()
        if not devices or call != min(len(devices), ROUND) - 1:
            return None
        return [self._figures[number] for number in range(len(devices))]

    def _open(self) -> None:
        self._again_s = self._clock() + RETRY_S
        self._failed = self._without_nvml()
        try:
            # imported here, so that a machine without a driver does not load it
            import pynvml as nvml
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                self._failed = GpuLook(0, GPU_LOST, UNKNOWN)
        else:
            self._nvml = nvml
            self._devices = [_Device(nvml, handle) for handle in handles]
            self._figures, self._call = {}, 0

    def _close(self, nvml: Any) -> None:
        self._nvml, self._devices = None, []
        with suppress(nvml.NVMLError):  # nvmlInit then says what is wrong
            nvml.nvmlShutdown()

    def _without_nvml(self) -> GpuLook:
        there = any(map(os.path.exists, DEVICES))
        return GpuLook(0, GPUS_UNREADABLE if there else NO_GPU, UNKNOWN)


class _Device:
    """One GPU. ``look`` raises NVMLError where its activity cannot be known."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._seen_us = 0
        self._instances: dict[int, Any] = {}  # under MIG: the GPM sample of the last look
        self._looks: deque[int] = deque(maxlen=_SECONDS)  # activity since the last figures

    def look(self) -> int:
        """Percent, since the last look."""
        self._looks.append(UNKNOWN)
        self._looks[-1] = percent = self._percent()
        return percent

    def figures(self) -> GpuFigures:
        nvml, handle = self._nvml, self._handle
        used_mib = free_mib = UNKNOWN
        with suppress(nvml.NVMLError):
            # read once, so that both values are of one moment
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            used_mib, free_mib = _known(memory.used // MIB), _known(memory.free // MIB)
        looks = [*self._looks]
        self._looks.clear()
        whole = bool(looks) and UNKNOWN not in looks
        return GpuFigures(
            percent=sum(looks) // len(looks) if whole else UNKNOWN,
            used_mib=used_mib,
            free_mib=free_mib,
            temperature_c=self._figure(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_mw=self._figure(lambda: nvml.nvmlDeviceGetPowerUsage(handle)),
            pcie_sent_kb_s=self._figure(
                lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
            ),
            pcie_received_kb_s=self._figure(
                lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            ),
        )

    def _figure(self, ask: Callable[[], int]) -> int:
        """NVML's answer; UNKNOWN where this GPU or driver does not support the question."""
        try:
            return _known(ask())
        except self._nvml.NVMLError:
            return UNKNOWN

    def _percent(self) -> int:
        if self._in_mig_mode():
            return self._instances_percent()
        nvml = self._nvml
        try:
            _, samples = nvml.nvmlDeviceGetSamples(
                self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen_us
            )
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            samples = []  # not supported, no such function, or nothing new
        known = [
            sample.sampleValue.uiVal
            for sample in samples
            if sample.timeStamp > self._seen_us and sample.sampleValue.uiVal <= 100
        ]
        if not known:
            return int(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        self._seen_us = max(sample.timeStamp for sample in samples)
        return int(max(known))

    def _in_mig_mode(self) -> bool:
        nvml = self._nvml
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(self._handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return False  # a GPU or a driver from before MIG
            raise
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    def _instances_percent(self) -> int:
        """The activity of the busiest instance; a new instance is unknown until the next look."""
        nvml = self._nvml
        before, self._instances = self._instances, {}
        percents = []
        try:
            for number in self._instance_numbers():
                self._instances[number] = now = nvml.nvmlGpmSampleAlloc()
                nvml.nvmlGpmMigSampleGet(self._handle, number, now)
                if number in before:
                    percents.append(self._gpm_percent(before[number], now))
        finally:
            for sample in before.values():
                nvml.nvmlGpmSampleFree(sample)
        if len(percents) < len(self._instances):
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_DATA)
        return int(max(percents, default=0))  # without an instance nothing can run

    def _instance_numbers(self) -> list[int]:
        nvml = self._nvml
        found = set()
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(self._handle)):
            try:
                mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, index)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:
                    raise
                continue  # no instance has this index
            found.add(nvml.nvmlDeviceGetGpuInstanceId(mig))
        return sorted(found)

    def _gpm_percent(self, before: Any, now: Any) -> int:
        """The higher of two: GRAPHICS_UTIL has read 0 under full load (dcgm-exporter #662)."""
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted = (nvml.NVML_GPM_METRIC_GRAPHICS_UTIL, nvml.NVML_GPM_METRIC_SM_UTIL)
        asked.numMetrics = len(wanted)
        asked.sample1, asked.sample2 = before, now
        for place, metric in enumerate(wanted):
            asked.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(asked)
        answers = [asked.metrics[place] for place in range(len(wanted))]
        fine = [answer.value for answer in answers if answer.nvmlReturn == nvml.NVML_SUCCESS]
        if not fine:
            raise nvml.NVMLError(answers[0].nvmlReturn)
        percent: float = max(fine)
        return round(percent)


def _known(value: int) -> int:
    """The figure, or UNKNOWN for a value that it cannot have."""
    return int(value) if 0 <= value <= MOST else UNKNOWN
