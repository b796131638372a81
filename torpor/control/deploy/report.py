"""What a deploy did, for people."""

from __future__ import annotations

import msgspec

from torpor.control.reports import Row, WorkspaceReport
from torpor.shared.values import MachineId, SnapshotId


class DeployReport(WorkspaceReport, frozen=True):
    """A server that has answered, on a machine that is the user's. ``seconds``: wall time by phase;
    ``within``: of what happened at the same time in the phase `restore`. ``from_rental_s`` and
    ``from_ssh_s``: until the first completion; None without a rental."""

    stack: str
    strategy: str
    snapshot: SnapshotId | None
    environment: str
    machine: MachineId
    host: str
    port: int
    user: str
    server_port: int
    log: str
    seconds: dict[str, float]
    within: dict[str, float]
    from_rental_s: float | None
    from_ssh_s: float
    price_usd_h: float
    warnings: list[str] = msgspec.field(default_factory=list)

    @property
    def forward(self) -> str:
        """The command that makes the server reachable on the user's own computer, where `torpor
        ssh --setup` has told OpenSSH the names of workspaces."""
        ports = f"{self.server_port}:127.0.0.1:{self.server_port}"
        return f"ssh -N -L {ports} {self.workspace}"

    def title(self) -> str:
        return f"Stack {self.stack} on workspace {self.workspace}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns; at most ten rows, which is a page in the UI."""
        rental = "no machine was rented"
        if self.from_rental_s is not None:
            rental = f"{self.from_rental_s:.1f} s from the rental"
        values = {
            "address": f"http://127.0.0.1:{self.server_port}, after the next command",
            "forward": f"{self.forward} (after `torpor ssh --setup`, once)",
            "log in": f"torpor ssh {self.workspace}",
            "machine": f"{self.machine}, {self.price_usd_h:.2f} $ an hour",
            "strategy": self.strategy,
            "environment": self.environment,
            "snapshot": self.snapshot or "the workspace was not restored",
            "first completion": f"{rental}, {self.from_ssh_s:.1f} s from SSH",
            "seconds by phase": _seconds(self.seconds | self.within),
            "server's log": "; ".join([self.log, *self.warnings]),
        }
        return [{"what": what, "value": value} for what, value in values.items()]


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
