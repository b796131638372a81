"""What an upgrade during a running job needs: supervisors of older bundles hold grants of their own
and save the workspace by themselves. They give both up, and their commands go on.

Delete this file, the call of ``end_their_saves`` in ``start_job``, OWN_MARK in
``processes._of_supervisor``, and what ``JobFolder._told`` takes of the supervisor's state, once no
job of an older bundle can run.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torpor.machine.agent.call import Call
from torpor.machine.agent.processes import ask
from torpor.machine.sampler.save_lock import end_save
from torpor.machine.supervisor.folder import JobFolder, Kept, job_folders
from torpor.shared.errors import MachineError
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.protocol import encode_line

_NO_GRANTS: Final[dict[str, Any]] = {
    **{of: [] for of in ("roots", "exclude", "accepted", "known", "lost", "saves", "packs")},
    "save_argv": [],
    "compression": {},
    "key": None,
    "parent": None,
    "save_timeout_s": 0.0,
}


def end_their_saves(workspace: WorkspaceName, call: Call) -> None:
    """End all saves of older supervisors except a running save after a notice. MachineError where
    one may go on."""
    for folder, kept in _that_save(call.home, workspace):
        args = {"job": folder.job, "workspace": workspace, **_NO_GRANTS}
        line = encode_line({"id": call.request_id, "op": "job.standby", "args": args})
        said = None
        with suppress(OSError), folder.connect() as peer:
            said = ask(peer, line)
        if (said is None or said.error is not None) and kept.supervisor.lives:
            raise MachineError(
                f"the supervisor of job {folder.job} is of an older torpor and keeps its grants to "
                f"save workspace {workspace}: try again, or stop the job"
            )
        end_save(call.home, workspace)


def older_that_saves(home: Path, workspace: WorkspaceName) -> str:
    """The job whose older supervisor saves the workspace; empty where there is none."""
    return next((folder.job for folder, _ in _that_save(home, workspace)), "")


def _that_save(home: Path, workspace: WorkspaceName) -> list[tuple[JobFolder, Kept]]:
    """The older supervisors that save, except those whose command is frozen: they save nothing, and
    would leave without grants."""
    found = []
    for folder in job_folders(home):
        with suppress(MachineError, OSError):  # what cannot be read cannot be known
            kept = folder.read()
            if kept is None or not kept.supervisor.lives or kept.state.frozen:
                continue
            if _has_grants(folder, workspace):
                found.append((folder, kept))
    return found


def _has_grants(folder: JobFolder, workspace: WorkspaceName) -> bool:
    """Whether an older supervisor has written that it got grants, and has not written that it has
    none."""
    try:
        kept = json.loads((folder.path / "state").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(kept.get("saves") == workspace and kept.get("saves_until_unix") != 0)
