"""The count of lines: which package a path belongs to, and the comparison with a revision."""

from __future__ import annotations

import pytest

from benchmarks.lines import Kind, at, count, floors_of, here, package_of, table

FLOORS = {"codecs": "shared", "errors": "shared", "agent": "machine"}


@pytest.mark.parametrize(
    ("path", "package", "kind"),
    [
        ("torpor/shared/codecs/planes.py", "torpor/shared/codecs", "code"),
        ("torpor/codecs/planes.py", "torpor/shared/codecs", "code"),
        ("torpor/errors.py", "torpor/shared/errors", "code"),
        ("torpor/machine/__init__.py", "machine", "code"),
        ("torpor/__init__.py", "torpor", "code"),
        ("tests/codecs/test_planes.py", "torpor/shared/codecs", "tests"),
        ("tests/shared/test_errors.py", "torpor/shared/errors", "tests"),
        ("tests/fixtures/trees.py", "fixtures", "tests"),
        ("gpu_kernels/rans/rans.c", "gpu_kernels", "code"),
    ],
)
def test_each_path_belongs_to_the_package_it_has_now(path: str, package: str, kind: Kind) -> None:
    assert package_of(path, FLOORS) == (package, kind)


def test_a_comparison_shows_each_package_and_the_sum_without_the_benchmarks() -> None:
    before = count([("torpor/errors.py", b"a\nb\n"), ("benchmarks/x.py", b"a\n")], FLOORS)
    after = count([("torpor/shared/errors.py", b"a\n"), ("tests/test_errors.py", b"a\n")], FLOORS)
    lines = [line.split() for line in table(before, after).splitlines()]
    assert ["torpor/shared/errors", "2", "1", "-1", "0", "1", "+1"] in lines
    assert ["benchmarks", "1", "0", "-1", "0", "0", "+0"] in lines
    assert lines[-1] == ["all", "but", "benchmarks", "2", "1", "-1", "0", "1", "+1"]


def test_the_files_here_and_those_of_a_revision_are_found() -> None:
    files = dict(here())
    assert floors_of(files)["agent"] == "machine"
    assert set(dict(at("HEAD"))) & set(files) > {"benchmarks/peers.py", "gpu_kernels/rans/rans.c"}
