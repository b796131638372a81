"""The block of a Kubernetes cluster with GPUs: where it is, and what a machine there is."""

from __future__ import annotations

import re
from typing import Final

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, HttpUrl, SecretStr, ValidationInfo, field_validator

from blocks.container import Ports, Variables, Volumes, container, no_variables
from blocks.reference import LOGOS
from torpor.control.providers.kubernetes import provider as kubernetes
from torpor.control.providers.kubernetes.jump import IMAGE as JUMP_IMAGE
from torpor.control.providers.kubernetes.objects import Address, Machines, toleration
from torpor.shared.errors import InvalidInput

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


class KubernetesProvider(Block):
    """A namespace of a Kubernetes cluster with GPUs, CoreWeave's among them. Needs the extra
    `kubernetes`.

    A machine is the pod of a Job. The block states what a machine has and costs, because a cluster
    does not.

    Example:
        List what is on sale:
        ```python
        from blocks import KubernetesProvider
        from torpor.shared.values import Want

        provider = KubernetesProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="H100")))
        ```
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # the input may be a secret

    _block_type_name = "Kubernetes Provider"
    _block_type_slug = "kubernetes-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://kueue.sigs.k8s.io/docs")

    kubeconfig: SecretStr = Field(
        description=(
            "The text of a kubeconfig. Its user needs the Role in "
            "docs/guide/markets/kubernetes.md. Files and programs that it names must be on the "
            "host of the flows."
        )
    )
    context: str = Field(
        default="", description="The kubeconfig's context. Empty: its current context."
    )
    namespace: str = Field(default="default", description="The namespace of the machines.")
    queue: str = Field(
        default="",
        description=(
            "Kueue's LocalQueue in that namespace: machines wait there for quota. Empty: no queue."
        ),
    )
    priority_class: str = Field(
        default="",
        description=(
            "With a queue, Kueue's WorkloadPriorityClass; without, the PriorityClass of the pods."
        ),
    )
    spot: bool = Field(
        default=False,
        description=(
            "Whether the cluster may take a machine away: another's priority is higher, or its "
            "nodes are spot machines. Workspaces that want no spot machine leave such a block out."
        ),
    )
    gpu: str = Field(
        default="",
        title="GPU",
        description="The model, such as H100 SXM 80GB. Empty: machines without a GPU.",
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu", title="GPU resource", description="The cluster's name for GPUs."
    )
    most_gpus: int = Field(
        default=8, ge=1, le=64, title="Most GPUs", description="The most GPUs of one machine."
    )
    cores: float = Field(
        default=8.0, gt=0, description="Cores of a machine with one GPU; n times as many with n."
    )
    memory_gib: float = Field(
        default=64.0,
        gt=0,
        title="Memory (GiB)",
        description="Memory of a machine with one GPU; n times as much with n GPUs.",
    )
    disk_gib: float = Field(
        default=200.0,
        gt=0,
        title="Disk (GiB)",
        description=(
            "The most ephemeral storage that a machine asks for, and what one asks for where a "
            "workspace does not say how much."
        ),
    )
    price_usd_h: float = Field(
        gt=0,
        title="Price ($/h)",
        description="What a machine with one GPU costs an hour; n times as much with n GPUs.",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="The labels of the nodes to use. Empty: any node."
    )
    tolerations: list[str] = Field(
        default_factory=list,
        description=(
            "The taints of nodes that machines may use all the same, as kubectl writes them: "
            "dedicated=ml:NoSchedule, spot:NoExecute or any-key. The taint of GPUs needs none."
        ),
    )
    runtime_class: str = Field(
        default="",
        description=(
            "The runtime class of machines with GPUs, which k3s and RKE2 need. Empty: nvidia "
            "where the user sees such a class in the cluster, else the cluster's default."
        ),
    )
    image: str = Field(
        default="",
        description=f"The container image of machines. Empty: {kubernetes.IMAGE}.",
    )
    image_pull_secret: str = Field(
        default="",
        description=(
            "The name of a Secret in that namespace with the login to a private registry, as "
            "`kubectl create secret docker-registry` makes it. Empty: images are public."
        ),
    )
    env: Variables = Field(default_factory=no_variables)
    ports: Ports = Field(default_factory=list)
    volumes: Volumes = Field(
        default_factory=list,
        description=(
            "PersistentVolumeClaims of that namespace to mount, as CLAIM:/PATH: my-data:/data. "
            "torpor leaves alone what is there: no snapshot holds it, and it outlives the machine. "
            "The path must be outside of the workspace's."
        ),
    )
    address: Address = Field(
        default="LoadBalancer",
        description=(
            "How SSH reaches a machine: LoadBalancer and NodePort make a Service of that type for "
            "each machine; jump pod makes one load balancer for all, before a pod that forwards "
            "SSH to them, and needs the rights for Deployments in "
            "docs/guide/markets/kubernetes.md; pod IP needs a host of the flows inside the "
            "cluster's network."
        ),
    )
    node_address: str = Field(
        default="",
        description="With NodePort: where the nodes are reached. Empty: the node's own address.",
    )
    service_annotations: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Annotations of the Service, which the cluster's load balancer may ask for. The one "
            "for a public address at CoreWeave is set there without being named."
        ),
    )
    jump_image: str = Field(
        default="",
        description=(
            "With jump pod: its container image, which needs OpenSSH's /usr/sbin/sshd. "
            f"Empty: {JUMP_IMAGE}."
        ),
    )
    region: str = Field(
        default="cluster", description="The name by which a workspace's regions may choose it."
    )
    architecture: str = Field(
        default="x86_64", description="The processors of the nodes, as `uname -m` says it."
    )
    cuda: str = Field(
        default="",
        title="CUDA",
        description="The newest version that the nodes' driver supports, such as 12.8.",
        pattern=r"^(?:\d{1,2}\.\d{1,2})?$",
    )
    grace_s: int = Field(
        default=120,
        ge=1,
        le=3600,
        title="Notice (s)",
        description="How long a machine with a job may save after the cluster has taken it away.",
    )
    nodes_billed: bool = Field(
        default=False,
        description=(
            "Whether nodes cost, and not pods, as at CoreWeave. Then `reconcile` lists the nodes "
            "of the selector on which no machine of torpor is."
        ),
    )

    def open(self) -> kubernetes.KubernetesProvider:
        """The provider, ready to use. Nothing is sent. Raises InvalidInput."""
        major, _, minor = self.cuda.partition(".")
        return kubernetes.KubernetesProvider(
            self.kubeconfig.get_secret_value(),
            self.namespace,
            Machines(
                price_usd_h=self.price_usd_h,
                gpu=self.gpu,
                gpu_resource=self.gpu_resource,
                most_gpus=self.most_gpus,
                cores=self.cores,
                memory_gib=self.memory_gib,
                disk_gib=self.disk_gib,
                image=self.image,
                region=self.region,
                architecture=self.architecture,
                cuda=(int(major), int(minor)) if self.cuda else None,
                spot=self.spot,
                node_selector=self.node_selector,
                tolerations=self.tolerations,
                runtime_class=self.runtime_class,
                queue=self.queue,
                priority_class=self.priority_class,
                address=self.address,
                node_address=self.node_address,
                service_annotations=self.service_annotations,
                jump_image=self.jump_image,
                grace_s=self.grace_s,
                nodes_billed=self.nodes_billed,
                container=container(self.env, self.ports, self.image_pull_secret, self.volumes),
            ),
            context=self.context,
        )

    @field_validator("tolerations", mode="after")
    @classmethod
    def _tainted(cls, value: list[str]) -> list[str]:
        try:
            for taint in value:
                toleration(taint)
        except InvalidInput as fault:
            raise ValueError(str(fault)) from fault
        return value

    @field_validator("namespace", "queue", "priority_class", "image_pull_secret", mode="after")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        value = value.strip()
        if (value or info.field_name == "namespace") and not _NAME.fullmatch(value):
            raise ValueError(f"{value!r} is no name that Kubernetes gives")
        return value
