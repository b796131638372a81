"""The block of a workspace: what is kept, where it is stored and what machine it wants."""

from __future__ import annotations

from typing import Final

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, field_validator

from blocks.local_provider import LocalProvider
from blocks.object_store import ObjectStore
from blocks.reference import LOGOS, Reference, load
from blocks.ssh_identity import SSHIdentity
from torpor.control.providers.seam import Provider
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import InvalidInput
from torpor.shared.values import (
    MIB,
    RESERVED,
    Compression,
    Want,
    WorkspaceName,
    WorkspaceSpec,
    workspace_name,
)

PROVIDERS: Final = (LocalProvider,)
"""The provider blocks, the usual one first. A new market is added here and nowhere else."""

MAX_PARTS: Final = 64  # each is a task run, for which Prefect writes state


class Workspace(Block):
    """What you keep: directories on a machine, where snapshots go, and what GPU it wants.

    Holds no secrets: the store, the provider and the SSH identity are blocks that it names.

    Args:
        name: The workspace's name, also in the store and on machines.
        paths: The directories to keep.
        exclude: Patterns of what not to keep.
        store: The block of the object store.
        provider: The block of the provider, as type/name.
        identity: The block of the SSH identity.
        gpu: The GPU it wants.
        gpu_count: How many of them.
        disk_gib: The least disk, in GiB.
        max_price_usd_h: The most it may cost, in dollars an hour.
        quiesce: A command that makes work on the machine pause.
        quiesce_timeout_s: How long that command may take.
        accept_changed: Patterns of files that may change while they are read.
        parts: How many shares a transfer is cut into.
        part_mib: The least that a share moves, in MiB.
        smallest: Whether fewer bytes count for more than less time.
        gpu_encodes: Whether the machine's GPU may encode weights.
        owner: Whose machines they are, on the label of each.

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
            "Names the workspace in the store and on machines: 1 to 63 lower-case letters, digits "
            "and hyphens. Two blocks of one name are one workspace."
        ),
    )
    paths: list[str] = Field(
        default=["~/workspace"],
        min_length=1,
        description="The directories to keep, absolute or beginning with ~/.",
    )
    exclude: list[str] = Field(
        default_factory=list,
        description=(
            "What not to keep, as patterns: *.pyc or __pycache__ for names anywhere, cache/tmp* "
            "for paths below a directory of the workspace."
        ),
    )
    store: Reference = Field(
        default="default", description="The name of the Object Store block where snapshots go."
    )
    provider: Reference = Field(
        default="local-provider/default",
        description="The block of the provider to rent from, as type/name: local-provider/default.",
    )
    identity: Reference = Field(
        default="default",
        title="SSH identity",
        description="The name of the SSH Identity block to log in with.",
    )
    gpu: str = Field(
        default="",
        title="GPU",
        description="The GPU it wants, for example RTX 4090. Empty: any machine will do.",
    )
    gpu_count: int = Field(
        default=1, ge=1, le=16, title="GPU count", description="How many GPUs, 1 to 16."
    )
    disk_gib: float = Field(
        default=0.0, ge=0, title="Disk (GiB)", description="The least disk, in GiB. 0: no wish."
    )
    max_price_usd_h: float | None = Field(
        default=None,
        gt=0,
        title="Highest price per hour",
        description="The most a machine may cost, in dollars an hour. None: no limit.",
    )
    quiesce: list[str] = Field(
        default_factory=list,
        title="Quiesce command",
        description=(
            "A command on the machine that makes work pause before the last pass: the program and "
            "each argument as an item of its own. It is not given to a shell. May stay empty."
        ),
    )
    quiesce_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=3600,
        title="Quiesce timeout (seconds)",
        description="How long the quiesce command may take, in seconds.",
    )
    accept_changed: list[str] = Field(
        default_factory=list,
        description=(
            "Patterns of files that may still change while they are read, such as *.log. Any other "
            "file that changes keeps the machine from being destroyed."
        ),
    )
    parts: int = Field(
        default=32,
        ge=1,
        le=MAX_PARTS,
        description="How many shares a transfer is cut into, each retried on its own, 1 to 64.",
    )
    part_mib: int = Field(
        default=64,
        ge=1,
        le=4096,
        title="Least part (MiB)",
        description="The least that a share moves: a small workspace is cut into fewer of them.",
    )
    smallest: bool = Field(
        default=False,
        title="Fewest bytes",
        description=(
            "Compress text and programs as hard as is sensible, whatever time it takes. Otherwise "
            "as hard as the link leaves time for. Weights are always stored in their smallest form."
        ),
    )
    gpu_encodes: bool = Field(
        default=False,
        title="GPU encodes",
        description=(
            "Let the machine's GPU encode weights, where the cores are too slow for the link and "
            "it proves faster than they are. It takes under 1 GiB of the GPU's memory meanwhile."
        ),
    )

    owner: str = Field(
        default="torpor",
        description=(
            "Whose machines they are; it stands in the label of each. Give every installation that "
            "shares a provider's account a name of its own."
        ),
    )

    @classmethod
    def of(cls, value: Workspace | str) -> Workspace:
        """The block itself, or the saved one of that name; raises InvalidInput."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise InvalidInput(
                f"a workspace is a Workspace block or the name of one, not a {type(value).__name__}"
            )
        return load(value.strip(), (cls,), of="this run")

    def spec(self) -> WorkspaceSpec:
        """What is kept and what it needs, as a plain value."""
        return WorkspaceSpec(
            name=WorkspaceName(self.name),
            paths=list(self.paths),
            exclude=list(self.exclude),
            want=Want(
                gpu=self.gpu or None,
                gpu_count=self.gpu_count,
                disk_gib=self.disk_gib,
                max_price_usd_h=self.max_price_usd_h,
            ),
            quiesce=list(self.quiesce),
            quiesce_timeout_s=self.quiesce_timeout_s,
            accept_changed=list(self.accept_changed),
            parts=self.parts,
            part_bytes=self.part_mib * MIB,
            compression=Compression(smallest=self.smallest, gpu=self.gpu_encodes),
        )

    def for_measuring(self, name: WorkspaceName, path: str, parts: int, part_mib: int) -> Workspace:
        """The same store, provider and identity under a reserved name; never saved."""
        changes = {
            "name": name, "paths": [path], "exclude": [], "quiesce": [], "accept_changed": [],
            "parts": parts, "part_mib": part_mib,
        }  # fmt: skip
        scratch = self.model_copy(update=changes)
        scratch._block_document_id = scratch._block_document_name = None
        return scratch

    def open_store(self) -> S3Store:
        """Its object store, ready to use; raises InvalidInput."""
        return self._store().open()

    def store_key(self) -> bytes | None:
        """The key that its store seals snapshots with; None where they stay plain."""
        return self._store().key()

    def open_provider(self) -> Provider:
        """Its provider, ready to use; raises InvalidInput."""
        return load(self.provider, PROVIDERS, of=self._me()).open()

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
        if name.startswith(RESERVED):
            raise ValueError(
                f"names that begin with {' or '.join(RESERVED)} are torpor's own: what is kept "
                "under them is cleared. Choose another name"
            )
        return name

    @field_validator("owner", mode="after")
    @classmethod
    def _owned(cls, value: str) -> str:
        try:
            return workspace_name(value.strip())  # a label takes the same letters
        except InvalidInput:
            raise ValueError(
                f"{value!r} is not an owner: use 1 to 63 lower-case letters, digits and hyphens"
            ) from None

    @field_validator("paths", mode="after")
    @classmethod
    def _placed(cls, value: list[str]) -> list[str]:
        for path in value:
            if not path.startswith(("/", "~/")) or "\0" in path:
                raise ValueError(
                    f"{path!r} is not a path on a machine: begin with / or ~/ and name a directory"
                )
            if ".." in path.split("/"):
                raise ValueError(f"{path!r} goes up with ..: name the directory itself")
        return value

    @field_validator("gpu", mode="after")
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @field_validator("quiesce", mode="after")
    @classmethod
    def _argv(cls, value: list[str]) -> list[str]:
        if value and not value[0]:
            raise ValueError("the quiesce command's first item is the program and cannot be empty")
        return value
