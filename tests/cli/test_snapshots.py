"""Commands about snapshots: which words their flows get."""

from __future__ import annotations

from typing import Any

import pytest

from torpor_cli import snapshots
from torpor_cli.app import app


@pytest.mark.rule(23)
@pytest.mark.parametrize(
    ("words", "leaves_git"),
    [
        ([], True),
        (["--machine", "here"], True),
        (["--with-git"], False),
        (["--leave-git"], True),
        (["--machine", "m-1"], False),
        (["--machine", "m-1", "--leave-git"], True),
    ],
)
def test_a_restore_to_this_host_leaves_git_out_unless_it_is_wished(
    monkeypatch: pytest.MonkeyPatch, words: list[str], leaves_git: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(snapshots, "run", lambda name, options, **given: asked.update(given))
    app(["restore", "mywork", "proj", ".", *words], exit_on_error=False)
    assert asked["leave_git"] is leaves_git
