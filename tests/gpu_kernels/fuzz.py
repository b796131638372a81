"""Mutated streams through every decoder: ``python -m tests.gpu_kernels.fuzz --streams N``.

Compiles the C twins and the CUDA source (under the CPU shim) with address and undefined-behaviour
sanitizers, and runs ``fuzzing/fuzz.cpp``, whose comment says what must hold. Ends with its figures
as JSON, or with the sanitizer's report and status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gpu_kernels.build import ROOM, SOURCES, BuildError, run_compiler
from tests.fixtures.manifests import plain_entries
from tests.fixtures.waiting import PATIENCE_S
from torpor.shared.format.manifest import Content, Entries, Extent

_SANITIZE: Final = ("-O2", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
                    "-fno-sanitize-recover=all")  # fmt: skip
STREAMS_PER_S: Final = 500
"""A pessimistic rate, for the time limit."""


def compile_fuzzer(folder: Path, harness: str = "fuzz") -> Path:
    """Compile a harness into ``folder``; raises BuildError where there is no gcc or g++."""
    gcc, gxx = shutil.which("gcc"), shutil.which("g++")
    if gcc is None or gxx is None:
        raise BuildError("fuzzing needs gcc and g++ with their sanitizers: install g++")
    objects = []
    for name in SOURCES:
        target = folder / (Path(name).stem + ".o")
        run_compiler([gcc, "-std=c11", *_SANITIZE, "-c", str(ROOM / name)], target)
        objects.append(str(target))
    fuzzer = folder / harness
    source = str(ROOM / f"fuzzing/{harness}.cpp")
    run_compiler([gxx, "-std=c++17", *_SANITIZE, source, *objects], fuzzer)
    return fuzzer


def fuzz(streams: int, seed: int) -> dict[str, Any]:
    """Run the harness; raises RuntimeError with its report when anything does not hold."""
    with tempfile.TemporaryDirectory(prefix="torpor-fuzz-") as folder:
        fuzzer = compile_fuzzer(Path(folder))
        started = time.monotonic()
        figures = _ran([str(fuzzer), str(streams), str(seed)], streams / STREAMS_PER_S)
    return {**figures, "seed": seed, "wall_s": round(time.monotonic() - started, 1)}


def fuzz_entries(entries: Entries, rounds: int, seed: int) -> dict[str, Any]:
    """Run these entries of a manifest, mutated, through the C that reads them; raises RuntimeError
    as ``fuzz``."""
    with tempfile.TemporaryDirectory(prefix="torpor-fuzz-") as folder:
        rows, contents = Path(folder) / "rows", Path(folder) / "contents"
        rows.write_bytes(b"".join(map(msgspec.msgpack.encode, entries)))
        content = Content(100, (Extent(0, 0, 60), Extent(1, 5, 40)), b"d" * 16)
        contents.write_bytes(msgspec.msgpack.encode(content) * len(entries))
        fuzzer = compile_fuzzer(Path(folder), "entries")
        numbers = map(str, (len(entries), rounds, seed))
        return _ran([str(fuzzer), str(rows), str(contents), *numbers], rounds / STREAMS_PER_S)


def _ran(command: Sequence[str], seconds: float) -> dict[str, Any]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S + seconds,
        # Leak checks need ptrace, which containers forbid; the harness frees what it takes.
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"},
    )
    if done.returncode:
        raise RuntimeError(f"the fuzzer ended with {done.returncode}: {done.stderr[-4000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_kernels.fuzz", description=__doc__)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        print(json.dumps(fuzz(options.streams, options.seed), indent=2))
        entries = Entries(plain_entries())
        print(json.dumps(fuzz_entries(entries, options.streams, options.seed), indent=2))
    except (BuildError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
