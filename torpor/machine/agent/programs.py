"""Programs of a workspace: their processes are frozen before the last pass of a snapshot, and go on
if the machine is kept. If it ends, they are killed: then they may go on elsewhere.

What is frozen is in the snapshot of the run that froze it, and in no other: memory that is older
than the files beside it must never go on.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.machine.checkpoint.tree import freeze, frozen_bytes, give_gpus_back, remove_images
from torpor.machine.supervisor.folder import JobFolder, Kept
from torpor.machine.supervisor.processes import are_stopped, descendants
from torpor.shared.errors import TorporError
from torpor.shared.values import PROGRAMS
from torpor.shared.wire.snapshot import Froze, Program

GPUS_S: Final = 120.0
_IMAGES: Final = re.compile("[0-9a-f]{12}")
"""The name of a folder with what is frozen of a program: its job's id."""


class Programs:
    """The programs of the workspace on this machine. ``root``: its first directory; ``excluded``:
    which paths there no snapshot holds."""

    def __init__(self, home: Path, root: bytes, excluded: Callable[[bytes], bool] | None) -> None:
        self._home = home
        self._root = Path(os.fsdecode(root))
        self._excluded = excluded

    def forget(self, frozen: Sequence[Program]) -> None:
        """Remove what is frozen of all but these."""
        folder = self._root / PROGRAMS
        kept = {images_of(program) for program in frozen}
        if folder.is_dir() and not folder.is_symlink():
            for path in folder.iterdir():
                if _IMAGES.fullmatch(path.name) and path not in kept:
                    remove_images(path)

    def freeze(
        self,
        programs: Sequence[Program],
        criu: str,
        within_s: float,
        check: Callable[[], None],
    ) -> Iterator[Froze]:
        """Freeze each ``within_s``, one after another. What is frozen already stays so."""
        for program in programs:
            check()
            began_s = time.monotonic()
            try:
                size = self._freeze(program, Path(criu), within_s)
            except (TorporError, OSError) as error:
                yield Froze(program.job, why_not=str(error))
            else:
                yield Froze(program.job, size, time.monotonic() - began_s)

    def _freeze(self, program: Program, criu: Path, within_s: float) -> int:
        """The bytes of its images; 0 where it has ended."""
        images = images_of(program)
        folder = JobFolder(self._home, program.job)
        _, kept = folder.look()
        if kept is None:
            raise CheckpointFailed("torpor has not started it on this machine")
        left = folder.processes(kept)
        if not kept.at_work:
            if left:
                raise CheckpointFailed("it has ended, and left processes in the background")
            return 0
        if (size := frozen_bytes(images)) and are_stopped(left):
            return size
        let_go_on(self._home, [program])
        strays = {*left} - {kept.command.pid, *descendants(kept.command.pid)}
        if strays:
            raise CheckpointFailed(
                f"processes {', '.join(map(str, sorted(strays)))} of it run in the background, "
                "outside of its tree"
            )
        try:
            size = freeze(criu, *_root_of(kept), images, within_s)
            self._check_kept(images)
        except BaseException:
            let_go_on(self._home, [program])
            raise
        return size

    def _check_kept(self, images: Path) -> None:
        """The snapshot has to hold every one of them."""
        for file in (images.parent, images, *images.iterdir()):
            name = file.relative_to(self._root)
            if self._excluded is not None and self._excluded(os.fsencode(name)):
                raise CheckpointFailed(f"the workspace's `exclude` leaves out {name}")


def let_go_on(home: Path, programs: Sequence[Program]) -> None:
    """Let the frozen ones of them go on, and remove their images. One that cannot go on is no
    reason not to let the others."""
    for program in programs:
        images = images_of(program)
        with suppress(TorporError, OSError):
            _, kept = JobFolder(home, program.job).look()
            _signal(home, program, signal.SIGCONT)
            if kept is not None:
                give_gpus_back(images, _root_of(kept)[1], GPUS_S)
        remove_images(images)


def end_frozen(home: Path, programs: Sequence[Program]) -> None:
    """Kill those that are frozen: nothing of them is lost."""
    for program in programs:
        if frozen_bytes(images_of(program)):
            with suppress(TorporError):
                _signal(home, program, signal.SIGKILL)


def images_of(program: Program) -> Path:
    return Path(os.path.expanduser(program.images))


def _root_of(kept: Kept) -> tuple[int, int | None]:
    """The root of its tree, and where that has a namespace of its own, this one's first process."""
    if kept.root is None:
        return kept.command.pid, None
    return kept.root, kept.command.pid


def _signal(home: Path, program: Program, number: signal.Signals) -> None:
    folder = JobFolder(home, program.job)
    for pid in folder.processes(folder.look()[1]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
