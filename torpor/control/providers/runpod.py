"""RunPod, by its REST API version 2: containers ("pods") on demand, in two clouds of its hosts.

https://docs.runpod.io/api-reference-v2. Spot pods exist only in older APIs and are not offered.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import httpx
import msgspec

from torpor.control.providers.adopted import Adopted
from torpor.control.providers.checks import warranted
from torpor.control.providers.container import PLAIN, Container
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.market_client import TIMEOUT, MarketClient, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows, offered
from torpor.control.providers.start_script import check_image, end_lines, start_command
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    NoCapacity,
    ProviderDenied,
    ProviderError,
    QuotaReached,
)
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, Want

URL: Final = "https://api.runpod.io"
IMAGE: Final = "nvidia/cuda:12.4.1-base-ubuntu22.04"
DISK_USD_GB_MONTH: Final = 0.10  # of a running pod (list price, November 2026)
_MONTH_H: Final = 730
_MOST_DISK_GIB: Final = 1000.0  # what every host is asked for at most; the API states no limit
_GB: Final = 1e9
_ANYWHERE: Final = "any"
_MOST_PAGES: Final = 100  # of up to 1,000 pods each
_POLL_S: Final = 10.0
"""Seconds between two looks: 60 requests a minute and 3,000 an hour are allowed (runpod-mcp,
tests/rate-limit.test.ts)."""
_ADDRESS_S: Final = 90.0
"""Seconds after which a pod without an address for SSH is given up. A pod of the community cloud
whose host has no public address never gets one, and API v2 cannot ask for one
(runpod-plugins-official, runpod-migrate)."""
_CRASHES: Final = 3
_STEADY_S: Final = 120
"""A container that ends is started again, and its pod stays RUNNING, and billed. One that was
started _CRASHES times more while torpor looked, and is younger than this, is taken to go on so."""

_POOL: Final = re.compile(r"\bpools?\b", re.IGNORECASE)
"""The text of a 403 about GPUs that the account may not rent. Other 403s are about the key's
permissions."""

_Cloud = Literal["SECURE", "COMMUNITY"]
_CLOUDS: Final[tuple[_Cloud, ...]] = ("SECURE", "COMMUNITY")


class _Centre(msgspec.Struct):
    id: str
    availability: str


class _Cuda(msgspec.Struct):
    version: str
    available: bool


class _Prices(msgspec.Struct):
    secure: float
    community: float


class _Counts(msgspec.Struct):
    secure: int
    community: int


class _GpuType(msgspec.Struct, rename="camel"):
    id: str
    name: str
    memory: float  # GB
    secure: bool
    community: bool
    price: _Prices  # dollars an hour of one GPU
    max_count: _Counts
    availability: str = "NONE"
    data_centers: list[_Centre] = []
    cuda_versions: list[_Cuda] = []


class _Catalog(msgspec.Struct):
    gpus: list[Any]


class _Ssh(msgspec.Struct):
    host: str
    port: int
    username: str


class _SshWays(msgspec.Struct):
    direct: _Ssh | None


class _Pod(msgspec.Struct):
    name: str | None
    id: str = ""
    status: str = ""
    cost: float | None = None
    ssh: _SshWays | None = None
    runtime: dict[str, Any] | None = None


class _Made(msgspec.Struct):
    id: str


class _Pagination(msgspec.Struct, rename="camel"):
    has_next_page: bool
    next_cursor: str | None = None


class _Pods(msgspec.Struct):
    pods: list[Any]
    pagination: _Pagination | None = None  # since October 2026


class _NetworkVolume(msgspec.Struct, rename="camel"):
    data_center: str


class _Keys(msgspec.Struct):
    keys: list[str]


class RunpodProvider:
    """See ``providers.provider.Provider`` for the contract."""

    abilities: Final = Abilities(
        kind="pod",
        privileged=False,
        host_key="installed",
        idempotency="lookup",
        settling_s=300.0,
        ready_s=900.0,
        address_s=_ADDRESS_S,
        poll_s=_POLL_S,
        stop_keeps="nothing",  # a stop wipes the container's disk, and torpor rents no volume
        stopped_usd_gib_month=0.20,
        min_disk_gib=5.0,
        billing_s=1.0,
        notice_s=None,
        many_owners=True,
        ends_machines="the machine",
        adopts="by record",  # a change of the name may reset the pod, which wipes its disk
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
            "runpod",
            url,
            api_key,
            identity=account,
            secrets=container.secrets,
            timeout=timeout,
            sleep=sleep,
        )
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._container, self._url = container, url
        self.volumes = [volume.path for volume in container.volumes]
        # Pods of the secure cloud alone can mount a network volume.
        self._clouds = _CLOUDS[:1] if data_centres_only or self.volumes else _CLOUDS
        self._adopted = Adopted()
        self._rows = Rows(self.identity, _Pod, id_of=lambda pod: pod.id, label_of=self._label_of)
        self.mark = self._adopted.mark
        self._uptimes: dict[str, tuple[int, int]] = {}  # pod: the last, and how often it fell

    def check(self, image: str = "") -> Account:
        """The API names neither the account nor its balance."""
        check_image(image or IMAGE)
        self._client.read(_Keys, "/v2/account/ssh-keys")
        self._pods()
        self._centre()
        return Account(name=self.identity, notes=["RunPod's API does not state the balance"])

    def offers(self, want: Want) -> list[Offer]:
        if want.spot == "only":
            return []
        count, centre = want.gpu_count if want.gpu else 1, self._centre()
        found = [offer for cloud in self._clouds for offer in self._on_sale(want, cloud, count)]
        return [offer for offer in found if offer.unread or centre in ("", offer.region)]

    def create(self, order: Order) -> Machine:
        if (known := self._of_label(order.label)) is not None:
            return known
        gpu, count, cloud, centre = _offer_parts(order.offer.id)
        itself = f'{shlex.quote(self._url)}/v2/pods/"$RUNPOD_POD_ID"'
        *program, script = start_command(order, first=end_lines(order, itself, "RUNPOD_API_KEY"))
        start = {"entrypoint": program, "cmd": [script]}
        body: dict[str, Any] = {
            "name": label_name(order.label),
            "image": order.image or IMAGE,
            # Specifications since October 2026 and dstack have this JSON here; older ones have any
            # string, and no field of its own for an ENTRYPOINT or CMD, which newer ones have, too.
            "args": msgspec.json.encode(start).decode(),
            # root, whatever the image's is (dstack)
            "env": {**self._container.env, "RUNPOD_POD_USER": "0"},
            "disk": _disk_gb(order.disk_gib, self.abilities.min_disk_gib),
            "ports": [f"{port}/tcp" for port in (22, *self._container.ports)],
            "cloud": cloud,
            "gpu": {"id": gpu, "count": count},
        }
        if self._container.login:
            body["registry"] = self._container.login
        if self._container.volumes:
            body["mounts"] = {
                "network": [
                    {"volumeId": volume.name, "path": volume.path}
                    for volume in self._container.volumes
                ]
            }
        if centre != _ANYWHERE:
            body["dataCenterIds"] = [centre]
        if order.cuda is not None:
            body["gpu"]["minCudaVersion"] = f"{order.cuda[0]}.{order.cuda[1]}"
        answer = self._client.create("POST", "/v2/pods", _Made, body)
        if isinstance(answer, Refusal):
            raise _refused(order, answer)
        price = order.offer.price_usd_h
        return Machine(MachineId(answer.id), self.identity, order.label, "starting", None, price)

    def find(self, machine: MachineId) -> Machine | Absent:
        if not machine.isalnum():
            return Absent()
        path = f"/v2/pods/{machine}"
        answer: Any = self._client.ask("GET", path, Any)
        if isinstance(answer, Refusal) and not self._client.is_gone(answer):
            raise self._client.refused(answer, f"show pod {machine}")
        if answer is not None and not isinstance(answer, Refusal):
            return self._rows.one(machine, answer, self._seen)
        listed = self._rows.find(machine, self._pods(), self._seen)
        if listed is not None or answer is None:  # null: it may be on its way out
            return listed or Absent()
        return Absent(f"RunPod answers 404 for pod {machine} and does not list it")

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._pods(), self._seen)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        # No long wait between the warrant's check and the request: it holds for a minute.
        if warranted(self, machine, warrant) is None:
            return
        path = f"/v2/pods/{machine.id}"
        self._client.seek("DELETE", path, type(None), f"terminate pod {machine.id}")

    def residue(self) -> list[Residue]:
        """None: the disk goes with the pod, and torpor rents no network volumes here."""
        return []

    def _centre(self) -> str:
        """Where the network volume is, and so the pod; empty without one. ProviderDenied."""
        for volume in self._container.volumes:
            path = f"/v2/network-volumes/{volume.name}"
            found = self._client.seek("GET", path, _NetworkVolume, f"show volume {volume.name}")
            if found is None:
                raise ProviderDenied(
                    f"{self.identity} has no network volume {volume.name}: correct `volumes` in "
                    "the provider block"
                )
            return found.data_center
        return ""

    def _on_sale(self, want: Want, cloud: _Cloud, count: int) -> list[Offer]:
        params = {
            "include": "AVAILABILITY",
            "product": "POD",
            "count": str(count),
            "cloud": cloud,
        }
        if (cuda := want.least_cuda) is not None:
            params["minCudaVersion"] = f"{cuda[0]}.{cuda[1]}"
        found = self._client.read(_Catalog, "/v2/catalog/gpus", params).gpus
        return offered(
            self.identity, _GpuType, found, lambda gpu: self._of_type(gpu, want, cloud, count)
        )

    def _of_type(self, gpu: _GpuType, want: Want, cloud: _Cloud, count: int) -> list[Offer]:
        sold, each_usd_h, most = (
            (gpu.secure, gpu.price.secure, gpu.max_count.secure)
            if cloud == "SECURE"
            else (gpu.community, gpu.price.community, gpu.max_count.community)
        )
        if not sold or most < count or each_usd_h <= 0:
            return []
        newest = max((_version(version.version) for version in gpu.cuda_versions), default=None)
        disk_gb = _disk_gb(want.disk_gib, self.abilities.min_disk_gib)
        centres = gpu.data_centers or [_Centre(_ANYWHERE, gpu.availability)]
        return [
            Offer(
                id=f"{gpu.id}/{count}/{cloud}/{centre.id}",
                provider=self.identity,
                gpu=parse_gpu(gpu.id, gpu.memory),
                gpu_count=count,
                price_usd_h=each_usd_h * count + disk_gb * DISK_USD_GB_MONTH / _MONTH_H,
                region=centre.id,
                disk_gib=_MOST_DISK_GIB,
                domain=f"{gpu.id} x{count} {cloud} {centre.id}",
                priced_unix=time.time(),
                available=centre.availability != "NONE",
                many_owners=cloud == "COMMUNITY",
                cuda=newest,
            )
            for centre in centres
        ]

    def _of_label(self, label: Label) -> Machine | None:
        return next((own for own in self.list_own() if own.label == label), None)

    def _label_of(self, pod: _Pod) -> Label | None:
        return label_in(pod.name) or self._adopted.get(pod.id)

    def _pods(self) -> list[object]:
        """All of them: a page that is missing would prove an absence."""
        params: dict[str, str] = {}
        pods: list[object] = []
        for _ in range(_MOST_PAGES):
            page = self._client.read(_Pods, "/v2/pods", params)
            pods += page.pods
            more = page.pagination
            if more is None or not more.has_next_page:
                return pods
            if not more.next_cursor or more.next_cursor == params.get("cursor"):
                break
            params = {"cursor": more.next_cursor}
        raise self._client.unexpected("pages without an end", "GET /v2/pods")

    def _seen(self, pod: _Pod) -> Machine | Absent:
        if pod.status == "TERMINATED":
            return Absent(f"RunPod says that pod {pod.id} is TERMINATED")
        return self._machine(pod)

    def _machine(self, pod: _Pod) -> Machine:
        # A pod is RUNNING, and billed, before its container runs.
        up = pod.status == "RUNNING" and pod.runtime is not None
        stopped = pod.status in ("EXITED", "ERROR", "TERMINATED")
        note, way = f"RunPod says {pod.status}", pod.ssh.direct if up and pod.ssh else None
        if up and self._crashes(pod):
            note, way = f"{note}, but its container ends, and is started, again and again", None
        return Machine(
            MachineId(pod.id),
            self.identity,
            self._label_of(pod),
            "stopped" if stopped else "running" if up else "starting",
            None if way is None else Endpoint(way.host, way.port, "root"),
            pod.cost or 0.0,
            note,
        )

    def _crashes(self, pod: _Pod) -> bool:
        uptime = (pod.runtime or {}).get("uptime")
        if not isinstance(uptime, int):
            return False
        last, restarts = self._uptimes.get(pod.id, (0, 0))
        restarts += uptime < last
        self._uptimes[pod.id] = uptime, restarts
        return restarts >= _CRASHES and uptime < _STEADY_S


def _refused(order: Order, refusal: Refusal) -> ProviderError:
    asked = f"RunPod refused {order.offer.id}: {refusal}"
    if refusal.status == 400:
        return NoCapacity(f"{asked}. RunPod says 400 both for no capacity and for a wrong request")
    if refusal.status == 403 and _POOL.search(refusal.text):
        return QuotaReached(asked)
    if refusal.status in (401, 402, 403):
        return ProviderDenied(f"{asked}. Check the key, its permissions and the account's balance")
    return CreateFailed(asked)


def _offer_parts(offer: str) -> tuple[str, int, str, str]:
    parts = offer.rsplit("/", 3)
    if len(parts) != 4 or not parts[1].isdecimal():
        raise CreateFailed(f"{offer!r} is no offer of RunPod")
    return parts[0], int(parts[1]), parts[2], parts[3]


def _disk_gb(disk_gib: float, least_gib: float) -> int:
    return math.ceil(max(disk_gib, least_gib) * GIB / _GB)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
