"""What an installation needs on its Prefect server: block types, blocks, pools, deployments.

Run by ``make up`` as a process of its own, because Prefect reads its settings when it is imported.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import sys
import tempfile
from copy import deepcopy
from typing import Any, Final
from urllib.parse import urlsplit

import yaml
from prefect.blocks.core import Block
from prefect.cli import app as prefect_command
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker
from prefect_aws.credentials import AwsCredentials
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
from blocks.reference import load_named
from deployments.first_machine import make_demo, revive
from deployments.installation import CHECKOUT, Installation, prefect_file, secret_file
from deployments.lost_parameters import remove_lost_parameters
from deployments.schedules import WATCH, offer_schedules
from deployments.stacks import ready_made
from deployments.worker import POOLS, RUN_COMMAND
from torpor.control.store.embedded import EmbeddedStore
from torpor.shared.errors import StoreError, TorporError

DEMO: Final = "demo"
EMBEDDED: Final = "embedded"
"""The credentials block of the embedded store. torpor serves a store block that names it."""
BUCKET: Final = "torpor"
KNOCK_S: Final = 2.0


def main() -> int:
    """Register everything that is missing. Existing blocks belong to the user and stay."""
    installation = Installation.here()
    try:
        register_types()
        make_first_blocks(installation)
        serve_store(installation)
        make_pools()
        deploy(installation)
        offer_schedules()
        first_machine(installation)
    except TorporError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def register_types() -> None:
    """Add or update the block types, so that the UI offers them."""
    kinds: list[type[Block]] = [
        ObjectStore,
        SSHIdentity,
        *PROVIDERS,
        Workspace,
        Idleness,
        Tuning,
        Budget,
        Stack,
        AwsCredentials,
    ]
    for kind in kinds:
        kind.register_type_and_schema()


def make_first_blocks(installation: Installation) -> None:
    """Make a first identity, provider, store and workspace, and the ready-made stacks, if they
    are missing."""
    if not exists(SSHIdentity, "default"):
        SSHIdentity.generate().save("default")
    if not exists(LocalProvider, "default"):
        LocalProvider(folder=str(installation.machines)).save("default")
    if not exists(AwsCredentials, EMBEDDED):
        AwsCredentials(
            aws_access_key_id=f"torpor-{secrets.token_hex(8)}",
            aws_secret_access_key=SecretStr(secrets.token_urlsafe(32)),
        ).save(EMBEDDED)
    if not exists(ObjectStore, "default"):
        ObjectStore(
            flavour="seaweedfs",
            bucket=BUCKET,
            credentials=f"aws-credentials/{EMBEDDED}",
            endpoint_url="http://127.0.0.1:8333",  # until serve_store knows the port
            encryption_key=first_key(installation),
        ).save("default")
    if not exists(Workspace, DEMO):
        Workspace(name=DEMO).save(DEMO)
    make_stacks()


def make_stacks() -> None:
    """Make the ready-made stacks that are missing."""
    for name, stack in ready_made().items():
        if not exists(Stack, name):
            stack.save(name)


def first_key(installation: Installation) -> SecretStr:
    """The key of the first store block; the same where only the database is lost."""
    key = secret_file(
        installation.store_key_file, lambda: ObjectStore.new_encryption_key().get_secret_value()
    )
    return SecretStr(key)


def serve_store(installation: Installation) -> None:
    """Start the embedded store, if the default store block names it and it does not run."""
    block = load_named(ObjectStore, "default", of="make up")
    if block.credentials != f"aws-credentials/{EMBEDDED}":
        return
    keys = block.settings()
    if _answers(block, keys.endpoint_url or ""):
        return
    server = EmbeddedStore.start(installation.store, keys.access_key, keys.secret_key, block.bucket)
    block.endpoint_url = server.endpoint_url
    block.save("default", overwrite=True)


def _answers(block: ObjectStore, endpoint_url: str) -> bool:
    """Whether the store can be used. Its own retries would take half a minute if none listens."""
    where = urlsplit(endpoint_url)
    try:
        socket.create_connection((where.hostname or "", where.port or 80), timeout=KNOCK_S).close()
        block.open().probe()
    except (StoreError, OSError):
        return False
    return True


def make_pools() -> None:
    """Create the process work pools that run the deployments, and their queues, if they are
    missing. Those that exist get a command if they have none; all else belongs to the user."""
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
            except ObjectAlreadyExists:
                there = client.read_work_pool(pool.name).base_job_template
                template = with_command(deepcopy(there))
                if template != there:
                    client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=template))
            for priority, queue in enumerate(pool.queues, 1):
                with contextlib.suppress(ObjectAlreadyExists):
                    client.create_work_queue(queue, priority=priority, work_pool_name=pool.name)


def with_command(template: dict[str, Any]) -> dict[str, Any]:
    """The job template of a pool, with a command for its runs if it has none. Without one, Prefect
    imports itself twice for each run, once to find out the command: 3 s. A run gets a session of
    its own, as without one, so that signals to its worker do not reach it."""
    command = template.get("variables", {}).get("properties", {}).get("command", {})
    if command and not command.get("default"):
        command["default"] = RUN_COMMAND
    return template


def deploy(installation: Installation) -> None:
    """Deploy what prefect.yaml names and the server lacks. Of a deployment that is there, only what
    belongs to the code changes: Prefect would reset all that its user has set, such as a pause, and
    a kill before that could be set again would lose it. What a flow no longer has is removed from
    the parameters of every deployment of it, also of the user's own ones."""
    content: dict[str, Any] = yaml.safe_load(prefect_file().read_text())
    missing, schemas = [], {}
    with get_client(sync_client=True) as client, contextlib.chdir(CHECKOUT):
        for one in content["deployments"]:
            function = one["entrypoint"].rpartition(":")[2]
            name = f"{function.replace('_', '-')}/{one['name']}"
            if name == WATCH:
                ours = {**one.get("parameters", {}), "metrics": str(installation.metrics)}
                one["parameters"] = ours
            try:
                there = client.read_deployment_by_name(name)
            except ObjectNotFound:
                missing.append(one)
            else:
                changes = _of_the_code(one, there)
                client.update_deployment(there.id, changes)
                schemas[one["entrypoint"]] = changes.parameter_openapi_schema or {}
        for words in remove_lost_parameters(client, schemas):
            print(words)
    if missing:
        _deploy({**content, "deployments": missing})


def _of_the_code(one: dict[str, Any], there: DeploymentResponse) -> DeploymentUpdate:
    """What a new version changes of a deployment. Parameters that it adds have its defaults."""
    flow: Flow[..., Any] = load_flow_from_entrypoint(one["entrypoint"], use_placeholder_flow=False)
    changes: dict[str, Any] = {
        "entrypoint": one["entrypoint"],
        "version": flow.version,
        "description": one["description"],
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "pull_steps": [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}
        ],
    }
    ours = one.get("parameters", {})
    if ours.keys() - there.parameters.keys():
        changes["parameters"] = {**ours, **there.parameters}
    return DeploymentUpdate(**changes)


def _deploy(content: dict[str, Any]) -> None:
    """As `prefect --no-prompt deploy --all` does from this checkout.

    In this process, which has imported Prefect and the flows: another one takes 5 s to do so.
    """
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
    """Make the workspace `demo` and its machine; print a fault, because torpor works without."""
    try:
        for machine in revive(installation):
            print(f"  note      machine {machine.id} had stopped and is served again")
        make_demo(DEMO)
    except TorporError as error:
        print(f"  note      the demo has no machine: {error}")


def exists(kind: type[Block], name: str) -> bool:
    """Whether there is a block of this type and name."""
    with get_client(sync_client=True) as client:
        try:
            client.read_block_document_by_name(
                name, kind.get_block_type_slug(), include_secrets=False
            )
        except ObjectNotFound:
            return False
        return True


if __name__ == "__main__":
    sys.exit(main())
