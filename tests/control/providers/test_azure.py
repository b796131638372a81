"""Azure: the contract, and this market's traps."""

from __future__ import annotations

import base64
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, Shop, label, of_model
from tests.markets.azure import (
    ADDRESS_USD_H,
    APPLICATION,
    SUBSCRIPTION,
    TENANT,
    FakeAzure,
    disk_usd_h,
)
from tests.markets.azure_rules import IMAGE_GIB
from tests.markets.server import Answer
from torpor.control.providers.azure.client import AzureLogin
from torpor.control.providers.provider import Absent
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NoCapacity,
    ProviderDenied,
    ProviderUnavailable,
    QuotaReached,
)
from torpor.shared.values import Machine, Want
from torpor.shared.wire.job import NoticeSource

CODES: dict[str, type[Exception]] = {
    "SkuNotAvailable": NoCapacity,
    "NotAvailableForSubscription": NoCapacity,
    "AllocationFailed": NoCapacity,
    "OverconstrainedAllocationRequest": NoCapacity,
    "ZonalAllocationFailed": NoCapacity,
    "OverconstrainedZonalAllocationRequest": NoCapacity,
    "OperationPreempted": NoCapacity,
    "QuotaExceeded": QuotaReached,
    "PublicIPCountLimitReached": QuotaReached,
    "OSProvisioningTimedOut": CreateFailed,
    "VMStartTimedOut": CreateFailed,
    "AuthorizationFailed": ProviderDenied,
    "InvalidAuthenticationToken": ProviderDenied,
    "MissingSubscriptionRegistration": ProviderDenied,
}
QUOTAS = (
    "exceeding approved LowPriorityCores quota. Current Limit: 3",
    "exceeding approved standardNCADSA100v4Family Cores quota. Current Limit: 0",
    "exceeding approved Total Regional Cores Quota. Current Limit: 10",
)


class TestAzure(MarketContract):
    label_cells: ClassVar = {"tags"}
    id_cells: ClassVar = {"name"}
    row = "azure"
    sells_spot = True
    states_on_demand = True
    elsewhere: ClassVar = {"subscription": "00000000-0000-0000-0000-000000000000"}

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="T4", disk_gib=20)

    def with_an_odd_offer(self, body: Any) -> Any:
        """The first size: a row for disks stands before it."""
        if len(body["value"]) > 1:
            body["value"][1] = dict.fromkeys(body["value"][1])
        return body

    # -- what a failure means

    @pytest.mark.parametrize("at_once", [True, False])
    @pytest.mark.parametrize("code", CODES)
    def test_each_code_blocks_what_it_concerns_wherever_it_stands(
        self, shop: Shop, code: str, at_once: bool
    ) -> None:
        """In the answer with 409, or later in the operation with 200. The failed machine is
        deleted."""
        shop.fake.exhausted, shop.fake.exhausted_at_once = (code, "in Azure's words"), at_once
        shop.arm("no capacity", "create")
        # Behind a 409, a code that is not known says nothing of what else has the name.
        uncertain = at_once and CODES[code] is CreateFailed
        error = CreateUncertain if uncertain else CODES[code]
        with pytest.raises(error, match="in Azure's words") as told:
            shop.create()
        assert type(told.value) is error
        assert shop.market.rented == []
        assert bool(shop.fake.groups) is uncertain

    @pytest.mark.parametrize("words", QUOTAS)
    def test_an_operation_that_is_not_allowed_is_a_quota_where_azure_says_so(
        self, shop: Shop, words: str
    ) -> None:
        shop.fake.exhausted = ("OperationNotAllowed", words)
        shop.arm("no capacity", "create")
        with pytest.raises(QuotaReached, match=f"page Quotas of subscription {SUBSCRIPTION}"):
            shop.create()
        shop.fake.exhausted = ("OperationNotAllowed", "The disk is in use.")
        shop.arm("no capacity", "create")
        with pytest.raises(CreateFailed) as told:
            shop.create()
        assert type(told.value) is CreateFailed

    def test_another_machine_of_the_name_is_not_deleted(self, shop: Shop) -> None:
        shop.fake.exhausted = ("PropertyChangeNotAllowed", "Changing it is not allowed.")
        shop.fake.exhausted_at_once = True
        shop.arm("no capacity", "create")
        with pytest.raises(CreateUncertain, match="Another machine may have this name"):
            shop.create()
        assert len(shop.fake.groups) == 1

    def test_a_failed_machine_that_cannot_be_deleted_is_uncertain(self, shop: Shop) -> None:
        shop.arm("no capacity", "create")
        shop.arm("denied", "destroy", count=9)
        with pytest.raises(CreateUncertain, match="was not deleted"):
            shop.create()
        shop.fake.faults.clear()
        (failed,) = shop.plain.list_own()
        assert failed.state == "stopped"
        assert "ProvisioningState/failed/AllocationFailed" in failed.note
        shop.destroy(failed)
        assert shop.find(failed).proof
        assert shop.fake.groups == {}

    def test_a_refused_network_leaves_nothing(self, shop: Shop) -> None:
        shop.fake.for_networks = [FakeAzure.error(403, "RequestDisallowedByPolicy", "No.")]
        with pytest.raises(CreateFailed, match="RequestDisallowedByPolicy"):
            shop.create()
        assert shop.fake.groups == {}

    # -- lost, late and missing answers

    @pytest.mark.parametrize("skip", range(9))
    @pytest.mark.parametrize("kind", ["lost", "error after", "unavailable"])
    def test_a_lost_answer_before_the_machine_is_asked_for_changes_nothing(
        self, shop: Shop, kind: str, skip: int
    ) -> None:
        """Of each request: group, network and operations have names."""
        shop.arm(kind, "account", skip=skip)
        made = shop.create()
        assert len(shop.slept) == 1, "the fault has happened, and one request was repeated"
        assert [machine.id for machine in shop.plain.list_own()] == [made.id]
        assert len(shop.market.rented) == len(shop.fake.groups) == 1

    @pytest.mark.parametrize("kind", ["lost", "error after", "unavailable"])
    def test_a_lost_answer_to_a_delete_is_repeated(self, shop: Shop, kind: str) -> None:
        machine = shop.create()
        shop.arm(kind, "destroy")
        shop.destroy(machine)
        assert shop.find(machine).proof
        shop.arm("no capacity", "create")
        shop.arm(kind, "destroy")
        with pytest.raises(NoCapacity):
            shop.create(disk_gib=21)
        assert len(shop.slept) == 2, "both deletes were repeated"
        assert shop.fake.groups == {}, "the failed machine is deleted, too"

    def test_a_group_that_azure_does_not_know_everywhere_yet_is_asked_for_again(
        self, shop: Shop
    ) -> None:
        """One of its regions may not know what another one made."""
        unknown = FakeAzure.error(404, "ResourceGroupNotFound", "not found")
        shop.fake.for_networks = [unknown, unknown]
        shop.create()
        assert len(shop.slept) == 2
        assert len(shop.market.rented) == 1

    def test_a_machine_that_is_not_shown_at_once_is_starting(self, shop: Shop) -> None:
        machine = shop.create()
        shop.arm("not found", "find", skip=1)  # the machine, and not its group
        assert shop.find(machine).state == "starting"
        assert shop.find(machine).state == "running"

    def test_a_create_waits_for_its_operation(self, shop: Shop) -> None:
        shop.fake.operation_looks = 3
        assert shop.create().state == "starting"
        assert shop.slept == [2.0] * 9  # of the firewall, the network and the machine
        shop.fake.operation_looks = 1000
        assert shop.create(label=label()).state == "starting"
        shop.fake.operation_looks = 0

    def test_a_create_whose_operation_is_not_seen_is_uncertain(self, shop: Shop) -> None:
        ended = Answer(200, {"status": "Succeeded"})
        denied = FakeAzure.error(403, "AuthorizationFailed", "No.")
        shop.fake.for_operations = [ended, ended, denied]  # of firewall, network and machine
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            shop.create()
        assert len(shop.market.rented) == 1

    def test_a_group_that_is_being_deleted_is_stopping_and_no_proof(self, shop: Shop) -> None:
        machine = shop.create()
        shop.fake.deletion_looks = 40
        shop.destroy(machine)
        found = shop.find(machine)
        assert (found.state, found.endpoint) == ("stopping", None)
        assert shop.market.alive() == []
        with pytest.raises(CreateFailed, match="ResourceGroupBeingDeleted"):
            shop.create()
        seen = [shop.find(machine) for _ in range(30)]
        assert {type(look) for look in seen[:9]} == {Machine}
        assert "neither by its name nor in its list" in seen[-1].proof

    def test_a_machine_has_ended_before_its_group_has(self, shop: Shop) -> None:
        """What costs money is gone in a minute or two, the rest of the group later."""
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        machine = provider.create(shop.order)
        clock.advance(provider.abilities.settling_s)
        shop.fake.deletion_looks = 1000
        shop.arm("lives", "destroy")
        shop.destroy(machine, provider)
        assert provider.find(machine.id).state == "running"
        shop.destroy(machine, provider)
        shop.fake.groups[machine.id]["left"] = [("Microsoft.Network/publicIPAddresses", "ip")]
        assert "no machine in resource group" in provider.find(machine.id).proof
        assert [residue.kind for residue in provider.residue()] == ["address"]
        del shop.fake.groups[machine.id]["left"]
        assert provider.residue() == []

    # -- spot

    @pytest.mark.rule(2)
    def test_a_spot_machine_that_azure_takes_is_proved_to_be_gone(self, shop: Shop) -> None:
        """Azure deletes the machine, with its disk and address, and leaves its network."""
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        machine = provider.create(shop.changed(offer=_spot(shop)))
        shop.market.end(shop.market.rented[0])
        assert provider.find(machine.id).state == "starting"  # it may not be shown yet
        clock.advance(provider.abilities.settling_s)
        found = provider.find(machine.id)
        assert isinstance(found, Absent)
        assert "no machine in resource group" in found.proof
        assert provider.list_own() == provider.residue() == []
        assert list(shop.fake.groups) == [machine.id]
        other = provider.create(shop.changed(label=label()))
        assert set(shop.fake.groups) == {machine.id, other.id}  # somebody may still be making it
        clock.advance(24 * 3600)
        provider.create(shop.changed(label=label()))
        assert machine.id not in shop.fake.groups
        assert other.id in shop.fake.groups

    @pytest.mark.rule(2)
    @pytest.mark.parametrize("fault", ["not found", "hidden"])
    def test_a_create_deletes_no_group_of_a_machine_that_a_look_misses(
        self, shop: Shop, fault: str
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        machine = provider.create(shop.order)
        clock.advance(48 * 3600)
        if fault == "hidden":
            shop.market.rented[0].hidden_looks = 2
        else:
            shop.arm(fault, "find")
        provider.create(shop.changed(label=label()))
        assert machine.id in shop.fake.groups

    @pytest.mark.rule(2)
    @pytest.mark.parametrize(
        "kept",
        [
            ("Microsoft.Compute/snapshots", "my-disk-before-the-upgrade"),
            ("Microsoft.Storage/storageAccounts", "myresults"),
            ("Microsoft.Network/virtualNetworks", "mine"),
        ],
    )
    def test_a_create_deletes_no_group_in_which_a_user_keeps_something(
        self, shop: Shop, kept: tuple[str, str]
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        machine = provider.create(shop.changed(offer=_spot(shop)))
        shop.market.end(shop.market.rented[0])
        shop.fake.groups[machine.id]["left"] = [kept]
        clock.advance(25 * 3600)
        provider.create(shop.changed(label=label()))
        assert machine.id in shop.fake.groups

    def test_a_disk_that_outlived_its_machine_is_residue_and_ends_with_its_label(
        self, shop: Shop
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        machine = provider.create(shop.order)
        shop.market.end(shop.market.rented[0])
        left = [("Microsoft.Compute/disks", "torpor_OsDisk_1")]
        shop.fake.groups[machine.id]["left"] = left
        clock.advance(provider.abilities.settling_s)
        (residue,) = provider.residue()
        assert (residue.kind, residue.label) == ("disk", machine.label)
        clock.advance(24 * 3600)
        other = provider.create(shop.changed(label=label()))
        assert set(shop.fake.groups) == {machine.id, other.id}  # it may hold work
        shop.destroy(machine, provider)
        assert set(shop.fake.groups) == {other.id}
        assert provider.residue() == []

    def test_a_spot_machine_costs_at_most_what_it_costs_on_demand(self, shop: Shop) -> None:
        offer = _spot(shop)
        beside = disk_usd_h(IMAGE_GIB + 20) + ADDRESS_USD_H
        assert offer.price_usd_h == pytest.approx(0.16 + beside)
        assert offer.most_usd_h == pytest.approx(0.526 + beside)
        shop.create(offer=offer)
        asked = shop.asked()["properties"]
        assert (asked["priority"], asked["evictionPolicy"]) == ("Spot", "Delete")
        assert asked["billingProfile"] == {"maxPrice": -1}
        shop.create(offer=offer, bid_usd_h=0.3)
        most = shop.asked()["properties"]["billingProfile"]["maxPrice"]
        assert most == pytest.approx(0.3 - beside, abs=1e-5)
        with pytest.raises(CreateFailed, match="less than disk and address"):
            shop.create(offer=offer, bid_usd_h=0.01)

    def test_a_machine_asks_azure_whether_it_will_be_taken(self, shop: Shop) -> None:
        able = shop.plain.abilities
        assert able.notices == (NoticeSource("azure", "http://169.254.169.254"),)
        elsewhere = shop.connect(metadata_url="http://127.0.0.1:1")
        assert elsewhere.abilities.notices == (NoticeSource("azure", "http://127.0.0.1:1"),)

    # -- what is on sale, and what is asked for

    def test_parts_of_gpus_and_restricted_sizes_are_not_on_sale(self, shop: Shop) -> None:
        want = Want(spot="allowed", disk_gib=20)
        found = shop.plain.offers(want)
        assert {str(offer.gpu) for offer in found} == {"T4", "A100 PCIe", "H100 NVL"}
        assert {offer.gpu_count for offer in of_model(found, "H100")} == {1, 2}
        shop.fake.restricted = {"Standard_NC4as_T4_v3"}
        assert of_model(shop.plain.offers(want), "T4") == []
        sizes = ["Standard_D4s_v5", "Standard_NV6ads_A10_v5", "Standard_ND96is_MI300X_v5"]
        named = shop.connect(sizes=sizes)
        (plain,) = named.offers(Want(disk_gib=20))
        assert (plain.id, plain.gpu, plain.gpu_count) == ("Standard_D4s_v5/eastus", None, 0)
        assert named.create(shop.changed(offer=plain, label=label())).state == "starting"

    def test_all_pages_are_read(self, shop: Shop) -> None:
        want = Want(spot="allowed", disk_gib=20)
        found = [offer.id for offer in shop.plain.offers(want)]
        shop.market.page = 2
        assert [offer.id for offer in shop.plain.offers(want)] == found
        assert shop.plain.check() == shop.another().plain.check()

    def test_a_price_is_of_linux_with_disk_and_address(self, shop: Shop) -> None:
        for gib, tier in ((20, 128), (64, 128), (65, 256), (400, 512)):
            offer, *_ = of_model(shop.plain.offers(Want(disk_gib=gib)), "T4")
            beside = disk_usd_h(tier) + ADDRESS_USD_H
            assert offer.price_usd_h == pytest.approx(0.526 + beside)
        assert offer.disk_gib == 4095 - IMAGE_GIB
        assert [found.region for found in shop.plain.offers(Want(regions=["westeurope"]))] == [
            "westeurope",
            "westeurope",
        ]

    def test_the_machine_gets_our_keys_and_port_22_is_open_to_us(self, shop: Shop) -> None:
        provider = shop.connect(ports=[8000])
        machine = provider.create(shop.changed(label=label()))
        asked = shop.asked()["properties"]
        script = base64.b64decode(asked["osProfile"]["customData"]).decode()
        assert shop.order.host_key.strip() in script
        assert asked["storageProfile"]["osDisk"]["diskSizeGB"] == IMAGE_GIB + 20
        assert asked["storageProfile"]["imageReference"]["version"] == "22.04.2026091502"
        group = shop.fake.groups[machine.id]
        assert group["asked"]["tags"]["torpor-rental"] == machine.label.rental
        (rule,) = group["things"]["networkSecurityGroups"]["properties"]["securityRules"]
        assert rule["properties"]["destinationPortRanges"] == ["22", "8000"]
        assert rule["properties"]["sourceAddressPrefix"] == "203.0.113.7/32"

    def test_a_machine_that_is_off_says_what_it_costs(self, shop: Shop) -> None:
        machine = shop.create()
        shop.market.rented[0].stopped = True
        live = shop.find(machine)
        assert (live.state, live.endpoint) == ("stopped", None)
        assert "cost money until it is ended" in live.note
        shop.market.rented[0].stopped = False
        assert isinstance(shop.find(machine), Machine)

    # -- the account

    def test_the_account_shows_its_quotas(self, shop: Shop) -> None:
        account = shop.plain.check()
        assert account.name == "Azure subscription Pay-As-You-Go"
        notes = " ".join(account.notes)
        assert "lowPriorityCores 0 of 3 vCPUs" in notes
        assert "standardNCASv3_T4Family 0 of 8 vCPUs" in notes
        assert "A100" not in notes

    def test_a_disabled_subscription_is_denied(self, shop: Shop) -> None:
        shop.fake.state = "Disabled"
        with pytest.raises(ProviderDenied, match="is Disabled"):
            shop.plain.check()

    def test_another_subscription_is_denied_and_never_empty(self, shop: Shop) -> None:
        wrong = shop.connect(**self.elsewhere)
        for ask in (
            wrong.check,
            wrong.list_own,
            wrong.residue,
            lambda: wrong.offers(Want()),
            lambda: wrong.create(shop.order),
        ):
            with pytest.raises(ProviderDenied, match="SubscriptionNotFound"):
                ask()

    def test_a_missing_registration_says_what_to_run(self, shop: Shop) -> None:
        shop.fake.exhausted = ("MissingSubscriptionRegistration", "namespace 'Microsoft.Compute'")
        shop.arm("no capacity", "create")
        with pytest.raises(ProviderDenied, match="az provider register"):
            shop.create()

    def test_an_image_that_azure_does_not_have_is_named(self, shop: Shop) -> None:
        for image in ("microsoft-dsvm:ubuntu-hpc:9999:latest", "microsoft-dsvm:x:2204:1.0.0"):
            with pytest.raises(InvalidInput, match="Azure has no image"):
                shop.plain.check(image)
        shop.plain.check("microsoft-dsvm:ubuntu-hpc:2204:22.04.2024102301")

    def test_only_a_group_with_its_name_and_tags_is_ours(self, shop: Shop) -> None:
        machine = shop.create()
        tags = shop.fake.groups[machine.id]["asked"]["tags"]
        shop.fake.groups["theirs"] = {"asked": {"location": "eastus", "tags": tags}, "things": {}}
        assert [listed.id for listed in shop.plain.list_own()] == [machine.id]
        forged = msgspec.structs.replace(machine, id="theirs")
        assert shop.plain.find(forged.id) == Absent()


def _spot(shop: Shop):  # type: ignore[no-untyped-def]
    (offer,) = of_model(shop.plain.offers(Want(disk_gib=20, spot="only")), "T4")
    return offer


def test_a_secret_buys_tokens_and_a_wrong_one_is_denied_and_not_shown() -> None:
    with FakeAzure() as fake:
        login = AzureLogin.of_application(TENANT, APPLICATION, fake.secret, url=fake.url)
        assert login.token() == fake.key
        wrong = AzureLogin.of_application(TENANT, APPLICATION, "not-the-secret", url=fake.url)
        with pytest.raises(ProviderDenied, match=r"AADSTS7000215.*secrets expire") as told:
            wrong.token()
        assert "not-the-secret" not in str(told.value)
        assert "Trace ID" not in str(told.value)


def test_a_token_is_kept_until_it_is_about_to_end() -> None:
    ends = [time.time() + 200, time.time() + 3600]
    login = AzureLogin(lambda: (f"token-{len(ends)}", ends.pop(0)))
    assert [login.token() for _ in range(3)] == ["token-2", "token-1", "token-1"]


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    monkeypatch.setitem(sys.modules, "azure.core.exceptions", ModuleType("exceptions"))
    with pytest.raises(InvalidInput, match=r"pip install '\.\[azure\]'"):
        AzureLogin.of_this_host()


def test_the_login_of_this_host_is_denied_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AzureError(Exception):
        pass

    class ClientAuthenticationError(AzureError):
        pass

    asked: list[object] = []

    class DefaultAzureCredential:
        def get_token(self, scope: str) -> SimpleNamespace:
            asked.append(scope)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(token=answer, expires_on=time.time() + 3600)

    modules = {
        "azure": ModuleType("azure"),
        "azure.core": ModuleType("azure.core"),
        "azure.core.exceptions": ModuleType("azure.core.exceptions"),
        "azure.identity": ModuleType("azure.identity"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    told = {"AzureError": AzureError, "ClientAuthenticationError": ClientAuthenticationError}
    vars(modules["azure.core.exceptions"]).update(told)
    vars(modules["azure.identity"])["DefaultAzureCredential"] = DefaultAzureCredential
    answer: object = "a-token"

    assert AzureLogin.of_this_host().token() == "a-token"
    assert asked == ["https://management.azure.com/.default"]
    answer = ClientAuthenticationError("nothing found.\nAttempted credentials: many")
    with pytest.raises(ProviderDenied, match=r"Azure: nothing found\. Run az login"):
        AzureLogin.of_this_host().token()
    answer = AzureError("no route")
    with pytest.raises(ProviderUnavailable):
        AzureLogin.of_this_host().token()


def test_the_login_goes_to_no_other_host() -> None:
    """The fake's links name management.azure.com, as Azure's do: each is asked for at the address
    of the block."""
    with FakeAzure() as fake:
        for _ in range(fake.market.page + 5):
            fake.rent_by_hand()
        provider = fake.connect()
        assert provider.list_own() == []
        assert len([call for call in fake.calls if call[1].endswith("/resourcegroups")]) == 2
