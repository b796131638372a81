"""Google Cloud: Compute Engine machines in the zones of one project, on demand and spot.

https://cloud.google.com/compute/docs/reference/rest/v1. Offers are made in ``gcp_offers``.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import httpx
import msgspec

from torpor.control.providers.checks import to_mark, warranted
from torpor.control.providers.gcp.client import (
    URL,
    GcpClient,
    GoogleLogin,
    Operation,
    fault_of,
)
from torpor.control.providers.gcp.deadline import DEADLINE_KEY, start_watcher
from torpor.control.providers.gcp.image import GcpImages, gpu_quotas
from torpor.control.providers.gcp.launch import (
    PRICE_KEY,
    instance_name,
    launch_refused,
    launch_request,
    start_refused,
)
from torpor.control.providers.gcp.network import GcpNetwork
from torpor.control.providers.gcp.offers import GcpOffers, offer_parts, region_of, zone_of
from torpor.control.providers.labels import label_among, with_label
from torpor.control.providers.market_client import TIMEOUT, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateUncertain,
    NotOurs,
    ProviderDenied,
    ProviderError,
    TorporError,
)
from torpor.shared.values import Endpoint, Label, Machine, MachineId, Want, learned
from torpor.shared.wire.job import SPOT_NOTICE_S, NoticeSource

METADATA_URL: Final = "http://metadata.google.internal"
_SSH_PORT: Final = 22
_ID: Final = re.compile(r"([a-z][a-z0-9-]{0,62})\.([a-z][a-z0-9-]{1,62})")
_FRESH: Final = 0.75  # a deadline with more than this share of its time left is not renewed yet
_ABANDONED: Final = "The attempt is abandoned; reconcile ends the machine if it appears"
_POLL_S: Final = 1.0
"""Seconds between two looks. Google takes 1,500 reads, and as many lists, in a minute of a project
(Compute Engine rate quotas)."""
_RENTAL_LABEL: Final = "torpor-rental"
_STATES: Final = {
    "": "starting", "PENDING": "starting", "PROVISIONING": "starting", "STAGING": "starting",
    "REPAIRING": "starting", "RUNNING": "running", "TERMINATED": "stopped", "SUSPENDED": "stopped",
}  # fmt: skip
"""TERMINATED is Google's word for a machine that is off and keeps its disk."""


class _Item(msgspec.Struct):
    key: str
    value: str = ""


class _Metadata(msgspec.Struct):
    items: list[_Item] = []
    fingerprint: str = ""


class _Access(msgspec.Struct):
    address: str = msgspec.field(name="natIP", default="")


class _Card(msgspec.Struct, rename="camel"):
    access_configs: list[_Access] = []


class _Attached(msgspec.Struct, rename="camel"):
    disk_size_gb: str = "0"


class _Instance(msgspec.Struct, rename="camel"):
    kind: Literal["compute#instance"]
    name: str = ""
    zone: str = ""
    status: str = ""
    labels: dict[str, str] = {}
    label_fingerprint: str = ""
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    network_interfaces: list[_Card] = []
    disks: list[_Attached] = []
    status_message: str = ""


class _Left(msgspec.Struct, rename="camel"):
    """A disk or an address that was left. ``users``: the machines to which it belongs."""

    name: str
    labels: dict[str, str] = {}
    users: list[str] = []
    size_gb: str = "0"


class _Project(msgspec.Struct):
    kind: Literal["compute#project"]
    name: str


class GcpProvider:
    """See ``providers.provider.Provider`` for the contract.

    A machine's id is its name and zone, as Google's own names in DNS have them. A machine has an
    address that goes with it, and no service account.
    """

    abilities: Abilities = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="name",
        settling_s=300.0,
        forgets_s=14 * 86_400.0,  # it keeps operations at least this long
        ready_s=900.0,
        poll_s=_POLL_S,
        ends_machines="the market",
        stop_keeps="disk",
        restarts=True,
        stopped_usd_gib_month=None,
        min_disk_gib=0.0,
        billing_s=1.0,
        notice_s=SPOT_NOTICE_S["gcp"],
        notices=(NoticeSource("gcp", METADATA_URL),),
        adopts="marked",
    )

    def __init__(
        self,
        login: GoogleLogin,
        project: str,
        zones: Sequence[str],
        prices: Mapping[str, float],
        disk_usd_gib_month: float,
        *,
        image: str = "",
        network: str = "default",
        subnetwork: str = "",
        ssh_from: str = "",
        ports: Sequence[int] = (),
        url: str = URL,
        metadata_url: str = METADATA_URL,
        deadline_s: float | None = None,
        ssh_port: int = _SSH_PORT,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = GcpClient(login, project, url=url, timeout=timeout, sleep=sleep)
        self.identity = self._client.identity
        self._images = GcpImages(self._client, image)
        self._offers = GcpOffers(self._client, self._images, zones, prices, disk_usd_gib_month)
        self._network = GcpNetwork(self._client, network, ssh_from, ports)
        self._zones, self._subnetwork = list(zones), subnetwork
        self._ssh_port, self._metadata_url, self._clock = ssh_port, metadata_url, clock
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=_id_of,
            label_of=lambda row: label_among(row.labels),
            exact=["labels"],
        )
        self.abilities = msgspec.structs.replace(
            self.abilities,
            stopped_usd_gib_month=disk_usd_gib_month,
            deadline_s=deadline_s,
            notices=(NoticeSource("gcp", metadata_url),),
        )

    def check(self, image: str = "") -> Account:
        """Asks for the project and its quotas: Google has no request that only checks whether a
        create is allowed."""
        found = self._client.read(_Project, "")
        self._images.image(image)
        opens = self._network.check()
        wares = self._offers.wares
        if not wares:
            raise ProviderDenied(
                f"the block of project {found.name} states no price, so nothing there is on sale: "
                "add the machine types to rent to its prices"
            )
        notes = gpu_quotas(self._client, sorted({region_of(zone) for zone in self._zones}))
        notes.append(f"on sale by the block's prices: {', '.join(map(str, wares))}")
        notes.append("quotas of H100 and newer GPUs are only on Google's page Quotas")
        notes.append("GCP shows only at a create whether the login may create machines")
        return Account(name=f"Google Cloud project {found.name}", notes=notes + opens)

    def offers(self, want: Want) -> list[Offer]:
        return self._offers.found(want)

    def create(self, order: Order) -> Machine:
        if own := [
            machine for machine in self._listed(order.label) if machine.label == order.label
        ]:
            return own[0]
        self._network.open()
        _, zone, _ = offer_parts(order.offer.id)
        name = MachineId(f"{instance_name(order)}.{zone}")
        length_s = self.abilities.deadline_s
        body = launch_request(
            self._images.image(order.image),
            order,
            network=self._network.name,
            subnetwork=self._subnetwork,
            default_image=self._images.is_default(order.image),
            more_script=start_watcher(self._metadata_url, length_s) if length_s else "",
            more_metadata={DEADLINE_KEY: self._deadline(length_s)} if length_s else {},
        )
        # The id of the request makes Google carry it out once, however often it is sent.
        path = f"/zones/{zone}/instances?requestId={uuid.uuid4()}"
        answer = self._client.create("POST", path, Operation, body, reads_conflict=True)
        if isinstance(answer, Refusal) and answer.status != 409:
            raise launch_refused(self._client, order, fault_of(answer), answer.status)
        price = order.offer.price_usd_h
        try:
            done = answer if isinstance(answer, Refusal) else self._client.settled(answer, zone)
            fault = fault_of(done) if isinstance(done, Refusal) else done.fault
            if fault is None:
                return Machine(name, self.identity, order.label, "starting", None, price)
            live = self.find(name)
        except TorporError as cause:  # whatever the error is, the request was sent
            raise CreateUncertain(
                f"{self.identity} was asked to rent {name} and does not say how it went: {cause}. "
                f"{_ABANDONED}"
            ) from cause
        if isinstance(live, Machine) and live.label == order.label:
            return live
        if isinstance(live, Absent) and live.proof and isinstance(done, Operation):
            raise launch_refused(self._client, order, fault)
        raise CreateUncertain(
            f"{self.identity} said of {name}: {fault}, and nothing proves that {order.label} has "
            f"no machine. {_ABANDONED}"
        )

    def find(self, machine: MachineId) -> Machine | Absent:
        """That Google does not know a name is no proof. A deletion that has finished is one, and so
        is a creation that has failed."""
        if (parts := _ID.fullmatch(machine)) is None:
            return Absent()
        name, zone = parts.groups()
        answer: Any = self._client.ask("GET", f"/zones/{zone}/instances/{name}", Any)
        if not isinstance(answer, Refusal):
            return self._rows.one(machine, answer, self._machine)
        if answer.status != 404:
            raise self._client.refused(answer, f"show instance {machine}")
        return Absent(self._end_of(name, zone))

    def list_own(self) -> list[Machine]:
        return self._listed(None)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        live = warranted(self, machine, warrant)
        if live is None:
            self._end_residue(machine.label)
            return
        name, _, zone = machine.id.partition(".")
        self._delete(f"/zones/{zone}/instances/{name}", f"delete instance {machine.id}")

    def residue(self) -> list[Residue]:
        """Disks and addresses that belong to no machine any more. What torpor orders goes with its
        machine, unless somebody changed that."""
        return [residue for residue, _ in self._left()]

    def mark(self, machine: Machine, label: Label | None) -> None:
        """See ``providers.provider.Adopts``. Its disks stay unmarked: those that do not
        go with the machine are its user's."""
        if not to_mark(self, machine, label):
            return
        name, _, zone = machine.id.partition(".")
        path, doing = f"/zones/{zone}/instances/{name}", f"label instance {machine.id}"
        row = self._client.read(_Instance, path)
        # Google refuses a fingerprint that is not the newest, so nobody else's change is lost.
        body = {"labels": with_label(row.labels, label), "labelFingerprint": row.label_fingerprint}
        whole = f"{path}/setLabels?requestId={uuid.uuid4()}"
        answer = self._client.ask("POST", whole, Operation, body=body)
        if isinstance(answer, Refusal):
            raise self._client.refused(answer, doing)
        fault = self._client.settled(answer, zone).fault
        if fault is not None:
            raise ProviderError(f"GCP did not {doing}: {fault}")

    def renew(self, machine: Machine) -> None:
        """See ``providers.provider.Deadlines``. A machine that was made without a
        deadline goes on without one."""
        name, _, zone = machine.id.partition(".")
        path = f"/zones/{zone}/instances/{name}"
        row = self._client.read(_Instance, path)
        if machine.label is None or label_among(row.labels) != machine.label:
            raise NotOurs(f"machine {machine.id} is not of {machine.label}: nothing was changed")
        items = {item.key: item.value for item in row.metadata.items}
        length_s = self.abilities.deadline_s
        if length_s is None or DEADLINE_KEY not in items:
            return
        left_s = _number(items[DEADLINE_KEY]) - self._clock()
        if length_s * _FRESH < left_s <= length_s:  # more than that comes of a clock that was wrong
            return
        items[DEADLINE_KEY] = self._deadline(length_s)
        # Google refuses a fingerprint that is not the newest, so nobody else's change is lost.
        body = {
            "fingerprint": row.metadata.fingerprint,
            "items": [{"key": key, "value": value} for key, value in items.items()],
        }
        whole = f"{path}/setMetadata?requestId={uuid.uuid4()}"
        answer = self._client.ask("POST", whole, Operation, body=body)
        if isinstance(answer, Refusal):
            raise self._client.refused(answer, f"renew the deadline of {machine.id}")

    def start(self, machine: Machine) -> None:
        """See ``providers.provider.Restarts``."""
        name, _, zone = machine.id.partition(".")
        path, doing = f"/zones/{zone}/instances/{name}", f"start instance {machine.id}"
        row = self._client.read(_Instance, path)
        if machine.label is None or label_among(row.labels) != machine.label:
            raise NotOurs(f"machine {machine.id} is not of {machine.label}: it was not started")
        if _STATES.get(row.status) != "stopped":
            return
        # Google refuses "start" of a suspended machine
        word = "resume" if row.status == "SUSPENDED" else "start"
        answer = self._client.ask("POST", f"{path}/{word}?requestId={uuid.uuid4()}", Operation)
        if isinstance(answer, Refusal):
            raise self._client.refused(answer, doing)
        fault = self._client.settled(answer, zone).fault
        if fault is not None:
            raise start_refused(self._client, machine.id, fault)

    def _deadline(self, length_s: float) -> str:
        return f"{self._clock() + length_s:.0f}"

    def _listed(self, label: Label | None) -> list[Machine]:
        asked = f"labels.{_RENTAL_LABEL}" + (f" = {label.rental}" if label else ":*")
        rows: list[tuple[str, Any]] = self._client.everywhere(Any, "instances", asked)
        return self._rows.own([row for _, row in rows], self._machine)

    def _machine(self, row: _Instance) -> Machine:
        state = _STATES.get(row.status, "stopping")
        addresses = [a.address for card in row.network_interfaces for a in card.access_configs]
        address = next(filter(None, addresses), "")
        endpoint = Endpoint(address, self._ssh_port, "root") if address else None
        if state == "running" and endpoint is None:
            state = "starting"
        metadata = {item.key: item.value for item in row.metadata.items}
        price = _number(metadata.get(PRICE_KEY, ""))
        note = f"GCP says {row.status} {row.status_message}".strip()
        if state == "stopped":
            price = self._offers.disk_usd_h(sum(_number(disk.disk_size_gb) for disk in row.disks))
            note += (
                "; its disk is kept and costs on: start it in Google's console to hibernate it, or "
                "end it. A job starts its own"
            )
        return msgspec.convert(
            {
                "id": _id_of(row),
                "provider": self.identity,
                "label": label_among(row.labels),
                "state": state,
                "endpoint": endpoint if state == "running" else None,
                "price_usd_h": price,
                "note": note,
            },
            learned(Machine),
        )

    def _end_of(self, name: str, zone: str) -> str:
        """What proves that a machine is not there any more, or never was; empty where nothing does.

        Google keeps operations for two weeks at least. The last one that made or deleted the name
        counts, without a creation that failed because the name was taken.
        """
        asked = f'targetLink eq ".*/zones/{zone}/instances/{name}"'
        listed = self._client.listed(Operation, f"/zones/{zone}/operations", asked)
        rows = [row for row in listed if _counts(row)]
        if not rows:
            return ""
        last = max(rows, key=lambda row: _when(row.insert_time))
        if last.status != "DONE" or (last.operation_type == "insert") != (last.fault is not None):
            return ""
        said = f"failed ({last.fault})" if last.fault is not None else "is done"
        return f"GCP says that the {last.operation_type} of instance {name} {said}: {last.name}"

    def _left(self) -> list[tuple[Residue, str]]:
        """Disks and addresses that belong to no machine, each with its path."""
        asked, found = f"labels.{_RENTAL_LABEL}:*", []
        for word in ("disks", "addresses"):
            for where, row in self._client.everywhere(_Left, word, asked):
                if not row.users and label_among(row.labels) is not None:
                    found.append((self._residue(word, where, row), f"/{where}/{word}/{row.name}"))
        return found

    def _residue(self, word: str, where: str, row: _Left) -> Residue:
        is_disk = word == "disks"
        return Residue(
            id=f"{row.name}.{zone_of(where)}",
            provider=self.identity,
            kind="disk" if is_disk else "address",
            label=label_among(row.labels),
            price_usd_h=self._offers.disk_usd_h(float(row.size_gb)) if is_disk else None,
        )

    def _end_residue(self, label: Label | None) -> None:
        for residue, path in self._left():
            if residue.label == label:
                self._delete(path, f"delete {residue.kind} {residue.id}")

    def _delete(self, path: str, doing: str) -> None:
        """Begin to delete a resource. ``find`` and ``residue`` show whether it is done."""
        answer = self._client.ask("DELETE", f"{path}?requestId={uuid.uuid4()}", Operation)
        if isinstance(answer, Refusal) and answer.status != 404:
            raise self._client.refused(answer, doing)


def _id_of(row: _Instance) -> str:
    return f"{row.name}.{zone_of(row.zone)}" if row.name and row.zone else ""


def _counts(row: Operation) -> bool:
    taken = row.fault is not None and row.fault.code in ("RESOURCE_ALREADY_EXISTS", "alreadyExists")
    return row.operation_type in ("insert", "delete") and not taken


def _when(text: str) -> float:
    """The Unix time of a text; 0 for a time that Google did not state."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
