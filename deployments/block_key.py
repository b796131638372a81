"""The key of the secrets in Prefect's blocks: a file beside the database, not a row in it.

Prefect reads it from ``PREFECT_SERVER_ENCRYPTION_KEY``, which only the server gets. Without that it
makes a key and stores it in the database, where whoever copies the one has the other too.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from deployments.installation import Installation, secret_file
from torpor.shared.errors import TorporError

VARIABLE: Final = "PREFECT_SERVER_ENCRYPTION_KEY"


def block_key(installation: Installation) -> str:
    """The key. Made at the first use, but never for blocks that another one was lost of."""
    file, database = installation.block_key_file, installation.database
    if not file.exists() and database.exists():
        with contextlib.closing(sqlite3.connect(database)) as open_database:
            blocks, stored = _blocks(open_database), _stored_key(open_database)
        if blocks and not stored:
            raise TorporError(
                f"{file} is missing: it is the key of the {len(blocks)} blocks in {database}, and "
                "nobody can read them without it: put it back from your backup"
            )
    return secret_file(file, lambda: Fernet.generate_key().decode())


def move_blocks(installation: Installation) -> int:
    """Encrypt with the file's key what the database's own key was used for, and remove that one.

    One transaction, with the file on disk before: interrupted anywhere, all blocks can be read with
    the key that the database has, or all with the file's. The server must not run.
    """
    key = block_key(installation)
    if not installation.database.exists():
        return 0
    with contextlib.closing(
        sqlite3.connect(installation.database, isolation_level=None)
    ) as database:
        database.execute("PRAGMA secure_delete = ON")
        database.execute("BEGIN IMMEDIATE")
        stored = _stored_key(database)
        if stored is None:
            return 0
        keys = MultiFernet([Fernet(key), Fernet(stored)])
        blocks = _blocks(database)
        for block, name, token in blocks:
            try:
                again = keys.rotate(token.encode()).decode()
            except InvalidToken:
                raise TorporError(
                    f"the block {name} in {installation.database} can be read neither with the "
                    f"key in the database nor with that in {installation.block_key_file}: nothing "
                    "was changed; put back the key file of this database from your backup"
                ) from None
            database.execute(
                "UPDATE block_document SET data = ? WHERE id = ?", (json.dumps(again), block)
            )
        database.execute("DELETE FROM configuration WHERE key = 'ENCRYPTION_KEY'")
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the key is in no file any more
    return len(blocks)


def _stored_key(database: sqlite3.Connection) -> str | None:
    """The key that Prefect made itself; None if it made none."""
    if not _has_tables(database):
        return None
    found = database.execute(
        "SELECT value FROM configuration WHERE key = 'ENCRYPTION_KEY'"
    ).fetchone()
    return str(json.loads(found[0])["fernet_key"]) if found else None


def _blocks(database: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Id, name and ciphertext of each block that has one."""
    if not _has_tables(database):
        return []
    rows = database.execute("SELECT id, name, data FROM block_document").fetchall()
    read = [(block, name, json.loads(data)) for block, name, data in rows]
    return [(block, name, token) for block, name, token in read if isinstance(token, str)]


def _has_tables(database: sqlite3.Connection) -> bool:
    """False for a database whose first server was killed before it made them."""
    wanted = "SELECT count(*) FROM sqlite_master WHERE name IN ('configuration', 'block_document')"
    return bool(database.execute(wanted).fetchone()[0] == 2)
