"""Microsoft Azure: virtual machines in the regions of one subscription, on demand and spot.

https://learn.microsoft.com/rest/api/compute. ``launch`` has what is asked for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import httpx
import msgspec

from torpor.control.providers.azure.client import (
    NO_GROUP,
    URL,
    AzureClient,
    AzureLogin,
    Fault,
    fault_of,
)
from torpor.control.providers.azure.image import AzureImages
from torpor.control.providers.azure.launch import (
    ABANDONED,
    FIREWALL,
    MACHINE,
    NAME,
    NETWORK,
    PRICE_TAG,
    SINCE_TAG,
    firewall_request,
    group_name,
    group_request,
    launch_refused,
    machine_request,
    network_request,
)
from torpor.control.providers.azure.offers import AzureOffers, offer_parts
from torpor.control.providers.azure.prices import PRICES_URL, AzurePrices
from torpor.control.providers.checks import warranted
from torpor.control.providers.labels import label_among
from torpor.control.providers.market_client import TIMEOUT, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows
from torpor.control.safety import Warrant
from torpor.shared.errors import CreateUncertain, ProviderDenied, ProviderError, TorporError
from torpor.shared.values import Endpoint, Label, Machine, MachineId, Want, learned
from torpor.shared.wire.job import SPOT_NOTICE_S, NoticeSource

METADATA_URL: Final = "http://169.254.169.254"
_SSH_PORT: Final = 22
_GROUPS: Final = "2021-04-01"
_COMPUTE: Final = "2024-07-01"
_NETWORKS: Final = "2024-05-01"
_SUBSCRIPTION: Final = "2022-12-01"
_NAME: Final = re.compile(r"torpor-[0-9a-f]{32}")
_FORCED: Final = "&forceDeletionTypes=Microsoft.Compute/virtualMachines"
_MACHINES: Final = "&$filter=resourceType%20eq%20'Microsoft.Compute/virtualMachines'"
_POLL_S: Final = 2.0
"""Seconds between two looks, each of which is three requests. Azure takes 25 reads a second of a
subscription, after a first 250 (Azure Resource Manager, request limits)."""
_LEFT: Final[dict[str, Literal["disk", "address"]]] = {
    "microsoft.compute/disks": "disk",
    "microsoft.network/publicipaddresses": "address",
}
_MACHINE: Final = "microsoft.compute/virtualmachines"
_SHELL: Final = {
    ("microsoft.network/networksecuritygroups", NAME),
    ("microsoft.network/virtualnetworks", NAME),
}
_SHELL_S: Final = 24 * 3600.0
_POWER: Final = "PowerState/"
_STATES: Final = {
    "running": "running", "starting": "starting", "stopping": "stopping",
    "deallocating": "stopping", "stopped": "stopped", "deallocated": "stopped",
}  # fmt: skip
"""The states of a machine. ``stopped``: by its own system, and billed in full; ``deallocated``: by
Azure, and only its disk and address are billed."""


class _Provisioned(msgspec.Struct, rename="camel", frozen=True):
    provisioning_state: str = ""


class _Group(msgspec.Struct):
    name: str = ""
    properties: _Provisioned = _Provisioned()
    tags: Any = None

    @property
    def texts(self) -> dict[str, str]:
        """The tags of a resource. msgspec.ValidationError where they cannot be read."""
        return msgspec.convert(self.tags or {}, dict[str, str])


class _Status(msgspec.Struct):
    code: str
    message: str = ""


class _View(msgspec.Struct):
    statuses: list[_Status] = []


class _State(msgspec.Struct, rename="camel"):
    provisioning_state: str
    instance_view: _View = msgspec.field(default_factory=_View)


class _Vm(msgspec.Struct):
    id: str
    properties: _State


class _Ip(msgspec.Struct, rename="camel"):
    ip_address: str = ""


class _Address(msgspec.Struct):
    properties: _Ip


class _Thing(msgspec.Struct):
    id: str
    name: str
    type: str


class _Subscription(msgspec.Struct, rename="camel"):
    display_name: str
    state: str


class AzureProvider:
    """See ``providers.provider.Provider`` for the contract.

    A machine's id is its resource group. A group without a machine is one that is being made, and
    after ``settling_s`` one whose machine was taken, or never came.
    """

    abilities: Abilities = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="name",
        settling_s=300.0,
        ready_s=1200.0,
        poll_s=_POLL_S,
        stop_keeps="disk",
        stopped_usd_gib_month=None,  # the price depends on size and region
        min_disk_gib=0.0,
        billing_s=60.0,
        # ends_machines stays empty: Azure's schedules (DevTestLab, ComputeSchedule) stop a machine
        # and delete none, and a machine needs rights over its group to delete itself.
        notice_s=SPOT_NOTICE_S["azure"],
        notices=(NoticeSource("azure", METADATA_URL),),
        not_adopted="an end there deletes a whole resource group, and a machine that torpor did "
        "not make shares its group with what its user keeps",
    )

    def __init__(
        self,
        login: AzureLogin,
        subscription: str,
        regions: Sequence[str],
        ssh_from: str,
        *,
        sizes: Sequence[str] = (),
        image: str = "",
        ports: Sequence[int] = (),
        url: str = URL,
        prices_url: str = PRICES_URL,
        metadata_url: str = METADATA_URL,
        ssh_port: int = _SSH_PORT,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = AzureClient(login, subscription, url=url, timeout=timeout, sleep=sleep)
        self.identity = self._client.identity
        self._images = AzureImages(self._client, image)
        prices = AzurePrices(url=prices_url, timeout=timeout, sleep=sleep)
        self._offers = AzureOffers(self._client, self._images, prices, regions, sizes)
        self._regions, self._ssh_from, self._ports = list(regions), ssh_from, list(ports)
        self._ssh_port, self._clock = ssh_port, clock
        self._rows = Rows(self.identity, _Group, id_of=lambda group: group.name, label_of=_label)
        self.abilities = msgspec.structs.replace(
            self.abilities, notices=(NoticeSource("azure", metadata_url),)
        )

    def check(self, image: str = "") -> Account:
        """Asks for the subscription and the quotas: Azure has no request that only checks whether a
        create is allowed."""
        found = self._client.read(_Subscription, self._client.at("", _SUBSCRIPTION))
        if found.state in ("Disabled", "Deleted", "Expired"):
            raise ProviderDenied(
                f"subscription {found.display_name} is {found.state}: enable it in Azure's portal"
            )
        for region in self._regions:
            self._images.image(region, image)
        notes = [note for region in self._regions for note in self._offers.quotas(region)]
        notes.append("Azure shows only at a create whether the login may create machines")
        return Account(name=f"Azure subscription {found.display_name}", notes=notes)

    def offers(self, want: Want) -> list[Offer]:
        return self._offers.found(want)

    def create(self, order: Order) -> Machine:
        _, region, _ = offer_parts(order.offer.id)
        image = self._images.image(region, order.image)
        beside_usd_h = 0.0
        if order.bid_usd_h is not None:
            beside_usd_h = self._offers.beside_usd_h(region, image.gib + order.disk_gib)
        name = group_name(order)
        body = machine_request(order, self._group_path(name), image, beside_usd_h)
        path = self._client.at(f"/resourceGroups/{name}/{MACHINE}", _COMPUTE)
        if self._client.seek("GET", path, _Vm, f"show machine {name}") is not None:
            made = self.find(MachineId(name))
            if isinstance(made, Machine) and made.label == order.label:
                return made
            raise self._client.uncertain(f"{name} does not show {order.label}", "an earlier create")
        self._make_place(order, name)
        answer = self._client.create("PUT", path, _Vm, body, reads_conflict=True)
        if isinstance(answer, Refusal):
            raise self._given_up(order, name, fault_of(answer), conflict=answer.status == 409)
        try:
            found = self._client.settled(path)
        except TorporError as cause:  # whatever the error is, the request was sent
            raise CreateUncertain(
                f"{self.identity} was asked to rent {name} and does not say how it went: {cause}. "
                f"{ABANDONED}"
            ) from cause
        if found is not None:
            raise self._given_up(order, name, found)
        price = order.offer.price_usd_h
        return Machine(MachineId(name), self.identity, order.label, "starting", None, price)

    def find(self, machine: MachineId) -> Machine | Absent:
        """The proof of an end is that neither the group itself nor the list of groups shows it: one
        of Azure's regions may not know yet what another one made (terraform-provider-azurerm
        #18268). Of a group that is there, see ``AzureProvider``."""
        if not _NAME.fullmatch(machine):
            return Absent()
        path, doing = self._client.at(f"/resourceGroups/{machine}", _GROUPS), f"show {machine}"
        answer: Any = self._client.ask("GET", path, Any)
        if not isinstance(answer, Refusal):
            return self._rows.one(machine, answer, self._seen)
        if fault_of(answer).code != NO_GROUP:
            raise self._client.refused(answer, doing)
        if self._rows.find(machine, self._groups(), lambda group: Absent()) is not None:
            return Absent()
        return Absent(f"Azure has no resource group {machine}, neither by its name nor in its list")

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._groups(), self._seen)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        live = warranted(self, machine, warrant)
        if live is not None:
            self._delete(live.id)
            return
        for group in self._bare():
            if _label(group) == machine.label:
                self._delete(group.name)

    def residue(self) -> list[Residue]:
        """Disks and addresses in a group whose machine is gone. What torpor orders goes with its
        machine, unless somebody changed that."""
        return [
            Residue(
                id=f"{group.name}/{thing.name}",
                provider=self.identity,
                kind=_LEFT[_kind(thing)],
                label=_label(group),
            )
            for group in self._bare()
            for thing in self._things(group.name)
            if _kind(thing) in _LEFT
        ]

    def _make_place(self, order: Order, name: str) -> None:
        """The group with its network, before which the shells of earlier ones are deleted."""
        with suppress(ProviderError):  # they cost nothing, and a later create tries again
            for group in self._bare():
                label = _label(group)
                ours = label is not None and label.owner == order.label.owner
                if ours and self._is_older(group, _SHELL_S):
                    self._delete_shell(group.name)
        path, body = f"/resourceGroups/{name}", group_request(order, self._clock())
        if (fault := self._client.put(self._client.at(path, _GROUPS), body)) is not None:
            raise launch_refused(self._client, order, fault)
        for thing, body in (
            (FIREWALL, firewall_request(order, self._ssh_from, self._ports)),
            (NETWORK, network_request(order, self._group_path(name))),
        ):
            fault = self._client.put(self._client.at(f"{path}/{thing}", _NETWORKS), body)
            if fault is not None:
                raise self._given_up(order, name, fault)

    def _delete_shell(self, name: str) -> None:
        """Delete a group without a machine if it holds nothing but the network that torpor made:
        Azure deletes a spot machine that it takes, and leaves the network. A snapshot of the disk,
        say, is its user's. What is there is asked once more, after a day in which nobody can still
        be making it."""
        things = {(_kind(thing), thing.name) for thing in self._things(name)}
        path = self._client.at(f"/resourceGroups/{name}/{MACHINE}", _COMPUTE)
        bare = self._client.seek("GET", path, _Vm, f"show machine {name}") is None
        if bare and things <= _SHELL:
            self._delete(name)

    def _given_up(
        self, order: Order, name: str, fault: Fault, *, conflict: bool = False
    ) -> ProviderError:
        """The error for a rental that failed; deletes its group, because a failed machine stays,
        with its disk and address."""
        error = launch_refused(self._client, order, fault, conflict=conflict)
        if isinstance(error, CreateUncertain):
            return error
        try:
            self._delete(name)
        except ProviderError as cause:
            return CreateUncertain(
                f"{error}. Its resource group {name} was not deleted: {cause}. {ABANDONED}"
            )
        return error

    def _groups(self) -> list[Any]:
        return self._client.pages(Any, self._client.at("/resourcegroups", _GROUPS))

    def _bare(self) -> list[_Group]:
        """The groups with our label whose machine is proved to be gone."""
        rows = self._client.pages(_Thing, self._client.at("/resources", _GROUPS, _MACHINES))
        kept = {row.id.lower().split("/")[4] for row in rows}
        return [
            group
            for group in self._rows.readable(self._groups())
            if _label(group) is not None and group.name.lower() not in kept
            if isinstance(seen := self._seen(group), Absent) and seen.proof
        ]

    def _things(self, name: str) -> list[_Thing]:
        path = self._client.at(f"/resourceGroups/{name}/resources", _GROUPS)
        return self._client.pages(_Thing, path)

    def _group_path(self, name: str) -> str:
        return f"/subscriptions/{self._client.subscription}/resourceGroups/{name}"

    def _seen(self, group: _Group) -> Machine | Absent:
        """What a group that Azure shows stands for. Its machine ends before the group does."""
        ends = group.properties.provisioning_state == "Deleting"
        path = f"/resourceGroups/{group.name}/{MACHINE}"
        path = self._client.at(path, _COMPUTE, "&$expand=instanceView")
        answer = self._client.ask("GET", path, _Vm)
        if isinstance(answer, _Vm) and not ends:
            return self._shown(group, answer.properties)
        if isinstance(answer, Refusal):
            if fault_of(answer).code == NO_GROUP:
                return Absent()  # the group was deleted a moment ago
            if not self._client.is_gone(answer):
                raise self._client.refused(answer, f"show the machine of {group.name}")
            # the machine, if it existed, would be shown by now
            shown = self._is_older(group, self.abilities.settling_s)
            if shown and _MACHINE not in map(_kind, self._things(group.name)):
                return Absent(
                    f"Azure has no machine in resource group {group.name}, neither by its name nor "
                    "in the group's list"
                )
        note = "Azure says Deleting" if ends else "Azure shows no machine yet"
        return self._machine(group, "stopping" if ends else "starting", None, note)

    def _is_older(self, group: _Group, age_s: float) -> bool:
        since = _number(group.texts.get(SINCE_TAG, ""))
        return since is not None and self._clock() >= since + age_s

    def _shown(self, group: _Group, vm: _State) -> Machine:
        codes = [status.code for status in vm.instance_view.statuses]
        power = next((code.removeprefix(_POWER) for code in codes if code.startswith(_POWER)), "")
        failed = vm.provisioning_state == "Failed"
        state = _STATES.get(power, "stopped" if failed else "starting")
        if vm.provisioning_state == "Deleting":
            state = "stopping"
        note = f"Azure says {vm.provisioning_state} {power}".strip()
        if failed:
            words = [f"{s.code} {s.message}" for s in vm.instance_view.statuses]
            note += f": {'; '.join(words)[:300]}"
        if state == "stopped":
            note += "; its disk and address cost money until it is ended or started again"
        address = self._address(group.name) if state == "running" else ""
        endpoint = Endpoint(address, self._ssh_port, "root") if address else None
        if state == "running" and endpoint is None:
            state = "starting"
        return self._machine(group, state, endpoint, note)

    def _address(self, name: str) -> str:
        path = f"/resourceGroups/{name}/providers/Microsoft.Network/publicIPAddresses"
        rows = self._client.pages(_Address, self._client.at(path, _NETWORKS))
        return next((row.properties.ip_address for row in rows if row.properties.ip_address), "")

    def _machine(self, group: _Group, state: str, endpoint: Endpoint | None, note: str) -> Machine:
        told: dict[str, Any] = {
            "id": group.name,
            "provider": self.identity,
            "label": _label(group),
            "state": state,
            "endpoint": endpoint,
            "price_usd_h": _number(group.texts.get(PRICE_TAG, "")) or 0.0,
            "note": note,
        }
        return msgspec.convert(told, learned(Machine))

    def _delete(self, name: str) -> None:
        """Begin to delete a group with everything in it."""
        path = self._client.at(f"/resourceGroups/{name}", _GROUPS, _FORCED)
        answer = self._client.ask("DELETE", path, Any)
        if isinstance(answer, Refusal) and fault_of(answer).code != NO_GROUP:
            raise self._client.refused(answer, f"delete resource group {name}")


def _label(group: _Group) -> Label | None:
    """The label of a group; None where the group's name shows that it is not torpor's."""
    return label_among(group.texts) if not group.name or _NAME.fullmatch(group.name) else None


def _kind(thing: _Thing) -> str:
    return thing.type.lower()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
