"""The block of tuning: settings of encodings, machines and destroys that few people change."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, ValidationInfo, field_validator

from blocks.reference import LOGOS
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Compression, GpuUse, workspace_name


class Tuning(Block):
    """Settings that rarely need a change, for workspaces that name this block.

    Example:
        Let the GPU encode weights:
        ```python
        from blocks import Tuning, Workspace

        Tuning(gpu_encodes=True).save("on-gpu")
        Workspace(name="mywork", tuning="on-gpu").save("mywork")

        tuning = Tuning.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Tuning"
    _block_type_slug = "tuning"
    _logo_url = HttpUrl(f"{LOGOS}/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    smallest: bool = Field(
        default=False,
        title="Fewest bytes",
        description=(
            "Prefer smaller snapshots to faster ones: compress text and programs harder. Without "
            "this and the next setting, compression follows the speed of the link, and weights get "
            "their smallest form."
        ),
    )
    fastest: bool = Field(
        default=False,
        title="Least time",
        description=(
            "Prefer faster snapshots to smaller ones: where cores are slower than the link, "
            "compress less, or nothing. The store then holds up to twice the bytes, and each wake "
            "fetches them. Not with Fewest bytes."
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
    quiesce_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=3600,
        title="Quiesce timeout (seconds)",
        description=(
            "The time limit of the quiesce command, of the resume command, and for freezing each "
            "program, in seconds."
        ),
    )
    move_aside: bool = Field(
        default=False,
        title="Move aside",
        description=(
            "Rename what the image of a rented machine has put into a directory of the workspace, "
            "such as /workspace, to /workspace.before-SNAPSHOT. Otherwise such a wake is refused."
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
    owner: str = Field(
        default="torpor",
        description=(
            "The owner in the label of each machine. Installations that share a provider's account "
            "need different owners."
        ),
    )

    def compression(self) -> Compression:
        """What chunks are encoded for, as a plain value."""
        use = GpuUse(self.gpu_python, self.gpu_install) if self.gpu_encodes else None
        return Compression(smallest=self.smallest, fastest=self.fastest, gpu=use)

    @field_validator("fastest", mode="after")
    @classmethod
    def _one_of_two(cls, value: bool, others: ValidationInfo) -> bool:
        if value and others.data.get("smallest"):
            raise ValueError("choose one of `smallest` and `fastest`, or neither")
        return value

    @field_validator("owner", mode="after")
    @classmethod
    def _owned(cls, value: str) -> str:
        try:
            # a label allows the same letters as a workspace's name
            return workspace_name(value.strip())
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
