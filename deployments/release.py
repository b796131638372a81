"""``make release``: the wheel, the sdist and the notes of a version, under out/release.

The notes are the version's section of CHANGELOG.md. Whoever publishes them uploads the three files;
nothing is uploaded here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import tomllib

from deployments.installation import CHECKOUT
from torpor.shared.errors import InvalidInput, TorporError

FOLDER: Final = CHECKOUT / "out" / "release"
_HEADING: Final = re.compile(r"^## (?P<version>\S+?), (?P<when>.+)$", re.MULTILINE)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")


def main() -> int:
    try:
        for file in release():
            print(file)
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    return 0


def release() -> list[Path]:
    """Build what is committed; returns the files. InvalidInput for a version without a date, and
    for uncommitted changes."""
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    notes = notes_of(version, (CHECKOUT / "CHANGELOG.md").read_text())
    if changed := _run(["git", "status", "--porcelain"]).strip():
        raise InvalidInput(
            f"a release is what is committed, and {CHECKOUT} has changes:\n{changed}\nCommit or "
            "remove them"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in FOLDER.glob("torpor-*"):
        file.unlink()
    with TemporaryDirectory(prefix="torpor-release-") as folder:
        extract(CHECKOUT, Path(folder))
        uv = Path(sys.executable).with_name("uv")
        build = [str(uv), "build", "--quiet", "--wheel", "--sdist", "--out-dir", str(FOLDER)]
        _run(build, Path(folder))
    (FOLDER / f"torpor-{version}.md").write_text(notes)
    return sorted(FOLDER.glob("torpor-*"))


def extract(checkout: Path, into: Path) -> None:
    """Write the committed files into a folder. Files that git ignores, such as keys and builds, are
    in no release."""
    packed = into / "committed.tar"
    _run(["git", "archive", "--format=tar", f"--output={packed}", "HEAD"], checkout)
    _run(["tar", "-xf", str(packed)], into)
    packed.unlink()


def notes_of(version: str, changelog: str) -> str:
    """The section of CHANGELOG.md for that version; InvalidInput where there is none, or where it
    has no date."""
    headings = [*_HEADING.finditer(changelog)]
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if heading["version"] != version:
            continue
        if not _DATE.fullmatch(heading["when"]):
            raise InvalidInput(
                f"CHANGELOG.md calls {version} {heading['when']}: write the date of the release "
                "there, as in 2026-12-01"
            )
        return changelog[heading.start() : following.start() if following else None].strip() + "\n"
    raise InvalidInput(
        f"CHANGELOG.md has no section `## {version}, DATE`, which pyproject.toml calls the version"
    )


def _run(argv: Sequence[str], folder: Path = CHECKOUT) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise TorporError(f"{' '.join(argv)} ended with {done.returncode}: {said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
