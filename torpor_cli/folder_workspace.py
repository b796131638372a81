"""The workspace of a folder on this host: its name, its block, and who uses it now."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torpor.control.own_server import state_folder
from torpor.shared.errors import InvalidInput, WorkspaceBusy
from torpor.shared.values import workspace_name
from torpor_cli.torpor_yaml import TorporYaml

if TYPE_CHECKING:
    from blocks import Workspace

MACHINE_ID: Final = Path("/etc/machine-id")
_MOST_WORDS: Final = 40
"""Characters of a workspace's name that come from its folder's name."""
_SYSTEM: Final = re.compile(
    r"/(bin|boot|dev|etc|lib(32|64)?|media|mnt|opt|proc|run|sbin|srv|sys|tmp|usr|var(/tmp)?)?"
)
"""Folders of the system, which are no projects. A folder below one of these may be one."""
TAKEN: Final = (
    "store",
    "provider",
    "more_providers",
    "identity",
    "max_price_usd_h",
    "regions",
    "project",
    "idle",
    "when_idle",
    "tuning",
)
"""The settings that a new workspace takes from another one: where it is stored, and where and at
what price machines are rented. What to run, and on which GPU, belongs to the folder."""


def checked_folder(folder: Path) -> Path:
    """The folder, without symlinks in its path; InvalidInput for one that is no project, such as a
    home: all that it holds would be sent to a rented machine, keys and letters too, or a machine
    would write into it what programs of this host read."""
    folder = folder.resolve()
    home = Path.home().resolve()
    own = state_folder()
    if own in (folder, *folder.parents):
        raise InvalidInput(f"{folder} is torpor's own, with keys of stores: no machine gets it")
    if folder == home or folder in home.parents or _SYSTEM.fullmatch(str(folder)):
        what = "your home" if folder == home else "no folder of a project"
        raise InvalidInput(
            f"{folder} is {what}. `torpor run` or `push` sends all that it holds to a rented "
            "machine, and `pull` lets a machine write any file of it: change into the folder of "
            "your project, or name it. `torpor cp` copies single files and directories"
        )
    return folder


def name_for(folder: Path) -> str:
    """The name of the workspace of a folder: train-1f0c2b7a. The name is the same each time for one
    folder of one host, and differs for other folders of this name and for other hosts."""
    words = re.sub(r"[^a-z0-9]+", "-", folder.name.lower())[:_MOST_WORDS].strip("-") or "folder"
    host = ""
    with suppress(OSError):
        host = MACHINE_ID.read_text().strip()
    of = f"{host or socket.gethostname()}\0{folder}"
    return f"{words}-{hashlib.sha256(os.fsencode(of)).hexdigest()[:8]}"


@contextmanager
def held(name: str) -> Iterator[None]:
    """Hold a workspace against another `torpor run` on this host. WorkspaceBusy where another one
    runs. The hold ends with this process, however that ends."""
    runs = state_folder() / "runs"
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file is not removed: otherwise two processes could hold the name, each by a file of its
    # own.
    file = os.open(runs / workspace_name(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.pread(file, 20, 0).decode(errors="replace").strip()
            raise WorkspaceBusy(
                f"another `torpor run` of workspace {name} runs on this host, as process {process}:"
                " wait until it has ended, or press Ctrl-C where it runs"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)


def block_for(name: str, project: TorporYaml) -> tuple[Workspace, bool]:
    """The block of the workspace, and whether it is new: then it is not saved yet. InvalidInput
    where a saved one differs from torpor.yaml, which changes no block."""
    from blocks import Workspace
    from blocks.reference import saved_names

    if name not in saved_names(Workspace):
        return _new_block(name, project), True
    block = Workspace.of(name)
    resources = project.settings.resources
    for setting in type(resources).model_fields:
        # a setting of each rental, not of the workspace
        if setting not in resources.model_fields_set or setting == "gpu":
            continue
        wanted, now = getattr(resources, setting), getattr(block, setting)
        if wanted != now:
            raise InvalidInput(
                f"{project.at('resources', setting)}: {setting} is {_shown(wanted)} there and "
                f"{_shown(now)} in workspace {name}. `torpor edit {name} "
                f"{_edits(setting, wanted)}` changes the workspace"
            )
    return block, False


def _edits(setting: str, value: Any) -> str:
    if isinstance(value, list) and value:
        return shlex.join(f"{setting}={one}" for one in value)
    return shlex.quote(f"{setting}={'' if value in (None, []) else value}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "empty"
    return "empty" if value in (None, "") else str(value)


def _new_block(name: str, project: TorporYaml) -> Workspace:
    from blocks import Workspace
    from torpor_cli import setup

    settings = project.settings
    other = Workspace.of(settings.like) if settings.like else _only_one()
    taken = {one: getattr(other, one) for one in TAKEN}
    resources = settings.resources
    taken |= {one: getattr(resources, one) for one in resources.model_fields_set}
    block: Workspace = setup.made(
        lambda: Workspace(name=name, paths=[setup.usual_path(other.provider)], **taken)
    )
    return block


def _only_one() -> Workspace:
    """The saved workspace whose store and market a new one takes if the user names none. All saved
    workspaces must agree in these. The workspace of `torpor demo` counts only where there is no
    other."""
    from blocks import Workspace
    from blocks.reference import saved_names
    from deployments.register import DEMO

    names = saved_names(Workspace)
    found: list[Workspace] = []
    unread: list[str] = []
    for name in sorted({*names} - {DEMO}) or sorted({*names}):
        try:
            found.append(Workspace.of(name))
        except InvalidInput:
            unread.append(name)
    if not found:
        raise InvalidInput(
            "no workspace names a store and a market yet: `torpor init mywork` asks for both, and "
            "`torpor run` takes them from there"
        )
    first = found[0]
    differ = any(getattr(one, key) != getattr(first, key) for one in found for key in TAKEN)
    if differ or unread:
        names = sorted({*names})
        raise InvalidInput(
            "your workspaces differ in their store, market or highest price: name the one whose "
            f"settings this folder takes, as `like: {names[0]}` in torpor.yaml, or name one to use "
            f"with --workspace. There are {', '.join(names)}"
        )
    return first
