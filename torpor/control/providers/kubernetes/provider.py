"""A Kubernetes cluster with GPUs, CoreWeave's among them: pods as machines, queued by Kueue.

https://kubernetes.io/docs/reference/kubernetes-api and https://kueue.sigs.k8s.io. A cluster states
no prices: the provider block does. It is one market for each namespace and queue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

import httpx
import msgspec

from torpor.control.providers.checks import warranted
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.kubernetes.client import (
    KubernetesClient,
    Right,
    fault_of,
    is_coreweave,
)
from torpor.control.providers.kubernetes.cluster import Cluster, Nodes
from torpor.control.providers.kubernetes.jump import RIGHTS as JUMP_RIGHTS
from torpor.control.providers.kubernetes.jump import JumpPod, is_owner
from torpor.control.providers.kubernetes.objects import (
    BATCH,
    JOB,
    OF_QUEUE,
    PRICE,
    QUEUE,
    RENTAL,
    Items,
    KubernetesJob,
    Machines,
    ManyConditioned,
    Metadata,
    Object,
    Objects,
    Pod,
    Pods,
    Service,
    is_name,
    job_of,
    name_of,
    pinned_to,
    pods_of,
    secret_of,
    service_of,
    toleration,
)
from torpor.control.providers.kubernetes.trouble import (
    PULL_S,
    Events,
    lacks_room,
    pull_fault,
    room_fault,
)
from torpor.control.providers.labels import label_among
from torpor.control.providers.market_client import TIMEOUT, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows
from torpor.control.providers.start_script import check_image
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    ProviderDenied,
    ProviderError,
    QuotaReached,
    TorporError,
)
from torpor.shared.values import Endpoint, Machine, MachineId, Want

IMAGE: Final = "nvidia/cuda:12.4.1-base-ubuntu22.04"
QUEUE_S: Final = 24 * 3600.0
_SSH_PORT: Final = 22
_POLL_S: Final = 1.0
"""Seconds between two looks, each of which is three or four requests. API servers share their time
by flows and state no limit; the clients of Kubernetes itself keep to 5 requests a second
(client-go, rest.DefaultQPS)."""
_ADDRESS_S: Final = 600.0  # seconds; load balancers of clouds take some minutes
_COREWEAVE: Final = {"service.beta.kubernetes.io/coreweave-load-balancer-type": "public"}
"""An annotation without which CoreWeave gives a Service an address that only its own network
reaches (docs.coreweave.com, Expose a Service)."""

RIGHTS: Final = (
    *(Right(verb, "jobs", "batch") for verb in ("create", "get", "list", "patch", "delete")),
    *(Right(verb, "secrets") for verb in ("create", "get", "delete")),
    *(Right(verb, "services") for verb in ("create", "get", "list", "delete")),
    *(Right(verb, "pods") for verb in ("list", "delete")),
)
_NO_EVENTS: Final = (
    "its user may not list events: a machine for which no node has room is waited for as long as "
    "one that starts"
)
QUEUE_RIGHTS: Final = (
    *(Right(verb, "localqueues", "kueue.x-k8s.io") for verb in ("get", "list")),
    Right("list", "workloads", "kueue.x-k8s.io"),
)


class KubernetesProvider:
    """See ``providers.provider.Provider`` for the contract.

    A rental is a Job, a Secret and a Service of one name. ``find`` makes the pod that it shows
    first an owner of its Job: then all of them go with that pod, also when nobody is there.
    """

    abilities: Abilities = Abilities(
        kind="pod",
        privileged=False,
        host_key="installed",
        idempotency="name",
        settling_s=120.0,  # a request that was given up may still be carried out
        ready_s=1800.0,  # a node may have to start, and pull an image of many GB
        address_s=_ADDRESS_S,
        poll_s=_POLL_S,
        ends_machines="the market",
        stop_keeps="nothing",
        stopped_usd_gib_month=None,
        min_disk_gib=0.0,
        billing_s=1.0,
        notice_s=120.0,
        private_network=True,  # that of pods, unless a NetworkPolicy forbids it
        queue_s=0.0,
        not_adopted="its machines are pods of Jobs that torpor writes itself, and whoever made "
        "another pod may make it again, or end it with all that it holds",
    )

    def __init__(
        self,
        kubeconfig: str,
        namespace: str,
        machines: Machines,
        *,
        context: str = "",
        ssh_port: int = _SSH_PORT,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for taint in machines.tolerations:
            toleration(taint)
        queue = f"/{machines.queue}" if machines.queue else ""
        self._client = KubernetesClient(
            kubeconfig,
            namespace,
            queue,
            context=context,
            secrets=machines.container.secrets,
            timeout=timeout,
            sleep=sleep,
        )
        self.identity = self._client.identity
        self._market = self._client.market
        self._machines, self._clock = machines, clock
        self.volumes = [volume.path for volume in machines.container.volumes]
        self._cluster = Cluster(self._client, machines)
        self._pull_failed_unix: dict[str, float] = {}  # by pod: when it was first seen to fail
        self._annotations = _COREWEAVE if is_coreweave(self._client.url) else {}
        self._jumps = machines.address == "jump pod"
        self._jump = JumpPod(self._client, machines, self._annotations, ssh_port)
        self._ssh_port = ssh_port
        self._rows = Rows(
            self.identity,
            KubernetesJob,
            id_of=lambda job: job.metadata.name,
            label_of=lambda job: label_among(job.metadata.labels),
            exact=["metadata.labels"],
        )
        self._gpu = parse_gpu(machines.gpu)
        self.abilities = msgspec.structs.replace(
            self.abilities,
            notice_s=float(machines.grace_s),
            queue_s=QUEUE_S if machines.queue else 0.0,
        )

    def check(self, image: str = "") -> Account:
        """Asks the API server for each right that renting needs, and Kueue for the queue."""
        check_image(image or self._machines.image or IMAGE)
        self._cluster.check_version()
        queue = self._machines.queue
        more = (*(QUEUE_RIGHTS if queue else ()), *(JUMP_RIGHTS if self._jumps else ()))
        for right in (*RIGHTS, *more):
            if not self._client.may(right):
                group = f".{right.group}" if right.group else ""
                raise ProviderDenied(
                    f"{self.identity}: the kubeconfig's user may not {right.verb} "
                    f"{right.resource}{group} in namespace {self._client.namespace}. Grant the "
                    "Role in docs/guide/markets/kubernetes.md"
                )
        answer = self._market.ask("GET", f"/api/v1/namespaces/{self._client.namespace}", Object)
        if isinstance(answer, Refusal) and answer.status == 404:
            raise InvalidInput(f"{self.identity}: there is no namespace {self._client.namespace}")
        if isinstance(answer, Refusal) and answer.status != 403:
            raise self._client.refused(answer, "show the namespace")
        if queue:
            self._cluster.check_queue(queue)
        if self._machines.nodes_billed:
            self._billed_nodes()
        notes = [] if self._client.may(Right("list", "events")) else [_NO_EVENTS]
        notes += [*self._cluster.check_priority(), *self._cluster.notes()]
        return Account(name=self.identity, notes=notes)

    def offers(self, want: Want) -> list[Offer]:
        """One machine of as many GPUs as are wanted, and what cannot be read of nodes."""
        machines, nodes = self._machines, self._cluster.nodes()
        count = min(want.gpu_count if want.gpu else 1, machines.most_gpus) if self._gpu else 0
        times = max(count, 1)
        return [
            *(nodes.unread if nodes else ()),
            Offer(
                id=_offer_id(self._gpu is not None, count, machines),
                provider=self.identity,
                gpu=self._gpu,
                gpu_count=count,
                price_usd_h=machines.price_usd_h * times,
                region=machines.region,
                disk_gib=machines.disk_gib,
                domain=f"{machines.gpu or 'no GPU'} x{count}",
                priced_unix=time.time(),
                spot=machines.spot,
                available=self._cluster.has(count, nodes),
                architecture=machines.architecture,
                cuda=machines.cuda,
                ram_gib=machines.memory_gib * times,
                cores=machines.cores * times,
            ),
        ]

    def create(self, order: Order) -> Machine:
        gpus = order.offer.gpu_count
        if order.offer.id != _offer_id(self._gpu is not None, gpus, self._machines):
            raise CreateFailed(
                f"{order.offer.id!r} is no offer of this provider block: blocks that rent "
                "different machines in one namespace need a queue of their own each"
            )
        image = order.image or self._machines.image or IMAGE
        if not order.disk_gib:
            order = msgspec.structs.replace(order, disk_gib=self._cluster.default_disk_gib())
        runtime = self._cluster.runtime_class() if gpus else ""
        body = job_of(order, self._machines, gpus, image, self._ssh_port, runtime)
        path = self._client.path("jobs", api=BATCH)
        answer = self._market.create("POST", path, KubernetesJob, body, reads_conflict=True)
        if isinstance(answer, Refusal) and answer.status != 409:
            raise self._not_made(order, answer)
        job = self._known(order, answer) if isinstance(answer, Refusal) else answer
        try:
            self._add("secrets", secret_of(order, job.metadata, self._machines), job.metadata)
            service = service_of(
                order, job.metadata, self._machines, self._ssh_port, self._annotations
            )
            if service is not None:
                self._add("services", service, job.metadata)
            if self._jumps:
                self._jump.share(order, job.metadata)
        except CreateUncertain:
            raise
        except TorporError as cause:
            raise CreateUncertain(
                f"{self.identity} made the Job of {order}, but not all that belongs to it: {cause}"
            ) from cause
        return self._machine(job, "queued" if job.spec.suspend else "starting", None, "")

    def find(self, machine: MachineId) -> Machine | Absent:
        """Gone is what has neither a Job, nor pods, nor a Secret, nor a Service."""
        if not is_name(machine):
            return Absent()
        answer: Any = self._market.ask("GET", self._client.path("jobs", machine, BATCH), Any)
        if not isinstance(answer, Refusal):
            pods = self._pods(pods_of(machine))
            return self._rows.one(machine, answer, lambda job: self._state(job, pods, pins=True))
        if answer.status != 404:
            raise self._client.refused(answer, f"show Job {machine}")
        pods = self._pods(pods_of(machine))
        if pods:
            return self._without_job(machine, pods)
        if self._left(machine):
            return Absent()
        return Absent(
            f"the API server knows no Job, pod, Secret or Service of {machine} in namespace "
            f"{self._client.namespace}"
        )

    def list_own(self) -> list[Machine]:
        path = self._client.path("jobs", api=BATCH)
        rows = self._client.read(Items, path, RENTAL).items
        names = {job.metadata.name for job in self._rows.readable(rows)}
        pods: dict[str, list[Pod]] = {}
        for pod in self._pods(RENTAL):
            pods.setdefault(pod.metadata.labels.get(JOB, ""), []).append(pod)

        def seen(job: KubernetesJob) -> Machine | Absent:
            if job.metadata.labels.get(QUEUE, "") != self._machines.queue:
                return Absent()
            return self._state(job, pods.get(job.metadata.name, []), pins=False)

        machines = self._rows.own(rows, seen)
        machines += [
            self._without_job(MachineId(name), found)
            for name, found in pods.items()
            if name not in names and is_name(name)
            for pod in _orphans(found)[:1]
            if pod.metadata.annotations.get(OF_QUEUE, "") == self._machines.queue
        ]
        return [machine for machine in machines if machine.label is not None]

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """The Job's pods, Secret and Service go with it. A pod that no Job owns is deleted too."""
        if warranted(self, machine, warrant) is not None:
            path = self._client.path("jobs", machine.id, BATCH)
            answer: Any = self._market.ask("GET", path, Any)
            if not isinstance(answer, Refusal):
                ending = [("jobs", self._rows.row(machine.id, answer).metadata)]
            elif answer.status == 404:
                pods = self._pods(pods_of(machine.id))
                ending = [("pods", pod.metadata) for pod in _orphans(pods)]
            else:
                raise self._client.refused(answer, f"show Job {machine.id}")
        else:
            ending = [*self._left(machine.id).items()]
        for resource, meta in ending:
            if label_among(meta.labels) == machine.label:
                self._delete(resource, meta)

    def residue(self) -> list[Residue]:
        """Services that outlived their Jobs and pods: a load balancer costs. Where nodes are
        billed, also those on which no machine of ours is: a pool that does not shrink costs on."""
        services = self._client.read(Objects, self._client.path("services"), RENTAL).items
        jumps = self._jump.services() if self._jumps else []
        jobs = self._client.read(Items, self._client.path("jobs", api=BATCH), RENTAL).items
        names = {job.metadata.name for job in self._rows.readable(jobs)}
        names |= {pod.metadata.labels.get(JOB, "") for pod in self._pods(RENTAL)}
        left = [
            Residue(
                id=service.metadata.name,
                provider=self.identity,
                kind="service",
                label=label_among(service.metadata.labels),
            )
            for service in services
            if service.metadata.name not in names
            and label_among(service.metadata.labels) is not None
        ]
        left += [
            Residue(id=jump.metadata.name, provider=self.identity, kind="service", label=None)
            for jump in jumps
            if not is_owner(jump.metadata, names)
        ]
        return left + (self._idle_nodes() if self._machines.nodes_billed else [])

    # -- looking

    def _billed_nodes(self) -> Nodes:
        nodes = self._cluster.nodes()
        if nodes is None:
            raise ProviderDenied(
                f"{self.identity}: the kubeconfig's user may not list nodes. Grant the ClusterRole "
                "in docs/guide/markets/kubernetes.md, or say in the provider block that nodes are "
                "not billed"
            )
        return nodes

    def _idle_nodes(self) -> list[Residue]:
        nodes = self._billed_nodes()
        used = {pod.spec.node_name for pod in self._pods(RENTAL)}
        return [
            Residue(
                id=node.metadata.name,
                provider=self.identity,
                kind="node",
                label=None,
                price_usd_h=self._machines.price_usd_h
                * max(node.has(self._machines.gpu_resource), 1),
            )
            for node in nodes.items
            if node.metadata.name not in used
        ] + [
            Residue(id=node.id, provider=self.identity, kind="node", label=None)
            for node in nodes.unread
        ]

    def _state(self, job: KubernetesJob, pods: list[Pod], *, pins: bool) -> Machine:
        """``pins``: keep the Job to the pod that is shown, before it is shown."""
        meta, owners = job.metadata, {owner.uid for owner in job.metadata.owner_references}
        ours = [pod for pod in pods if pod.metadata.uid in owners] if owners else pods
        live = [pod for pod in ours if pod.metadata.deletion_timestamp is None]
        over = [
            condition
            for condition in job.status.conditions
            if condition.type in ("Complete", "Failed")
        ]
        if meta.deletion_timestamp is not None or (owners and not live):
            return self._machine(job, "stopping", None, "its pod is taken away")
        if ended := [condition for condition in over if condition.status == "True"]:
            words = f"its Job is {ended[0].type}: {ended[0].reason} {ended[0].message}"
            return self._machine(job, "stopped", None, words)
        if not live:
            if job.spec.suspend and not ours:
                return self._machine(job, "queued", None, self._queue_words(job))
            return self._machine(job, "starting", None, "its pod is not there yet")
        pod = live[0]
        if pod.status.phase in ("Succeeded", "Failed"):
            return self._machine(job, "stopped", None, pod.words())
        if pod.status.phase != "Running":
            vain = self._vain(pod) if pins else ""
            return self._machine(job, "stopped" if vain else "starting", None, vain or pod.words())
        endpoint = self._endpoint(meta.name, pod)
        if endpoint is None:
            return self._machine(job, "running", None, "no load balancer gives its Service one")
        ours_to_pin = not owners and label_among(meta.labels) is not None
        if ours_to_pin and not (pins and self._pin(job, pod)):
            return self._machine(job, "starting", None, "its pod runs")
        return self._machine(job, "running", endpoint, pod.words())

    def _machine(
        self, job: KubernetesJob, state: Any, endpoint: Endpoint | None, note: str
    ) -> Machine:
        meta = job.metadata
        return Machine(
            MachineId(meta.name),
            self.identity,
            label_among(meta.labels),
            state,
            endpoint,
            _price(meta),
            note,
        )

    def _vain(self, pod: Pod) -> str:
        """Why a pod that waits will never run; empty where it may. Asked only of a machine that
        somebody waits for."""
        now_unix = self._clock()
        if fault := pull_fault(pod):
            first_unix = self._pull_failed_unix.setdefault(pod.metadata.name, now_unix)
            if fault.lasts or now_unix - first_unix >= PULL_S:
                return fault.words
        if not lacks_room(pod, now_unix):
            return ""
        params = {"fieldSelector": f"involvedObject.name={pod.metadata.name}"}
        answer = self._market.ask("GET", self._client.path("events"), Events, params=params)
        if isinstance(answer, Events):
            return room_fault(pod, answer.items)
        return ""  # a destroy looks, too: no refusal to explain a wait may hold it up

    def _without_job(self, machine: MachineId, pods: list[Pod]) -> Machine:
        """A machine whose Job is gone and whose pod is not gone yet."""
        orphans = _orphans(pods)
        pod = orphans[0] if orphans else pods[0]
        endpoint, price = None, 0.0
        state: Any = "stopping"
        if orphans and pod.metadata.deletion_timestamp is None:
            price = _price(pod.metadata)
            if pod.status.phase in ("Succeeded", "Failed"):
                state = "stopped"
            else:
                running = pod.status.phase == "Running"
                endpoint = self._endpoint(machine, pod) if running else None
                state = "running" if endpoint else "starting"
        note = "its Job was deleted without its pod" if orphans else "its pod ends"
        label = label_among(pod.metadata.labels)
        return Machine(machine, self.identity, label, state, endpoint, price, note)

    def _pin(self, job: KubernetesJob, pod: Pod) -> bool:
        path = self._client.path("jobs", job.metadata.name, BATCH)
        answer = self._market.ask("PATCH", path, KubernetesJob, body=pinned_to(job, pod.metadata))
        if isinstance(answer, KubernetesJob):
            return True
        if answer.status in (404, 409):  # it has changed since: the next look decides
            return False
        raise self._client.refused(answer, f"change Job {job.metadata.name}")

    def _endpoint(self, name: str, pod: Pod) -> Endpoint | None:
        if self._machines.address == "pod IP":
            found: tuple[str, int] | None = (pod.status.pod_ip, self._ssh_port)
        else:
            answer = self._market.ask("GET", self._client.path("services", name), Service)
            if isinstance(answer, Refusal):
                if answer.status == 404:
                    return self._behind_jump(name, pod)
                raise self._client.refused(answer, f"show Service {name}")
            found = answer.address()
            if self._machines.address == "NodePort":
                host = self._machines.node_address or pod.status.host_ip
                found = (host, answer.spec.ports[0].node_port)
        return Endpoint(found[0], found[1], "root") if found and all(found) else None

    def _behind_jump(self, name: str, pod: Pod) -> Endpoint | None:
        jump = self._jump.endpoint(name)
        if jump is None or not pod.status.pod_ip:
            return None
        return Endpoint(pod.status.pod_ip, self._ssh_port, "root", jump=jump)

    def _queue_words(self, job: KubernetesJob) -> str:
        """Why Kueue has not started it."""
        selector = f"kueue.x-k8s.io/job-uid={job.metadata.uid}"
        path = self._client.path("workloads", api=self._cluster.kueue())
        told = [
            condition.message
            for workload in self._client.read(ManyConditioned, path, selector).items
            for condition in workload.status.conditions
            if condition.type == "QuotaReserved" and condition.status == "False"
        ]
        return f"queued in {self._machines.queue}: {' '.join(told) or 'Kueue has not seen it yet'}"

    def _pods(self, selector: str) -> list[Pod]:
        return self._client.read(Pods, self._client.path("pods"), selector).items

    def _left(self, name: str) -> dict[str, Metadata]:
        """The Secret and the Service of this name, by their resources."""
        found = {}
        for resource in ("secrets", "services"):
            answer = self._market.ask("GET", self._client.path(resource, name), Object)
            if isinstance(answer, Object):
                found[resource] = answer.metadata
            elif answer.status != 404:
                raise self._client.refused(answer, f"show {name} among {resource}")
        return found

    # -- changing

    def _known(self, order: Order, conflict: Refusal) -> KubernetesJob:
        """The Job that an earlier create of this order made. CreateFailed where there is none."""
        path = self._client.path("jobs", name_of(order), BATCH)
        try:
            answer = self._market.ask("GET", path, KubernetesJob)
        except ProviderError as cause:
            raise self._market.uncertain(cause, "the Job's name is taken, but GET") from cause
        if isinstance(answer, Refusal):
            if answer.status != 404:
                raise self._market.uncertain(answer, "the Job's name is taken, but GET")
            raise CreateFailed(  # a quota that somebody else changed meanwhile, as a rule
                f"{self.identity} refused {order.offer.id}: {fault_of(conflict).message}"
            )
        if label_among(answer.metadata.labels) != order.label:
            raise CreateFailed(f"{name_of(order)} is the name of a Job that is not ours")
        if answer.metadata.deletion_timestamp is not None:
            raise CreateFailed(f"Job {name_of(order)} is being deleted")
        return answer

    def _add(self, resource: str, body: dict[str, Any], job: Metadata) -> None:
        name = body["metadata"]["name"]
        answer = self._market.ask("POST", self._client.path(resource), Object, body=body)
        if _is(answer, 409):
            answer = self._market.ask("GET", self._client.path(resource, name), Object)
        if isinstance(answer, Refusal):
            raise self._client.refused(answer, f"create {name} among {resource}")
        if job.uid not in {owner.uid for owner in answer.metadata.owner_references}:
            raise CreateUncertain(
                f"{name} among {resource} belongs to an earlier Job of this name: the attempt is "
                "abandoned; reconcile ends it"
            )

    def _delete(self, resource: str, meta: Metadata) -> None:
        """Delete this very object, not another one that has its name by now."""
        name = meta.name
        path = self._client.path(resource, name, BATCH if resource == "jobs" else "v1")
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": meta.uid},
        }
        answer = self._market.ask("DELETE", path, dict[str, Any], body=body)
        if isinstance(answer, Refusal) and answer.status not in (404, 409):
            raise self._client.refused(answer, f"delete {name} among {resource}")

    def _not_made(self, order: Order, refusal: Refusal) -> ProviderError:
        fault = fault_of(refusal)
        asked = f"{self.identity} refused {order.offer.id}: {fault.message}"
        if "exceeded quota" in fault.message:
            return QuotaReached(asked)
        if refusal.status in (401, 403, 404):
            return ProviderDenied(
                f"{asked}. Check the namespace, the kubeconfig and the rights of its user"
            )
        return CreateFailed(asked)


def _offer_id(with_gpu: bool, count: int, machines: Machines) -> str:
    return f"{machines.gpu if with_gpu else 'no GPU'}/{count}"


def _is(answer: object, status: int) -> bool:
    return isinstance(answer, Refusal) and answer.status == status


def _orphans(pods: list[Pod]) -> list[Pod]:
    """Those whose Job was deleted without them, as a plain DELETE of the API does. They stay; all
    others of a Job that is gone go by themselves."""
    return [pod for pod in pods if not pod.metadata.owner_references]


def _price(meta: Metadata) -> float:
    try:
        found = json.loads(meta.annotations.get(PRICE, "0"))
    except ValueError:
        return 0.0
    return float(found) if isinstance(found, int | float) else 0.0
