"""A store behind a private certificate authority: whom the control side trusts, and the machine."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.own_saves import book_of, saved, stored
from tests.fixtures.snapshots import Machines
from tests.fixtures.stores import Server
from tests.fixtures.tls_front import TlsFront
from tests.fixtures.trees import content, differences, facts, kept, let_settle
from torpor.control.remote.examination import Examination, PackWork
from torpor.control.remote.measurement import line_of
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import open_manifest
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import InvalidInput, StoreError
from torpor.shared.values import KIB, ObjectKey


@pytest.fixture
def front(seaweed: Server, tmp_path: Path) -> Iterator[TlsFront]:
    front = TlsFront(seaweed.endpoint_url, tmp_path)
    yield front
    front.close()


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a host whose user has configured no authority."""
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))


def behind(front: TlsFront, seaweed: Server, bundle: Path | None) -> S3Store:
    named = None if bundle is None else str(bundle)
    return seaweed.same(seaweed.store(), endpoint_url=front.endpoint_url, verify_tls=named)


def test_whatever_a_machine_asks_of_its_store_trusts_the_authority_of_the_control_side(
    front: TlsFront, seaweed: Server, was: Path, machines: Machines, tmp_path: Path
) -> None:
    store = behind(front, seaweed, front.authority)
    engine, before = machines(store, tmp_path / "home"), kept(was)
    first = engine.snapshot([was])
    (was / "small").write_bytes(content(8, 9000))
    let_settle()
    after = kept(was)
    own_save = saved(engine, book_of(engine, was, first))
    verify_snapshot(store, stored(engine, own_save), engine.seal)

    engine.sync(first, discard_local=True)
    assert differences(before, facts(was)) == []
    other, back = machines(store, tmp_path / "other"), tmp_path / "back"
    other.restore(own_save.snapshot, [back])
    assert differences(after, facts(back)) == []
    path = other.path_restore(first, b"small", tmp_path / "into")
    for part in path.begin().parts:
        path.restore_part(part)
    path.check(full=True)
    path.end()
    assert (tmp_path / "into/small").read_bytes() == content(2, 3000)

    manifest, _ = open_manifest(store, WORKSPACE, first, engine.seal)
    works = [PackWork(pack, []) for pack in manifest.packs]
    found = Examination(engine, store, WORKSPACE, None, works).run()
    assert [one.fault for one in found] == [""] * len(works)
    key = ObjectKey("workspaces/demo/line")
    put, get = (store.grant(verb, key, expires_s=60) for verb in ("PUT", "GET"))
    assert line_of(engine, store.authority)([put], [get], KIB, 1).up_s > 0


@pytest.mark.parametrize("where", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "ca_bundle"])
def test_the_authority_is_taken_from_where_the_aws_tools_take_it(
    where: str,
    front: TlsFront,
    seaweed: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    system = tmp_path / "system.pem"  # as a system's: the public ones, and one's own
    system.write_text(f"# all\n{certifi.contents()}\n{front.authority.read_text()}")
    if where == "ca_bundle":
        (tmp_path / "aws-config").write_text(f"[default]\nca_bundle = {system}\n")
    else:
        monkeypatch.setenv(where, str(system))
    store = behind(front, seaweed, None)
    store.probe()
    assert store.authority == front.authority.read_text()


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_without_an_authority_the_store_is_not_trusted_and_where_to_name_one_is_said(
    front: TlsFront, seaweed: Server, was: Path, machines: Machines, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="verify_cert_path"):
        behind(front, seaweed, None).probe()
    trusted = behind(front, seaweed, front.authority)
    first = machines(trusted, tmp_path / "home").snapshot([was])
    unchecked = seaweed.same(trusted, endpoint_url=front.endpoint_url, verify_tls=False)
    doubts = machines(unchecked, tmp_path / "other")
    with pytest.raises(StoreError, match=r"is not trusted: .* verify_cert_path"):
        doubts.restore(first, [tmp_path / "back"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file"),
        ("-----BEGIN PRIVATE KEY-----", "hold no certificate"),
        (ssl.DER_cert_to_PEM_cert(b"no certificate"), "cannot be read: "),
        (
            "-----BEGIN CERTIFICATE-----\nAbc\n-----END CERTIFICATE-----",
            "are no cert",
        ),
    ],
)
def test_a_file_that_holds_no_authority_is_named_before_anything_is_sent(
    text: str | None, why: str, front: TlsFront, seaweed: Server, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.pem"
    if text is not None:
        bundle.write_text(text)
    with pytest.raises(InvalidInput, match=rf"bundle\.pem.* {why}.*AWS_CA_BUNDLE"):
        behind(front, seaweed, bundle)
    seaweed.same(seaweed.store(), verify_tls=str(bundle)).probe()  # http needs none
