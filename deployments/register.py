"""What an installation needs on its Prefect server: block types, blocks, pools, deployments.

Run by ``make up`` as a process of its own, because Prefect reads its settings when it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import yaml
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import SyncClientContext
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.states import Cancelled, Scheduled
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker
from pydantic import SecretStr

from blocks import (
    PROVIDERS,
    Budget,
    Idleness,
    LocalProvider,
    ObjectStore,
    SSHIdentity,
    Stack,
    Tuning,
    Workspace,
)
from blocks.reference import load_named, saved_names
from deployments import idle
from deployments.first_machine import make_demo, revive
from deployments.installation import (
    BELIEVE,
    BELIEVE_HELP,
    CHECKOUT,
    Installation,
    code_version,
    prefect_file,
    secret_file,
)
from deployments.older_parameters import renew_parameters
from deployments.parent import see_that_they_run
from deployments.record_signing import sign_stores
from deployments.schedules import OFFERED, WATCH, offer_schedules
from deployments.stacks import ready_made
from deployments.worker import POOLS, RUN_COMMAND, WATCH_COMMAND
from deployments.written import Written
from tasks.front_page import make_front_page
from tasks.overview import watching
from tasks.own_deployments import is_own, refusal
from tasks.prefect_alerts import PrefectAlerts
from torpor.control.front_page import first_page
from torpor.control.own_server import choose_server
from torpor.control.store import embedded
from torpor.control.supervision import STORE, trouble_of
from torpor.shared.errors import InvalidInput, TorporError

DEMO: Final = "demo"
EMBEDDED: Final = "embedded"
"""The credentials block of the embedded store. torpor serves the store of a block that names these
credentials."""
BUCKET: Final = "torpor"
TYPES: Final[tuple[type[Block], ...]] = (
    ObjectStore,
    SSHIdentity,
    *PROVIDERS,
    Workspace,
    Idleness,
    Tuning,
    Budget,
    Stack,
)
"""torpor's own block types."""
KEYS: Final = "aws-credentials"
"""The block type of the embedded store's key. prefect_aws, which has it, is slow to import."""
_PAGE: Final = 200  # the most rows in one answer of the API
_WAITING: Final = ("Scheduled", "Late", "AwaitingConcurrencySlot")
"""States of runs that a worker has yet to take from a queue."""
MOST_CANCELLED: Final = 1000
"""Late runs of schedules that one registration cancels at most: each takes a request. `watch` makes
720 runs a day."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Register everything that is missing, and name what is made again. Existing blocks belong to
    the user and stay."""
    parser = argparse.ArgumentParser(prog="python -m deployments.register")
    parser.add_argument(BELIEVE, action="store_true", help=BELIEVE_HELP)
    options = parser.parse_args(arguments)
    installation = Installation.here()
    try:
        with SyncClientContext.get_or_create():  # each further client would read all certificates
            _register(installation, options.believe_records)
    except TorporError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _register(installation: Installation, believe: bool) -> None:
    again = installation.store_key_file.exists()  # the installation has registered before
    with get_client(sync_client=True) as client:
        api_url = str(client.api_url)
    found, _ = own_deployments()  # checked before anything is changed
    written = Written.read(installation, api_url)
    same = bool(found) and all(written.holds(name, one) for name, one in found.items())
    if not same or _lacks_types():
        register_types()
    made = make_first_blocks(installation)
    mended = serve_store(installation)
    signed = sign_stores() if believe else []
    made += make_pools()
    deployed = deploy(installation, written)
    if not same or deployed.made:
        Written.keep(installation, api_url, own_deployments()[0])
    offer_schedules()
    if again:
        _say(made + deployed.made, "it was missing, and was made")
        _choose_again(installation, deployed)
    _say(deployed.moved, "is run by our workers again: its work pool or queue was deleted")
    _say(deployed.asked_again, "the first one waited in a deleted work queue")
    _say(mended, "it has the store's own keys again, which lie in the installation's folder")
    _note(signed)
    first_machine(installation)
    _make_page()


def _make_page() -> None:
    """Make torpor's page in the UI. Nothing depends on it: a server that does not take the page
    delays no start."""
    try:
        coming = watching(PrefectAlerts().coming())
        make_front_page(first_page(sorted(saved_names(Workspace)), coming))
    except Exception as error:  # noqa: BLE001 - whatever the server's client raises
        _note([f"torpor's page in the UI was not made: {error}"])


def _say(what: list[str], how: str) -> None:
    _note([f"{one}: {how}" for one in what])


def _note(lines: list[str]) -> None:
    for line in lines:
        print(f"  note      {line}")


def _choose_again(installation: Installation, deployed: Deployed) -> None:
    """Restore what becomes of idle machines, which the installation keeps, too: a deployment that
    was lost has lost its schedules."""
    chosen = idle.chosen(installation)
    for name in deployed.made:
        if name == f"deployment {WATCH}" and chosen:
            idle.choose(installation, chosen)
        elif name.partition(" ")[2] in [one.deployment for one in OFFERED]:
            print(f"  note      the schedule of {name} is off: switch it on in the UI if it was on")


def register_types() -> None:
    """Add or update the block types, so that the UI offers them."""
    from prefect_aws.credentials import AwsCredentials

    kinds: list[type[Block]] = [*TYPES, AwsCredentials]
    for kind in kinds:
        kind.register_type_and_schema()


def _lacks_types() -> bool:
    with get_client(sync_client=True) as client:
        there = {one.slug for one in client.read_block_types()}
    return not there >= {KEYS, *(kind.get_block_type_slug() for kind in TYPES)}


def make_first_blocks(installation: Installation) -> list[str]:
    """Make a first identity, provider, store and workspace, and the ready-made stacks, where they
    are missing; returns what was made."""
    made = []
    # Another server's key belongs to its users.
    choice = choose_server(installation.folder, connected=False)
    own = choice is not None and choice.taken.source == "installation"
    if not exists(SSHIdentity, "default"):
        (first_identity(installation) if own else SSHIdentity.generate()).save("default")
        made.append("block ssh-identity/default")
    elif (identity := load_identity()) is not None:
        if own:
            keep_identity(installation, identity)
        put_on_record(identity)
    if not exists(LocalProvider, "default"):
        LocalProvider(folder=str(installation.machines)).save("default")
        made.append("block local-provider/default")
    if not exists(KEYS, EMBEDDED):
        save_keys(installation)
        made.append(f"block aws-credentials/{EMBEDDED}")
    if not exists(ObjectStore, "default"):
        ObjectStore(
            flavour="seaweedfs",
            bucket=BUCKET,
            credentials=f"aws-credentials/{EMBEDDED}",
            endpoint_url="http://127.0.0.1:8333",  # replaced when serve_store knows the port
            encryption_key=first_key(installation),
        ).save("default")
        made.append("block object-store/default")
    if not exists(Workspace, DEMO):
        Workspace(name=DEMO).save(DEMO)
        made.append(f"block workspace/{DEMO}")
    return made + make_stacks()


def make_stacks() -> list[str]:
    """Make the ready-made stacks that are missing; returns what was made."""
    missing = {name: stack for name, stack in ready_made().items() if not exists(Stack, name)}
    for name, stack in missing.items():
        stack.save(name)
    return [f"block stack/{name}" for name in missing]


def first_identity(installation: Installation) -> SSHIdentity:
    """The first SSH identity; the same where only the block is lost, because machines that are
    awake know no other."""
    file = installation.identity_file
    new = not file.exists()
    key = secret_file(file, lambda: SSHIdentity.generate().private_key.get_secret_value())
    if new:
        print(f"  note      the SSH identity is new: {file} keeps it")
        if installation.store_key_file.exists():  # not the first registration
            print("            a machine that knows the earlier one lets only that one in")
    block = SSHIdentity(private_key=SecretStr(key))
    block.on_record = block.is_generated
    return block


def load_identity() -> SSHIdentity | None:
    """The first SSH identity; None for a damaged block, which is named."""
    try:
        return load_named(SSHIdentity, "default", of="make up")
    except InvalidInput as error:
        print(f"  note      {error}")
        return None


def put_on_record(block: SSHIdentity) -> None:
    """Have the bucket keep this key, which a version before `torpor recover` has made, as it keeps
    that of a new installation. A key that its user has kept out of the bucket stays out."""
    if block.is_generated and "on_record" not in block.model_fields_set:
        block.on_record = True
        block.save(str(block._block_document_name), overwrite=True)
        print("  note      the private key of ssh-identity/default is kept in the bucket from now")
        print("            on, sealed with the key of the store, for `torpor recover` on another")
        print("            host. Keep in the bucket, in that block, takes it out again")


def keep_identity(installation: Installation, block: SSHIdentity) -> None:
    """Keep the block's key in the installation's file, and an earlier one beside it. A key with a
    passphrase is its user's, who has it."""
    file = installation.identity_file
    key = block.private_key.get_secret_value()
    if block.passphrase is not None or (file.exists() and file.read_text().strip() == key.strip()):
        return
    if file.exists():
        file.rename(file.with_name(f"{file.name}.before"))
    secret_file(file, lambda: key)


def first_key(installation: Installation) -> SecretStr:
    """The key of the first store block; the same where only the database is lost."""
    key = secret_file(
        installation.store_key_file, lambda: ObjectStore.new_encryption_key().get_secret_value()
    )
    return SecretStr(key)


def save_keys(installation: Installation) -> None:
    """Make the block of the embedded store's keys, which lie in the store's folder."""
    from prefect_aws.credentials import AwsCredentials

    access_key, secret_key = embedded.set_up(installation.store)
    AwsCredentials(aws_access_key_id=access_key, aws_secret_access_key=SecretStr(secret_key)).save(
        EMBEDDED, overwrite=True
    )


def serve_store(installation: Installation) -> list[str]:
    """See that the embedded store can be used, if the default store block names it; returns what
    was put right. The supervisor starts it once its folder has keys."""
    block, folder = load_named(ObjectStore, "default", of="make up"), installation.store
    if block.credentials != f"aws-credentials/{EMBEDDED}":
        return []
    settings = block.reach()  # the store may not run yet
    found = settings.access_key, settings.secret_key
    changed = embedded.set_up(folder, first=found) != found
    if changed:
        save_keys(installation)
    see_that_they_run(installation, [STORE], embedded.READY_S)
    endpoint_url = embedded.endpoint_of(folder)
    if block.endpoint_url != endpoint_url:
        block.endpoint_url = endpoint_url
        block.save("default", overwrite=True)
    embedded.make_bucket(
        folder,
        block.reach(),
        wait_s=embedded.READY_S,
        hopeless=lambda: trouble_of(installation.folder, STORE),
    )
    return [f"block aws-credentials/{EMBEDDED}"] if changed else []


def make_pools() -> list[str]:
    """Create the process work pools that run the deployments, and their queues, where they are
    missing; returns what was made. Those that exist get a command if they have none; all else
    belongs to the user. InvalidInput where a pool of our name runs no processes."""
    made = []
    with get_client(sync_client=True) as client:
        for pool in POOLS:
            wanted = WorkPoolCreate(
                name=pool.name,
                type="process",
                base_job_template=with_command(ProcessWorker.get_default_base_job_template()),
                description=pool.description,
                concurrency_limit=pool.limit,
            )
            try:
                client.create_work_pool(wanted)
                made.append(f"work pool {pool.name}")
            except ObjectAlreadyExists:
                found = client.read_work_pool(pool.name)
                if found.type != wanted.type:
                    raise InvalidInput(
                        f"the work pool {pool.name} at {client.api_url} is somebody else's: its "
                        f"type is {found.type}, and torpor's is process. Give torpor a Prefect "
                        "server of its own, or ask its owner to name it otherwise"
                    ) from None
                there = found.base_job_template
                template = with_command(deepcopy(there))
                if template != there:
                    client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=template))
            for priority, queue in enumerate(pool.queues, 1):
                with contextlib.suppress(ObjectAlreadyExists):
                    client.create_work_queue(queue, priority=priority, work_pool_name=pool.name)
                    made.append(f"work queue {queue} of {pool.name}")
    return made


def with_command(template: dict[str, Any]) -> dict[str, Any]:
    """The job template of a pool, with a command for its runs if it has none of its user's. Without
    one, Prefect imports itself twice for each run, once to find out the command: 3 s. A run gets a
    session of its own, as without one, so that signals to its worker do not reach it."""
    command = template.get("variables", {}).get("properties", {}).get("command", {})
    if command and command.get("default") in (None, "", WATCH_COMMAND):
        command["default"] = RUN_COMMAND
    return template


@dataclass
class Deployed:
    """What deploy() did, in names: deployments that were made, those that had lost their pool or
    queue, and runs that waited in a pool or queue that is gone."""

    made: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    asked_again: list[str] = field(default_factory=list)


def deploy(installation: Installation, written: Written | None = None) -> Deployed:
    """Deploy what prefect.yaml names and the server lacks. What the server has as it was
    ``written`` stays. Of a deployment that is there, only what belongs to the code changes: Prefect
    would reset all that its user has set, such as a pause, and a kill before that could be set
    again would lose it. A parameter that a flow no longer has is removed from each of the flow's
    deployments, also from the user's own ones. InvalidInput, and nothing is changed, where a
    deployment with one of torpor's names is somebody else's."""
    content: dict[str, Any] = yaml.safe_load(prefect_file().read_text())
    done, missing, ids, schemas = Deployed(), [], [], {}
    found, users, of_this_code = *own_deployments(), code_version()
    with get_client(sync_client=True) as client, contextlib.chdir(CHECKOUT):
        for one in content["deployments"]:
            name = _full_name(one)
            one["version"] = of_this_code  # `torpor connect` compares the version
            if name == WATCH:
                ours = {**one.get("parameters", {}), "metrics": str(installation.metrics)}
                one["parameters"] = ours
                variables = {"command": WATCH_COMMAND}
                one["work_pool"] = {**one["work_pool"], "job_variables": variables}
            there = found.get(name)
            if there is None:
                missing.append(one)
                done.made.append(f"deployment {name}")
                continue
            ids.append(there.id)
            if written and written.holds(name, there) and not _lacks(one, there):
                schemas[one["entrypoint"]] = there.parameter_openapi_schema or {}
                continue
            changes = _of_the_code(one, there)
            client.update_deployment(there.id, changes)
            schemas[one["entrypoint"]] = changes.parameter_openapi_schema or {}
            if there.work_pool_name is None:
                done.moved.append(f"deployment {name}")
        # made by `prefect deploy` of torpor's flows, as the guide says
        for name, there in users.items():
            ids.append(there.id)
            if there.work_pool_name is None:
                pool = _pool_of(there, content)
                client.update_deployment(there.id, DeploymentUpdate(**pool))
                done.moved.append(f"deployment {name}")
        for words in renew_parameters(client, schemas):
            print(words)
    if missing:
        _deploy({**content, "deployments": missing})
    with get_client(sync_client=True) as client:
        done.asked_again = ask_again(client, ids)
    return done


def own_deployments() -> tuple[dict[str, DeploymentResponse], dict[str, DeploymentResponse]]:
    """The deployments of prefect.yaml that the server has, and those that its user has made of our
    flows in this checkout, by their full names. InvalidInput where one of the names is taken by
    somebody else."""
    content: dict[str, Any] = yaml.safe_load(prefect_file().read_text())
    wanted = {_full_name(one): str(one["entrypoint"]) for one in content["deployments"]}
    names = sorted({name.partition("/")[0] for name in wanted})
    ours, users, others = {}, {}, {}
    with get_client(sync_client=True) as client:
        by_name = FlowFilter(name=FlowFilterName(any_=names))
        flows = {flow.id: flow.name for flow in client.read_flows(flow_filter=by_name)}
        there: list[DeploymentResponse] = []
        while len(there) % _PAGE == 0:
            page = client.read_deployments(flow_filter=by_name, limit=_PAGE, offset=len(there))
            if not page:
                break
            there += page
        for one in there:
            name = f"{flows[one.flow_id]}/{one.name}"
            if name not in wanted:
                if one.entrypoint in wanted.values() and one.pull_steps == _pull_steps():
                    users[name] = one
            elif is_own(one, wanted[name]):
                ours[name] = one
            else:
                others[name] = one
        if others:
            raise InvalidInput(refusal(others, str(client.api_url)))
    return ours, users


def ask_again(client: SyncPrefectClient, deployments: list[UUID]) -> list[str]:
    """Cancel runs of these deployments that wait in a work queue which was deleted: none would ever
    start. Runs that a person asked for are asked for again, and their names returned; a schedule
    makes its next run itself."""
    asked: list[str] = []
    kept = cancelled = 0
    while deployments:
        page = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=deployments)),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[*_WAITING]))
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_ASC,
            limit=_PAGE,
            offset=kept,
        )
        for run in page:
            of_schedule, words = run.auto_scheduled, ""
            if run.work_queue_id is not None or (of_schedule and cancelled >= MOST_CANCELLED):
                kept += 1
                continue
            if not of_schedule and run.deployment_id is not None:
                again = _ask_for(client, run, run.deployment_id)
                words = f"run {again} was asked for in its place"
                asked.append(f"run {run.name} ({run.id}), of {run.created:%Y-%m-%d %H:%M}: {words}")
            why = f"its work queue was deleted. {words}".strip()
            client.set_flow_run_state(run.id, Cancelled(message=why))
            cancelled += of_schedule
        if len(page) < _PAGE:
            break
    return asked


def _ask_for(client: SyncPrefectClient, run: FlowRun, deployment: UUID) -> UUID:
    """Ask for a run like this one, in the queue of its name; returns its id."""
    of_ours = any(run.work_queue_name in pool.queues for pool in POOLS)
    again = client.create_flow_run_from_deployment(
        deployment,
        parameters=run.parameters,
        name=run.name,
        tags=run.tags,
        idempotency_key=f"again-{run.id}",
        work_queue_name=run.work_queue_name if of_ours else None,
        job_variables=run.job_variables,
        state=Scheduled(scheduled_time=run.expected_start_time),
    )
    return again.id


def _full_name(one: dict[str, Any]) -> str:
    function = one["entrypoint"].rpartition(":")[2]
    return f"{function.replace('_', '-')}/{one['name']}"


def _pool_of(there: DeploymentResponse, content: dict[str, Any]) -> dict[str, Any]:
    """The pool of prefect.yaml for the code that a deployment runs."""
    return next(
        _pool(one) for one in content["deployments"] if one["entrypoint"] == there.entrypoint
    )


def _pool(one: dict[str, Any]) -> dict[str, Any]:
    """The pool and the queue of a deployment in prefect.yaml, as an update names them."""
    pool = one["work_pool"]
    return {
        "work_pool_name": pool["name"],
        "work_queue_name": pool.get("work_queue_name", "default"),
    }


def _pull_steps() -> list[dict[str, Any]]:
    return [{"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}]


def _lacks(one: dict[str, Any], there: DeploymentResponse) -> bool:
    """Whether the deployment's work pool or queue was deleted, or a parameter or job variable that
    torpor gives it is missing."""
    given, variables = one.get("parameters", {}).keys(), _job_variables(one).keys()
    return there.work_pool_name is None or bool(
        given - there.parameters.keys() or variables - there.job_variables.keys()
    )


def _job_variables(one: dict[str, Any]) -> dict[str, Any]:
    """The job variables with which a deployment's runs start."""
    variables: dict[str, Any] = one.get("work_pool", {}).get("job_variables", {})
    return variables


def _of_the_code(one: dict[str, Any], there: DeploymentResponse) -> DeploymentUpdate:
    """The fields of a deployment that a new version of the code changes. A new parameter gets its
    default."""
    flow: Flow[..., Any] = load_flow_from_entrypoint(one["entrypoint"], use_placeholder_flow=False)
    changes: dict[str, Any] = {
        "entrypoint": one["entrypoint"],
        "version": one["version"],
        "description": one["description"],
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "pull_steps": _pull_steps(),
    }
    if there.work_pool_name is None:  # the pool or its queue was deleted
        changes |= _pool(one)
    ours = one.get("parameters", {})
    if ours.keys() - there.parameters.keys():
        changes["parameters"] = {**ours, **there.parameters}
    variables = _job_variables(one)
    if variables.keys() - there.job_variables.keys():
        changes["job_variables"] = {**variables, **there.job_variables}
    return DeploymentUpdate(**changes)


def _deploy(content: dict[str, Any]) -> None:
    """Deploy as `prefect --no-prompt deploy --all` does from this checkout, but in this process,
    which has imported Prefect and the flows already: another process takes 5 s for that."""
    from prefect.cli import app as prefect_command

    said = io.StringIO()
    status: object = None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(content, file)
        file.flush()
        sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file.name]
        with (
            contextlib.chdir(CHECKOUT),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                prefect_command()
            except SystemExit as ended:
                status = ended.code
    if status:
        raise TorporError(
            f"prefect deploy ended with {status} in {CHECKOUT}:\n{said.getvalue()[-4000:]}"
        )


def first_machine(installation: Installation) -> None:
    """Make the workspace `demo` and its machine. An error is only printed, because torpor works
    without them."""
    try:
        for machine in revive(installation):
            print(f"  note      machine {machine.id} had stopped and is served again")
        make_demo(DEMO)
    except TorporError as error:
        print(f"  note      the demo has no machine: {error}")


def exists(kind: type[Block] | str, name: str) -> bool:
    """Whether there is a block of this type, or of the type with this slug, and of this name."""
    slug = kind if isinstance(kind, str) else kind.get_block_type_slug()
    with get_client(sync_client=True) as client:
        try:
            client.read_block_document_by_name(name, slug, include_secrets=False)
        except ObjectNotFound:
            return False
        return True


if __name__ == "__main__":
    sys.exit(main())
