"""No account key is on a machine, in a start script, a log, an artifact, or Prefect's files."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from prefect_aws import MinIOCredentials
from pydantic import SecretStr

from blocks import ObjectStore, SSHIdentity, Tuning, VastProvider, Workspace
from deployments.installation import Installation
from deployments.server import Server
from flows import create, hibernate, reconcile, wake
from tests.fixtures.machines import KeyPair
from tests.fixtures.stores import Server as Store
from tests.markets.azure import FakeAzure
from tests.markets.boot import BootedMachine
from tests.markets.ec2 import REGION, FakeEc2
from tests.markets.every import NAMES, Markets
from tests.markets.faults import Fault
from tests.markets.gcp import FakeGcp
from tests.markets.market import Ware
from tests.markets.server import Answer, FakeMarket, Request

BLOCK = "keys"
_ONE_OFFER = ("kubernetes",)  # where a create that fails leaves no other offer
_OWN = ("etc", "home", "mnt", "opt", "root", "run", "tmp", "var")
"""What of a machine's root is not this host's."""


def _save(markets: Markets, store: Store, identity: KeyPair) -> None:
    """All blocks, as a user saves them; ``use`` chooses the market."""
    for name in NAMES:
        for block in markets.blocks(name, BLOCK):
            block.save(BLOCK, overwrite=True)
    MinIOCredentials(
        minio_root_user=store.access_key, minio_root_password=SecretStr(store.secret_key)
    ).save(BLOCK, overwrite=True)
    ObjectStore(
        flavour="seaweedfs",
        bucket=store.bucket(),
        endpoint_url=store.endpoint_url,
        credentials=f"minio-credentials/{BLOCK}",
    ).save(BLOCK, overwrite=True)
    SSHIdentity(private_key=SecretStr(identity.private)).save(BLOCK, overwrite=True)


@pytest.fixture
def saved_blocks(
    prefect_server: Server, markets: Markets, seaweed: Store, identity_key: KeyPair
) -> Iterator[None]:
    """In the end none of a market is left: others share the server, and reconcile looks at all."""
    _save(markets, seaweed, identity_key)
    yield
    markets.delete_blocks(NAMES, BLOCK)


def _use(name: str) -> None:
    """The workspace names this market, and another one after it."""
    order = [f"{market}-provider/{BLOCK}" for market in (name, *(n for n in NAMES if n != name))]
    Tuning(rank="order").save(BLOCK, overwrite=True)
    Workspace(
        name=BLOCK,
        store=BLOCK,
        identity=BLOCK,
        provider=order[0],
        more_providers=order[1:2],
        gpu="H100",
        tuning=BLOCK,
    ).save(BLOCK, overwrite=True)


def _heard(fake: FakeMarket, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every request but for its authorization."""
    heard: list[str] = []
    answer = fake.answer

    def listening(request: Request, authorization: str) -> Answer | None:
        heard.append(f"{request.method} {request.path} {request.query} {request.body}")
        return answer(request, authorization)

    monkeypatch.setattr(fake, "answer", listening)
    return heard


def _holding(words: dict[str, str], where: str, content: bytes) -> list[str]:
    return [f"{name} in {where}" for name, word in words.items() if word.encode() in content]


def _unpacked(text: str) -> bytes:
    """With all that is base64 in it: markets take start scripts so."""
    packed = re.findall(r"(?:[A-Za-z0-9+/]{4}){25,}(?:[A-Za-z0-9+/]{2,3}={1,2})?", unquote(text))
    return b"\n".join([text.encode(), *(base64.b64decode(word) for word in packed)])


def _on_the_machine(machine: BootedMachine, words: dict[str, str]) -> Iterator[str]:
    """In its files and in what its processes were started with."""
    processes = [path for path in (machine.root / "proc").iterdir() if path.name.isdecimal()]
    assert processes
    paths = [path / name for path in processes for name in ("cmdline", "environ")]
    for name in _OWN:
        paths += [path for path in (machine.root / name).rglob("*") if path.is_file()]
    for path in paths:
        try:
            content = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        yield from _holding(words, str(path), content)


def _in_files(folder: Path, words: dict[str, str]) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            with contextlib.suppress(FileNotFoundError):  # other tests' machines come and go
                if path.is_file():
                    yield from _holding(words, str(path), path.read_bytes())


@pytest.mark.usefixtures("saved_blocks")
def test_no_account_key_is_anywhere_but_in_requests_authorizations(
    markets: Markets,
    installation: Installation,
    identity_key: KeyPair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for name in NAMES:  # a fake has no port 22
        defaults = type(markets.provider(name)).__init__.__kwdefaults__
        if "ssh_port" in defaults:
            monkeypatch.setitem(defaults, "ssh_port", markets.machines.port)
    heard = {name: _heard(fake, monkeypatch) for name, fake in markets.fakes.items()}
    keys = {f"{name}'s key": fake.key for name, fake in markets.fakes.items()}
    aws_id = {"AWS's key id": keys.pop("ec2's key")}  # no secret: Prefect's events show it
    aws = markets.fakes["ec2"]
    assert isinstance(aws, FakeEc2)
    keys["AWS's secret key"] = aws.secret
    google = markets.fakes["gcp"]
    assert isinstance(google, FakeGcp)
    keys["Google's private key"] = google.private_key.splitlines()[5]
    azure = markets.fakes["azure"]
    assert isinstance(azure, FakeAzure)
    keys["Azure's client secret"] = azure.secret
    zone = Ware("H100", 8, 80, 55.04, f"{REGION}a", name="p5.48xlarge")
    aws.market.wares.append(zone)
    found: list[str] = []
    for name in NAMES:
        _use(name)
        if name not in _ONE_OFFER:
            markets.fakes[name].faults.arm(Fault("no capacity", "create"))  # so it is in the log
        if name == NAMES[0]:
            create(BLOCK)
            work = markets.workspace(name)
            work.mkdir(exist_ok=True)
            (work / "notes.txt").write_text("the work\n")
        else:
            wake(BLOCK)
        assert markets.alive() == [name]
        body = markets.body(name)
        public = identity_key.public.split()[1]
        assert list(_on_the_machine(body, {"login": public}))  # so the search finds what is there
        found += _on_the_machine(body, keys | aws_id)
        hibernate(BLOCK)
    reconcile(BLOCK)
    assert markets.alive() == []

    for name in NAMES:
        said = _unpacked("\n".join(heard[name]))
        assert b"ssh_host_ed25519_key" in said  # of the start script
        found += _holding(keys | aws_id, f"requests to {name}", said)
    logged = "\n".join(caplog.handler.format(record) for record in caplog.records)
    assert logged.count("failed, trying the next") == len(NAMES) - len(_ONE_OFFER)
    found += _holding(keys | aws_id, "logs", logged.encode())
    assert list(_in_files(installation.prefect_home, {"artifact": f"hibernate-{BLOCK}"}))
    found += _in_files(installation.folder, keys)
    store = Workspace.of(BLOCK).open_store()
    for listed in store.list(""):
        found += _holding(keys, listed.key, store.get(listed.key, max_bytes=64 << 20))
    assert found == []
    assert VastProvider.load(BLOCK).api_key.get_secret_value() == markets.fakes["vast"].key
