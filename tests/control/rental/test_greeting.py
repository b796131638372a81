"""A machine is ready when it answers as itself."""

from __future__ import annotations

import asyncio

import asyncssh
import msgspec
import pytest

from tests.fixtures.machines import KeyPair
from tests.fixtures.sshd import Sshd
from tests.fixtures.waiting import until
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.rental.greeting import greeting_fault
from torpor.control.rental.order import host_key_of, order_for
from torpor.shared.values import Label, Want, workspace_name


@pytest.mark.rule(8)
def test_another_host_key_means_not_ready_yet(
    local_provider: LocalProvider, identity_key: KeyPair
) -> None:
    key = asyncssh.import_private_key(identity_key.private)
    label = Label("me", workspace_name("demo"), "1")
    offer = local_provider.offers(Want())[0]
    endpoint = local_provider.create(order_for(offer, label, key)).endpoint
    assert endpoint is not None
    right = host_key_of(key, label).public
    other = host_key_of(key, msgspec.structs.replace(label, rental="2")).public
    until(lambda: greeting_fault(endpoint, None, key) is None, "its server greets")
    assert greeting_fault(endpoint, right, key) is None

    async def in_a_notebook() -> str | None:
        return greeting_fault(endpoint, right, key)

    assert asyncio.run(in_a_notebook()) is None
    assert "shows another host key" in str(greeting_fault(endpoint, other, key))
    assert "refused" in str(greeting_fault(msgspec.structs.replace(endpoint, port=1), right, key))


def test_a_machine_behind_a_jump_host_greets_through_it(sshd: Sshd, jump: Sshd) -> None:
    key = sshd.identity.load()
    endpoint = msgspec.structs.replace(sshd.endpoint, jump=jump.endpoint)
    for right in (None, sshd.host_key):
        assert greeting_fault(endpoint, right, key) is None
    assert jump.log.read_text().count("Accepted publickey") == 2
    assert "shows another host key" in str(greeting_fault(endpoint, jump.host_key, key))
    away = msgspec.structs.replace(endpoint, port=1)
    assert "port 1: " in str(greeting_fault(away, None, key))
    jump.stop()
    assert "the jump host" in str(greeting_fault(endpoint, None, key))
