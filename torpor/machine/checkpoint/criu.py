"""CRIU as a program with deadlines: it dumps a process tree into a folder, and restores it.

Its errors are words of its log; its exit status says whether it worked. Options and their reasons:
https://criu.org/CLI/opt.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from torpor.shared.errors import MachineError

OLDEST: Final = (4, 2)
"""Older ones dump no network socket on kernels from 6.16 on."""
_BOTH: Final = (
    "--file-locks",
    "--manage-cgroups=ignore",  # a machine's cgroups are its own
    "--tcp-close",  # another machine has another address
    "--ghost-limit=1G",  # files that were deleted and are open go into the image
    "-v2",
)
_HARMLESS: Final = ("RLIMIT_NOFILE", "shutdown state of inet socket", "Unable to create tun")
_MOST_LOG: Final = 64 << 10


class CheckpointFailed(MachineError):
    """A process tree could not be dumped or restored; it says why."""


class Criu:
    """``program``: the argv that runs it."""

    def __init__(self, program: Sequence[str]) -> None:
        self._program = list(program)

    def version(self) -> tuple[int, ...]:
        """CheckpointFailed where it does not run."""
        said = self._run(["--version"], 10.0)
        found = re.search(r"Version: (\d+(?:\.\d+)*)", said)
        if found is None:
            raise CheckpointFailed(f"CRIU does not say its version: {said[:200]}")
        return tuple(map(int, found[1].split(".")))

    def dump(self, pid: int, images: Path, within_s: float) -> None:
        """Write the tree of ``pid``, a session leader, into ``images``, a folder of its own. The
        tree is stopped then, and goes on after SIGCONT; where this fails, it goes on by itself.

        One that had to be ended at its deadline may leave the tree broken.
        """
        argv = ["dump", "--tree", str(pid), "--images-dir", str(images), "--leave-stopped"]
        self._logged([*argv, "--log-file", "dump.log", *_BOTH], images / "dump.log", within_s)

    def restore(self, images: Path, within_s: float) -> None:
        """Restore the tree in this PID namespace, which must have its numbers free. It runs on as a
        child of this namespace's first process."""
        argv = ["restore", "--images-dir", str(images), "--restore-detached"]
        self._logged([*argv, "--log-file", "restore.log", *_BOTH], images / "restore.log", within_s)

    def write_cpu(self, images: Path, within_s: float) -> None:
        """Keep what this machine's processor can do."""
        self._run(["cpuinfo", "dump", "--images-dir", str(images)], within_s)

    def check_cpu(self, images: Path, within_s: float) -> None:
        """CheckpointFailed where this machine's processor lacks what that of the dump had."""
        try:
            self._run(["cpuinfo", "check", "--images-dir", str(images)], within_s)
        except CheckpointFailed as error:
            raise CheckpointFailed(
                f"this machine's processor lacks what the other one has: {error}"
            ) from None

    def _logged(self, argv: Sequence[str], log: Path, within_s: float) -> None:
        try:
            self._run(argv, within_s)
        except CheckpointFailed as error:
            raise CheckpointFailed(_reason(log) or str(error)) from None

    def _run(self, argv: Sequence[str], within_s: float) -> str:
        """What it prints. Its whole process tree is ended at the deadline: a restore may hang."""
        try:
            process = subprocess.Popen(
                [*self._program, *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CheckpointFailed(f"CRIU cannot be started: {error}") from error
        with process:
            try:
                said, _ = process.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.stdout.close()  # type: ignore[union-attr]  # what it restored may hold it
                raise CheckpointFailed(f"CRIU {argv[0]} took over {within_s:.0f} s") from None
        if process.returncode != 0:
            words = said.decode(errors="replace").strip()[-300:]
            raise CheckpointFailed(f"CRIU {argv[0]} ended with {process.returncode}: {words}")
        return said.decode(errors="replace")


def _reason(log: Path) -> str:
    """The first error in a log, which the later ones follow from; empty for none."""
    try:
        with log.open("rb") as file:
            text = file.read(_MOST_LOG).decode(errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        _, marker, words = line.partition("Error (")
        if marker and not any(harmless in words for harmless in _HARMLESS):
            return words.partition("): ")[2].strip() or words
    return ""
