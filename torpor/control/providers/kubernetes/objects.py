"""What a rental is in a cluster: a Job whose pod is the machine, its Secret and its Service."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from torpor.control.providers.container import PLAIN, Container
from torpor.control.providers.labels import label_tags
from torpor.control.providers.provider import Order
from torpor.control.providers.start_script import SSHD, start_script
from torpor.shared.errors import InvalidInput

Address = Literal["LoadBalancer", "NodePort", "jump pod", "pod IP"]

BATCH: Final = "batch/v1"
KUEUE: Final = "kueue.x-k8s.io/v1beta2"
PRICE: Final = "torpor.dev/price-usd-h"
OF_QUEUE: Final = "torpor.dev/queue"  # of a pod: Kueue takes pods with its own label as its own
RENTAL: Final = "torpor-rental"
QUEUE: Final = "kueue.x-k8s.io/queue-name"
_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
JOB: Final = "batch.kubernetes.io/job-name"
_START: Final = "/etc/torpor-start"
# seconds after which a Job whose pod has ended is removed, with all that it owns
_FINISHED_S: Final = 60
_SHIFTS: Final = {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
_TAINT: Final = re.compile(
    r"(?P<key>[\w./-]+)(?:=(?P<value>[\w.-]*))?"
    r"(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

_FIRST: Final = f"""
running() {{ grep -lazx "$1" /proc/[0-9]*/cmdline 2>/dev/null; }}
leave() {{
    trap '' TERM
    for found in $(running '[a]utosave'); do
        found=${{found#/proc/}}
        kill -s TERM "${{found%/cmdline}}" && saves=10
    done
    while [ "${{saves:-0}}" -gt 0 ]; do
        sleep 0.5
        saves=$((saves - 1))
        [ -z "$(running '[r]escue')" ] || saves=2
    done
    exit 143
}}
trap leave TERM
/bin/sh {_START}/start &
started=$!
seen=0
while [ "$seen" -lt 2 ]; do
    sleep 1 &
    wait "$!"
    if grep -qx sshd "/proc/$started/comm" 2>/dev/null; then
        seen=$((seen + 1))
    elif ! kill -0 "$started" 2>/dev/null; then
        wait "$started"
        exit
    fi
done
wait "$started"
while :; do
    sleep 1 &
    wait "$!"
    (
mkdir -p -m 755 /run/sshd
{SSHD}    ) &
    wait "$!"
done
"""
"""The pod's first process. SIGTERM is how a cluster says that it takes the pod. Only the first
process gets it, and all others end with that one: it passes the notice to the autosave processes,
and stays until the saves that these make have ended. It ends with a start script that
fails, but not with an sshd that ran: whoever restarts or upgrades sshd keeps the machine. The start
script is not repeated, as it would undo what the user changed."""

_KEPT: Final = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations of a pod that nobody takes only to save a node."""


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """What one provider block rents. Cores, memory and price are those of a machine with one GPU; a
    machine with more GPUs has as many times as much."""

    price_usd_h: float
    gpu: str = ""  # the model, as people write it; empty: no GPU
    gpu_resource: str = "nvidia.com/gpu"
    most_gpus: int = 8
    cores: float = 4.0
    memory_gib: float = 16.0
    disk_gib: float = 100.0  # the most ephemeral storage that a pod asks for
    image: str = ""
    region: str = "cluster"
    architecture: str = "x86_64"
    cuda: tuple[int, int] | None = None
    spot: bool = False
    node_selector: Mapping[str, str] = {}
    tolerations: Sequence[str] = ()  # taints, as kubectl writes them
    runtime_class: str = ""  # of machines with GPUs; empty: nvidia, where the cluster has it
    queue: str = ""
    priority_class: str = ""
    address: Address = "LoadBalancer"
    node_address: str = ""  # of NodePort; empty: the node's own
    service_annotations: Mapping[str, str] = {}
    jump_image: str = ""
    grace_s: int = 120
    nodes_billed: bool = False
    container: Container = PLAIN


class Owner(msgspec.Struct, frozen=True):
    uid: str
    name: str = ""


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    name: str
    uid: str
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[Owner] = []
    deletion_timestamp: str | None = None


class Object(msgspec.Struct, frozen=True):
    metadata: Metadata


class Objects(msgspec.Struct, frozen=True):
    items: list[Object]


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = msgspec.field(default=None, name="lastTransitionTime")


class JobSpec(msgspec.Struct, frozen=True):
    suspend: bool = False


class JobStatus(msgspec.Struct, frozen=True):
    conditions: list[Condition] = []


class KubernetesJob(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()


class Items(msgspec.Struct, frozen=True):
    """A list whose rows are read one by one."""

    items: list[Any]


class _Waiting(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _ContainerState(msgspec.Struct, frozen=True):
    waiting: _Waiting | None = None


class _Container(msgspec.Struct, frozen=True):
    state: _ContainerState = _ContainerState()


class PodStatus(msgspec.Struct, rename="camel", frozen=True):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    host_ip: str = msgspec.field(default="", name="hostIP")
    pod_ip: str = msgspec.field(default="", name="podIP")
    nominated_node_name: str = ""
    conditions: list[Condition] = []
    container_statuses: list[_Container] = []


class _PodSpec(msgspec.Struct, rename="camel", frozen=True):
    node_name: str = ""


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: PodStatus
    spec: _PodSpec = _PodSpec()

    def words(self) -> str:
        """What Kubernetes says of a pod that does not run."""
        told = [self.status.phase, self.status.reason, self.status.message]
        for container in self.status.container_statuses:
            if (waiting := container.state.waiting) is not None:
                told += [waiting.reason, waiting.message]
        for condition in self.status.conditions:
            if condition.type == "PodScheduled" and condition.status == "False":
                told += [condition.reason, condition.message]
        return " ".join(word for word in told if word)


class Version(msgspec.Struct, frozen=True):
    """The version of the API server. A minor may end in a plus sign."""

    major: str = ""
    minor: str = ""

    def is_before(self, major: int, minor: int) -> bool:
        found = re.match(r"(\d+)\.(\d+)", f"{self.major}.{self.minor}")
        return found is not None and (int(found[1]), int(found[2])) < (major, minor)


class Pods(msgspec.Struct, frozen=True):
    items: list[Pod]


class _Port(msgspec.Struct, rename="camel", frozen=True):
    port: int
    node_port: int = 0


class _ServiceSpec(msgspec.Struct, frozen=True):
    ports: list[_Port]


class _Ingress(msgspec.Struct, frozen=True):
    ip: str = ""
    hostname: str = ""


class _LoadBalancer(msgspec.Struct, frozen=True):
    ingress: list[_Ingress] = []


class _ServiceStatus(msgspec.Struct, rename="camel", frozen=True):
    load_balancer: _LoadBalancer = _LoadBalancer()


class Service(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _ServiceSpec
    status: _ServiceStatus

    def address(self) -> tuple[str, int] | None:
        """Where the load balancer answers; None before it has an address."""
        places = [ingress.ip or ingress.hostname for ingress in self.status.load_balancer.ingress]
        return (places[0], self.spec.ports[0].port) if places else None


class Services(msgspec.Struct, frozen=True):
    items: list[Service]


class _NodeStatus(msgspec.Struct, frozen=True):
    allocatable: dict[str, str] = {}


class KubernetesNode(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: _NodeStatus

    def has(self, resource: str) -> int:
        told = self.status.allocatable.get(resource, "0")
        return int(told) if told.isdigit() else 0

    @property
    def disk_bytes(self) -> int:
        """Its ephemeral storage, which kubelets write in bytes or with a binary suffix; 0 for
        another notation."""
        told = self.status.allocatable.get("ephemeral-storage", "")
        found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)?", told)
        return int(found[1]) << _SHIFTS[found[2]] if found else 0


class _Status(msgspec.Struct, frozen=True):
    conditions: list[Condition] = []


class Conditioned(msgspec.Struct, frozen=True):
    """A LocalQueue, or a Workload: Kueue's record of a Job in a queue."""

    metadata: Metadata
    status: _Status = _Status()


class ManyConditioned(msgspec.Struct, frozen=True):
    items: list[Conditioned]


def name_of(order: Order) -> str:
    """The name of the Job, the Secret and the Service: a repeated create finds it taken."""
    return f"torpor-{order.token}"


def is_name(text: str) -> bool:
    """Whether a name could be that of one of torpor's objects."""
    return _NAME.fullmatch(text) is not None


def pods_of(name: str) -> str:
    """The label selector of a Job's pods."""
    return f"{JOB}={name}"


def toleration(taint: str) -> dict[str, str]:
    """Tolerate a taint, which kubectl writes KEY=VALUE:EFFECT, KEY:EFFECT or KEY. InvalidInput."""
    found = _TAINT.fullmatch(taint.strip())
    if found is None:
        raise InvalidInput(
            f"{taint!r} is no taint: write KEY=VALUE:EFFECT, KEY:EFFECT or KEY, where the effect "
            "is NoSchedule, PreferNoSchedule or NoExecute"
        )
    value, effect = found["value"], found["effect"]
    told = {"key": found["key"], "operator": "Exists" if value is None else "Equal"}
    return (
        told | ({} if value is None else {"value": value}) | ({"effect": effect} if effect else {})
    )


def job_of(
    order: Order, machines: Machines, gpus: int, image: str, ssh_port: int, runtime_class: str
) -> dict[str, Any]:
    """The Job. With a queue it is made suspended: Kueue starts it when there is quota."""
    tags = label_tags(order.label)
    labels = dict(tags)
    price = {PRICE: json.dumps(order.offer.price_usd_h)}
    told = price | {OF_QUEUE: machines.queue} | ({} if machines.spot else _KEPT)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # the machine needs no right in the cluster
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": machines.grace_s,
        "containers": [_container(order, machines, gpus, image, ssh_port)],
        "volumes": [
            {"name": "start", "secret": _start_of(order)},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": volume.name}}
                for n, volume in enumerate(machines.container.volumes)
            ),
        ],
    }
    if machines.container.login:
        pod["imagePullSecrets"] = [{"name": machines.container.login}]
    if machines.node_selector:
        pod["nodeSelector"] = dict(machines.node_selector)
    # the taint that clusters set on nodes with GPUs, and those of the block
    common = [toleration(machines.gpu_resource)] if gpus else []
    if tolerated := [*common, *map(toleration, machines.tolerations)]:
        pod["tolerations"] = tolerated
    if runtime_class:
        pod["runtimeClassName"] = runtime_class
    if machines.queue:
        labels[QUEUE] = machines.queue
    if machines.queue and machines.priority_class:
        labels[_PRIORITY] = machines.priority_class
    elif machines.priority_class:
        pod["priorityClassName"] = machines.priority_class
    return {
        "apiVersion": BATCH,
        "kind": "Job",
        "metadata": {
            "name": name_of(order),
            "labels": labels,
            "annotations": price,
        },
        "spec": {
            "suspend": bool(machines.queue),
            **({"activeDeadlineSeconds": round(order.lifetime_s)} if order.lifetime_s else {}),
            "backoffLimit": 0,  # another pod would be another machine, without the work
            "ttlSecondsAfterFinished": _FINISHED_S,
            "template": {"metadata": {"labels": tags, "annotations": told}, "spec": pod},
        },
    }


def secret_of(order: Order, job: Metadata, machines: Machines) -> dict[str, Any]:
    """The start script, with the host key, and the environment variables: nobody who may only read
    Jobs and pods sees them."""
    variables = {_key_of(name): value for name, value in machines.container.env.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _owned(order, job),
        "immutable": True,
        "stringData": {"start": start_script(order), **variables},
    }


def service_of(
    order: Order, job: Metadata, machines: Machines, ssh_port: int, annotations: Mapping[str, str]
) -> dict[str, Any] | None:
    """None for a machine without one of its own. ``annotations``: beside the block's."""
    if machines.address in ("jump pod", "pod IP"):
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            **_owned(order, job),
            "annotations": {**annotations, **machines.service_annotations},
        },
        "spec": {
            "type": machines.address,
            "selector": {JOB: job.name},
            "ports": [  # the first one is SSH's
                {"name": name, "port": port, "targetPort": port}
                for name, port in _ports(machines, ssh_port).items()
            ],
        },
    }


def owner_of(job: Metadata) -> dict[str, str]:
    """What names the Job as an owner of another object."""
    return {"apiVersion": BATCH, "kind": "Job", "name": job.name, "uid": job.uid}


def pinned_to(job: KubernetesJob, pod: Metadata) -> dict[str, Any]:
    """A patch that makes the pod an owner of its Job, if nobody has changed the Job.

    Kueue suspends a Job to take its quota, and starts it again later with a new pod: an empty
    machine with the same host key. So the Job goes with the pod that was seen, and with the Job its
    Secret and Service: the cluster's own garbage collection deletes what has no owner left.
    """
    return {
        "metadata": {
            "uid": job.metadata.uid,
            "resourceVersion": job.metadata.resource_version,
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
            ],
        }
    }


def _container(
    order: Order, machines: Machines, gpus: int, image: str, ssh_port: int
) -> dict[str, Any]:
    times = max(gpus, 1)
    resources = {
        "cpu": f"{machines.cores * times:g}",
        "memory": f"{math.ceil(machines.memory_gib * times)}Gi",
    }
    if gpus:
        resources[machines.gpu_resource] = str(gpus)
    # No limit of the disk: a kubelet takes a pod that exceeds one, with the work on it.
    disk = {"ephemeral-storage": f"{math.ceil(order.disk_gib)}Gi"}
    return {
        "name": "machine",
        "image": image,
        "command": ["/bin/sh", "-c", _FIRST],
        "env": [
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": name_of(order), "key": _key_of(name)}},
            }
            for name in machines.container.env
        ],
        "ports": [
            {"name": name, "containerPort": port}
            for name, port in _ports(machines, ssh_port).items()
        ],
        "resources": {"requests": resources | disk, "limits": resources},
        "volumeMounts": [
            *(
                {"name": f"volume-{n}", "mountPath": volume.path}
                for n, volume in enumerate(machines.container.volumes)
            ),
            {"name": "start", "mountPath": _START, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - programs expect it there
        ],
    }


def _start_of(order: Order) -> dict[str, Any]:
    """The volume of the start script, without the environment variables."""
    return {
        "secretName": name_of(order),
        "defaultMode": 0o400,
        "items": [{"key": "start", "path": "start"}],
    }


def _key_of(variable: str) -> str:
    """Where an environment variable stands in the Secret."""
    return f"env.{variable}"


def _ports(machines: Machines, ssh_port: int) -> dict[str, int]:
    return {"ssh": ssh_port} | {f"port-{port}": port for port in machines.container.ports}


def _owned(order: Order, job: Metadata) -> dict[str, Any]:
    return {
        "name": name_of(order),
        "labels": label_tags(order.label),
        "ownerReferences": [owner_of(job)],
    }
