"""What users add to the containers that they rent. Subclass it for each market of containers."""

from __future__ import annotations

import traceback
from typing import Any

import asyncssh
import pytest

from tests.control.providers.market_contract import MarketContract, Shop
from tests.fixtures.machines import KeyPair
from tests.fixtures.waiting import until
from tests.markets.boot import Machines
from tests.markets.test_boot import run
from torpor.control.providers.container import Container, Volume
from torpor.control.providers.start_script import start_command
from torpor.shared.errors import ProviderDenied, ProviderError
from torpor.shared.values import DRILL, Label, Want, reserved_name, workspace_name

TOKEN = "hf_0123456789 \"quoted\" 'and' $(not run) \\n"
ENV = {"HF_TOKEN": TOKEN, "MODE": "1"}
PASSWORD = "canary-password"
_TRIAL = reserved_name(DRILL, workspace_name("contract"))


class ContainerContract(MarketContract):
    login = ""
    """A login to a private registry, as the market's API takes it."""

    def ask_for_login(self, shop: Shop) -> None:
        """Every image is private from now on."""
        raise NotImplementedError

    def open_ports(self, shop: Shop) -> set[int]:
        """What the newest create opened."""
        raise NotImplementedError

    def waits(self, shop: Shop, container: Container) -> bool:
        """Whether a machine of this container does not start."""
        provider = shop.connect(container=container)
        try:
            made = provider.create(shop.order)
        except ProviderError:
            return True
        found = provider.find(made.id)
        assert PASSWORD not in repr(found)
        shop.destroy(made, provider)
        return bool(found.state != "running")

    def test_a_private_image_needs_the_login(self, shop: Shop) -> None:
        self.ask_for_login(shop)
        assert self.waits(shop, Container())
        assert not self.waits(shop, Container(login=self.login))

    def test_ports_are_open_beside_ssh_s(self, shop: Shop) -> None:
        assert shop.create() and self.open_ports(shop) == {22}
        other = shop.another(container=Container(ports=(8000, 6006)))
        machine = other.create()
        assert self.open_ports(other) == {22, 8000, 6006}
        assert other.find(machine).endpoint == shop.find(machine).endpoint

    def test_sessions_have_the_variables_and_the_market_s_own_stay(
        self, shop: Shop, booted_machines: Machines, identity_key: KeyPair
    ) -> None:
        shop.market.boot = lambda command: booted_machines.boot(command, shop.fake.body)
        shop.ssh_port = booted_machines.port
        shop.connect(container=Container(env=ENV)).create(shop.order)
        shown = asyncssh.import_private_key(shop.order.host_key).export_public_key()
        said: list[str] = []

        def says() -> bool:
            body = shop.market.rented[0].body
            ask = 'printf "%s|" "$HF_TOKEN" "$MODE" "${CONTAINER_API_KEY:+given}"'
            try:
                said.append(run(body, identity_key, shown.decode().strip(), ask))
            except (OSError, asyncssh.Error):
                return False
            return True

        until(says, "the machine lets its owner in")
        assert said[-1] == f"{TOKEN}|1|given|"

    @pytest.mark.parametrize("fault", ["quota", "no capacity"])
    def test_no_message_repeats_a_secret(self, shop: Shop, fault: Any) -> None:
        shop.fake.repeats = True
        container = Container(env={"TOKEN": "canary-token"}, login=self.login)
        provider = shop.connect(container=container)
        shop.arm(fault, "create")
        with pytest.raises(ProviderError) as raised:
            provider.create(shop.order)
        told = "".join(traceback.format_exception(raised.value))
        told += f"{container!r} {container.secrets!r} {vars(provider)!r}"
        assert "canary-token" not in told
        assert PASSWORD not in told


class MarketOfHosts(ContainerContract):
    """Vast.ai and RunPod: images run as their makers wrote them, and volumes are the account's."""

    def test_the_start_script_runs_as_root_whatever_the_image_starts(self, shop: Shop) -> None:
        shop.fake.entrypoint, shop.fake.image_user = ("/opt/nvidia/entrypoint.sh",), "1000"
        started: list[list[str]] = []
        shop.market.boot = lambda command: started.append(command)
        shop.create()
        assert [command[-3:] for command in started] == [start_command(shop.order)]

    def test_a_machine_with_a_lifetime_ends_itself_with_the_key_that_the_market_gave_it(
        self, shop: Shop, booted_machines: Machines
    ) -> None:
        """And no other machine."""
        shop.market.boot = lambda command: booted_machines.boot(command, shop.fake.body)
        stays, label = shop.create(), Label("contract", _TRIAL, "0" * 16)
        machine = shop.create(label=label, lifetime_s=1.0)
        until(lambda: len(shop.market.alive()) < 2, "the machine has ended itself")
        assert [live.id for live in shop.plain.list_own()] == [stays.id]
        assert shop.find(machine).proof

    def test_a_volume_that_is_not_there_is_named(self, shop: Shop) -> None:
        gone = shop.connect(container=Container(volumes=(Volume("7", "/data"),)))
        with pytest.raises(ProviderDenied, match=r"no (network )?volume 7"):
            gone.check()
        with pytest.raises(ProviderDenied):  # a search goes on at other markets
            gone.offers(Want())
