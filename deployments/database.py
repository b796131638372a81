"""PostgreSQL as the database of our own Prefect server, where a team has outgrown SQLite."""

from __future__ import annotations

import asyncio
import json
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
from cryptography.fernet import Fernet, InvalidToken

from deployments.block_key import block_key
from deployments.installation import Installation, secret_file
from torpor.shared.errors import InvalidInput, TorporError

_SETTING: Final = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
_ANSWERS_S: Final = 10.0
_SCHEMES: Final = ("postgresql", "postgres")
_OPTIONS: Final = {"host", "sslmode"}
"""Options of libpq that the server's driver takes, too. The server would refuse to start with any
other."""


def choose(installation: Installation, url: str) -> None:
    """Keep ``url`` for this and later starts of the server. InvalidInput where it is no such
    address, holds a password, or would leave blocks and schedules behind."""
    used = chosen(installation)
    if url == used:
        return
    parts, options = _parts(url), {name for name, _ in parse_qsl(urlsplit(url).query)}
    if parts.password is not None or "password" in options:
        raise InvalidInput(
            "--database holds a password, and a command line shows it to everybody on this host: "
            "leave it out, and put the line HOST:PORT:DATABASE:USER:PASSWORD into ~/.pgpass, with "
            "chmod 600"
        )
    if options - _OPTIONS:
        raise InvalidInput(
            f"--database has the options {', '.join(sorted(options - _OPTIONS))}: only "
            f"{' and '.join(sorted(_OPTIONS))} can be used"
        )
    if used or installation.database.exists():
        file = installation.database_file if used else installation.database
        raise InvalidInput(
            f"this server has a database already ({used or file}), with blocks and schedules that "
            "are not moved: without them no schedule runs. Note what you need of them, run "
            f"`torpor down`, move {file} away, and run this again"
        )
    check(installation, url)
    secret_file(installation.database_file, lambda: url)


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in _SCHEMES and len(parts.path) > 1 and parts.port != 0:
            return parts
    except ValueError:  # raised for the port
        pass
    raise InvalidInput(
        "--database is no address of PostgreSQL: write postgresql://USER@HOST/DATABASE"
    )


def chosen(installation: Installation) -> str | None:
    """The address of PostgreSQL; None for SQLite."""
    try:
        return installation.database_file.read_text().strip()
    except FileNotFoundError:
        return None


def settings(url: str) -> dict[str, str]:
    """What Prefect's server needs to use PostgreSQL at ``url``. Its driver reads ~/.pgpass too."""
    parts = urlsplit(url)
    # asyncpg reads libpq's sslmode only from an address that asyncpg parses itself.
    query = [("ssl" if name == "sslmode" else name, it) for name, it in parse_qsl(parts.query)]
    return {
        _SETTING: urlunsplit(parts._replace(scheme="postgresql+asyncpg", query=urlencode(query)))
    }


def check(installation: Installation, url: str) -> None:
    """TorporError where PostgreSQL does not answer, or where the key of its blocks is missing
    here."""
    where = urlsplit(url)
    named = f"the database {where.path[1:]} at {where.hostname or 'localhost'}:{where.port or 5432}"
    try:
        blocks = asyncio.run(_blocks(url))
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise TorporError(
            f"{named} cannot be used ({str(error) or type(error).__name__}): see that PostgreSQL "
            "runs there, has this database, and lets this user in"
        ) from None
    key = Fernet(block_key(installation))
    for name, token in blocks:
        try:
            key.decrypt(token)
        except InvalidToken:
            raise TorporError(
                f"the block {name} in {named} cannot be read with the key in "
                f"{installation.block_key_file}: put back the file that belongs to this database, "
                "or use an empty database"
            ) from None


async def _blocks(url: str) -> list[tuple[str, str]]:
    """The name and the encrypted secrets of each block that has secrets."""
    connection = await asyncpg.connect(url, timeout=_ANSWERS_S, command_timeout=_ANSWERS_S)
    try:
        if await connection.fetchval("SELECT to_regclass('block_document')") is None:
            return []
        rows = await connection.fetch("SELECT name, data FROM block_document")
    finally:
        await connection.close()
    read = [(row["name"], json.loads(row["data"])) for row in rows]
    return [(name, token) for name, token in read if isinstance(token, str)]
