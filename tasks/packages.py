"""The steps of packages outside of the workspace: a wake puts them back where `environment` is
keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.losses import clean
from torpor.control.remote.restore import RemoteRestore
from torpor.shared.errors import RunCancelled, TorporError
from torpor.shared.values import WorkspaceSpec
from torpor.shared.wire.packages import NotBack, PackagesBack

_NAMED: Final = 10
"""Names in a command; the report has the others."""


def note_packages(opened: OpenWorkspace, restore: RemoteRestore, *, rented: bool) -> None:
    """Have the machine remember the packages of its snapshot before it is handed over: later
    snapshots name them even if this run is killed before they are back. Fails no wake."""
    if opened.spec.environment != "keep":
        return
    try:
        restore.put_packages_back(install=False, rented=rented)
    except RunCancelled:
        raise
    except TorporError as error:
        runner().log.warning("the machine did not note the packages of its snapshot: %s", error)


def put_packages_back(opened: OpenWorkspace, restore: RemoteRestore, *, rented: bool) -> list[str]:
    """Put packages of apt and pip back on a machine that was handed over, where the workspace keeps
    its environment. Returns what came back and what did not, for people. Fails no wake."""
    if opened.spec.environment != "keep":
        return []
    return _put_packages_back(opened.spec, restore, rented)


@step("put packages back", retries=ONCE, says="putting packages of apt and pip back")
def _put_packages_back(spec: WorkspaceSpec, restore: RemoteRestore, rented: bool) -> list[str]:
    try:
        answer = restore.put_packages_back(install=True, rented=rented)
    except TorporError as error:
        words = f"whether packages of apt and pip are back is not known: {error}"
        runner().log.warning("%s", words)
        return [words]
    came = _came(answer)
    lacking = [_not_back(one, spec) for one in answer.not_back]
    for words in came:
        runner().log.info("packages %s", words)
    for words in lacking:
        runner().log.warning("packages %s", words)
    return [*came, *lacking]


def _came(answer: PackagesBack) -> list[str]:
    found = []
    if answer.back:
        found.append(f"back: {_names(answer.back, answer.back_count)}")
    if answer.other:
        found.append(f"there in another version: {_names(answer.other, answer.other_count)}")
    return found


def _not_back(found: NotBack, spec: WorkspaceSpec) -> str:
    """What is missing, why, and what its user may type."""
    names = " ".join(clean(name) for name in found.names[:_NAMED])
    install = "apt-get install" if found.kind == "apt" else "python3 -m pip install"
    return (
        f"not back: {_names(found.names, found.count)} ({clean(found.kind)}): {clean(found.why)}. "
        f"To install them: `torpor ssh {spec.name}`, and there `{install} {names}`"
    )


def _names(names: Sequence[str], count: int) -> str:
    more = max(0, count - len(names))
    return ", ".join(map(clean, names)) + (f", and {more} more" if more else "")
