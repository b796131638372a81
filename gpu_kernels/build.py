"""Compiles the kernels: ``python -m gpu_kernels.build``. Only build machines run this.

* the C twins into one plain shared object, which needs gcc, and no Python headers: one file
  serves every Python on a machine;
* the CUDA kernels into one fat binary a room (a cubin for each architecture, PTX for later ones),
  where nvcc is. Nothing is compiled on a user's machine. They are kept in the repository, with
  what they were made from: few machines have nvcc.
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
"""What we would like; nvcc is asked what it still knows (CUDA 13 begins at 75)."""

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


def build_cuda(nvcc: str | None = None) -> list[Path]:
    """Compile each room's kernels into a fat binary; an empty list where there is no nvcc."""
    found = nvcc or shutil.which("nvcc")
    if found is None:
        return []
    known = _output([found, "--list-gpu-code"])
    wanted = [a for a in ARCHITECTURES if f"sm_{a}" in known.split()]
    if not wanted:
        raise BuildError(f"{found} knows none of the architectures {ARCHITECTURES}")
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
    codes.append(f"-gencode=arch=compute_{wanted[0]},code=compute_{wanted[0]}")
    made = []
    for name in CUDA_SOURCES:
        target = BUILT / (Path(name).stem + ".fatbin")
        run_compiler([found, "-O3", "-std=c++17", "-fatbin", *codes, str(ROOM / name)], target)
        made.append(target)
    (BUILT / "kernels.json").write_text(json.dumps(cuda_digests(), indent=1) + "\n")
    return made


def cuda_digests() -> dict[str, str]:
    """SHA-256 of the kernels' sources and of the fat binaries that are here: built/kernels.json
    must say the same, or some fat binary is of other sources."""
    sources = hashlib.sha256()
    for name in CUDA_SOURCES + CUDA_HEADERS:
        sources.update(f"{name}\0".encode() + (ROOM / name).read_bytes())
    names = [Path(name).stem + ".fatbin" for name in CUDA_SOURCES]
    made = {name: hashlib.sha256((BUILT / name).read_bytes()).hexdigest() for name in names}
    return {"sources": sources.hexdigest(), **made}


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
    parser.add_argument("--no-cuda", action="store_true", help="leave the CUDA kernels out")
    options = parser.parse_args()
    try:
        print(build_library(machine=options.machine))
        kernels = [] if options.no_cuda else build_cuda()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for path in kernels:
        print(path)
    if not kernels and not options.no_cuda:
        print("no nvcc: the CUDA kernels were not built", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
