from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.deployments import run_deployment
from prefect_aws.credentials import AwsCredentials
from pydantic import Field, SecretStr, ValidationError

from blocks import (
    Idleness,
    LocalProvider,
    ObjectStore,
    SSHIdentity,
    Tuning,
    Workspace,
    reference,
)
from blocks.reference import load, load_all, saved_names_of
from deployments.server import Server
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from tests.fixtures.prefect_api import ask
from torpor.control.providers.local.provider import LocalProvider as LocalMachines
from torpor.shared.errors import InvalidInput
from torpor.shared.values import (
    Compression,
    GpuUse,
    IdleRules,
    Want,
    WorkspaceName,
    WorkspaceSpec,
)


class Lookalike(Block):
    """A provider whose fields are the local one's: a union of blocks would mix them up."""

    _block_type_name = "Lookalike"
    _block_type_slug = "lookalike"

    folder: str = Field(default="/lookalike", description="A folder.")
    price_usd_h: float = Field(default=9.0, description="A price.")
    server: str = Field(default="auto", description="A server.")


class Deleted(Lookalike):
    _block_type_name = "Deleted"
    _block_type_slug = "deleted"


class OneOfSeveral(Lookalike):
    _block_type_name = "One Of Several"
    _block_type_slug = "one-of-several"


class NeverSaved(LocalProvider):
    _block_type_slug = "never-saved"


@pytest.fixture(scope="module")
def saved(prefect_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines")
    AwsCredentials(aws_access_key_id="id", aws_secret_access_key=SecretStr("hidden-secret")).save(
        "ws"
    )
    ObjectStore(
        flavour="other",
        bucket="bucket",
        endpoint_url="http://localhost:1",
        credentials="ws",
        encryption_key=SecretStr("ab" * 32),
    ).save("ws")
    SSHIdentity.generate().save("ws")
    LocalProvider(folder=str(folder), price_usd_h=2.0).save("ws")
    Lookalike().save("ws")
    workspace().save("ws")
    return folder


def workspace(**fields: Any) -> Workspace:
    return Workspace(**{"name": "ws", "store": "ws", "provider": "ws", "identity": "ws", **fields})


@pytest.mark.rule(7)
def test_one_directory_has_one_path() -> None:
    typed = ["~//code/", "/data/./big//", "~/code", "/", "~/"]
    block = Workspace(name="demo", paths=typed)
    assert block.paths == ["~/code", "/data/big", "/", "~/"]
    assert Workspace.model_validate(block.model_dump()).paths == block.paths


def test_saved_and_loaded_it_opens_what_it_names(saved: Path) -> None:
    for block in (Workspace.of("ws"), Workspace.of(" workspace/ws "), Workspace.of(workspace())):
        assert block.open_store().address == "http://localhost:1/bucket"
        assert block.store_key() == bytes.fromhex("ab" * 32)
        assert block.open_identity().public_key.startswith("ssh-ed25519 ")
        (provider,) = block.open_providers()
        assert isinstance(provider, LocalMachines)
        assert provider.identity == f"local://{socket.gethostname()}{saved}"


def test_every_setting_reaches_what_the_flows_read() -> None:
    """All but names of other blocks, which are opened by themselves."""
    blocks_named = {"store", "provider", "more_providers", "identity", "idle", "tuning"}
    changed: dict[str, Any] = {
        "name": "other",
        "paths": ["/data"],
        "exclude": ["*.pyc"],
        "first": ["venv"],
        "gpu": "RTX 4090",
        "gpu_count": 2,
        "disk_gib": 100.0,
        "max_price_usd_h": 0.75,
        "regions": ["eu"],
        "spot": "only",
        "cuda": "12.4",
        "driver": "550",
        "image": "ubuntu:24.04",
        "quiesce": ["true"],
        "resume": ["true"],
        "accept_changed": ["*.log"],
        "accept_lost": ["~/.cache"],
        "programs": ["sleep 1"],
        "process": "try",
        "environment": "keep",
        "save_minutes": 5,
        "sleep_minutes": 60,
        "when_idle": "report",
    }
    assert changed.keys() | blocks_named | {"project"} == Workspace.model_fields.keys()
    plain = Workspace(name="mywork").spec()
    for setting, value in changed.items():
        assert Workspace(**{"name": "mywork", setting: value}).spec() != plain, setting


def test_every_field_survives_saving(prefect_server: Server) -> None:
    Tuning(
        quiesce_timeout_s=12.5,
        gpu_encodes=True,
        gpu_python="/opt/conda/bin/python",
        gpu_install=True,
        owner="team-a",
    ).save("all-of-it", overwrite=True)
    Idleness(idle_minutes=120, when_left="report").save("all-of-it", overwrite=True)
    fields = {
        "name": "all-of-it",
        "paths": ["/data", "~/work"],
        "exclude": ["*.pyc", "cache/tmp*"],
        "first": ["venv", "*.gguf"],
        "gpu": "RTX 4090",
        "gpu_count": 2,
        "disk_gib": 100.5,
        "max_price_usd_h": 0.75,
        "cuda": "12.4",
        "driver": "550.54.14",
        "quiesce": ["systemctl", "stop", "my job"],
        "resume": ["systemctl", "start", "my job"],
        "accept_changed": ["*.log"],
        "idle": "all-of-it",
        "tuning": "tuning/all-of-it",
    }
    Workspace(**fields).save("all-of-it", overwrite=True)
    loaded = Workspace.of("all-of-it")
    Workspace.delete("all-of-it")  # others on this server open every workspace
    assert loaded.model_dump(include=set(fields)) == fields
    assert loaded.spec() == WorkspaceSpec(
        name=loaded.spec().name,
        paths=["/data", "~/work"],
        exclude=["*.pyc", "cache/tmp*"],
        first=["venv", "*.gguf"],
        want=Want("RTX 4090", 2, 100.5, 0.75, cuda=(12, 4), driver=(550, 54, 14)),
        quiesce=["systemctl", "stop", "my job"],
        resume=["systemctl", "start", "my job"],
        quiesce_timeout_s=12.5,
        accept_changed=["*.log"],
        compression=Compression(gpu=GpuUse("/opt/conda/bin/python", install=True)),
        idle=IdleRules(minutes=120),
        when_left="report",
    )
    assert OpenWorkspace.of(workspace(tuning="all-of-it")).owner == "team-a"


@pytest.mark.usefixtures("prefect_server")
def test_a_workspace_that_names_no_block_of_settings_has_their_defaults() -> None:
    assert workspace().spec() == WorkspaceSpec(WorkspaceName("ws"), ["~/workspace"])
    assert workspace(idle=None, tuning=" ").spec() == workspace().spec()


@pytest.mark.usefixtures("prefect_server")
def test_the_time_of_a_workspace_goes_before_that_of_its_idle_rules() -> None:
    Idleness(idle_minutes=120, idle_people=False).save("patient", overwrite=True)
    slept = workspace(idle="patient", sleep_minutes=15).spec().idle
    assert slept == IdleRules(minutes=15, people=False, unused=True)


@pytest.mark.usefixtures("saved")
def test_a_tuning_with_the_parts_of_an_earlier_version_still_opens() -> None:
    earlier: dict[str, Any] = {"parts": 7, "part_mib": 5, "smallest": True}
    Tuning(**earlier).save("earlier", overwrite=True)
    assert workspace(tuning="earlier").spec() == WorkspaceSpec(
        WorkspaceName("ws"), ["~/workspace"], compression=Compression(smallest=True)
    )


def test_a_tuning_asks_for_fewest_bytes_or_least_time() -> None:
    assert Tuning(fastest=True).compression() == Compression(fastest=True)
    with pytest.raises(ValueError, match="choose one of `smallest` and `fastest`"):
        Tuning(smallest=True, fastest=True)


@pytest.mark.usefixtures("saved")
def test_a_missing_block_of_settings_closes_its_own_workspace_only() -> None:
    workspace(tuning="gone").save("lacks-tuning", overwrite=True)
    workspace(idle="gone").save("lacks-idleness", overwrite=True)
    opened, closed = open_all(["ws", "lacks-tuning", "lacks-idleness"])
    assert [*opened] == ["ws"]
    said = {name: str(error) for name, error in closed.items()}
    assert "workspace ws: there is no block tuning/gone" in said["lacks-tuning"]
    assert "workspace ws: there is no block idleness/gone" in said["lacks-idleness"]
    for name in said:
        Workspace.delete(name)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("idle_minutes", "idle_minutes is a setting of the block Idleness: .* name it in `idle`"),
        ("smallest", "smallest is a setting of the block Tuning: .* name it in `tuning`"),
        ("gpus", "workspace ws has no setting 'gpus'"),
    ],
)
def test_a_setting_that_is_none_of_its_own_is_refused(setting: str, said: str) -> None:
    """Prefect would take it, and drop it when the block is saved."""
    block = workspace(**{setting: 4})
    for use in (
        lambda: block.save("never"),
        lambda: asyncio.run(block.asave("never")),
        lambda: Workspace.of(block),
    ):
        with pytest.raises(InvalidInput, match=said):
            use()


def test_a_gpu_that_is_not_understood_is_refused_and_a_block_that_has_it_still_opens(
    saved: Path,
) -> None:
    """What is awake is stored and ended whatever its block says of the next machine."""
    with pytest.raises(InvalidInput, match=r"the GPU '24 potatoes' is not understood"):
        workspace(gpu="24 potatoes").save("never")
    workspace(gpu="RTX 4090, H100:2, 24GB+").save("wishes", overwrite=True)
    old = Workspace.load("wishes")
    old.gpu = "24 potatoes"
    Block.save(old, "wishes", overwrite=True)
    assert Workspace.of("wishes").spec().want.gpu == "24 potatoes"
    Workspace.delete("wishes")


@pytest.mark.rule(10)
@pytest.mark.usefixtures("saved")
def test_providers_of_one_shape_load_as_their_own_types() -> None:
    kinds: tuple[type[Block], ...] = (LocalProvider, Lookalike)
    for kind in kinds:
        reference = f"{kind.get_block_type_slug()}/ws"
        workspace(provider=reference).save("which", overwrite=True)
        assert type(load(Workspace.of("which").provider, kinds, of="test")) is kind
    with pytest.raises(InvalidInput, match=r"workspace ws .*type 'lookalike'.*local-provider/NAME"):
        workspace(provider="lookalike/ws").open_providers()


@pytest.mark.usefixtures("saved")
def test_a_saved_block_stands_for_its_name_and_an_unsaved_one_is_refused() -> None:
    provider = load("ws", (LocalProvider,), of="test")
    assert workspace(provider=provider).provider == "local-provider/ws"
    with pytest.raises(ValidationError, match="not saved yet"):
        workspace(provider=LocalProvider())


@pytest.mark.usefixtures("saved")
def test_a_missing_block_is_named_with_what_to_do() -> None:
    with pytest.raises(InvalidInput, match=r"^there is no block workspace/gone .*page Blocks"):
        Workspace.of("gone")
    with pytest.raises(
        InvalidInput, match=r"workspace ws: .*object-store/gone .*type Object Store"
    ):
        workspace(store="gone").open_store()
    with pytest.raises(InvalidInput, match="name of the workspace is empty"):
        Workspace.of(" ")
    with pytest.raises(InvalidInput, match="not a int"):
        Workspace.of(3)  # type: ignore[arg-type]


def test_a_damaged_document_is_named_without_its_secrets(prefect_server: Server) -> None:
    SSHIdentity.generate().save("damaged", overwrite=True)
    api = prefect_server.api_url
    by_name = f"{api}/block_types/slug/ssh-identity/block_documents/name/damaged"
    damaged = {"data": {"private_key": "a-secret-text"}, "merge_existing_data": False}
    ask("PATCH", f"{api}/block_documents/{ask('GET', by_name)['id']}", damaged)
    with pytest.raises(InvalidInput, match=r"ssh-identity/damaged.*whole text") as refused:
        workspace(identity="damaged").open_identity()
    assert "a-secret-text" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "Not A Name"}, "not a workspace name"),
        ({"name": "benchmark--demo"}, "are reserved"),
        ({"name": "benchmark-machines--demo"}, "are reserved"),
        ({"name": "drill--demo"}, "are reserved"),
        ({"name": "home--demo"}, "are reserved"),
        ({"paths": []}, "at least 1"),
        ({"paths": ["relative"]}, "not a path on a machine"),
        ({"paths": ["~other/x"]}, "not a path on a machine"),
        ({"paths": ["/a/../b"]}, "goes up"),
        ({"gpu_count": 0}, "greater than or equal"),
        ({"max_price_usd_h": 0}, "greater than 0"),
        ({"disk_gib": -1}, "greater than or equal"),
        ({"quiesce": ["", "x"]}, "cannot be empty"),
        ({"resume": ["", "x"]}, "cannot be empty"),
        ({"store": "No Such/Name/x"}, "does not name a block"),
        ({"provider": ""}, "does not name a block"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        workspace(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"owner": "A B"}, "not an owner"),
        ({"gpu_python": "python3"}, "not a program on a machine"),
        ({"quiesce_timeout_s": 0}, "greater than 0"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Tuning(**fields)


@pytest.mark.rule(9)
@pytest.mark.usefixtures("saved")
def test_a_flow_takes_the_block_or_its_name_and_stores_no_secret(prefect_server: Server) -> None:
    seen = []

    @flow(name="takes-either")
    def takes_either(workspace: Workspace | str) -> None:
        seen.append(Workspace.of(workspace).open_identity().public_key)

    takes_either(Workspace.of("ws"))
    takes_either("ws")
    assert len(set(seen)) == 1
    wanted = {"flows": {"name": {"any_": ["takes-either"]}}}
    runs = ask("POST", f"{prefect_server.api_url}/flow_runs/filter", wanted)
    assert len(runs) == 2
    assert {type(run["parameters"]["workspace"]) for run in runs} == {dict, str}
    assert "hidden-secret" not in json.dumps(runs)
    assert "PRIVATE KEY" not in json.dumps(runs)


@pytest.mark.usefixtures("saved")
def test_a_block_object_as_a_deployment_parameter_arrives_whole(prefect_server: Server) -> None:
    """Nested blocks would arrive with asterisks for secrets; names arrive as they are."""

    @flow(name="takes-one")
    def takes_one(workspace: Workspace | str) -> None:
        """Never run here."""

    api = prefect_server.api_url
    owner = ask("POST", f"{api}/flows/", {"name": "takes-one"})["id"]
    ask("POST", f"{api}/deployments/", {"name": "d", "flow_id": owner})
    run = run_deployment(
        "takes-one/d", parameters={"workspace": Workspace.of("ws")}, timeout=0, as_subflow=False
    )
    taken = takes_one.validate_parameters(run.parameters)["workspace"]
    assert isinstance(taken, Workspace)
    assert taken.open_store().address == "http://localhost:1/bucket"


@pytest.mark.usefixtures("prefect_server")
def test_a_server_may_not_know_a_type_of_which_nothing_was_saved() -> None:
    assert load_all(NeverSaved) == []


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("sent_at_once", [1, 200])
def test_the_blocks_of_several_types_are_all_found_however_many_the_server_sends_at_once(
    sent_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of somebody else may send fewer (PREFECT_SERVER_API_DEFAULT_LIMIT)."""
    for name in ("a", "b"):
        OneOfSeveral(server=name).save(name, overwrite=True)
    Lookalike().save("a", overwrite=True)
    request = SyncPrefectClient.request

    def limited(client: SyncPrefectClient, method: Any, path: Any, **asked: Any) -> Any:
        if path.endswith("/filter"):
            asked["json"]["limit"] = sent_at_once
        return request(client, method, path, **asked)

    monkeypatch.setattr(SyncPrefectClient, "request", limited)
    found = saved_names_of([OneOfSeveral, NeverSaved, Lookalike])
    assert found[:3] == [(OneOfSeveral, "a"), (OneOfSeveral, "b"), (Lookalike, "a")]
    assert {kind for kind, _ in found[3:]} <= {Lookalike}  # those of other tests


@pytest.mark.usefixtures("prefect_server")
def test_a_block_that_is_deleted_while_all_are_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("goes", "stays"):
        Deleted(price_usd_h=len(name)).save(name)
    load_named = reference.load_named

    def late(kind: type[Deleted], name: str, *, of: str) -> Deleted:
        if name == "goes":
            Deleted.delete(name)
        return load_named(kind, name, of=of)

    monkeypatch.setattr(reference, "load_named", late)
    assert [block.price_usd_h for block in load_all(Deleted)] == [len("stays")]
