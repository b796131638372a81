from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_kernels import native
from gpu_kernels.device import Device, Queue
from tests.fixtures.shim import ShimDriver
from torpor.shared.values import MIB


@pytest.fixture
def device(shim: ShimDriver) -> Iterator[Device]:
    """The CUDA source, compiled for this CPU; all is given back at the end."""
    opened = shim.device()
    yield opened
    opened.close()
    assert shim.held == 0


@pytest.fixture
def queue(device: Device) -> Queue:
    return device.queue(16 * MIB, 8 * MIB)


@pytest.fixture(params=[0, 1, 2], ids=["plain C", "AVX2", "AVX-512"])
def lib(request: pytest.FixtureRequest, built_library: Path) -> Iterator[native.Library]:
    """The C twins, held to one instruction set (or the best one below it that this CPU has)."""
    found = native.library()
    assert found is not None, f"{built_library} does not load"
    before = found.torpor_cpu_level()
    found.torpor_cpu_limit(request.param)
    yield found
    found.torpor_cpu_limit(before)
