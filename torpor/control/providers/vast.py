"""Vast.ai: containers on hosts of many owners, on demand or by bid.

https://docs.vast.ai/api-reference. Only the v1 list of instances is read: the retired v0 list shows
none, whatever there is.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable
from typing import Any, Final, cast

import httpx
import msgspec

from torpor.control.providers.checks import to_mark, warranted
from torpor.control.providers.container import PLAIN, Container
from torpor.control.providers.gpu_wishes import GpuWish, wishes_of
from torpor.control.providers.gpus import least_vram_gib, parse_gpu
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.market_client import TIMEOUT, MarketClient, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows, offered
from torpor.control.providers.start_script import check_image, end_lines, start_command
from torpor.control.providers.vast_gpus import names_of
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    NoCapacity,
    NotOurs,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    QuotaReached,
)
from torpor.shared.values import (
    GIB,
    Endpoint,
    Label,
    Machine,
    MachineId,
    Want,
    driver_version,
    learned,
)

URL: Final = "https://console.vast.ai"
IMAGE: Final = "nvidia/cuda:12.4.1-base-ubuntu22.04"
_GB: Final = 1e9
_MB_GIB: Final = 1024
"""MiB to a GiB: what Vast.ai calls a megabyte of a GPU's memory is a MiB."""
_POLL_S: Final = 5.0
"""Seconds between two looks. Vast.ai's specification has 429 for two looks at an instance within 2
s, two at the list within 1 s, two destroys within 3 s and two creates within 4.5 s."""
_MOST_OFFERS: Final = 64
"""Offers in one search: Vast.ai shows no more, whatever is asked for (ex_atlas, vast/translate.ex).
gpuhunt asks for more."""
_MOST_SEARCHES: Final = 12  # of one kind, on demand or by bid: 768 offers, the cheapest ones
_MOST_PAGES: Final = 400
_PAGE: Final = 25  # the most that Vast.ai shows at once
_DATA_CENTRE: Final = 1
"""The ``hosting_type`` of a data centre. No offer has the key ``datacenter``, by which a search
leaves out other hosts."""
_ARCHITECTURES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_UNREACHED: Final = frozenset({"unknown", "offline"})
"""States in which Vast.ai has not heard from the host, so that it is unknown whether its instance
runs."""
_NOT_THERE: Final = frozenset({400, 404, 410})
_BROKEN: Final = re.compile(
    r"OCI runtime create failed|error response from daemon|pull access denied|manifest unknown"
    r"|manifest for .* not found|repository does not exist|no such image|docker_build\(\) error",
    re.IGNORECASE,
)
"""The ``status_msg`` of a container that will never start (dstack; vast-cli's self-test)."""
_BID: Final = 1.05
"""The bid as a multiple of the least bid: the next bidder outbids whoever bids exactly that."""


class _Bundle(msgspec.Struct):
    id: int
    machine_id: int
    gpu_name: str
    num_gpus: int
    gpu_ram: float  # MB each
    dph_total: float  # with the storage that was asked for
    disk_space: float  # GB
    geolocation: str | None
    cuda_max_good: float | None = None
    driver_version: str | None = None
    reliability: float | None = None
    reliability2: float | None = None
    cpu_arch: str | None = None
    cpu_ram: float | None = None  # MB
    cpu_cores_effective: float | None = None
    inet_down: float | None = None  # Mbit/s
    inet_down_cost: float | None = None  # dollars a GB
    dph_base: float | None = None  # dollars an hour without the storage
    min_bid: float | None = None  # the same
    hosting_type: int | None = None


class _Bundles(msgspec.Struct):
    offers: list[Any]


class _Port(msgspec.Struct, rename={"port": "HostPort"}):
    port: str


class _Instance(msgspec.Struct):
    label: str | None
    id: int | str = ""
    actual_status: str | None = None
    dph_total: float | None = None
    cur_state: str | None = None
    intended_status: str | None = None
    next_state: str | None = None
    public_ipaddr: str | None = None
    ports: dict[str, list[_Port] | None] | None = None
    status_msg: str | None = None


class _Page(msgspec.Struct):
    instances: list[Any]
    next_token: str | msgspec.UnsetType | None = msgspec.UNSET


class _One(msgspec.Struct):
    instances: Any


class _User(msgspec.Struct):
    id: int
    balance: float | None = None
    credit: float | None = None
    email: str | None = None


class _Volume(msgspec.Struct):
    id: int
    machine_id: int


class _Volumes(msgspec.Struct):
    volumes: list[_Volume]


class _Created(msgspec.Struct):
    success: bool
    new_contract: int | None = None
    error: str = ""
    msg: str = ""


class _Done(msgspec.Struct):
    success: bool
    msg: str = ""


class VastProvider:
    """See ``providers.provider.Provider`` for the contract."""

    abilities: Final = Abilities(
        kind="container",
        privileged=False,
        host_key="installed",
        idempotency="lookup",
        settling_s=300.0,
        ready_s=900.0,
        poll_s=_POLL_S,
        stop_keeps="disk",
        restarts=True,
        stopped_usd_gib_month=None,  # each host has its own price
        min_disk_gib=8.0,
        billing_s=1.0,
        notice_s=None,
        many_owners=True,
        adopts="marked",
        ends_machines="the machine",
    )

    def __init__(
        self,
        api_key: str,
        *,
        account: str = "",
        container: Container = PLAIN,
        data_centres_only: bool = False,
        url: str = URL,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = MarketClient(
            "vast",
            url,
            api_key,
            identity=account,
            secrets=container.secrets,
            timeout=timeout,
            sleep=sleep,
            is_gone=lambda refusal: refusal.status in _NOT_THERE,
        )
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=lambda row: str(row.id),
            label_of=lambda row: label_in(row.label),
        )
        self.volumes = [volume.path for volume in container.volumes]
        self._data_centres_only, self._url = data_centres_only, url
        self._container, self._hidden_in = container, container.secrets.hidden_in

    def check(self, image: str = "") -> Account:
        check_image(image or IMAGE)
        user = self._client.read(_User, "/api/v0/users/current/")
        self._host()
        balance_usd = user.credit if user.credit is not None else user.balance
        if balance_usd is not None and balance_usd <= 0:
            raise ProviderDenied(
                f"Vast.ai account {user.id} has {balance_usd:.2f} $ of credit: add some first"
            )
        return Account(name=user.email or str(user.id), balance_usd=balance_usd)

    def offers(self, want: Want) -> list[Offer]:
        found = [] if want.spot == "only" else self._search(want, spot=False)
        return found if want.spot == "never" else found + self._search(want, spot=True)

    def create(self, order: Order) -> Machine:
        if (known := self._of_label(order.label)) is not None:
            return known
        itself = f'{shlex.quote(self._url)}/api/v0/instances/"$CONTAINER_ID"/'
        ends = end_lines(order, itself, "CONTAINER_API_KEY")
        program, *arguments = start_command(order, first=ends)
        body: dict[str, Any] = {
            "image": order.image or IMAGE,
            "disk": self._disk_gb(order.disk_gib),
            "label": label_name(order.label),
            "runtype": "args",
            "user": "root",  # whatever the image's is
            "onstart": program,  # with runtype args it stands in for the image's ENTRYPOINT
            "args": arguments,
            "env": {**_mapped(22, *self._container.ports), **self._container.env},
            "target_state": "running",
            "cancel_unavail": True,  # rather than a stopped machine that waits for its GPU
        }
        if self._container.login:
            body["image_login"] = self._container.login
        for volume in self._container.volumes:
            body["volume_info"] = {
                "create_new": False,
                "volume_id": int(volume.name),
                "mount_path": volume.path,
            }
        if order.offer.spot:  # without a price it would be rented on demand
            body["price"] = round(_bid(order), 6)
        path = f"/api/v0/asks/{_offer_number(order.offer.id)}/"
        answer = self._client.create("PUT", path, _Created, body)
        created = answer if isinstance(answer, _Created) else _words(answer)
        if created is not None and created.success and created.new_contract is not None:
            return Machine(
                MachineId(str(created.new_contract)),
                self.identity,
                order.label,
                "starting",
                None,
                order.offer.price_usd_h,
            )
        raise self._refused(order, answer, created)

    def find(self, machine: MachineId) -> Machine | Absent:
        if not machine.isdecimal():
            return Absent()
        # The whole list: a filter that Vast.ai reads otherwise shows none, and proves nothing.
        listed = self._rows.find(machine, self._pages({}), self._machine)
        if isinstance(listed, Machine):
            return listed
        path = f"/api/v0/instances/{machine}/"
        found = self._client.seek("GET", path, _One, f"show instance {machine}")
        if found is not None and found.instances is not None:
            return self._rows.one(machine, found.instances, self._machine)
        return listed or Absent(
            f"Vast.ai shows no instance {machine}, neither by its id nor in its list"
        )

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._pages({}), self._machine)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        if warranted(self, machine, warrant) is None:
            return
        doing = f"destroy instance {machine.id}"
        path = f"/api/v0/instances/{machine.id}/"
        done = self._client.seek("DELETE", path, _Done, doing)
        if done is not None and not done.success:
            raise ProviderError(f"Vast.ai did not {doing}: {done.msg or 'no words'}")

    def mark(self, machine: Machine, label: Label | None) -> None:
        """See ``providers.provider.Adopts``. The instance has no other label."""
        if to_mark(self, machine, label):
            doing = f"label instance {machine.id}"
            body = {"label": label_name(label) if label else ""}
            path = f"/api/v0/instances/{machine.id}/"
            answer = self._client.ask("PUT", path, _Done, body=body)
            if isinstance(answer, Refusal):
                raise self._client.refused(answer, doing)
            if not answer.success:
                raise ProviderError(f"Vast.ai did not {doing}: {answer.msg or 'no words'}")

    def start(self, machine: Machine) -> None:
        """See ``providers.provider.Restarts``. An instance that was outbid waits until
        its bid is the highest, and its disk cannot be reached meanwhile."""
        live = self.find(machine.id)
        if machine.label is None or isinstance(live, Absent) or live.label != machine.label:
            raise NotOurs(f"machine {machine.id} is not of {machine.label}: it was not started")
        doing = f"start instance {machine.id}"
        path = f"/api/v0/instances/{machine.id}/"
        answer = self._client.ask("PUT", path, _Done, body={"state": "running"})
        if isinstance(answer, Refusal):
            if self._client.denies(answer):
                raise self._client.denied(answer, doing)
            raise NoCapacity(f"Vast.ai did not {doing}: {answer}")
        if not answer.success:
            raise NoCapacity(f"Vast.ai did not {doing}: {answer.msg or 'no words'}")

    def residue(self) -> list[Residue]:
        """None: the disk goes with the instance, and torpor rents no volumes here."""
        return []

    def _search(self, want: Want, *, spot: bool) -> list[Offer]:
        """Each wish by itself: else cheaper models may fill the search, or smaller ones."""
        at = self._host()
        found: dict[str, object] = {}
        searched: list[dict[str, Any]] = []  # of all models, which shows no more a second time
        for wish in wishes_of(want) or [GpuWish("", 1)]:
            least = at | {"num_gpus": {"gte": max(1, wish.count)}}
            if wish.gpu is not None and wish.gpu.vram_gib:
                least["gpu_ram"] = {"gte": int(least_vram_gib(wish.gpu.vram_gib) * _MB_GIB)}
            names = names_of(wish.gpu)
            rows = self._cheapest(want, spot, {**least, "gpu_name": {"in": names}}) if names else []
            if not rows and least not in searched:  # by now the market may have another name for it
                rows = self._cheapest(want, spot, least)
                searched.append(least)
            found |= _numbered(rows)

        def offers(bundle: _Bundle) -> list[Offer]:
            apart = self._data_centres_only and bundle.hosting_type != _DATA_CENTRE
            return [] if apart else [self._offer(bundle, want, spot)]

        return offered(self.identity, _Bundle, [*found.values()], offers)

    def _host(self) -> dict[str, Any]:
        """The filter for the host of the volume; empty without one. ProviderDenied."""
        for volume in self._container.volumes:
            for row in self._client.read(_Volumes, "/api/v0/volumes/").volumes:
                if str(row.id) == volume.name:
                    return {"machine_id": {"eq": row.machine_id}}
            raise ProviderDenied(
                f"{self.identity} has no volume {volume.name}: correct `volumes` in the provider "
                "block"
            )
        return {}

    def _cheapest(self, want: Want, spot: bool, filters: dict[str, Any]) -> list[object]:
        disk_gb = self._disk_gb(want.disk_gib)
        query: dict[str, Any] = {
            **filters,
            "limit": _MOST_OFFERS,
            # Two, as the specification has it; Vast.ai's own client and others send one.
            "order": [["dph_total", "asc"], ["score", "desc"]],
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "direct_port_count": {
                "gte": 1 + len(self._container.ports)
            },  # SSH through their proxy moves no files
            "disk_space": {"gte": disk_gb},
            "allocated_storage": disk_gb,
        }
        if spot:
            query["type"] = "bid"
        # Else hosts with older drivers may fill the search.
        if want.cuda is not None:
            query["cuda_max_good"] = {"gte": float("{}.{}".format(*want.cuda))}
        if want.driver is not None:
            query["driver_version"] = {"gte": _driver_number(want.driver)}
        if self._data_centres_only:
            query["datacenter"] = {"eq": True}
        found: dict[str, object] = {}
        for _ in range(_MOST_SEARCHES):
            try:
                page = self._client.search(_Bundles, "/api/v0/bundles/", query).offers
            except ProviderUnavailable:
                if not found:
                    raise
                break  # the cheapest ones are there
            numbered = _numbered(page)
            fresh = numbered.keys() - found.keys()
            found |= numbered
            prices = [row.get("dph_total") for row in page if isinstance(row, dict)]
            dearest = max((usd for usd in prices if isinstance(usd, int | float)), default=None)
            if len(page) < _MOST_OFFERS or dearest is None:
                break
            # The price of the last one again: others may cost the same.
            query["dph_total"] = {"gte" if fresh else "gt": dearest}
        return list(found.values())

    def _offer(self, bundle: _Bundle, want: Want, spot: bool) -> Offer:
        bid = _least_bid(bundle, want) if spot else None
        cuda = bundle.cuda_max_good
        stated = bundle.reliability if bundle.reliability is not None else bundle.reliability2
        arch = bundle.cpu_arch or "amd64"
        return Offer(
            id=f"{bundle.id}-bid" if spot else str(bundle.id),
            provider=self.identity,
            gpu=parse_gpu(bundle.gpu_name, round(bundle.gpu_ram / _MB_GIB, 1)),
            gpu_count=bundle.num_gpus,
            price_usd_h=bundle.dph_total if bid is None else bid + _beside(bundle),
            region=(bundle.geolocation or "unknown").rsplit(",", 1)[-1].strip(),
            disk_gib=bundle.disk_space * _GB / GIB,
            domain=f"machine {bundle.machine_id}",
            priced_unix=time.time(),
            spot=spot,
            bid_usd_h=bid,
            available=True,
            reliability=stated,
            many_owners=True,
            architecture=_ARCHITECTURES.get(arch, arch),
            cuda=None if cuda is None else _version(cuda),
            driver=driver_version(bundle.driver_version or ""),
            ram_gib=None if bundle.cpu_ram is None else bundle.cpu_ram / 1024,
            cores=bundle.cpu_cores_effective,
            link_mbit_s=bundle.inet_down,
            traffic_usd_gib=(bundle.inet_down_cost or 0.0) * GIB / _GB,
        )

    def _disk_gb(self, disk_gib: float) -> int:
        return math.ceil(max(disk_gib, self.abilities.min_disk_gib) * GIB / _GB)

    def _of_label(self, label: Label) -> Machine | None:
        found = self._pages({"label": {"eq": label_name(label)}})
        own = self._rows.own(found, self._machine)
        return next((machine for machine in own if machine.label == label), None)

    def _pages(self, filters: dict[str, Any]) -> list[object]:
        params = {"limit": str(_PAGE), "select_filters": msgspec.json.encode(filters).decode()}
        rows: list[object] = []
        for _ in range(_MOST_PAGES):
            page = self._client.read(_Page, "/api/v1/instances/", params)
            rows += page.instances
            if page.next_token is msgspec.UNSET and len(page.instances) >= _PAGE:
                raise self._client.unexpected("a full page and no next_token", "a list")
            if not page.next_token:
                return rows
            params["after_token"] = page.next_token
        raise self._client.unexpected(f"more than {_MOST_PAGES} pages", "a list of instances")

    def _machine(self, row: _Instance) -> Machine:
        status = row.actual_status
        ssh = (row.ports or {}).get("22/tcp")
        endpoint = None
        if status == "running" and ssh and row.public_ipaddr:
            endpoint = Endpoint(row.public_ipaddr.strip(), int(ssh[0].port), "root")
        unreached, note = status in _UNREACHED, self._hidden_in(row.status_msg or "").strip()
        if unreached:
            note = f"Vast.ai says {status}: it does not reach its host {note}".strip()
        states = {row.cur_state, row.intended_status or row.cur_state}
        states.add(row.next_state or row.cur_state)
        broken = status in ("created", "loading") and _BROKEN.search(note) is not None
        stopped = not unreached and (status == "exited" or states == {"stopped"} or broken)
        return Machine(
            MachineId(str(row.id)),
            self.identity,
            label_in(row.label),
            "stopped" if stopped else "running" if endpoint is not None else "starting",
            endpoint,
            row.dph_total or 0.0,
            note,
        )

    def _refused(
        self, order: Order, answer: _Created | Refusal, created: _Created | None
    ) -> ProviderError:
        asked = f"Vast.ai refused offer {order.offer.id}"
        told = self._hidden_in(
            str(answer) if isinstance(answer, Refusal) else f"{answer.error} {answer.msg}"
        )
        if created is not None and (created.new_contract is not None or created.success):
            return CreateUncertain(
                f"{asked} and made instance {created.new_contract} all the same: {told}. The "
                "attempt is abandoned; reconcile ends the instance"
            )
        error = created.error if created is not None else ""
        status = answer.status if isinstance(answer, Refusal) else 200
        gone = error == "no_such_ask" or (created is not None and "no_such_ask" in created.msg)
        if gone or status in (404, 410):
            return NoCapacity(f"{asked}: {told}")
        if "quota" in error:
            return QuotaReached(f"{asked}: {told}")
        if status == 200 and not error:
            return self._client.uncertain(told, asked)
        if (isinstance(answer, Refusal) and self._client.denies(answer)) or "credit" in error:
            return ProviderDenied(f"{asked}: {told}. Check the key, its permissions and the credit")
        return CreateFailed(f"{asked}: {told}")


def _words(refusal: Refusal) -> _Created | None:
    """What Vast.ai says in an error; None where it is in no shape that we know."""
    try:
        said = msgspec.convert(
            {"success": False, **cast(dict[str, Any], refusal.body)}, learned(_Created)
        )
    except (TypeError, msgspec.ValidationError):
        return None
    return said


def _beside(bundle: _Bundle) -> float:
    """What the storage costs an hour."""
    return 0.0 if bundle.dph_base is None else max(0.0, bundle.dph_total - bundle.dph_base)


def _least_bid(bundle: _Bundle, want: Want) -> float:
    """The least bid with a margin, as far as the user's maximum allows one. Vast.ai bills what is
    bid."""
    least = bundle.min_bid or bundle.dph_base or bundle.dph_total
    bid = least * _BID
    if want.max_price_usd_h is not None:
        bid = max(least, min(bid, want.max_price_usd_h - _beside(bundle)))
    return bid


def _bid(order: Order) -> float:
    """The offer's bid, or less where that would cost more than the order allows."""
    total = order.offer.price_usd_h
    bid = total if order.offer.bid_usd_h is None else order.offer.bid_usd_h
    return bid if order.bid_usd_h is None else min(bid, order.bid_usd_h - (total - bid))


def _mapped(*ports: int) -> dict[str, str]:
    """Options of ``docker run``, as Vast.ai takes them among the environment."""
    return {f"-p {port}:{port}": "1" for port in ports}


def _version(number: float) -> tuple[int, int]:
    major, _, minor = f"{number:g}".partition(".")
    return int(major), int(minor or 0)


def _numbered(rows: list[Any]) -> dict[str, object]:
    return {str(row.get("id") if isinstance(row, dict) else row): row for row in rows}


def _driver_number(version: tuple[int, ...]) -> int:
    """A driver version as a search compares it: 535.86.05 is 535086005 (vast-cli,
    vastai/api/query.py)."""
    major, minor, patch = (*version, 0, 0)[:3]
    return (major * 1000 + minor) * 1000 + patch


def _offer_number(offer: str) -> int:
    number = offer.removesuffix("-bid")
    if not number.isdecimal():
        raise CreateFailed(f"{offer!r} is no offer of Vast.ai")
    return int(number)
