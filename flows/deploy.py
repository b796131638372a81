"""Deploy: from a stack and a workspace to a server that has answered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blocks import Stack, Workspace
from flows.procedures.deploy.deployment import DeployRequest, DeployTrial, deployment_on_a_machine
from flows.procedures.rounds import rounds
from tasks.deploy import expire_unused_bases, open_stack
from tasks.flow import flow
from tasks.machines import machines_of
from tasks.ownership import check_owner
from tasks.phases import phase_named_in_errors
from tasks.restore import NEWEST
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.deploy.report import DeployReport
from torpor.control.deploy.stack import Stack as OpenStack
from torpor.control.deploy.stack import StrategyName, strategy_named
from torpor.control.store.manifests import newest_snapshot
from torpor.shared.errors import InvalidInput, RestoreUnfinished, StartedTooEarly
from torpor.shared.values import WantChange


@flow("deploy")
def deploy(
    workspace: Workspace | str,
    stack: Stack | str,
    strategy: StrategyName = "stored",
    snapshot: str = NEWEST,
    full_check: bool = True,
    environment_days: Annotated[float, Field(ge=1, le=3660)] = 30.0,
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    agreed_usd_h: Annotated[float | None, Field(ge=0)] = None,
) -> DeployReport:
    """Start a server on the workspace's machine, or on a new one, and wait until it answers.

    A new machine is handed over after that, and destroyed if anything fails before. You reach the
    server through SSH; no port is opened.

    Args:
        workspace: The Workspace block to deploy on, or its name.
        stack: The Stack block to deploy, or its name.
        strategy: How the software gets onto the machine. official: the official image has it.
            setup: that image, and the setup command at each start. own: an image of your own has
            it. stored: the environment comes from the store; the first deploy makes and stores it.
        snapshot: The workspace's snapshot for a new machine: its id, or newest.
        full_check: Read and hash every restored byte before the server starts.
        environment_days: Delete stored environments that no deploy has used for so many days.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            restore on a new machine all the same. Without them such a snapshot is refused.
        agreed_usd_h: What a new machine may come to by the hour, in USD, as a person has agreed.
            Empty: nobody was asked, and the limit of the block holds.

    Returns:
        The machine, the server's port, and in `seconds` how long each phase took. `forward` is
        the SSH command that brings the port to this host.

    Raises:
        DeployFailed: A command failed, the server did not become ready, or it gave a wrong answer.
        InvalidInput: The stack has no model, image or command for this strategy.
        NoOffer: Nothing on sale fits the workspace.
        BudgetExceeded: A budget cannot pay for an hour of the machine.
        SnapshotDamaged: The stored environment is damaged; the next deploy makes a new one.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Start a stack on the cheapest machine:
        ```python
        from flows import deploy

        report = deploy("mywork", "vllm")
        print(report.from_rental_s, report.forward)
        ```
    """
    with phase_named_in_errors("the deploy failed"):
        opened = open_workspace(workspace).accepting(accept_paths)
        opened = opened.wanting(WantChange(agreed_usd_h=agreed_usd_h))
        wanted = open_stack(stack)
        wanted.check(strategy_named(strategy))
        probe_store(opened)
        check_owner(opened)
        if strategy != "own":  # the image of the strategy `own` may have the model
            _check_model(opened, wanted)
        report = deploy_stack(opened, wanted, strategy, snapshot, full_check)
    expire_unused_bases(opened, environment_days)
    return report


def _check_model(opened: OpenWorkspace, stack: OpenStack) -> None:
    """InvalidInput where a new machine would have no model to serve. Called before anything is
    rented."""
    if not stack.needs_model_there or newest_snapshot(opened.store, opened.spec.name):
        return
    if not machines_of(opened).machines:
        raise InvalidInput(
            f"stack {stack.name} serves {stack.model_path} of the workspace and fetches no model, "
            f"and workspace {opened.spec.name} has no snapshot with one: put a model there first "
            f"(`torpor create {opened.spec.name}`), or fill in `fetch` of the stack. Nothing was "
            "rented"
        )


def deploy_stack(
    opened: OpenWorkspace,
    stack: OpenStack,
    strategy: StrategyName,
    snapshot: str = NEWEST,
    full_check: bool = True,
    trial: DeployTrial | None = None,
) -> DeployReport:
    """Deploy on the workspace's machine, or on a new one. If the machine that a killed run left
    holds an unfinished restore of another snapshot, it is destroyed, and a second round rents
    another one. A second round also follows where the server has started too early
    (StartedTooEarly); in that round it starts last."""
    for number, again in enumerate(rounds(2, RestoreUnfinished, StartedTooEarly)):
        request = DeployRequest(stack, strategy, full_check, trial, early=not number)
        with again, deployment_on_a_machine(opened, request, snapshot) as deployment:
            deployment.stop_earlier()
            deployment.bring()  # environment and workspace, at the same time
            deployment.serve()  # unless the server runs already: it needs only what comes first
            deployment.store_environment()  # unless the environment was restored from the store
            deployment.hand_over()
    return deployment.report()
