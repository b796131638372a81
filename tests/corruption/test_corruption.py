"""A short run; the long one is ``python -m tests.corruption --rounds 1000``."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.corruption.__main__ import run
from tests.fixtures.stores import Server


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_every_corruption_is_found_and_the_right_files_are_blamed(
    sealed: bool, seaweed: Server, tmp_path: Path
) -> None:
    found = run(seaweed.store(), tmp_path, 24, secrets.randbelow(1 << 32), sealed)
    assert found.violations == []
    assert sum(found.report.values()) == 24
