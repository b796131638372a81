"""A process tree that stops on one machine and goes on on another, beside files that are the same.

Its images are a folder with CRIU's files and ``tree.json``, which says what must be as it was.
"""

from __future__ import annotations

import platform
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.checkpoint.criu import OLDEST, CheckpointFailed, Criu
from torpor.machine.checkpoint.cuda import GpuState, check_driver, release, resume, suspend
from torpor.machine.checkpoint.namespace import Namespace, begin
from torpor.shared.values import SnapshotId, learned
from torpor.shared.wire.snapshot import IMAGE_FILES

_FACTS, _COMPLETE = IMAGE_FILES
_SAVE: Final = "save"
_LOADER: Final = "ld-linux-x86-64.so.2"
_PROGRAM: Final = "criu"
_CPU_S: Final = 10.0
_THAW_S: Final = 120.0
_SLOWEST_BYTES_S: Final = 20e6
"""A slow disk that images are read from."""
_NEEDED: Final = {
    # The bit of each capability in linux/capability.h. Tried one by one, CRIU 4.1.1 and 4.2.1.
    "NET_ADMIN": 12,
    "SYS_ADMIN": 21,
    "SYS_TIME": 25,
}


class _Tree(msgspec.Struct, frozen=True):
    """``pid``: of the tree's root, in its namespace. ``kernel``: the release that it ran on."""

    pid: int
    kernel: str
    machine: str
    gpus: GpuState = GpuState()


def why_not() -> str:
    """What can be said for nothing: why no tree can be kept on this machine. Empty where only a
    canary can tell."""
    if platform.machine() != "x86_64":
        return f"CRIU is not sent to a machine of {platform.machine()}"
    held = _capabilities()
    lacks = [name for name, bit in _NEEDED.items() if not held & (1 << bit)]
    if lacks:
        return (
            f"the login on the machine lacks the capabilities {', '.join(lacks)}, as in containers "
            "of most markets: take a virtual machine"
        )
    return ""


def program(folder: Path) -> Criu:
    """CRIU as the control side has sent it into ``folder``; CheckpointFailed for one too old."""
    for name in (_LOADER, _PROGRAM):  # a bundle's files are not for running
        with suppress(FileNotFoundError):
            (folder / name).chmod(0o700)
    criu = Criu(_argv(folder))
    if criu.version() < OLDEST:
        raise CheckpointFailed(f"CRIU {criu.version()} in {folder} is older than {OLDEST}")
    return criu


def freeze(folder: Path, pid: int, first: int | None, images: Path, within_s: float) -> int:
    """Stop the tree of ``pid`` and write it into ``images``, which is new; its bytes. ``first``:
    the first process of the namespace that it was restored in before, by its id here. After an
    error the caller lets the tree go on, gives its GPUs back, and removes the images."""
    images.mkdir(mode=0o700, parents=True)
    program(folder)
    criu = Criu([*_inside(first), *_argv(folder)])
    gpus = suspend(pid, within_s, _inside(first))
    facts = _Tree(pid, platform.release(), platform.machine(), gpus)
    (images / _FACTS).write_bytes(msgspec.json.encode(facts))
    criu.dump(pid, images, within_s)
    criu.write_cpu(images, _CPU_S)
    (images / _COMPLETE).touch()
    return frozen_bytes(images)


def frozen_bytes(images: Path) -> int:
    """How large the images of a whole tree are; 0 where there is none."""
    if not _is_folder(images) or not (images / _COMPLETE).is_file():
        return 0
    return sum(file.lstat().st_size for file in images.iterdir())


def mark(images: Path, snapshot: SnapshotId) -> None:
    """Say in the images of which snapshot they are."""
    (images / _SAVE).write_text(snapshot)


def frozen_for(images: Path) -> SnapshotId | None:
    """The snapshot that the images of a whole tree were marked with; None for no such images."""
    try:
        return SnapshotId((images / _SAVE).read_text()) if frozen_bytes(images) else None
    except (OSError, ValueError):
        return None


def gpus_of(images: Path) -> int:
    """How many GPUs the machine has, where the tree of ``images`` uses them; else 0."""
    try:
        gpus = _tree(images).gpus
    except CheckpointFailed:
        return 0
    return len(gpus.gpus) if gpus.processes else 0


def remove_images(images: Path) -> None:
    """Also what only stands in their place: a link, a file."""
    if not _is_folder(images):
        with suppress(OSError):
            images.unlink()
        return
    with suppress(OSError):
        (images / _COMPLETE).unlink()  # from now on they are nobody's memory
    shutil.rmtree(images, ignore_errors=True)


def give_gpus_back(pid: int, first: int | None, within_s: float) -> None:
    """Give the tree of ``pid``, which goes on where it was frozen, what it had on its GPUs, however
    far that had come. ``first`` as in ``freeze``."""
    release(pid, within_s, _inside(first))


def thaw(folder: Path, images: Path) -> tuple[Namespace, int]:
    """Let the tree of ``images`` go on, once: its new namespace, and the tree's root, by its id
    there. The files that it has open must be as they were.

    Only for a process without threads. It has a deadline by its size.
    """
    size = frozen_bytes(images)
    if not size:
        raise CheckpointFailed(f"{images} holds no whole process tree")
    within_s = _THAW_S + size / _SLOWEST_BYTES_S
    tree = _tree(images)
    criu = program(folder)
    criu.check_cpu(images, _CPU_S)
    check_driver(tree.gpus)
    (images / _COMPLETE).unlink()  # the files may be newer from now on

    def restore() -> None:
        criu.restore(images, within_s)
        resume(tree.gpus, within_s)

    return begin(restore, tree.pid), tree.pid


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _inside(first: int | None) -> list[str]:
    return [] if first is None else ["nsenter", "-t", str(first), "-p", "-m", "-r"]


def _tree(images: Path) -> _Tree:
    try:
        tree = msgspec.json.decode((images / _FACTS).read_bytes(), type=learned(_Tree))
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointFailed(f"{images} holds no process tree: {error}") from None
    here = platform.release()
    if tree.machine != platform.machine():
        raise CheckpointFailed(f"it ran on {tree.machine}; this machine is {platform.machine()}")
    if _release(here) < _release(tree.kernel):
        raise CheckpointFailed(f"it ran on Linux {tree.kernel}; this machine has the older {here}")
    return tree


def _release(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def _capabilities() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        lines = [line.split() for line in status if line.startswith("CapEff:")]
    return int(lines[0][1], 16) if lines else 0


def _argv(folder: Path) -> list[str]:
    return [str(folder / _LOADER), "--library-path", str(folder), str(folder / _PROGRAM)]
