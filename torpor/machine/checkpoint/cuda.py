"""CUDA's part of a checkpoint: the driver moves what processes have on their GPUs into their own
memory, and back. In a process of its own: whoever calls the driver holds the GPUs open.

The calls are those of the CUDA Driver API, "CUDA Checkpointing", which drivers from 570 on have;
a mapping to other GPUs takes 580.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.shared.values import learned

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_PACKAGES: Final = Path(__file__).parents[3]  # where our packages are, also outside of a bundle
_MAIN: Final = f"""
import sys
sys.path.insert(0, sys.argv[1])
from {__package__}.cuda import main
main(sys.argv[2])
"""
_MOST_LOCK_S: Final = 10.0
"""How long a process may take to finish what it has asked its GPUs for."""
_UUID_BYTES: Final = 16
_LOCKED, _CHECKPOINTED = 1, 2  # CUprocessState


class GpuState(msgspec.Struct, frozen=True):
    """``processes``: those whose GPU memory is in their own memory now; ``gpus``: the UUIDs of all
    GPUs of the machine, in the driver's order."""

    processes: list[int] = []
    gpus: list[str] = []
    driver: str = ""


def suspend(root: int, within_s: float, inside: Sequence[str] = ()) -> GpuState:
    """Move what the tree of ``root`` has on GPUs into its memory. ``inside``: the argv in front
    that enters the namespace whose number ``root`` is. CheckpointFailed says why that cannot be;
    then nothing has changed."""
    if not _DRIVER.exists():
        return GpuState()
    said = _run([*inside, *_command("suspend", root, within_s)], within_s)
    return msgspec.convert(said, learned(GpuState))


def resume(state: GpuState, within_s: float, inside: Sequence[str] = ()) -> None:
    """Move it back, to the same GPUs or as many others of the same kind."""
    if state.processes:
        _run([*inside, *_command("resume", msgspec.to_builtins(state), within_s)], within_s)


def release(root: int, within_s: float, inside: Sequence[str] = ()) -> None:
    """Move it back, and let all processes of the tree of ``root`` go on, however far they were on
    their way. Nothing to do where they were not."""
    if _DRIVER.exists():
        _run([*inside, *_command("release", root, within_s)], within_s)


def check_driver(state: GpuState) -> None:
    """CheckpointFailed where this machine has another driver than the state needs."""
    if state.processes and state.driver != (here := driver()):
        raise CheckpointFailed(f"it used driver {state.driver}; here is {here or 'none'}")


def driver() -> str:
    """The version of NVIDIA's kernel driver; empty for none."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _command(action: str, what: object, within_s: float) -> list[str]:
    """It ends by itself: what enters a namespace is not the process that can be killed here."""
    asked = json.dumps([action, what, within_s])
    return [sys.executable, "-I", "-c", _MAIN, str(_PACKAGES), asked]


def _run(argv: Sequence[str], within_s: float) -> Any:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointFailed(f"the GPUs could not be asked: {error}") from None
    try:
        said = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.decode(errors="replace").strip()[-300:]
        raise CheckpointFailed(f"the GPUs could not be asked: {words}") from None
    if "fault" in said:
        raise CheckpointFailed(said["fault"])
    return said


class _Lock(ctypes.Structure):
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_uint * 15))


class _Pair(ctypes.Structure):
    _fields_ = (("old", ctypes.c_char * _UUID_BYTES), ("new", ctypes.c_char * _UUID_BYTES))


class _Restore(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (64 - ctypes.sizeof(ctypes.c_void_p) - 4)),
    )


class NoCuda(CheckpointFailed):
    """No program here can use CUDA."""


class Cuda:
    """The driver's calls. CheckpointFailed names the one that fails, with the driver's word."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoCuda(f"CUDA's driver library cannot be loaded: {error}") from None
        self._call("cuInit", 0)

    def suspend(self, processes: Sequence[int]) -> None:
        """All, or none where one cannot be moved."""
        lock = _Lock(int(_MOST_LOCK_S * 1000))
        try:
            for pid in processes:
                self._call("cuCheckpointProcessLock", pid, ctypes.byref(lock))
            for pid in processes:
                self._call("cuCheckpointProcessCheckpoint", pid, None)
        except CheckpointFailed:
            with suppress(CheckpointFailed):  # the caller releases it, too
                self.release(processes)
            raise

    def resume(self, processes: Sequence[int], gpus: Sequence[str]) -> None:
        here = self.gpus()
        if len(here) != len(gpus):
            raise CheckpointFailed(f"it ran beside {len(gpus)} GPUs; here are {len(here)}")
        moved = zip(map(bytes.fromhex, gpus), map(bytes.fromhex, here), strict=True)
        pairs = (_Pair * len(gpus))(*(_Pair(old, new) for old, new in moved))
        restore = _Restore(pairs, len(gpus)) if here != [*gpus] else None
        for pid in processes:
            given = None if restore is None else ctypes.byref(restore)
            self._call("cuCheckpointProcessRestore", pid, given)
        for pid in processes:
            self._call("cuCheckpointProcessUnlock", pid, None)

    def release(self, processes: Sequence[int]) -> None:
        """Undo a move as far as it had come. Processes that use no GPU have no state."""
        faults = []
        for pid in processes:
            try:
                if self._state(pid) == _CHECKPOINTED:
                    self._call("cuCheckpointProcessRestore", pid, None)
                if self._state(pid) == _LOCKED:
                    self._call("cuCheckpointProcessUnlock", pid, None)
            except CheckpointFailed as error:
                faults.append(f"process {pid}: {error}")
        if faults:
            raise CheckpointFailed("; ".join(faults))

    def _state(self, pid: int) -> int:
        """0 where it runs, or uses no GPU."""
        state = ctypes.c_int()
        with suppress(CheckpointFailed):
            self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        return state.value

    def gpus(self) -> list[str]:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for number in range(count.value):
            uuid = (ctypes.c_ubyte * _UUID_BYTES)()
            self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), number)
            found.append(bytes(uuid).hex())
        return found

    def _call(self, name: str, *given: Any) -> None:
        try:
            result = getattr(self._library, name)(*given)
        except AttributeError:
            raise CheckpointFailed(
                f"the driver {driver()} has no {name}: processes with GPU memory need 570 or newer"
            ) from None
        if result:
            words = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(words))
            raise CheckpointFailed(f"{name}: {(words.value or b'?').decode()} ({result})")


def _tree(root: int) -> Iterator[int]:
    yield root
    for thread in Path(f"/proc/{root}/task").glob("*/children"):
        with suppress(OSError):
            for child in thread.read_text().split():
                yield from _tree(int(child))


def _uses_gpu(pid: int) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if re.fullmatch(r"/dev/nvidia\d+", os.readlink(link)):
                return True
    return False


def main(asked: str) -> None:
    action, what, within_s = json.loads(asked)
    signal.alarm(max(1, int(within_s)))
    try:
        if action == "suspend":
            processes = [pid for pid in _tree(what) if _uses_gpu(pid)]
            state = GpuState()
            if processes:
                cuda = Cuda()
                state = GpuState(processes, cuda.gpus(), driver())
                cuda.suspend(processes)
            print(json.dumps(msgspec.to_builtins(state)))
        elif action == "release":
            with suppress(NoCuda):  # then nothing was moved
                Cuda().release([*_tree(what)])
            print("{}")
        else:
            state = msgspec.convert(what, learned(GpuState))
            Cuda().resume(state.processes, state.gpus)
            print("{}")
    except CheckpointFailed as error:
        print(json.dumps({"fault": str(error)}))
