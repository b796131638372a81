"""Count lines of code and of tests, package by package: ``python -m benchmarks.lines [REVISION]``.

With a revision of git: how many lines each package had there, has here, and the difference. A
package that moved to another folder since is compared under the name that it has here.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".c", ".h", ".cpp", ".cu", ".cuh", ".sh"}
FLOORS = ("shared", "machine", "control")

Kind = Literal["code", "tests"]
Counts = Counter[tuple[str, Kind]]
"""Lines by package and kind."""


def package_of(path: str, floors: dict[str, str]) -> tuple[str, Kind]:
    """The package that ``path`` belongs to, and whether it is code or tests.

    ``floors`` says on which floor each of torpor's packages is: a path without a floor, from before
    there were floors, belongs to the package of that name.
    """
    parts = PurePosixPath(path).with_suffix("").parts
    kind: Kind = "tests" if parts[0] == "tests" else "code"
    if kind == "tests":
        parts = tuple(part.removeprefix("test_") for part in parts[1:])
    elif parts[0] == "torpor":
        parts = parts[1:]
    else:
        return parts[0], kind
    if parts[-1] == "__init__":
        parts = parts[:-1] or ("torpor",)
    if parts[0] in FLOORS and len(parts) > 1:
        return f"torpor/{parts[0]}/{parts[1]}", kind
    if parts[0] in floors:
        return f"torpor/{floors[parts[0]]}/{parts[0]}", kind
    return parts[0], kind


def floors_of(paths: Iterable[str]) -> dict[str, str]:
    """Each of torpor's packages, with its floor."""
    found = {}
    for path in paths:
        parts = PurePosixPath(path).with_suffix("").parts
        if parts[0] == "torpor" and len(parts) > 2 and parts[1] in FLOORS:
            found[parts[2]] = parts[1]
    return found


def count(files: Iterable[tuple[str, bytes]], floors: dict[str, str]) -> Counts:
    counts: Counts = Counter()
    for path, content in files:
        counts[package_of(path, floors)] += len(content.splitlines())
    return counts


def table(before: Counts | None, after: Counts) -> str:
    """A line for each package, and the sums of all packages without the benchmarks."""
    packages = sorted({package for package, _ in after | (before or Counter())})
    lines = [_row("package", "code", "tests") if before is None else _head()]
    lines += [_line(package, [package], before, after) for package in packages]
    others = [package for package in packages if package != "benchmarks"]
    lines.append(_line("all but benchmarks", others, before, after))
    return "\n".join(lines)


def _line(name: str, packages: list[str], before: Counts | None, after: Counts) -> str:
    cells: list[str] = []
    kinds: tuple[Kind, ...] = ("code", "tests")
    for kind in kinds:
        now = sum(after[package, kind] for package in packages)
        if before is not None:
            was = sum(before[package, kind] for package in packages)
            cells += [str(was), str(now), f"{now - was:+}"]
        else:
            cells.append(str(now))
    return _row(name, *cells)


def _head() -> str:
    return "\n".join(
        (
            _row("", "code", "", "", "tests", "", ""),
            _row("package", *("before", "after", "change") * 2),
        )
    )


def _row(name: str, *cells: str) -> str:
    return f"{name:30}" + "".join(f"{cell:>9}" for cell in cells)


def here() -> Iterator[tuple[str, bytes]]:
    """Every source file that git knows of, as it is in the folder."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode()
    for path in filter(None, listed.split("\0")):
        if PurePosixPath(path).suffix in SUFFIXES and (ROOT / path).is_file():
            yield path, (ROOT / path).read_bytes()


def at(revision: str) -> Iterator[tuple[str, bytes]]:
    """Every source file of ``revision``."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision))) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and PurePosixPath(member.name).suffix in SUFFIXES:
                yield member.name, file.read()


def _git(*arguments: str) -> bytes:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True).stdout


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        print(__doc__)
        return 2
    files = list(here())
    floors = floors_of(path for path, _ in files)
    try:
        before = count(at(arguments[0]), floors) if arguments else None
    except subprocess.CalledProcessError as exc:
        print(exc.stderr.decode(), end="", file=sys.stderr)
        return 1
    print(table(before, count(files, floors)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
