"""The steps of packages outside of the workspace: a wake puts them back where `environment` is
keep."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.losses import clean
from torpor.control.remote.restore import RemoteRestore
from torpor.shared.errors import RunCancelled, TorporError
from torpor.shared.values import WorkspaceSpec
from torpor.shared.wire.packages import NotBack, PackagesBack


def put_packages_back(opened: OpenWorkspace, restore: RemoteRestore, *, rented: bool) -> list[str]:
    """Put packages of apt and pip back before a machine is handed over, where the workspace keeps
    its environment. Returns what came back and what did not, for people. Fails no wake."""
    if opened.spec.environment != "keep":
        return []
    return _put_packages_back(opened.spec, restore, rented)


@step("put packages back", retries=ONCE, says="putting packages of apt and pip back")
def _put_packages_back(spec: WorkspaceSpec, restore: RemoteRestore, rented: bool) -> list[str]:
    try:
        answer = restore.put_packages_back(rented=rented)
    except RunCancelled:
        raise
    except TorporError as error:
        words = f"whether packages of apt and pip are back is not known: {error}"
        runner().log.warning("%s", words)
        return [words]
    came = _came(answer)
    lacking = list(map(_not_back, answer.not_back))
    if lacking:
        lacking.append(f"to install others by hand: `torpor ssh {spec.name}`")
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


def _not_back(found: NotBack) -> str:
    """What is missing, and why."""
    names = _names(found.names, found.count)
    return f"not back: {names} ({clean(found.kind)}): {clean(found.why)}"


def _names(names: Sequence[str], count: int) -> str:
    more = max(0, count - len(names))
    return ", ".join(map(clean, names)) + (f", and {more} more" if more else "")
