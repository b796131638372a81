"""``python -m tests.machine.checkpoint.gpu``: on a machine with a GPU, freeze a process that holds
random bytes on it, and let it go on in a new namespace, twice. Exit 1 where it does not go on, or
its GPU holds something else."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fixtures.waiting import until
from torpor.control.remote.criu import criu_bundle
from torpor.machine.checkpoint.canary import fly
from torpor.machine.checkpoint.cuda import driver
from torpor.machine.checkpoint.tree import freeze, program, thaw, why_not
from torpor.machine.supervisor.processes import adopt_orphans

GIB = 4
LIMIT_S = 120.0
_HOLDS = """
import hashlib, itertools, os, sys, time
import cupy, numpy
some = cupy.asarray(numpy.frombuffer(os.urandom(1 << 20), dtype=numpy.uint8))
held = cupy.tile(some, int(sys.argv[1]) << 10)
for number in itertools.count():
    with open("said.new", "w") as said:
        said.write(f"{number} {hashlib.sha256(held.get()).hexdigest()}")
    os.rename("said.new", "said")
    while not os.path.exists(f"ask{number + 1}"):
        time.sleep(0.02)
"""


def main() -> int:
    adopt_orphans()  # a restored tree is none of its restorer's children
    print(f"Linux {platform.release()}, driver {driver() or 'none'}; {why_not() or 'may freeze'}")
    with tempfile.TemporaryDirectory(prefix="torpor-gpu-") as folder:
        place = Path(folder)
        shutil.unpack_archive(criu_bundle().archive, place / "criu")
        print(fly(program(place / "criu"), place))
        return _hold(place)


def _hold(place: Path) -> int:
    images, first, number = place / "images", None, 0
    argv = [sys.executable, "-c", _HOLDS, str(GIB)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    began_s = time.monotonic()
    with (place / "errors").open("wb") as errors:
        process = subprocess.Popen(
            argv, cwd=place, start_new_session=True, stderr=errors, **quiet
        )  # fmt: skip
    held = _ask(place, number)
    print(f"started in {time.monotonic() - began_s:.2f} s with {GIB} GiB on the GPU")
    root = process.pid
    try:
        for number in (1, 2):
            began_s = time.monotonic()
            size = freeze(place / "criu", root, first, images, LIMIT_S)
            frozen_s = time.monotonic() - began_s
            os.kill(first or root, signal.SIGKILL)
            os.waitpid(first or root, 0)
            began_s = time.monotonic()
            first, root = thaw(place / "criu", images)
            print(f"frozen in {frozen_s:.2f} s, {size:,} bytes; thawed in "
                  f"{time.monotonic() - began_s:.2f} s")  # fmt: skip
            shutil.rmtree(images)
            if _ask(place, number) != held:
                print("the GPU holds something else")
                return 1
    finally:
        os.kill(first or process.pid, signal.SIGKILL)
    return 0


def _ask(place: Path, number: int) -> str:
    (place / f"ask{number}").touch()

    def said() -> str:
        text = (place / "said").read_text() if (place / "said").exists() else ""
        at, _, what = text.partition(" ")
        return what if at == str(number) else ""

    return until(said, "it answers")


if __name__ == "__main__":
    sys.exit(main())
