"""The block of a workspace: what to keep, where to store it and which machine it needs."""

from __future__ import annotations

from typing import Final, Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, field_validator

import blocks
from blocks.machine_paths import MachinePaths
from blocks.markets import check_account_name
from blocks.object_store import ObjectStore
from blocks.reference import LOGOS, Reference, load, load_all, load_named, saved_names
from blocks.ssh_identity import SSHIdentity
from torpor.control.providers.seam import Provider
from torpor.control.store.s3 import S3Store
from torpor.control.store_prices import StorePrice
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import (
    BASE,
    MIB,
    RESERVED,
    Compression,
    GpuUse,
    IdleRules,
    Want,
    WorkspaceName,
    WorkspaceSpec,
    workspace_name,
)

MAX_PARTS: Final = 64  # each is a task run, and Prefect stores its states


class Workspace(Block):
    """Directories to keep, the store for their snapshots, and the GPU they need.

    It holds no secrets: it names the blocks of the store, the provider and the SSH identity.

    Args:
        name: The workspace's name, also in the store and on machines.
        paths: The directories to keep.
        exclude: Patterns of names and paths to leave out.
        first: Patterns of what a wake restores first, in this order.
        store: The block of the object store.
        provider: The block of the provider, as type/name.
        more_providers: Blocks of further providers, in the order of preference.
        identity: The block of the SSH identity.
        gpu: The GPU model it needs.
        gpu_count: The number of GPUs.
        disk_gib: The smallest disk, in GiB.
        max_price_usd_h: The highest price, in dollars an hour.
        regions: The regions to rent in, as the providers name them.
        spot: Whether to rent spot machines.
        min_reliability: The lowest reliability, 0 to 1.
        rank: Whether the cheapest offer or the first provider comes first.
        image: The image of the machine.
        quiesce: A command that pauses work on the machine.
        resume: A command that continues that work, when the machine is kept.
        quiesce_timeout_s: The time limit of each of these commands, in seconds.
        accept_changed: Patterns of files that may change while they are read.
        left_behind: Whether files outside of the workspace keep a machine from being destroyed.
        left_behind_gib: The size from which they do, in GiB.
        accept_lost: Directories outside of the workspace that may be lost with the machine.
        parts: The number of parts of a transfer.
        part_mib: The smallest part, in MiB.
        smallest: Prefer smaller snapshots to faster ones.
        gpu_encodes: Allow the machine's GPU to encode and decode weights.
        gpu_python: A Python on the machine that can import CuPy.
        gpu_install: Allow an install of CuPy into the agent's folder.
        when_idle: Whether the flow `watch` hibernates an idle machine or only reports it.
        idle_minutes: How long a machine must have been idle, in minutes.
        idle_share: The share of that time in which nothing ran, 0.5 to 0.99.
        idle_gpu_percent: The highest activity of an idle GPU, in percent.
        idle_cpu_percent: The highest CPU activity of an idle machine, in percent of one core.
        idle_network_kib_s: The highest network activity of an idle machine, in KiB/s.
        idle_disk_kib_s: The highest disk activity of an idle machine, in KiB/s.
        idle_people: Whether the use of SSH and Jupyter counts as work.
        when_left: What the flow `watch` does with a machine that a killed run left.
        owner: The owner in the label of each machine.
        project: The project that its machines are paid for.

    Example:
        Describe a workspace, and put it to sleep:
        ```python
        from blocks import Workspace
        from flows import hibernate

        Workspace(name="demo", paths=["~/workspace"], gpu="RTX 4090").save("demo")

        workspace = Workspace.load("BLOCK_NAME")
        hibernate(workspace)
        ```
    """

    _block_type_name = "Workspace"
    _block_type_slug = "workspace"
    _logo_url = HttpUrl(f"{LOGOS}/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    name: str = Field(
        title="Workspace name",
        description=(
            "The workspace's name in the store and on machines: 1 to 63 lower-case letters, digits "
            "and hyphens. Two blocks with the same name are the same workspace: where they differ "
            "in what is stored or in the store, `watch` hibernates nothing of it, and says so."
        ),
    )
    paths: MachinePaths = Field(
        default=["~/workspace"],
        min_length=1,
        description="The directories to keep: absolute paths, or paths that begin with ~/.",
    )
    exclude: list[str] = Field(
        default_factory=list,
        description=(
            "Patterns to leave out: *.pyc or __pycache__ match names anywhere, cache/tmp* matches "
            "paths below a directory of the workspace."
        ),
    )
    first: list[str] = Field(
        default_factory=list,
        title="First",
        description=(
            "Patterns, as in exclude, of what a wake restores first, in this order. An event says "
            "when all of it can be used, while the rest follows."
        ),
    )
    store: Reference = Field(
        default="default", description="The Object Store block that snapshots go to."
    )
    provider: Reference = Field(
        default="local-provider/default",
        description="The provider block to rent from, as type/name: local-provider/default.",
    )
    more_providers: list[Reference] = Field(
        default_factory=list,
        description="Further provider blocks to rent from, as type/name, in order of preference.",
    )
    identity: Reference = Field(
        default="default",
        title="SSH identity",
        description="The SSH Identity block to log in with.",
    )
    gpu: str = Field(
        default="",
        title="GPU",
        description="The GPU model, for example RTX 4090. Empty: any machine will do.",
    )
    gpu_count: int = Field(
        default=1, ge=1, le=16, title="GPU count", description="The number of GPUs, 1 to 16."
    )
    disk_gib: float = Field(
        default=0.0, ge=0, title="Disk (GiB)", description="The smallest disk, in GiB. 0: any."
    )
    max_price_usd_h: float | None = Field(
        default=None,
        gt=0,
        title="Highest price per hour",
        description=(
            "The highest price of a machine with its disk and address, in dollars an hour. None: "
            "no limit."
        ),
    )
    regions: list[str] = Field(
        default_factory=list,
        description="The regions to rent in, as the providers name them. Empty: any region.",
    )
    spot: Literal["never", "allowed", "only"] = Field(
        default="never",
        description=(
            "Whether to rent spot machines, which cost less and may be taken away at any time."
        ),
    )
    min_reliability: float = Field(
        default=0.0,
        ge=0,
        le=1,
        title="Lowest reliability",
        description="The lowest reliability of a host, 0 to 1. Data centres that state none fit, "
        "private hosts that state none do not.",
    )
    rank: Literal["price", "order"] = Field(
        default="price",
        title="Rank offers by",
        description="price: the cheapest offer first. order: the first provider's offers first.",
    )
    image: str = Field(
        default="", description="The image of the machine. Empty: the provider's usual one."
    )
    quiesce: list[str] = Field(
        default_factory=list,
        title="Quiesce command",
        description=(
            "A command that pauses work on the machine before the last pass: the program and each "
            "argument as an item of its own. No shell runs it. May stay empty."
        ),
    )
    resume: list[str] = Field(
        default_factory=list,
        title="Resume command",
        description=(
            "A command that continues what the quiesce command paused, in the same form. It runs "
            "whenever the machine is kept after that: after a backup, and after a hibernate that "
            "fails or is killed. May stay empty."
        ),
    )
    quiesce_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=3600,
        title="Quiesce timeout (seconds)",
        description="The time limit of the quiesce command and of the resume command, in seconds.",
    )
    accept_changed: list[str] = Field(
        default_factory=list,
        description=(
            "Patterns of files that may change while they are read, such as *.log. If any other "
            "file changes, the machine is not destroyed."
        ),
    )
    left_behind: Literal["report", "refuse"] = Field(
        default="report",
        title="Left behind",
        description=(
            "What a destroy does about files on the machine that are in no snapshot. report: name "
            "them. refuse: keep the machine if there are more than the size below. A link of the "
            "workspace that leads to such files always keeps the machine."
        ),
    )
    left_behind_gib: float = Field(
        default=1.0,
        ge=0,
        title="Left behind (GiB)",
        description="The size above which `refuse` keeps the machine, in GiB.",
    )
    accept_lost: MachinePaths = Field(
        default_factory=list,
        description=(
            "Directories outside of the workspace that may be lost with the machine, such as "
            "/data/cache: absolute paths, or paths that begin with ~/. They are not looked at."
        ),
    )
    parts: int = Field(
        default=32,
        ge=1,
        le=MAX_PARTS,
        description="The number of parts of a transfer, 1 to 64. Each is retried on its own.",
    )
    part_mib: int = Field(
        default=64,
        ge=1,
        le=4096,
        title="Smallest part (MiB)",
        description="The smallest part, in MiB. A small workspace has fewer parts.",
    )
    smallest: bool = Field(
        default=False,
        title="Fewest bytes",
        description=(
            "Prefer smaller snapshots to faster ones: compress text and programs harder. Otherwise "
            "compression follows the speed of the link. Weights always get their smallest form."
        ),
    )
    gpu_encodes: bool = Field(
        default=False,
        title="GPU encodes",
        description=(
            "Allow the machine's GPU to encode and decode weights where it proves faster than the "
            "cores. Needs CuPy on the machine. Uses less than 1 GiB of the GPU's memory."
        ),
    )
    gpu_python: str = Field(
        default="",
        title="Python with CuPy",
        description=(
            "The path of a Python on the machine that can import CuPy, for the GPU. Empty: the "
            "agent looks for one."
        ),
    )
    gpu_install: bool = Field(
        default=False,
        title="Install CuPy",
        description=(
            "Allow the agent to install CuPy (150 MB) into its own folder on the machine when no "
            "Python there has it."
        ),
    )

    when_idle: Literal["hibernate", "report"] = Field(
        default="hibernate",
        title="When idle",
        description="What the flow `watch` does with an idle machine of this workspace.",
    )
    idle_minutes: float = Field(
        default=30.0,
        ge=1,
        le=240,
        title="Idle minutes",
        description="A machine counts as idle after this many minutes without work, 1 to 240.",
    )
    idle_share: float = Field(
        default=0.95,
        ge=0.5,
        le=0.99,
        title="Idle share",
        description="The share of the seconds of that time in which nothing ran, 0.5 to 0.99.",
    )
    idle_gpu_percent: float = Field(
        default=5.0,
        ge=0,
        lt=100,
        title="Idle GPU (percent)",
        description=(
            "A GPU above this activity works. The busiest GPU counts. 0: any activity is work."
        ),
    )
    idle_cpu_percent: float = Field(
        default=50.0,
        ge=0,
        title="Idle CPU (percent of one core)",
        description="CPU activity above this is work. 0: do not look at the CPU.",
    )
    idle_network_kib_s: float = Field(
        default=100.0,
        ge=0,
        title="Idle network (KiB/s)",
        description="Network activity above this is work. 0: do not look at the network.",
    )
    idle_disk_kib_s: float = Field(
        default=1024.0,
        ge=0,
        title="Idle disk (KiB/s)",
        description="Disk activity above this is work. 0: do not look at the disk.",
    )
    idle_people: bool = Field(
        default=True,
        title="People are work",
        description="The use of SSH sessions and of Jupyter counts as work.",
    )
    when_left: Literal["end", "continue", "report"] = Field(
        default="end",
        title="When left by a killed run",
        description=(
            "What `watch` does with a machine that a killed run left before it was handed over, "
            "after ten minutes. end: destroy it, or hibernate it if its restore is whole. "
            "continue: wake the workspace on it. report: only notify. One that does not answer is "
            "only reported."
        ),
    )

    owner: str = Field(
        default="torpor",
        description=(
            "The owner in the label of each machine. Installations that share a provider's account "
            "need different owners."
        ),
    )

    project: str = Field(
        default="",
        description=(
            "The project that its machines are paid for, in `spend` and in budgets. Each rental "
            "keeps the project of its first moment. May stay empty."
        ),
    )

    @classmethod
    def of(cls, value: Workspace | str) -> Workspace:
        """The block itself, or the saved block of that name; raises InvalidInput."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise InvalidInput(
                f"a workspace is a Workspace block or its name, not a {type(value).__name__}"
            )
        return load(value.strip(), (cls,), of="this run")

    def spec(self) -> WorkspaceSpec:
        """The workspace as a plain value."""
        return WorkspaceSpec(
            name=WorkspaceName(self.name),
            paths=list(self.paths),
            exclude=list(self.exclude),
            first=list(self.first),
            want=Want(
                gpu=self.gpu or None,
                gpu_count=self.gpu_count,
                disk_gib=self.disk_gib,
                max_price_usd_h=self.max_price_usd_h,
                regions=list(self.regions),
                spot=self.spot,
                rank=self.rank,
                min_reliability=self.min_reliability,
                image=self.image,
            ),
            quiesce=list(self.quiesce),
            resume=list(self.resume),
            quiesce_timeout_s=self.quiesce_timeout_s,
            accept_changed=list(self.accept_changed),
            accept_lost=list(self.accept_lost),
            left_behind=self.left_behind,
            left_behind_gib=self.left_behind_gib,
            parts=self.parts,
            part_bytes=self.part_mib * MIB,
            compression=Compression(
                smallest=self.smallest,
                gpu=GpuUse(self.gpu_python, self.gpu_install) if self.gpu_encodes else None,
            ),
            idle=IdleRules(
                minutes=self.idle_minutes,
                gpu_percent=self.idle_gpu_percent,
                share=self.idle_share,
                cpu_percent=self.idle_cpu_percent,
                network_kib_s=self.idle_network_kib_s,
                disk_kib_s=self.idle_disk_kib_s,
                people=self.idle_people,
                hibernate=self.when_idle == "hibernate",
            ),
            when_left=self.when_left,
        )

    def for_measuring(self, name: WorkspaceName, path: str, parts: int, part_mib: int) -> Workspace:
        """The same store, provider and identity under a reserved name; never saved."""
        changes = {
            "name": name, "paths": [path], "exclude": [], "first": [], "quiesce": [], "resume": [],
            "accept_changed": [], "accept_lost": [], "left_behind": "report",
            "parts": parts, "part_mib": part_mib,
        }  # fmt: skip
        scratch = self.model_copy(update=changes)
        scratch._block_document_id = scratch._block_document_name = None
        return scratch

    def open_store(self) -> S3Store:
        """Its object store, ready to use; raises InvalidInput."""
        return self._store().open()

    def store_price(self) -> StorePrice | None:
        """What its object store costs; None if unknown."""
        return self._store().price()

    def store_key(self) -> bytes | None:
        """The key that seals its snapshots; None if they stay plain."""
        return self._store().key()

    def open_providers(self) -> tuple[Provider, ...]:
        """Its providers, in its order, ready to use; raises InvalidInput."""
        names = dict.fromkeys([self.provider, *self.more_providers])
        return tuple(open_provider(name, of=self._me()) for name in names)

    def open_identity(self) -> SSHIdentity:
        """The SSH identity it logs in with; raises InvalidInput."""
        return load(self.identity, (SSHIdentity,), of=self._me())

    def _store(self) -> ObjectStore:
        return load(self.store, (ObjectStore,), of=self._me())

    def _me(self) -> str:
        return f"workspace {self.name}"

    @field_validator("name", mode="after")
    @classmethod
    def _named(cls, value: str) -> str:
        try:
            name = workspace_name(value.strip())
        except InvalidInput as cause:
            raise ValueError(str(cause)) from None
        if name.startswith((*RESERVED, BASE)):
            raise ValueError(
                f"names that begin with {' or '.join((*RESERVED, BASE))} are reserved: torpor "
                "deletes what is stored under them. Choose another name"
            )
        return name

    @field_validator("owner", mode="after")
    @classmethod
    def _owned(cls, value: str) -> str:
        try:
            return workspace_name(value.strip())  # a label allows the same letters
        except InvalidInput:
            raise ValueError(
                f"{value!r} is not an owner: use 1 to 63 lower-case letters, digits and hyphens"
            ) from None

    @field_validator("gpu_python", mode="after")
    @classmethod
    def _program(cls, value: str) -> str:
        if value and (not value.startswith("/") or "\0" in value):
            raise ValueError(f"{value!r} is not a program on a machine: give its whole path")
        return value

    @field_validator("gpu", "project", mode="after")
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @field_validator("quiesce", "resume", mode="after")
    @classmethod
    def _argv(cls, value: list[str]) -> list[str]:
        if value and not value[0]:
            raise ValueError("the first item of a command is the program and cannot be empty")
        return value


def open_provider(reference: str, *, of: str) -> Provider:
    """The provider of the block that ``of`` names, ready to use; raises InvalidInput."""
    return _opened(load(reference, blocks.PROVIDERS, of=of))


def open_all_providers() -> tuple[Provider, ...]:
    """Every provider block of the installation, ready to use."""
    return tuple(_opened(block) for kind in blocks.PROVIDERS for block in load_all(kind))


def open_each_provider() -> list[tuple[str, Provider | TorporError]]:
    """The same by their references, with the error of each that cannot be opened."""
    found: list[tuple[str, Provider | TorporError]] = []
    for kind in blocks.PROVIDERS:
        for name in saved_names(kind):
            try:
                opened: Provider | TorporError = _opened(load_named(kind, name, of="compare"))
            except TorporError as error:
                opened = error
            found.append((f"{kind.get_block_type_slug()}/{name}", opened))
    return found


def _opened(block: blocks.ProviderBlock) -> Provider:
    check_account_name(block)
    return block.open()
