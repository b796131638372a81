"""The host key of a rental is derived: the same again, another's unlike it, and no secret shown."""

from __future__ import annotations

import asyncssh
import msgspec
import pytest

from tests.fixtures.market import H100
from torpor.control.rental.order import host_key_of, order_for
from torpor.shared.values import Label, Want, workspace_name

LABEL = Label("me", workspace_name("demo"), "0011223344556677")


@pytest.fixture(scope="module")
def identity() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


def test_a_repeat_needs_no_stored_secret(identity: asyncssh.SSHKey) -> None:
    again = asyncssh.import_private_key(identity.export_private_key())
    key = host_key_of(identity, LABEL)
    assert host_key_of(again, LABEL) == key  # to the byte: EC2 compares what a token was used with
    shown = asyncssh.import_private_key(key.private).export_public_key().decode().strip()
    assert shown == key.public


def test_every_rental_and_every_identity_has_its_own(identity: asyncssh.SSHKey) -> None:
    keys = {host_key_of(identity, LABEL).public}
    for other in ("me2", "demo", "x"), ("me", "demo2", "x"), ("me", "demo", "y"):
        keys.add(host_key_of(identity, Label(other[0], workspace_name(other[1]), other[2])).public)
    keys.add(host_key_of(asyncssh.generate_private_key("ssh-ed25519"), LABEL).public)
    assert len(keys) == 5


def test_any_kind_of_identity_will_do() -> None:
    for kind in ("ssh-rsa", "ecdsa-sha2-nistp256"):
        assert host_key_of(asyncssh.generate_private_key(kind), LABEL).public


def test_an_order_shows_no_secret_and_has_a_token_of_its_own(identity: asyncssh.SSHKey) -> None:
    order = order_for(H100, LABEL, identity, Want(disk_gib=30, image="ubuntu", max_price_usd_h=5))
    assert "PRIVATE" not in f"{order!r} {order} {host_key_of(identity, LABEL)!r}"
    assert (order.disk_gib, order.image, order.bid_usd_h) == (30, "ubuntu", None)
    assert len(order.token) == 32
    other = order_for(H100, msgspec.structs.replace(LABEL, rental="2"), identity)
    assert other.token != order.token
    assert order_for(H100, LABEL, identity).token == order.token


def test_the_bid_on_a_spot_machine_is_the_limit(identity: asyncssh.SSHKey) -> None:
    spot = msgspec.structs.replace(H100, spot=True)
    assert order_for(spot, LABEL, identity, Want(max_price_usd_h=5)).bid_usd_h == 5
