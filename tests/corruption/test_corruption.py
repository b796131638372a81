"""A short run; the long one is ``python -m tests.corruption --rounds 1000``."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.corruption.__main__ import run
from tests.fixtures.stores import Server


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_every_corruption_is_found_and_the_right_files_are_blamed(
    sealed: bool, seaweed: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(seaweed.store(), tmp_path, 24, secrets.randbelow(1 << 32), sealed)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "24 of 24 corruptions found" in printed
