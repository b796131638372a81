"""Whether the kernel ends the agents of a HOME for want of memory, one after another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from torpor.machine.agent.memory_room import memory_kills, room
from torpor.shared.errors import MachineUnfit

_RECORD: Final = "agent.memory"
_MOST: Final = 2
"""How many agents may end for want of memory. The second one has worked at one part at a time, so a
third would end as well."""


class MemoryTrouble:
    """The record of agents that the kernel has ended. It holds the kernel's counter at the start of
    the running agent, and how many agents before it were ended. An agent that leaves by itself
    removes the record."""

    root: ClassVar[Path] = Path("/")

    def __init__(self, home: Path) -> None:
        self._record = home / _RECORD

    @property
    def has_been(self) -> bool:
        """Whether the kernel has ended the agent before this one."""
        return self._read()[1] > 0

    def check(self) -> None:
        """Before an agent is started: count how the one before it ended. MachineUnfit, once, when
        the kernel has ended _MOST of them."""
        kills, ended = memory_kills(self.root), 0
        before, ended_before = self._read()
        if before is not None and kills > before:
            ended = ended_before + 1
        if ended < _MOST:
            with suppress(OSError):  # a full disk: its own error reports that
                self._record.write_text(f"{kills} {ended}\n")
            return
        self.forget()
        found = room(self.root)
        raise MachineUnfit(
            f"the machine has too little memory: the kernel ended the agent {ended} times, also "
            f"where it worked at one part at a time{f' ({found})' if found else ''}. "
            "Give the container or machine more memory (docker run --memory, a pod's "
            "resources.limits.memory), end other programs there, exclude what need not be kept (a "
            "million files take 0.5 GiB), or take `gpu_encodes` out of the Tuning block"
        )

    def forget(self) -> None:
        self._record.unlink(missing_ok=True)

    def _read(self) -> tuple[int | None, int]:
        with suppress(OSError, ValueError):
            kills, ended = self._record.read_text("ascii").split()
            return int(kills), int(ended)
        return None, 0
