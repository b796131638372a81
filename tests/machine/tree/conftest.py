"""What reads and writes small files, in both its languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.machine.tree import batch


@pytest.fixture(params=["C", "Python"])
def each_language(
    request: pytest.FixtureRequest, built_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "Python":
        monkeypatch.setattr(batch, "disk_library", lambda: None)
