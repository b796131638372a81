"""The steps of the Containerfile in a bare Debian: part of ``make oracles``. Root only.

No engine builds the image here. What its steps make is run as the chart runs it.
"""

from __future__ import annotations

import pytest

from tests.fixtures.containerfile import Image

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("needs_server"),
    pytest.mark.together("other roots"),
]


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


def test_machines_need_no_package_index(image: Image) -> None:
    program = "from torpor.control.remote.bundle import PYTHONS, Platform, make_bundle\n"
    program += "for python in PYTHONS: print(make_bundle(Platform(python, 'x86_64')).hash)"
    said = image.run_as_the_chart_does("env", "UV_OFFLINE=1", "python", "-c", program)
    assert len({*said.split()}) == 5
