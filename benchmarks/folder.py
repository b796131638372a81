"""A folder of many files and one large file by `torpor run`, also over a line that breaks.

    python -m benchmarks.folder [--files 10000] [--gb 10] [--breaks 2] [--keep NAME]

In an empty home, with a machine of the local provider. `torpor run` takes a folder of FILES small
files to a new workspace, runs a command that reads them, hibernates, and brings what the command
has written; then again with one file changed; then with a file of GB gigabytes of random bytes,
while the line of the copy is cut BREAKS times. The command writes the SHA-256 of all that it found,
which is compared with the folder. Prints JSON with the seconds of each, and what was sent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.kept import write_result
from benchmarks.own_home import TORPOR, OwnHome, own_home
from torpor.control.measure.host import host_facts
from torpor.shared.values import MIB

GB: Final = 10**9
SMALL_BYTES: Final = 2_000
SUMS: Final = "find data -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum > outputs/sums"
LOOK_S: Final = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--breaks", type=int, default=2)
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.files, int(options.gb * GB), options.breaks)
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(files: int, large_bytes: int, breaks: int) -> dict[str, Any]:
    """Of each `torpor run`: its seconds, what it says was sent, and how often its line was cut."""
    with own_home() as home:
        folder = home.folder / "project"
        data = folder / "data"
        for number in range(files):
            file = data / f"{number % 100}" / f"{number}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(secrets.token_bytes(SMALL_BYTES))
        steps = {"first": _run_folder(home, folder)}
        (data / "0" / "0").write_bytes(secrets.token_bytes(SMALL_BYTES))
        steps["one file changed"] = _run_folder(home, folder)
        with (data / "0" / "large").open("wb") as large:
            for at in range(0, large_bytes, MIB):
                large.write(secrets.token_bytes(min(MIB, large_bytes - at)))
        cuts = [large_bytes // (breaks + 1)] * breaks
        steps["one large file"] = _run_folder(home, folder, cuts)
    return {
        "benchmark": "folder",
        "host": host_facts(),
        "files": files,
        "small_bytes": SMALL_BYTES,
        "large_bytes": large_bytes,
        "steps": steps,
    }


def _run_folder(home: OwnHome, folder: Path, cuts: list[int] | None = None) -> dict[str, Any]:
    """One `torpor run`. ``cuts``: after so many bytes each, its line is cut. RuntimeError where
    what came back is not of this folder."""
    argv = [
        *TORPOR,
        "run",
        "--yes",
        "--bring",
        "outputs/",
        "--",
        "sh",
        "-c",
        f"mkdir -p outputs && {SUMS}",
    ]
    began_s = time.monotonic()
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=home.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    made: list[int] = []
    cutting = (process.pid, str(home.folder), cuts or [], made)
    threading.Thread(target=_cut, args=cutting, daemon=True).start()
    said = process.communicate()[0]
    seconds = time.monotonic() - began_s
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, said)
    if (folder / "outputs" / "sums").read_text() != "".join(_sums(folder)):
        raise RuntimeError(f"what came back is not of this folder: {said}")
    ((files, megabytes),) = re.findall(r"([\d,]+) files were sent, ([\d,.]+) MB", said)
    return {
        "s": seconds,
        "sent_files": int(files.replace(",", "")),
        "sent_mb": float(megabytes.replace(",", "")),
        "cut_after_bytes": made,
        "connected_again": said.count("connecting again"),
    }


def _cut(command: int, home: str, cuts: list[int], made: list[int]) -> None:
    """While the command runs, end the connection each time that it has sent so many bytes more."""
    for after in cuts:
        while psutil.pid_exists(command):
            if line := _sender(home, after):
                made.append(line.io_counters().write_chars)
                line.kill()
                break
            time.sleep(LOOK_S)


def _sender(home: str, after: int) -> psutil.Process | None:
    """The `ssh` of this home, which the copies share, once it has sent so many bytes."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.name() == "ssh" and home in " ".join(process.cmdline())
            if ours and process.io_counters().write_chars >= after:
                return process
    return None


def _sums(folder: Path) -> Iterator[str]:
    """As `sha256sum` writes them, in the order of `sort`."""
    for name in sorted(str(file.relative_to(folder)) for file in (folder / "data").glob("*/*")):
        with (folder / name).open("rb") as file:
            yield f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"


if __name__ == "__main__":
    main()
