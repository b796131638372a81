"""What a restore or a sync brings onto this machine, and what both do with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from torpor.machine.agent.call import Call
from torpor.machine.pipeline.download import FetchPlan
from torpor.machine.tree.abilities import FilesystemAbilities, check_cases, needs_of, probe
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.compare import Comparison, compare_tree
from torpor.shared.errors import DiskFull
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import FILE, Entry, Manifest, described
from torpor.shared.format.names import pack_key
from torpor.shared.values import MIB, WorkspaceName
from torpor.shared.wire.restore import Checked, RestorePart

SHOWN: Final = 20
"""The most names in an answer or an error. Counts are always complete."""
SPARE_BYTES: Final = 64 * MIB
"""Bytes left free beyond the content: for directories, metadata, the agent's own files."""


class Goal(NamedTuple):
    """A snapshot, or a part of one, and the directories that become it."""

    manifest: Manifest
    targets: list[bytes]
    seal: Seal

    @property
    def totals(self) -> tuple[int, int]:
        """How many files, and their bytes."""
        what = described(self.manifest.entries)
        sizes = [what.sizes[number] for number in what.of_kind(FILE)]
        return len(sizes), sum(sizes)

    @property
    def real_targets(self) -> list[bytes]:
        return [os.path.realpath(target) for target in self.targets]

    def abilities(self, note: Path) -> list[FilesystemAbilities]:
        """Try what the file system of each target can hold; MachineUnfit where it cannot hold what
        the target becomes. ``note``: the file in which ``probe`` keeps what it tries."""
        entries, targets = self.manifest.entries, self.targets
        needs = needs_of(entries, len(targets))
        each = zip(targets, needs, strict=True)
        able = [probe(target, _existing(target), need, note) for target, need in each]
        check_cases(entries, targets, able)
        return able

    def of(self, entries: Sequence[Entry]) -> Goal:
        """A goal with only these of its entries."""
        manifest = msgspec.structs.replace(self.manifest, entries=entries)
        return self._replace(manifest=manifest)

    def compare(
        self,
        call: Call,
        check: Callable[[], None],
        *,
        full: bool,
        attributes: Attributes,
        in_use_ns: int | None = None,
    ) -> Comparison:
        """Compare the disk with every entry, but for what ``attributes`` could not set; ``full``
        also reads and hashes every byte."""
        return compare_tree(
            self.manifest.entries,
            self.manifest.chunks,
            self.targets,
            self.seal,
            full=full,
            attributes=attributes,
            progress=call.moved,
            check=check,
            in_use_ns=in_use_ns,
        )


def restore_parts(workspace: WorkspaceName, plan: FetchPlan) -> list[RestorePart]:
    """The parts of a plan, as the control side grants them."""
    return [
        RestorePart(
            number,
            plan.plain_bytes(part),
            plan.stored_bytes(part),
            [pack_key(workspace, lot.pack) for lot in part],
            [lot.piece for lot in part if lot.piece],
        )
        for number, part in enumerate(plan.parts)
    ]


def check_space(
    needed: Mapping[bytes, int], who: str, then: str, names: Mapping[bytes, int] | None = None
) -> None:
    """Raise DiskFull where the file systems of some targets lack room for the bytes needed, or for
    so many ``names``."""
    by_device: dict[int, tuple[int, bytes, int]] = {}
    for target, size in needed.items():
        device = os.stat(_existing(target)).st_dev
        before, _, count = by_device.get(device, (0, target, 0))
        by_device[device] = (before + size, target, count + (names or {}).get(target, 0))
    for size, target, count in by_device.values():
        st = os.statvfs(_existing(target))
        free = st.f_bavail * st.f_frsize
        if size + SPARE_BYTES > free:
            raise DiskFull(
                f"{os.fsdecode(target)} has {free:,} bytes free and {who} needs {size:,}: {then}"
            )
        if st.f_files and count > st.f_favail:  # some file systems count no inodes
            raise DiskFull(
                f"the file system of {os.fsdecode(target)} can hold {st.f_favail:,} more files "
                f"(inodes) and {who} has {count:,}: wake on a machine whose file system has more; "
                "nothing was written"
            )


def first_few(words: Sequence[str]) -> list[str]:
    """The first few names, and how many more there are."""
    more = len(words) - SHOWN
    return [*words[:SHOWN], *([f"and {more} more"] if more > 0 else [])]


def shown(path: bytes) -> str:
    return path.decode(errors="backslashreplace")


def checked(compared: Comparison, changed: Sequence[str] = ()) -> Checked:
    differences = compared.differences
    return Checked(differences[:SHOWN], len(differences), first_few(changed))


def _existing(path: bytes) -> bytes:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
