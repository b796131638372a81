"""The block of a workspace: what to keep, where to store it and which machine it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient
from pydantic import Field, HttpUrl, field_validator

import blocks
from blocks.connection import connected_server
from blocks.idleness import Idleness
from blocks.machine_paths import MachinePaths
from blocks.markets import check_account_name
from blocks.object_store import ObjectStore
from blocks.reference import (
    LOGOS,
    OptionalReference,
    Reference,
    load,
    load_all_of,
    load_named,
    loaded_once,
    saved_names_of,
)
from blocks.ssh_identity import SSHIdentity
from blocks.tuning import Tuning
from torpor.control.providers.gpu_wishes import wishes_of
from torpor.control.providers.provider import Provider
from torpor.control.store.s3 import RootOf, S3Store
from torpor.control.store_prices import StorePrice
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import (
    BASE,
    HOME,
    RESERVED,
    Away,
    Want,
    WorkspaceName,
    WorkspaceSpec,
    cuda_version,
    driver_version,
    workspace_name,
)

KindT = TypeVar("KindT", Idleness, Tuning)


class Workspace(Block):
    """Directories to keep, the store for their snapshots, and the GPU they need.

    It holds no secrets: it names the blocks of the store, the provider and the SSH identity. Rules
    of idleness and tuning are blocks of their own, too.

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
            "Patterns, as in exclude, of what a wake restores first, in this order; without any, "
            "what the last deploy's server used. An event says when all of it can be used, while "
            "the rest follows."
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
        description=(
            "Further provider blocks to rent from, as type/name. The cheapest offer of all of them "
            "is tried first, unless the rank of the Tuning block says order."
        ),
    )
    identity: Reference = Field(
        default="default",
        title="SSH identity",
        description="The SSH Identity block to log in with.",
    )
    gpu: str = Field(
        default="",
        title="GPU",
        description=(
            "The GPUs, in order of preference, such as RTX 4090, L40S. H100:8 asks for eight; "
            "24GB+, or A100 80GB, for so much memory of each at least; any for any GPU; none for a "
            "machine without one. Empty: any machine will do."
        ),
    )
    gpu_count: int = Field(
        default=1,
        ge=1,
        le=16,
        title="GPU count",
        description="The number of GPUs, 1 to 16, of each that says none itself, as H100:8 does.",
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
    cuda: str = Field(
        default="",
        pattern=r"^(\d{1,3}\.\d{1,3})?$",
        title="Least CUDA",
        description=(
            "The least version of CUDA that the machine's driver must support, such as 12.4. "
            "Offers that do not state theirs fit. Empty: that of the snapshot that is woken."
        ),
    )
    driver: str = Field(
        default="",
        pattern=r"^(\d{3}(\.\d{1,3}){0,2})?$",
        title="Least driver",
        description=(
            "The least version of the machine's NVIDIA driver, such as 550 or 550.54.14. Where a "
            "market states only CUDA, the CUDA of that driver's branch counts; offers that state "
            "neither fit, but for branches that torpor does not know. Empty: any."
        ),
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
    accept_changed: list[str] = Field(
        default_factory=list,
        description=(
            "Patterns of files that may change while they are read, such as *.log. If any other "
            "file changes, the machine is not destroyed."
        ),
    )
    accept_lost: MachinePaths = Field(
        default_factory=list,
        description=(
            "Directories and files outside of the workspace that may be lost with the machine, "
            "such as /data/cache: absolute paths, or paths that begin with ~/. They are not looked "
            "at. ~/* is whatever was written in a home."
        ),
    )
    programs: list[str] = Field(
        default_factory=list,
        description=(
            "Command lines that a wake starts on the machine, by bash in the first directory, such "
            "as jupyter lab --no-browser. A job's machine and replicas start none."
        ),
    )
    process: Literal["never", "try", "require"] = Field(
        default="never",
        description=(
            "Whether a hibernate freezes these programs, and a spot notice a job's command, so "
            "that they go on where they were after the next wake. Needs a store block with a key, "
            "as the snapshot then holds their memory, and a virtual machine. Where that fails, "
            "`try` starts them afresh and says why; `require` rents no machine that cannot, and "
            "keeps one whose programs were not frozen."
        ),
    )
    environment: Literal["image", "keep"] = Field(
        default="image",
        description=(
            "What a wake does about packages of apt and pip that were added to the machine outside "
            "of the workspace. `image`: the machine has those of its image. `keep`: the wake of a "
            "rented machine installs those that it lacks, from the sources that its apt and pip "
            "have, before the machine is handed over, and its report names what could not be put "
            "back. A wake for a job on one node does so, too, and its log names it; a deploy and "
            "replicas install none. Kernels, drivers and what a cloud, SSH and the network need "
            "are never installed."
        ),
    )
    save_minutes: int = Field(
        default=0,
        ge=0,
        le=1440,
        title="Save every (minutes)",
        description=(
            "How often a rented machine stores what has changed by itself, so that one that "
            "vanishes costs these minutes of work: 5 suits most, 1 is possible. It goes on for "
            "twelve hours without `watch`, which renews that time. No quiesce command runs before "
            "such a save. A job has a `save_minutes` of its own, 30 by default. 0: the machine "
            "saves by itself only where AWS, Google Cloud or Azure says that it will take the "
            "spot machine away, which `watch` must have prepared."
        ),
    )
    when_idle: Literal["hibernate", "report"] = Field(
        default="hibernate",
        title="When idle",
        description="What the flow `watch` does with an idle machine of this workspace.",
    )
    sleep_minutes: int = Field(
        default=0,
        ge=0,
        le=240,
        title="Sleep after (minutes)",
        description=(
            "How long a rented machine may be without work before `watch` hibernates it, 1 to 240, "
            "whether anybody has worked on it or not. 0: as the idle rules below say, which keep a "
            "machine on which nothing has run yet."
        ),
    )
    idle: OptionalReference = Field(
        default="",
        title="Idle rules",
        description=(
            "The Idleness block that says when a machine is idle. Empty: 30 minutes without work, "
            "and the other defaults of that block."
        ),
    )
    project: str = Field(
        default="",
        description=(
            "The project that its machines are paid for, in `spend` and in budgets. Each rental "
            "keeps the project of its first moment. May stay empty."
        ),
    )
    tuning: OptionalReference = Field(
        default="",
        description=(
            "The Tuning block with compression, the choice of offers and what a destroy may leave "
            "behind. Empty: the defaults of that block."
        ),
    )

    @classmethod
    def of(cls, value: Workspace | str) -> Workspace:
        """The block itself, or the saved block of that name; raises InvalidInput."""
        if isinstance(value, cls):
            if value._block_document_id is None:
                value.check_settings()
            return value
        if not isinstance(value, str):
            raise InvalidInput(
                f"a workspace is a Workspace block or its name, not a {type(value).__name__}"
            )
        if not value.strip():
            raise InvalidInput(
                "the name of the workspace is empty: give the name of its block (`torpor status` "
                "lists them)"
            )
        return load(value.strip(), (cls,), of="")

    def spec(self, tuning: Tuning | None = None) -> WorkspaceSpec:
        """The workspace as a plain value, with the settings of the blocks that it names; raises
        InvalidInput. ``tuning``: its tuning, where it is loaded already."""
        tuning = tuning or self.open_tuning()
        idleness = self._settings(self.idle, Idleness)
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
                rank=tuning.rank,
                min_reliability=tuning.min_reliability,
                image=self.image,
                cuda=cuda_version(self.cuda),
                driver=driver_version(self.driver),
            ),
            quiesce=list(self.quiesce),
            resume=list(self.resume),
            quiesce_timeout_s=tuning.quiesce_timeout_s,
            accept_changed=list(self.accept_changed),
            accept_lost=list(self.accept_lost),
            move_aside=tuning.move_aside,
            left_behind=tuning.left_behind,
            left_behind_gib=tuning.left_behind_gib,
            compression=tuning.compression(),
            programs=list(self.programs),
            process=self.process,
            environment=self.environment,
            save_minutes=self.save_minutes,
            idle=idleness.rules(
                hibernate=self.when_idle == "hibernate", sleep_minutes=self.sleep_minutes
            ),
            when_left=idleness.when_left,
        )

    def save(
        self,
        name: str | None = None,
        overwrite: bool = False,
        client: PrefectClient | None = None,
        **how: Any,
    ) -> Any:
        """As every block. InvalidInput for a setting that a workspace does not have."""
        self.check_settings()
        return super().save(name, overwrite, client, **how)

    async def asave(
        self, name: str | None = None, overwrite: bool = False, client: PrefectClient | None = None
    ) -> Any:
        """The same for async callers."""
        self.check_settings()
        return await super().asave(name, overwrite, client)

    def open_tuning(self) -> Tuning:
        """Its tuning; raises InvalidInput."""
        return self._settings(self.tuning, Tuning)

    def open_store(self, on_away: Callable[[Away], None] | None = None) -> S3Store:
        """Its object store, ready to use; raises InvalidInput. ``on_away`` hears of its waits."""
        return loaded_once(("open", self.store, on_away), lambda: self._store().open(on_away))

    def store_price(self) -> StorePrice | None:
        """What its object store costs; None if unknown."""
        return self._store().price()

    def store_key(self) -> bytes | RootOf | None:
        """The store key, which seals its snapshots, or what reads it from the store; None if they
        stay plain."""
        return self._store().store_key()

    def open_providers(self) -> tuple[Provider, ...]:
        """Its providers, in its order, ready to use; raises InvalidInput."""
        names = dict.fromkeys([self.provider, *self.more_providers])
        return tuple(open_provider(name, of=self._me()) for name in names)

    def open_identity(self) -> SSHIdentity:
        """The SSH identity it logs in with; raises InvalidInput."""
        return load(self.identity, (SSHIdentity,), of=self._me())

    def _settings(self, named: str, kind: type[KindT]) -> KindT:
        return load(named, (kind,), of=self._me()) if named else kind()

    def check_settings(self) -> None:
        """InvalidInput for what cannot be saved. Prefect takes any setting, and saves only those
        that it knows. A saved block may have settings of a newer version, and a GPU that an older
        one took: what is awake is stored."""
        wishes_of(Want(gpu=self.gpu, gpu_count=self.gpu_count))
        for name in self.model_extra or {}:
            if name == "block_type_slug" or name.startswith("_"):
                continue  # a key of Prefect's, where a block is the parameter of a run
            for field, kind in (("idle", Idleness), ("tuning", Tuning)):
                if name in kind.model_fields:
                    raise InvalidInput(
                        f"{self._me()}: {name} is a setting of the block "
                        f"{kind.get_block_type_name()}: save one, and name it in `{field}`"
                    )
            raise InvalidInput(f"{self._me()} has no setting {name!r}: correct or remove it")

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
        if name.startswith((*RESERVED, BASE, HOME)):
            raise ValueError(
                f"names that begin with {' or '.join((*RESERVED, BASE, HOME))} are reserved for "
                "what torpor itself stores. Choose another name"
            )
        return name

    @field_validator("gpu", "project", mode="after")
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @field_validator("programs", mode="after")
    @classmethod
    def _programs(cls, value: list[str]) -> list[str]:
        if not all(line.strip() for line in value) or len({*value}) < len(value):
            raise ValueError("each program is a command line of its own, and none is empty")
        return value

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
    """Every provider block of the installation, ready to use, but for machines on the host of a
    server elsewhere, which cannot be reached from here: `torpor up` saves a block of them there."""
    elsewhere = connected_server()
    kinds = [one for one in blocks.PROVIDERS if not (elsewhere and one is blocks.LocalProvider)]
    return tuple(_opened(block) for block in load_all_of(kinds))


def open_each_provider() -> list[tuple[str, Provider | TorporError]]:
    """The same by their references, with the error of each that cannot be opened."""
    found: list[tuple[str, Provider | TorporError]] = []
    for kind, name in saved_names_of(blocks.PROVIDERS):
        try:
            opened: Provider | TorporError = _opened(load_named(kind, name, of="compare"))
        except TorporError as error:
            opened = error
        found.append((f"{kind.get_block_type_slug()}/{name}", opened))
    return found


def _opened(block: blocks.ProviderBlock) -> Provider:
    check_account_name(block)
    return block.open()
