"""The key of the secrets in Prefect's blocks: a file beside the database, not a row in it.

Prefect reads it from ``PREFECT_SERVER_ENCRYPTION_KEY``, which only the server gets. Without that
variable Prefect makes a key and stores it in the database, so that a copy of the database has the
key, too.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Final

from cryptography.fernet import Fernet

from deployments.installation import Installation, secret_file
from torpor.shared.errors import TorporError

VARIABLE: Final = "PREFECT_SERVER_ENCRYPTION_KEY"


def block_key(installation: Installation) -> str:
    """The key of blocks' secrets. Made at the first use, but refused where the database has blocks
    that a lost key encrypted."""
    file, database = installation.block_key_file, installation.database
    if not file.exists() and database.exists():
        with contextlib.closing(sqlite3.connect(database)) as open_database:
            blocks = _encrypted_blocks(open_database)
        if blocks:
            raise TorporError(
                f"{file} is missing: it is the key of the {blocks} blocks in {database}, and "
                "nobody can read them without it: put it back from your backup"
            )
    return secret_file(file, lambda: Fernet.generate_key().decode())


def _encrypted_blocks(database: sqlite3.Connection) -> int:
    """How many blocks have encrypted secrets; 0 for a database whose first server was killed before
    it made its tables."""
    wanted = "SELECT count(*) FROM sqlite_master WHERE name = 'block_document'"
    if not database.execute(wanted).fetchone()[0]:
        return 0
    rows = database.execute("SELECT data FROM block_document").fetchall()
    return sum(isinstance(json.loads(data), str) for (data,) in rows)
