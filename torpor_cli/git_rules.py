"""What the .gitignore files of a folder say, asked of git without the settings of a repository.

A folder may hold a repository that a machine has written: by `torpor cp`, or in a snapshot that was
restored here. git runs programs that `.git/config` names (`core.fsmonitor`, for example), whatever
it is asked about files. So git is given a git directory of torpor's, which holds only symlinks to
the repository's index and objects, and the repository's exclude patterns. Of the repository's
settings, git is asked only to read them, which runs nothing; three of them, which name no program,
are used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torpor.shared.errors import InvalidInput
from torpor_cli import programs

MOST_S: Final = 300.0
"""Seconds that git may take for one answer."""
_MODULE: Final = b"160000 "
"""The mode of a submodule in a repository's index."""
_NOTHING_RUNS: Final = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
"""Options by which git starts no program, also where the user's own settings name some: no folder
here needs them."""
_NAMES: Final = ("core.ignorecase", "core.precomposeunicode")
_READ: Final = rf"^({'|'.join(map(re.escape, _NAMES))})$"
_OF_THE_REPOSITORY: Final = ("local", "worktree")
"""Scopes of a repository's own settings; all other scopes are the user's."""
_OF_THE_USER: Final = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
_BOM: Final = b"\xef\xbb\xbf"


def not_ignored(path: Path, exclude: Sequence[str], skipped: list[str]) -> list[str] | None:
    """The names that git lists below a folder, also of the repositories in it: each has .gitignore
    files of its own. None for all of them."""
    with _git(path) as git:
        if git is None:
            return None
        git.has_unwritten()  # raises InvalidInput
        argv = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        argv += [f"--exclude={pattern}" for pattern in exclude]
        said = git.says(argv).split(b"\0")
        listed = sorted({os.fsdecode(name).rstrip("/") for name in said if name})
        folders = [name for name in listed if _is_folder(path / name)]
        repositories = {name for name in folders if git.is_repository(path / name)}
    found = [name for name in listed if name not in set(folders)]
    for name in folders:
        if name in repositories:
            below = not_ignored(path / name, exclude, skipped) or []
            found += [f"{name}/{one}" for one in below]
        elif any((path / name).iterdir()) and not any(x.startswith(f"{name}/") for x in listed):
            skipped.append(f"{name} (a submodule that git has not fetched)")
    return found


def ignored(path: Path, names: list[str], unread: set[str]) -> set[str]:
    """The names below a folder that its .gitignore files, and those of the repositories in it,
    name; and all names below directories that git cannot look into, which are added to ``unread``.
    What a repository tracks is not ignored."""
    with _git(path) as git:
        if git is None:
            return set()
        listing = git.says(["ls-files", "-z", "--stage"]).split(b"\0")
        staged = [one.partition(b"\t") for one in listing]
        tracked = {os.fsdecode(name) for _, _, name in staged}
        modules = {os.fsdecode(name) for mode, _, name in staged if mode.startswith(_MODULE)}
        inner, blocked = _apart(git, path, names, modules)
        elsewhere = {name for below in (*inner.values(), *blocked.values()) for name in below}
        own = [*inner, *(name for name in names if name not in elsewhere)]
        # otherwise a colon in a name has a meaning for git
        asked = b"\0".join(b"./" + os.fsencode(name) for name in own)
        argv = ["check-ignore", "-z", "--stdin"]
        # without the option, git reads the index, which takes time for all names
        argv += [] if git.has_unwritten() else ["--no-index"]
        said = git.says(argv, asked, fine=(0, 1)) if own else b""
    found = {os.fsdecode(name[2:]) for name in said.split(b"\0") if name}
    for name in tracked:
        while name:
            found.discard(name)
            name = name.rpartition("/")[0]
    for top, below in inner.items():
        if top in found:  # with all names below it
            found.update(below)
        else:
            at = len(top) + 1
            deeper: set[str] = set()
            names_below = ignored(path / top, [name[at:] for name in below], deeper)
            found.update(f"{top}/{name}" for name in names_below)
            unread.update(f"{top}/{name}" for name in deeper)
    for top, below in blocked.items():
        unread.add(top)
        found.update(below)
    return found & set(names)


class _Git:
    """git, asked about a folder with a git directory of torpor's, which is in ``made``."""

    def __init__(self, program: str, made: str, path: Path) -> None:
        self._program = program
        self._made = made
        self._path = path
        self._settings: list[str] = []
        found = self._repository_around()
        if found is None:
            self._init("sha1")
        else:
            self._take_over(*found)
        work_tree = path if found is None else found[0]
        self._settings += [f"--git-dir={made}/.git", f"--work-tree={work_tree}"]

    def says(self, argv: list[str], stdin: bytes = b"", fine: tuple[int, ...] = (0,)) -> bytes:
        return self._run([*self._settings, *argv], self._path, stdin=stdin, fine=fine)

    def has_unwritten(self) -> bool:
        """Whether the index has .gitignore files that the folder lacks, as in a sparse checkout:
        git reads those from the repository's objects. InvalidInput where these lack one, as in a
        partial clone: a program that the repository names would fetch it."""
        argv = ["ls-files", "-z", "-t", "--stage", "--", ":(top,glob)**/.gitignore"]
        listed = [os.fsdecode(one) for one in self.says(argv).split(b"\0") if one]
        unwritten = [one.split(" ")[2] for one in listed if one.startswith("S ")]
        if unwritten:
            said = self.says(["cat-file", "--batch-check"], "\n".join(unwritten).encode() + b"\n")
            if b" missing\n" in said:
                raise InvalidInput(
                    f"the repository of {self._path} has a .gitignore that is neither "
                    "checked out nor fetched, and may name what is not copied: `git "
                    "sparse-checkout disable` brings it, or add --everything"
                )
        return bool(unwritten)

    def is_repository(self, folder: Path) -> bool:
        """Whether git takes the folder for a repository, or for another work tree of one."""
        return self._resolved(folder) is not None

    def _repository_around(self) -> tuple[Path, Path] | None:
        """The repository that contains the folder, or is it: its work tree and its git
        directory."""
        broken = None
        for above in (self._path, *self._path.parents):
            if not os.path.lexists(above / ".git"):
                continue
            if (found := self._resolved(above)) is not None:
                return above, found
            broken = broken or above / ".git"
            if not broken.is_dir():
                break
        if broken is not None:
            raise InvalidInput(f"git does not read {self._path}: {broken} is no repository")
        return None

    def _resolved(self, folder: Path) -> Path | None:
        if not os.path.lexists(folder / ".git"):
            return None
        asked = ["rev-parse", "--resolve-git-dir", str(folder / ".git")]
        said = self._run(asked, about=folder, fine=(0, 1, 128))
        return folder / os.fsdecode(said[:-1]) if said else None

    def _take_over(self, top: Path, found: Path) -> None:
        """Take over from the repository what decides which files are tracked and which are
        ignored."""
        said = self._read(found, ["rev-parse", "--show-object-format", "--git-common-dir"])
        kind, _, common_dir = os.fsdecode(said).rstrip("\n").partition("\n")
        common = Path(self._made) / common_dir
        self._init(kind)
        ours = Path(self._made) / ".git"
        for one in found.iterdir():
            if (one.name == "index" or one.name.startswith("sharedindex.")) and one.is_file():
                (ours / one.name).symlink_to(one)
        shutil.rmtree(ours / "objects")
        (ours / "objects").symlink_to(common / "objects")
        patterns = self._take_excludes(top, found) + _content(common / "info" / "exclude")
        (ours / "info").mkdir(exist_ok=True)
        (ours / "info" / "exclude").write_bytes(patterns)
        said = self._read(found, ["config", "--null", "--get-regexp", _READ], fine=(0, 1))
        pairs = [os.fsdecode(one).partition("\n") for one in said.split(b"\0") if one]
        for name, newline, value in pairs:  # git uses the last value of a name
            self._settings += ["-c", f"{name}={value if newline else 'true'}"]

    def _take_excludes(self, top: Path, found: Path) -> bytes:
        """Have what `core.excludesFile` is in the user's own settings, which may be of the files
        that they include for this repository; returns what the repository's own file says."""
        asked = ["config", "--null", "--show-scope", "--type=path", "--get-all"]
        said = self._read(found, [*asked, "core.excludesFile"], fine=(0, 1)).split(b"\0")
        files = {
            os.fsdecode(scope) in _OF_THE_REPOSITORY: top / os.fsdecode(file)
            for scope, file in zip(said[::2], said[1::2], strict=False)
        }
        if mine := files.get(False):
            self._settings += ["-c", f"core.excludesFile={mine if mine.is_file() else os.devnull}"]
        return _content(files[True]) + b"\n" if True in files else b""

    def _init(self, kind: str) -> None:
        argv = ["init", "--quiet", "--template=", f"--object-format={kind}", self._made]
        self._run(argv)

    def _read(self, found: Path, argv: list[str], fine: tuple[int, ...] = (0,)) -> bytes:
        """git's answer about the settings of a repository, including the user's own settings for
        it."""
        asked = [f"--git-dir={found}", "--no-pager", *argv]
        return self._run(asked, fine=fine)

    def _run(
        self,
        argv: list[str],
        at: Path | None = None,
        about: Path | None = None,
        stdin: bytes = b"",
        fine: tuple[int, ...] = (0,),
    ) -> bytes:
        named = self._path if about is None else about
        try:
            done = subprocess.run(
                [self._program, *_NOTHING_RUNS, *argv],
                cwd=self._made if at is None else at,
                env=_plain_environment(),
                input=stdin,
                capture_output=True,
                check=False,
                timeout=MOST_S,
            )
        except subprocess.TimeoutExpired:
            raise InvalidInput(
                f"git does not read {named}: no answer within {MOST_S:.0f} s. It waits for ever "
                "where a pipe is in the place of a file, such as .gitignore or .git/HEAD"
            ) from None
        if done.returncode not in fine:
            words = done.stderr.decode(errors="replace").strip()
            raise InvalidInput(f"git does not read {named}: {words}")
        return done.stdout


@contextmanager
def _git(path: Path) -> Iterator[_Git | None]:
    """git for a folder that may be in no repository. None where this host has no git and the folder
    needs none."""
    if (program := programs.found("git")) is None:
        if found := next(path.rglob(".gitignore"), None):
            raise InvalidInput(
                f"{found} says what is not copied, and this host has no `git`, which "
                "reads it: install git, or add --everything"
            )
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="torpor-git-") as made:
        yield _Git(program, made, path)


def _apart(
    git: _Git, path: Path, names: list[str], modules: set[str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The names below repositories in the folder, by repository; and the names below the folder's
    symlinks and below submodules that are not fetched, by symlink or submodule."""
    kinds: dict[str, dict[str, list[str]] | None] = {}
    inner: dict[str, list[str]] = {}
    blocked: dict[str, list[str]] = {}

    def kind_of(above: str) -> dict[str, list[str]] | None:
        if os.path.islink(path / above):
            return blocked
        if git.is_repository(path / above):
            return inner
        return blocked if above in modules else None

    for name in names:
        parts = name.split("/")
        for end in range(1, len(parts)):
            above = "/".join(parts[:end])
            if above not in kinds:
                kinds[above] = kind_of(above)
            if (kind := kinds[above]) is not None:
                kind.setdefault(above, []).append(name)
                break
    return inner, blocked


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _content(file: Path) -> bytes:
    """The content of a file; empty for anything that is no file. A pipe in its place would
    block."""
    return file.read_bytes().removeprefix(_BOM) if file.is_file() else b""


def _plain_environment() -> dict[str, str]:
    """The environment without variables that would have git look at another repository, as they are
    set in a git hook."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _OF_THE_USER
    }
    return kept | {"GIT_OPTIONAL_LOCKS": "0"}
