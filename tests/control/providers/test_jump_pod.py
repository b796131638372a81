"""Kubernetes: one jump pod before all machines of an identity."""

from __future__ import annotations

from collections.abc import Iterator

import asyncssh
import pytest

from tests.control.providers.market_contract import Shop, label
from tests.fixtures.machines import KeyPair, new_key_pair
from tests.markets.kills import killed_at_request
from tests.markets.kubernetes import FakeKubernetes, secret_text
from torpor.shared.errors import CreateUncertain
from torpor.shared.values import Endpoint, Want


@pytest.fixture
def shop(identity_key: KeyPair) -> Iterator[Shop]:
    with FakeKubernetes() as fake:
        yield Shop(fake, Want(gpu="H100", disk_gib=20), identity_key, address="jump pod")


def test_machines_share_a_jump_pod_which_goes_with_the_last(shop: Shop) -> None:
    first, second = shop.create(), shop.create(label=label())
    kinds = sorted(kind for kind, _ in shop.fake.objects)
    assert kinds == ["deployments", "secrets", "secrets", "secrets", "services"]
    one, two = (shop.find(machine).endpoint for machine in (first, second))
    shown = asyncssh.import_private_key(shop.order.jump_host_key).export_public_key()
    assert one.jump == Endpoint("198.51.100.1", 22, "jump", shown.decode().strip())
    assert two.jump == one.jump
    assert two.host != one.host
    assert shop.another().find(first).endpoint == one  # whose block has another address by now
    shop.destroy(first)
    assert shop.find(second).endpoint == two
    assert shop.plain.residue() == []
    shop.fake.collects = False
    shop.destroy(second)
    (left,) = shop.plain.residue()
    assert (left.kind, left.label) == ("service", None)
    shop.fake.collects = True
    assert shop.plain.residue() == []
    assert shop.find(second).proof
    assert shop.fake.objects == {}


def test_each_identity_has_a_jump_pod_of_its_own(shop: Shop) -> None:
    stranger = new_key_pair()
    shop.create()
    shop.create(public_key=stranger.public)
    secrets = [shop.fake.objects["secrets", name] for kind, name in shop.fake.objects
               if kind == "deployments"]  # fmt: skip
    let_in = {secret_text(secret)["authorized_keys"].strip() for secret in secrets}
    assert let_in == {shop.order.public_key, stranger.public}


def test_a_jump_pod_that_is_being_deleted_is_not_used_again(shop: Shop) -> None:
    shop.fake.lingers = True
    shop.destroy(shop.create())
    machine = shop.create(label=label())
    assert shop.find(machine).endpoint.jump
    shown = [made["metadata"] for (kind, _), made in shop.fake.objects.items()
             if kind == "services"]  # fmt: skip
    assert ["deletionTimestamp" in meta for meta in shown] == [True, False]
    shop.destroy(machine)
    with pytest.raises(CreateUncertain, match="are being deleted"):
        shop.create(label=label())


def test_a_create_that_dies_at_any_request_leaves_no_jump_pod(shop: Shop) -> None:
    steps, killed = 0, True
    while killed:
        steps += 1
        order = shop.changed(label=label())
        killed = killed_at_request(shop.fake, steps, lambda order=order: shop.plain.create(order))
        for machine in shop.plain.list_own():
            shop.destroy(machine)
        assert shop.plain.residue() == []
        assert shop.fake.objects == {}
    assert steps > 16  # each request before and after it is carried out


def test_the_answer_to_each_request_for_a_jump_pod_may_be_lost(shop: Shop) -> None:
    for skip in range(7):
        shop.arm("error after", "account", skip=skip)
        machine = shop.create(label=label())
        assert shop.find(machine).endpoint.jump
        shop.destroy(machine)
        assert shop.plain.residue() == []
        assert shop.fake.objects == {}
