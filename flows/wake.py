"""Wake: restore a snapshot on a machine."""

from __future__ import annotations

from blocks import Workspace
from flows.procedures.phases import Phases
from flows.procedures.wake import wake_workspace
from tasks.flow import flow
from tasks.opening import open_workspace, probe_store
from tasks.restore import NEWEST
from tasks.runner import runner
from torpor.control.reports import WakeReport


@flow("wake")
def wake(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    machine: str = "",
    full_check: bool = True,
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> WakeReport:
    """Restore a workspace on a new machine, byte for byte.

    A wake that fails destroys the machine that it created. The snapshot is only read.

    Args:
        workspace: The Workspace block to wake, or its name.
        snapshot: The snapshot's id, or newest.
        machine: user@host:port of a machine of your own to wake on. Empty: rent one.
        full_check: Read and hash every restored byte at the end, not names and attributes only.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            restore all the same. Without them such a snapshot is refused.
    """
    phases = Phases()
    with phases.phase("prepare"):
        opened = open_workspace(workspace).accepting(accept_paths)
        probe_store(opened)
    report = wake_workspace(opened, phases, snapshot, machine, full_check)
    runner().table(
        key=f"wake-{opened.spec.name}",
        rows=report.rows(),
        description=f"Workspace {opened.spec.name} woken from {report.snapshot}",
    )
    return report
