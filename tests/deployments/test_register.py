"""What ``deployments.register`` says where it fails; what it makes is in test_up.py."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocks import ObjectStore
from deployments import register
from deployments.installation import Installation
from deployments.server import Server
from torpor.control.store.embedded import EmbeddedStore
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


@pytest.mark.parametrize(("state", "started"), [({"locked": True}, []), ({}, ["first"])])
def test_a_store_that_an_older_release_started_is_started_again(
    state: dict[str, bool], started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, as it always has: whoever asks."""
    made = Installation(tmp_path)
    begun: list[str] = []
    made.store.mkdir()
    (made.store / "embedded.json").write_text(json.dumps({"pid": 1, "started": "1"} | state))

    def start(folder: Path, access: str, secret: str, bucket: str) -> SimpleNamespace:
        assert (folder, access, secret) == (made.store, "AK", "secret")
        begun.append(bucket)
        return SimpleNamespace(endpoint_url="http://127.0.0.1:1")

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        block = SimpleNamespace(
            credentials=f"aws-credentials/{register.EMBEDDED}",
            bucket="first",
            settings=lambda: SimpleNamespace(
                endpoint_url=url, access_key="AK", secret_key="secret"
            ),
            open=lambda: SimpleNamespace(probe=lambda: None),
            save=lambda name, overwrite: None,
        )
        monkeypatch.setattr(register, "load_named", lambda *_, **__: block)
        monkeypatch.setattr(EmbeddedStore, "start", start)
        register.serve_store(made)
    assert begun == started


def test_the_first_store_has_a_key_unless_it_has_plain_snapshots(tmp_path: Path) -> None:
    made = Installation(tmp_path)
    made.store.mkdir()
    state = made.store / "embedded.json"
    state.write_text("{}")
    assert register.first_key(made) is None
    state.unlink()
    key = register.first_key(made)
    assert key is not None
    assert ObjectStore(bucket="first", encryption_key=key).key()
    assert made.store_key_file.stat().st_mode & 0o777 == 0o600
    state.write_text("{}")  # the same where the database is lost and the store is not
    assert register.first_key(made) == key
