"""Finds a Python on the machine that can import CuPy, and lends its worker to one run at a time."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from torpor.machine.agent.gpu_worker import GpuWorker, NotHere
from torpor.machine.sampler.gpus import DEVICES
from torpor.shared.codecs.gpu import GpuError
from torpor.shared.values import GpuUse

CUPY: Final = ("cupy-cuda12x==14.2.0", "numpy>=2,<3")
"""The packages that an install brings: about 150 MB of wheels."""
INSTALL_S: Final = 600.0
PYTHONS_MAX: Final = 12
"""Environments that are tried at most; each takes under a second where CuPy is missing."""
SEARCH_S: Final = 60.0

_INSTALLED: Final = "cupy"  # a folder in the agent's folder
_POLL_S: Final = 0.2
_PLACES: Final = (
    "/venv/*/bin/python", "/opt/conda/bin/python", "/opt/conda/envs/*/bin/python",
    "/opt/venv/bin/python", "/opt/*/bin/python3", "/workspace/*venv*/bin/python",
    "~/*conda*/bin/python", "~/*conda*/envs/*/bin/python", "~/*venv*/bin/python",
    "~/.venv/bin/python",
)  # fmt: skip
_IN_WORKSPACE: Final = (".venv", "venv", "*/.venv", "*/venv")

# one for the process, because the memory of workers is bounded for each process
_lent: Final = threading.Lock()


class MachineGpu:
    """The first GPU of this machine, for one run of the agent in ``home``."""

    def __init__(self, home: Path, use: GpuUse, roots: Sequence[bytes]) -> None:
        self._home = home
        self._use = use
        self._roots = roots

    def open(self, stopped: Callable[[], bool]) -> GpuWorker:
        """Start the worker; raises GpuError with the reason for none, soon after ``stopped``."""
        if not any(map(os.path.exists, DEVICES)):
            raise GpuError("this machine has no NVIDIA GPU, or no driver for one")
        if not _lent.acquire(blocking=False):
            raise GpuError("another run of this agent has it")
        try:
            worker = self._open(stopped)
        except BaseException:
            _lent.release()
            raise
        worker.released = _lent.release
        return worker

    def _open(self, stopped: Callable[[], bool]) -> GpuWorker:
        if self._use.python:
            return GpuWorker(self._use.python, stopped)
        until = time.monotonic() + SEARCH_S
        tried: list[str] = []
        installed = self._home / _INSTALLED
        if installed.is_dir():
            return GpuWorker(sys.executable, stopped, os.fspath(installed))
        for python in _pythons(self._roots):
            if len(tried) == PYTHONS_MAX or time.monotonic() > until:
                break
            try:
                return GpuWorker(python, stopped)
            except NotHere:
                tried.append(python)
        if self._use.install:
            self._install(installed, stopped)
            return GpuWorker(sys.executable, stopped, os.fspath(installed))
        raise GpuError(
            f"none of {len(tried)} Python environments of this machine can import CuPy "
            f"({', '.join(tried[:3]) or 'none was found'}): install torpor[gpu] in one, name one "
            "in the Tuning block (`gpu_python`), or allow the install (`gpu_install`)"
        )

    def _install(self, target: Path, stopped: Callable[[], bool]) -> None:
        """Install CuPy into the agent's folder, for the agent's own Python."""
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        uv = shutil.which("uv")
        argv = [uv, "pip"] if uv else [sys.executable, "-I", "-m", "pip"]
        argv += ["install", "--quiet", "--only-binary", ":all:", "--target", os.fspath(part)]
        argv += ["--no-cache", "--python", sys.executable] if uv else ["--no-cache-dir"]
        with open(target.with_suffix(".log"), "w+b") as log:
            process = subprocess.Popen(
                [*argv, *CUPY], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            until = time.monotonic() + INSTALL_S
            try:
                while process.poll() is None:
                    if stopped():
                        raise GpuError("the run ended while CuPy was installed")
                    if time.monotonic() > until:
                        raise GpuError(f"CuPy was not installed within {INSTALL_S:g} s")
                    time.sleep(_POLL_S)
            finally:
                process.kill()
                process.wait()
            if process.returncode != 0:
                log.seek(0)
                words = " ".join(log.read().decode("utf-8", "replace").split())[-300:]
                raise GpuError(f"CuPy cannot be installed: {words}")
        part.rename(target)


def _pythons(roots: Sequence[bytes]) -> Iterator[str]:
    """The Python environments of this machine, those of the workspace first; each once."""
    inside = [
        os.path.join(glob.escape(os.fsdecode(root)), place, "bin", "python")
        for root in roots
        for place in _IN_WORKSPACE
    ]
    on_path = [found for name in ("python3", "python") if (found := shutil.which(name))]
    around = [os.path.expanduser(place) for place in _PLACES]
    yield from dict.fromkeys([*_existing(inside), *on_path, *_existing(around)])


def _existing(patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        yield from sorted(glob.glob(pattern))
