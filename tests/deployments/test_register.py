"""What ``deployments.register`` says where it fails; what it makes is in test_up.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments import register
from torpor.shared.errors import TorporError


def test_a_deployment_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prefect.yaml").write_text(
        "deployments: [{name: lost, entrypoint: 'flows/lost.py:lost', work_pool: {name: torpor}}]"
    )
    monkeypatch.setattr(register, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    here = Path.cwd()
    nowhere = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with nowhere, pytest.raises(TorporError, match=rf"ended with 1 in {tmp_path}:[\s\S]*lost"):
        register.deploy()
    assert Path.cwd() == here
