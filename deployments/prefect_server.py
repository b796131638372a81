"""Prefect's server on SQLite, where every transaction takes the lock to write when it begins.

Prefect begins most of them DEFERRED. A transaction that reads and then writes fails at once with
"database is locked" (SQLITE_BUSY_SNAPSHOT) if another has written in between, and no timeout of
SQLite applies: the UI got 503, and workers lost heartbeats. Begun IMMEDIATE, it waits for its turn.
What only reads begins no transaction.
"""

from __future__ import annotations

import sys
from contextlib import _AsyncGeneratorContextManager
from typing import Final

from prefect.cli import app as prefect_command
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

_begin: Final = AioSqliteConfiguration.begin_transaction


def _begin_immediate(
    self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> _AsyncGeneratorContextManager[AsyncSessionTransaction]:
    return _begin(self, session, with_for_update=True)


if __name__ == "__main__":
    AioSqliteConfiguration.begin_transaction = _begin_immediate  # type: ignore[method-assign]
    sys.argv = ["prefect", *sys.argv[1:]]
    prefect_command()
