"""The measurement of a frozen process, with NumPy in CuPy's place: here is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deployments.installation import CHECKOUT

_CUPY = """
import numpy
class asarray:
    def __init__(self, held): self.held = held
    def get(self): return self.held
def tile(array, times): return asarray(numpy.tile(array.held, times))
"""


def test_a_process_is_frozen_and_goes_on_twice(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(_CUPY)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.frozen_gpu", "--gib", "0.05", "--runs", "2"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["0.05 GiB"]
    assert row["runs"] == 2
    assert row["images_bytes"][1] > 0.05 * 2**30
    assert row["images_again_bytes"][1] > 0.05 * 2**30
