"""The steps of the Containerfile in a bare Debian: part of ``make oracles``. Root only.

No engine builds the image here. What its steps make is run as the chart runs it.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.containerfile import Image
from tests.fixtures.roots import Bases

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("needs_server"),
    pytest.mark.together("other roots"),
]


@pytest.fixture(scope="module")
def image(bases: Bases) -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="torpor-image-") as folder:
        _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)  # apt syncs each file
        try:
            root = Path(folder) / "root"
            _run("cp", "--archive", str(bases.of("bookworm")), str(root))
            built = Image(root)
            built.build()
            yield built
        finally:
            _run("umount", folder)


def test_torpor_runs_without_root_where_nothing_can_be_written(image: Image) -> None:
    assert "hibernate" in image.run_as_the_chart_does("tini", "--", "torpor", "--help")


def test_what_the_charts_pods_start_is_there(image: Image) -> None:
    said = image.run_as_the_chart_does(
        *("python", "-m", "deployments.prefect_worker", "worker", "start", "--help")
    )
    assert "--install-policy" in said
    said = image.run_as_the_chart_does("python", "-m", "deployments.cluster", "--help")
    assert "budgets" in said
    assert image.run_as_the_chart_does("python", "-m", "http.server", "--help")


def test_the_kernels_are_built_and_bytecode_is_kept(image: Image) -> None:
    program = "import gpu_kernels.native as n, torpor, importlib.util as u; "
    program += "import os; print(n.library_path().exists(), "
    program += "os.path.exists(u.cache_from_source(torpor.__file__)))"
    assert image.run_as_the_chart_does("python", "-c", program).split() == ["True", "True"]


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
