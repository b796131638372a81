"""The key of the secrets in blocks is in a file, and no block is lost on the way there."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from deployments import block_key
from deployments.block_key import move_blocks
from deployments.installation import Installation
from torpor.shared.errors import TorporError

SECRETS = {"one": "aws", "two": "ssh", "three": "vast"}


@pytest.fixture
def old(tmp_path: Path) -> Installation:
    """As Prefect leaves a database that it made a key for."""
    made = Installation(tmp_path / "state")
    made.prefect_home.mkdir(parents=True)
    key = Fernet.generate_key()
    with contextlib.closing(sqlite3.connect(made.database)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE configuration (key, value)")
        database.execute("CREATE TABLE block_document (id, name, data)")
        value = json.dumps({"fernet_key": key.decode()})
        database.execute("INSERT INTO configuration VALUES ('ENCRYPTION_KEY', ?)", (value,))
        for name, secret in SECRETS.items():
            data = json.dumps(Fernet(key).encrypt(secret.encode()).decode())
            database.execute("INSERT INTO block_document VALUES (?, ?, ?)", (name, name, data))
        database.commit()
    return made


def _read(installation: Installation) -> dict[str, str]:
    """What a server would read: with the file's key once the database has none."""
    with contextlib.closing(sqlite3.connect(installation.database)) as database:
        stored = database.execute("SELECT value FROM configuration").fetchall()
        key = (
            json.loads(stored[0][0])["fernet_key"]
            if stored
            else installation.block_key_file.read_text().strip()
        )
        rows = database.execute("SELECT name, data FROM block_document").fetchall()
    return {name: Fernet(key).decrypt(json.loads(data)).decode() for name, data in rows}


def test_the_key_is_in_a_file_and_no_longer_in_the_database(old: Installation) -> None:
    with contextlib.closing(sqlite3.connect(old.database)) as database:
        value = database.execute("SELECT value FROM configuration").fetchone()[0]
    assert move_blocks(old) == len(SECRETS)
    assert _read(old) == SECRETS
    assert old.block_key_file.stat().st_mode & 0o777 == 0o600
    key = json.loads(value)["fernet_key"].encode()
    files = [path for path in old.folder.rglob("*") if path.is_file()]
    assert [path for path in files if key in path.read_bytes()] == []
    kept = old.block_key_file.read_text()
    assert move_blocks(old) == 0
    assert (_read(old), old.block_key_file.read_text()) == (SECRETS, kept)


def test_interrupted_anywhere_no_block_is_lost(
    old: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Stopped(Exception):
        pass

    class Interrupted(sqlite3.Connection):
        left = 0

        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            if Interrupted.left == 0:
                raise _Stopped
            Interrupted.left -= 1
            return super().execute(*arguments)

    connect = sqlite3.connect
    for steps in itertools.count():
        Interrupted.left = steps
        with monkeypatch.context() as patch, contextlib.suppress(_Stopped):
            patch.setattr(
                block_key.sqlite3,
                "connect",
                lambda *given, **named: connect(*given, factory=Interrupted, **named),
            )
            move_blocks(old)
            break
        assert _read(old) == SECRETS
    assert steps > len(SECRETS)
    assert _read(old) == SECRETS


def test_blocks_that_a_server_without_the_file_made_are_moved_too(old: Installation) -> None:
    """Prefect, started by hand on the same home, makes a key of its own beside the file's."""
    move_blocks(old)
    stray = Fernet.generate_key()
    with contextlib.closing(sqlite3.connect(old.database)) as database:
        value = json.dumps({"fernet_key": stray.decode()})
        database.execute("INSERT INTO configuration VALUES ('ENCRYPTION_KEY', ?)", (value,))
        data = json.dumps(Fernet(stray).encrypt(b"new").decode())
        database.execute("INSERT INTO block_document VALUES ('four', 'four', ?)", (data,))
        database.commit()
    move_blocks(old)
    assert _read(old) == {**SECRETS, "four": "new"}


def test_a_lost_file_is_an_error_and_not_a_new_key(old: Installation) -> None:
    move_blocks(old)
    old.block_key_file.unlink()
    with pytest.raises(TorporError, match="the key of the 3 blocks"):
        move_blocks(old)
    assert not old.block_key_file.exists()
    with contextlib.closing(sqlite3.connect(old.database)) as database:
        value = json.dumps({"fernet_key": Fernet.generate_key().decode()})
        database.execute("INSERT INTO configuration VALUES ('ENCRYPTION_KEY', ?)", (value,))
        database.commit()
    with pytest.raises(TorporError, match=r"the block one in .* neither"):
        move_blocks(old)
