"""The key of the secrets in blocks is in a file, and a lost one is not made anew."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from deployments.block_key import block_key
from deployments.installation import Installation
from torpor.shared.errors import TorporError

SECRETS = ("aws", "ssh", "vast")


def _database(made: Installation, *statements: str) -> None:
    made.prefect_home.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(made.database)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


@pytest.mark.rule(20)
def test_the_key_is_made_once_in_a_file_that_only_the_user_reads(tmp_path: Path) -> None:
    made = Installation(tmp_path / "state")
    key = block_key(made)
    assert made.block_key_file.stat().st_mode & 0o777 == 0o600
    assert block_key(made) == key


@pytest.mark.rule(20)
def test_a_lost_file_is_an_error_and_not_a_new_key(tmp_path: Path) -> None:
    made = Installation(tmp_path / "state")
    sealing = Fernet(block_key(made))
    _database(made, "CREATE TABLE block_document (id, name, data)")
    with contextlib.closing(sqlite3.connect(made.database)) as database:
        for secret in SECRETS:
            data = json.dumps(sealing.encrypt(secret.encode()).decode())
            database.execute("INSERT INTO block_document VALUES (?, ?, ?)", (secret, secret, data))
        database.commit()
    made.block_key_file.unlink()
    with pytest.raises(TorporError, match="the key of the 3 blocks"):
        block_key(made)
    assert not made.block_key_file.exists()


@pytest.mark.parametrize(
    "tables", [(), ("CREATE TABLE block_document (id, name, data)",)], ids=["none", "no block"]
)
def test_without_blocks_a_key_that_is_missing_is_made(
    tmp_path: Path, tables: tuple[str, ...]
) -> None:
    made = Installation(tmp_path / "state")
    _database(made, *tables)
    assert block_key(made)
