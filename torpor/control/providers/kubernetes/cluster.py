"""What a cluster has, as far as its user may see it: nodes, versions, classes."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import msgspec

from torpor.control.providers.kubernetes.client import KubernetesClient
from torpor.control.providers.kubernetes.objects import (
    KUEUE,
    Conditioned,
    KubernetesNode,
    Machines,
    ManyConditioned,
    Object,
    Version,
)
from torpor.control.providers.market_client import Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.rows import offer_rows
from torpor.shared.errors import InvalidInput, ProviderDenied
from torpor.shared.values import GIB

_OLDEST: Final = (1, 27)  # the oldest version that labels the pods of Jobs as ``JOB`` says
_NODES: Final = "/api/v1/nodes"
_PRIORITIES: Final = "/apis/scheduling.k8s.io/v1/priorityclasses"
_RUNTIMES: Final = "/apis/node.k8s.io/v1/runtimeclasses"
_NVIDIA: Final = "nvidia"
_GROUP: Final = KUEUE.partition("/")[0]
_CLASSES: Final = ("gpu.nvidia.com/class", "nvidia.com/gpu.product",
                   "cloud.google.com/gke-accelerator")  # fmt: skip
"""Labels that name a node's GPU: CoreWeave's, NVIDIA's GPU Operator's, Google's."""


class Nodes(NamedTuple):
    """``unread``: for each node that cannot be read an offer that fits nobody."""

    items: list[KubernetesNode]
    unread: list[Offer]


class _Rows(msgspec.Struct):
    items: list[Any]


class Cluster:
    """What one cluster has. Thread-safe; what does not change is asked for once."""

    def __init__(self, client: KubernetesClient, machines: Machines) -> None:
        self._client, self._machines = client, machines
        self._kueue = ""
        self._runtime: str | None = machines.runtime_class or None

    def check_version(self) -> None:
        answer = self._client.market.ask("GET", "/version", Version)
        if isinstance(answer, Version) and answer.is_before(*_OLDEST):
            raise InvalidInput(
                f"{self._client.identity} is Kubernetes {answer.major}.{answer.minor}; torpor "
                f"needs {_OLDEST[0]}.{_OLDEST[1]} or newer"
            )

    def kueue(self) -> str:
        """The group and version of Kueue's API: v1beta2 came with Kueue 0.15, in early releases
        there is only v1beta1, and torpor reads the same fields of both."""
        if not self._kueue:
            answer = self._client.market.ask("GET", f"/apis/{_GROUP}", dict[str, Any])
            rows = [] if isinstance(answer, Refusal) else answer.get("versions") or []
            served = [str(row.get("groupVersion")) for row in rows if isinstance(row, dict)]
            self._kueue = served[0] if served and KUEUE not in served else KUEUE
        return self._kueue

    def runtime_class(self) -> str:
        """The runtime class of machines with GPUs; empty for the cluster's default. k3s and RKE2
        give a container GPUs only in the class ``nvidia``, as the GPU Operator calls its own."""
        if self._runtime is None:
            answer = self._client.market.ask("GET", f"{_RUNTIMES}/{_NVIDIA}", Object)
            if isinstance(answer, Refusal) and answer.status not in (403, 404):
                raise self._client.refused(answer, f"show the runtime class {_NVIDIA}")
            self._runtime = "" if isinstance(answer, Refusal) else _NVIDIA
        return self._runtime

    def nodes(self) -> Nodes | None:
        """The nodes that fit the selector; None where they may not be listed."""
        selector = ",".join(f"{key}={value}" for key, value in self._machines.node_selector.items())
        params = {"labelSelector": selector} if selector else {}
        answer = self._client.market.ask("GET", _NODES, _Rows, params=params)
        if isinstance(answer, _Rows):
            return Nodes(*offer_rows(self._client.identity, KubernetesNode, answer.items))
        if answer.status == 403:
            return None
        raise self._client.refused(answer, "list nodes")

    def has(self, gpus: int, nodes: Nodes | None) -> bool | None:
        """Whether a node has so many. None where nobody knows: nodes may not be listed, one of them
        cannot be read, or a pool may grow from nothing."""
        if nodes is None or not nodes.items:
            return None
        most = max(node.has(self._machines.gpu_resource) for node in nodes.items)
        if most < gpus and nodes.unread:
            return None
        return most >= gpus if most or not gpus else None

    def default_disk_gib(self) -> float:
        """What a machine asks for where nobody wants a size: no more than some node has."""
        nodes = self.nodes()
        sizes = [node.disk_bytes for node in nodes.items] if nodes is not None else []
        most_gib = math.floor(max(sizes, default=0) / GIB)
        return min(self._machines.disk_gib, most_gib) if most_gib else self._machines.disk_gib

    def notes(self) -> list[str]:
        nodes = self.nodes()
        if nodes is None:
            return ["its user may not list nodes: whether there are GPUs shows only in a queue"]
        gpus = sum(node.has(self._machines.gpu_resource) for node in nodes.items)
        found = [
            f"{len(nodes.items)} nodes fit the node selector, with {gpus} "
            f"{self._machines.gpu_resource}"
        ]
        found += [f"node {node.id} cannot be read: {node.unread}" for node in nodes.unread]
        told = {
            f"{key}={node.metadata.labels[key]}"
            for node in nodes.items
            for key in _CLASSES
            if key in node.metadata.labels
        }
        if told:
            found.append(f"labels of GPUs, for the node selector: {', '.join(sorted(told))}")
        return found

    def check_queue(self, queue: str) -> None:
        path = self._client.path("localqueues", api=self.kueue())
        answer = self._client.market.ask("GET", f"{path}/{queue}", Conditioned)
        if isinstance(answer, Refusal):
            if answer.status != 404:
                raise self._client.refused(answer, f"show queue {queue}")
            there = [item.metadata.name for item in self._client.read(ManyConditioned, path).items]
            raise InvalidInput(
                f"{self._client.identity}: namespace {self._client.namespace} has no Kueue queue "
                f"{queue}; it has {', '.join(there) or 'none'}. Correct the queue in the provider "
                "block"
            )
        for condition in answer.status.conditions:
            if condition.type == "Active" and condition.status != "True":
                raise ProviderDenied(
                    f"{self._client.identity}: queue {queue} admits nothing now: "
                    f"{condition.message}"
                )

    def check_priority(self) -> list[str]:
        wanted = self._machines.priority_class
        if not wanted:
            return []
        queued = bool(self._machines.queue)
        root = f"/apis/{self.kueue()}/workloadpriorityclasses" if queued else _PRIORITIES
        answer = self._client.market.ask("GET", f"{root}/{wanted}", Object)
        if not isinstance(answer, Refusal):
            return []
        kind = "WorkloadPriorityClass" if queued else "PriorityClass"
        if answer.status == 403:
            return [f"whether there is a {kind} {wanted} cannot be seen: its user may not get them"]
        if answer.status == 404:
            raise InvalidInput(f"{self._client.identity}: the cluster has no {kind} {wanted}")
        raise self._client.refused(answer, f"show {kind} {wanted}")
