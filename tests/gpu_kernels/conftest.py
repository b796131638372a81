from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_kernels import native


@pytest.fixture(params=[0, 1, 2], ids=["plain C", "AVX2", "AVX-512"])
def lib(request: pytest.FixtureRequest, built_library: Path) -> Iterator[native.Library]:
    """The C twins, held to one instruction set (or the best one below it that this CPU has)."""
    found = native.library()
    assert found is not None, f"{built_library} does not load"
    before = found.torpor_cpu_level()
    found.torpor_cpu_limit(request.param)
    yield found
    found.torpor_cpu_limit(before)
