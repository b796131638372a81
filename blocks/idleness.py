"""The block of idle rules: when `watch` takes a machine for idle, or for left behind by a run."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl

from blocks.reference import LOGOS
from torpor.shared.values import IdleRules


class Idleness(Block):
    """When a machine is idle, for workspaces that name this block.

    Example:
        Keep a machine for two hours after its last work:
        ```python
        from blocks import Idleness, Workspace

        Idleness(idle_minutes=120).save("patient")
        Workspace(name="mywork", idle="patient").save("mywork")

        idleness = Idleness.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Idleness"
    _block_type_slug = "idleness"
    _logo_url = HttpUrl(f"{LOGOS}/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

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

    def rules(self, *, hibernate: bool) -> IdleRules:
        """The rules as a plain value."""
        return IdleRules(
            minutes=self.idle_minutes,
            gpu_percent=self.idle_gpu_percent,
            share=self.idle_share,
            cpu_percent=self.idle_cpu_percent,
            network_kib_s=self.idle_network_kib_s,
            disk_kib_s=self.idle_disk_kib_s,
            people=self.idle_people,
            hibernate=hibernate,
        )
