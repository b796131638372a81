"""The Prefect server of `torpor up` on PostgreSQL, with blocks that outlive both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import database, parent, server, services
from deployments.down import down
from deployments.installation import Installation
from deployments.up import up
from tests.fixtures.postgres import PASSWORD, Postgres
from tests.fixtures.prefect_api import ask
from torpor.control.ports import free_ports
from torpor.control.supervision import children_of
from torpor.shared.errors import InvalidInput, TorporError

SECRET = "secret-of-the-block"


@pytest.fixture
def installation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    made = Installation(Path(tempfile.mkdtemp(prefix="torpor-")).resolve())
    yield made
    down(made)
    shutil.rmtree(made.folder)


def test_a_server_on_postgres_runs_schedules_and_keeps_blocks_through_a_crash(
    postgres: Postgres, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSFILE", str(postgres.passfile))
    database.choose(installation, postgres.url())
    used = server.server_of(installation, free_ports(1)[0])
    first = parent.start(installation, used)
    assert not installation.database.exists()
    services.check_scheduler(used)
    _save(used, SECRET)
    assert parent.start(installation, used) is None  # it runs as it should

    postgres.stop("immediate")
    with pytest.raises(TorporError, match=f"database postgres at 127.0.0.1:{postgres.port}"):
        database.check(installation, postgres.url())
    postgres.start()
    assert _read(used) == SECRET

    parent.stop(first)
    assert parent.start(installation, used)
    assert _read(used) == SECRET
    pid = children_of(installation.folder)[server.ROLE]
    seen = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert PASSWORD.encode() not in seen + installation.database_file.read_bytes()

    # Another installation, or this one without its key, would make blocks that nobody reads.
    kept = installation.block_key_file.read_text()
    installation.block_key_file.unlink()
    with pytest.raises(TorporError, match=r"the block mine .* put back the file"):
        database.check(installation, postgres.url())
    installation.block_key_file.write_text(kept)
    with pytest.raises(InvalidInput, match="no schedule runs"):
        database.choose(installation, "postgresql://me@elsewhere/db")
    assert database.chosen(installation) == postgres.url()


def _save(used: server.Server, value: str) -> None:
    types = {"block_types": {"slug": {"any_": ["secret"]}}}
    (kind,) = ask("POST", f"{used.api_url}/block_types/filter", types, by=used.login)
    schemas = {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}}
    (schema,) = ask("POST", f"{used.api_url}/block_schemas/filter", schemas, by=used.login)
    body = {"name": "mine", "block_type_id": kind["id"], "block_schema_id": schema["id"]}
    body["data"] = {"value": value}
    ask("POST", f"{used.api_url}/block_documents/", body, by=used.login)


def _read(used: server.Server) -> str:
    url = f"{used.api_url}/block_types/slug/secret/block_documents/name/mine"
    found = ask("GET", url, query={"include_secrets": "true"}, by=used.login)
    return str(found["data"]["value"])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://me@host/db", "postgresql://USER@HOST/DATABASE"),
        ("postgresql://me@host", "postgresql://USER@HOST/DATABASE"),
        ("postgresql://me@host:port/db", "postgresql://USER@HOST/DATABASE"),
        ("postgresql://me@host/db?sslcert=mine", "options sslcert"),
        ("postgresql://me:hidden@host/db", r"\.pgpass"),
        ("postgresql://me@host/db?password=hidden", r"\.pgpass"),
    ],
)
def test_what_cannot_be_used_is_refused_and_no_password_is_repeated(
    url: str, said: str, installation: Installation
) -> None:
    with pytest.raises(InvalidInput, match=said) as raised:
        database.choose(installation, url)
    assert "hidden" not in str(raised.value)


def test_no_block_is_left_behind_in_sqlite(installation: Installation) -> None:
    installation.prefect_home.mkdir(parents=True)
    installation.database.touch()
    with pytest.raises(InvalidInput, match="are not moved"):
        database.choose(installation, "postgresql://me@host/db")
    assert database.chosen(installation) is None


def test_a_server_of_the_users_own_has_a_database_of_its_own(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    with pytest.raises(InvalidInput, match="leave out --database"):
        up(installation, postgres="postgresql://me@host/db")


def test_the_driver_gets_what_libpq_calls_sslmode() -> None:
    found = database.settings("postgres://me@db.example:5433/prefect?sslmode=verify-full")
    assert list(found.values()) == [
        "postgresql+asyncpg://me@db.example:5433/prefect?ssl=verify-full"
    ]
