"""Patches a big file in place, while it is set aside and no process has it open."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Final

from msgspec.structs import replace

from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.changes import Copy, CopySource, Staged
from torpor.machine.tree.names import Signature
from torpor.machine.tree.refusals import set_size
from torpor.machine.tree.staging import Staging, copy_range
from torpor.machine.tree.writers import take_lease
from torpor.shared.format.manifest import HOLE

_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def patch(
    file: Staged,
    seen: Signature | None,
    parent: int,
    name: bytes,
    staging: Staging,
    attributes: Attributes,
) -> bool:
    """Make ``name`` in ``parent`` the staged file, by its patches; False where it is in use.

    The file is renamed first, so that it is never half of two states under its own name. ``seen``:
    the file's signature when its content was known; None where a killed run has set it aside.
    """
    entry = file.entry
    aside = staging.aside(entry.root, entry.path)
    if seen is not None:
        if not _is_ours_alone(name, parent, seen):
            return False
        os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
        if not _is_ours_alone(aside, parent, replace(seen, ctime_ns=-1)):
            os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
            return False
    fd = os.open(aside, os.O_RDWR | _FLAGS, dir_fd=parent)
    try:
        if os.fstat(fd).st_size != entry.size:
            set_size(fd, entry)
        at = 0
        with staging.opened(entry, os.O_RDONLY) as staged:
            for number, extent in enumerate(entry.extents):
                if file.patches is not None and number in file.patches:
                    copy_range(staged, at, fd, at, extent.length, entry)
                at += extent.length
        attributes.apply(fd, entry, replacing=True)
    finally:
        os.close(fd)
    os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
    return True


def kept_runs(file: Staged, seen: Signature) -> list[Copy]:
    """The runs that a file which cannot be patched must copy from the existing file."""
    entry = file.entry
    copies = []
    at = 0
    for number, extent in enumerate(entry.extents):
        if extent.chunk != HOLE and file.patches is not None and number not in file.patches:
            copies.append(Copy(at, extent.length, CopySource((entry.root, entry.path), at, seen)))
        at += extent.length
    return copies


def _is_ours_alone(name: bytes, parent: int, seen: Signature) -> bool:
    """Whether a file is as it was seen (a ctime of -1: any) and no process has it open or mapped.
    Only then does the kernel grant a write lease, which is released at once. False where leases are
    not supported."""
    try:
        fd = os.open(name, os.O_RDWR | _FLAGS, dir_fd=parent)
    except OSError:
        return False  # read-only and not ours, or replaced meanwhile
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_nlink != 1:
            return False
        now = Signature.of(st)
        if (now if seen.ctime_ns >= 0 else replace(now, ctime_ns=-1)) != seen:
            return False
        take_lease(fd, fcntl.F_WRLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
