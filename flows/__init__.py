"""The use cases, one file each: order, retries and state.

from flows import hibernate, wake
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from torpor.control.own_packages import check_own_packages

check_own_packages()

from tasks.error_output import install

install()

if TYPE_CHECKING:
    from flows.adopt import adopt
    from flows.backup import backup
    from flows.benchmark import benchmark
    from flows.cancel_job import cancel_job
    from flows.compare import compare
    from flows.create import create
    from flows.delete_snapshots import delete_snapshots
    from flows.deploy import deploy
    from flows.diff import diff
    from flows.hibernate import hibernate
    from flows.job import job
    from flows.job_status import job_status
    from flows.jobs import jobs
    from flows.pin import pin
    from flows.procedures.listing import (
        frame,
        list_differences,
        list_entries,
        list_kept,
        list_machines,
        list_snapshots,
        list_versions,
    )
    from flows.prune import prune
    from flows.reconcile import reconcile
    from flows.replicate import replicate
    from flows.restore_path import restore_path
    from flows.snapshots import snapshots
    from flows.spend import spend
    from flows.sync import sync
    from flows.verify import verify
    from flows.wake import wake
    from flows.watch import watch

__all__ = [
    "adopt",
    "backup",
    "benchmark",
    "cancel_job",
    "compare",
    "create",
    "delete_snapshots",
    "deploy",
    "diff",
    "frame",
    "hibernate",
    "job",
    "job_status",
    "jobs",
    "list_differences",
    "list_entries",
    "list_kept",
    "list_machines",
    "list_snapshots",
    "list_versions",
    "pin",
    "prune",
    "reconcile",
    "replicate",
    "restore_path",
    "snapshots",
    "spend",
    "sync",
    "verify",
    "wake",
    "watch",
]

_LISTING: Final = frozenset(name for name in __all__ if name == "frame" or name.startswith("list_"))


class _Flows(ModuleType):
    """Imports each flow when it is first used: a run needs only one, and importing all takes 2 s of
    CPU."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "procedures.listing" if name in _LISTING else name
        return getattr(import_module(f"{__name__}.{module}"), name)

    def __setattr__(self, name: str, value: object) -> None:
        """Keep ``flows.wake`` the flow: importing the submodule of that name would replace it by
        the module."""
        if isinstance(value, ModuleType) and name in __all__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Flows
