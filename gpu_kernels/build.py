"""Compiles the kernels: ``python -m gpu_kernels.build``. Only build machines run this.

* the C twins into one plain shared object, which needs gcc, and no Python headers: one file
  serves every Python on a machine;
* with ``--cuda`` the CUDA kernels into one fat binary a room (machine code for each architecture,
  PTX for others). They are kept in the repository, with what they were made from: nothing is
  compiled on a user's machine, and a test compiles them again and compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_kernels import nvrtc
from gpu_kernels.native import BUILT, library_path

ROOM = Path(__file__).resolve().parent
SOURCES = ("cpu.c", "disk/disk.c", "entries/entries.c", "planes/planes.c", "rans/rans.c")
HEADERS = (
    "cpu.h",
    "disk/disk.h",
    "entries/entries.h",
    "planes/planes.h",
    "rans/rans.h",
    "rans/layout.h",
    "rans/rans_avx2.h",
)
CUDA_SOURCES = ("planes/planes.cu", "rans/rans.cu")
CUDA_HEADERS = ("shim/cuda.h", "planes/planes.cuh", "rans/layout.h", "rans/rans.h", "rans/rans.cuh")
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
"""V100, T4, A100, RTX 30, RTX 40 and L4, H100, B200, RTX 50. Machine code also runs on GPUs with
the same major and a greater minor number."""

C_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=default", "-Wall", "-Wextra")
_TIMEOUT_S = 600


class BuildError(Exception):
    """A compiler is missing or refused the sources."""


def build_library(compiler: str | None = None, machine: str | None = None) -> Path:
    """Compile the C twins for ``machine`` (default: this one); returns the shared object's path.

    Another machine's name (``aarch64``) needs a cross compiler (``aarch64-linux-gnu-gcc``).
    """
    here = platform.machine()
    machine = machine or here
    default = "gcc" if machine == here else f"{machine}-linux-gnu-gcc"
    found = shutil.which(compiler or os.environ.get("CC", default))
    if found is None:
        raise BuildError(
            f"no C compiler for {machine} was found: install gcc; without the library the codecs "
            "work at a tenth of the speed"
        )
    target = library_path(machine)
    run_compiler([found, *C_FLAGS, *(str(ROOM / name) for name in SOURCES)], target)
    return target


def build_cuda() -> list[Path]:
    """Compile each room's kernels into its fat binary."""
    made = []
    for name in CUDA_SOURCES:
        content = cuda_binary(name)
        target = BUILT / (Path(name).stem + ".fatbin")
        target.write_bytes(content)
        made.append(target)
    (BUILT / "kernels.json").write_text(json.dumps(cuda_digests(), indent=1) + "\n")
    return made


def cuda_binary(name: str) -> bytes:
    """The fat binary of one of CUDA_SOURCES."""
    room = Path(name).parent
    headers = {
        os.path.relpath(header, room): (ROOM / header).read_bytes() for header in CUDA_HEADERS
    }
    source = (ROOM / name).read_bytes()
    try:
        return nvrtc.fat_binary(Path(name).name, source, headers, ARCHITECTURES)
    except nvrtc.CompilerError as error:
        raise BuildError(str(error)) from error


def cuda_digests() -> dict[str, str]:
    """The compilers, and SHA-256 of the kernels' sources and of the fat binaries that are here:
    built/kernels.json must say the same, or some fat binary is of other sources."""
    sources = hashlib.sha256()
    for name in CUDA_SOURCES + CUDA_HEADERS:
        sources.update(f"{name}\0".encode() + (ROOM / name).read_bytes())
    names = [Path(name).stem + ".fatbin" for name in CUDA_SOURCES]
    made = {name: hashlib.sha256((BUILT / name).read_bytes()).hexdigest() for name in names}
    compilers = ", ".join(nvrtc.WHEELS)
    return {"compilers": compilers, "sources": sources.hexdigest(), **made}


def is_current() -> bool:
    """Whether this machine's library is there and newer than its sources."""
    target = library_path()
    if not target.exists():
        return False
    made = target.stat().st_mtime
    return all((ROOM / name).stat().st_mtime <= made for name in SOURCES + HEADERS)


def run_compiler(command: Sequence[str], target: Path) -> None:
    """Compile into a temporary name, so that no process loads half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _output([*command, "-o", str(part)])
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_kernels.build", description=__doc__)
    parser.add_argument("--machine", help="cross-build the C library, e.g. aarch64")
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels, not the C library")
    options = parser.parse_args()
    try:
        made = build_cuda() if options.cuda else [build_library(machine=options.machine)]
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
