"""What ``deployments.register`` says where it fails; what it makes is in test_up.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deployments import register
from deployments.installation import Installation
from deployments.server import Server
from torpor.shared.errors import TorporError


def test_a_deployment_that_fails_is_named(
    prefect_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.yaml").write_text(
        "deployments: [{name: lost, entrypoint: 'flows/lost.py:lost', work_pool: {name: torpor}}]"
    )
    monkeypatch.setattr(register, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    here = Path.cwd()
    with pytest.raises(TorporError, match=rf"ended with 1 in {tmp_path}:[\s\S]*lost"):
        register.deploy(Installation(tmp_path))
    assert Path.cwd() == here
