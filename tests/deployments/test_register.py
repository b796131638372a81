"""What ``deployments.register`` says where it fails; what it makes is in test_up.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect_aws import AwsCredentials
from pydantic import SecretStr

from blocks import ObjectStore, SSHIdentity
from deployments import register
from deployments.installation import CHECKOUT, Installation
from deployments.server import Server
from deployments.worker import RUN_COMMAND, WATCH_COMMAND
from tests.fixtures.machines import new_key_pair
from tests.fixtures.prefect_api import ask
from tests.fixtures.prefect_server import run_python
from torpor.control.store.s3 import S3Store
from torpor.shared.errors import TorporError
from torpor.shared.format.user_keys import UserKey

# It changes the limit of the pool whose limit tests/deployments/test_queues.py has set.
pytestmark = pytest.mark.together("automations and make up")


def test_a_deployment_that_fails_is_named(
    prefect_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.yaml").write_text(
        "deployments: [{name: lost, entrypoint: 'flows/lost.py:lost', work_pool: {name: torpor}}]"
    )
    monkeypatch.setattr(register, "CHECKOUT", tmp_path)
    monkeypatch.setattr(register, "prefect_file", lambda: tmp_path / "prefect.yaml")
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    here = Path.cwd()
    with pytest.raises(TorporError, match=rf"ended with 1 in {tmp_path}:[\s\S]*lost"):
        register.deploy(Installation(tmp_path))
    assert Path.cwd() == here


@pytest.mark.rule(21)
def test_the_first_store_has_the_same_key_where_the_database_is_lost(tmp_path: Path) -> None:
    made = Installation(tmp_path)
    key = register.first_key(made)
    assert ObjectStore(bucket="first", encryption_key=key).key()
    assert made.store_key_file.stat().st_mode & 0o777 == 0o600
    assert register.first_key(made) == key


def test_a_store_whose_key_is_in_it_is_started_before_it_is_opened(
    prefect_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `torpor store rotate default` the key object is in a store that does not run yet."""
    name, served = "started-first", []
    AwsCredentials(aws_access_key_id="id", aws_secret_access_key=SecretStr("secret")).save(
        name, overwrite=True
    )
    block = ObjectStore(
        flavour="seaweedfs",
        bucket="first",
        endpoint_url="http://127.0.0.1:1",
        credentials=f"aws-credentials/{name}",
        encryption_key=SecretStr(UserKey.new().text),
    )
    monkeypatch.setattr(register, "EMBEDDED", name)
    monkeypatch.setattr(register, "load_named", lambda kind, name, of: block)
    monkeypatch.setattr(register, "see_that_they_run", lambda *how: served.append("started"))
    monkeypatch.setattr(register.embedded, "endpoint_of", lambda folder: block.endpoint_url)
    monkeypatch.setattr(
        register.embedded, "make_bucket", lambda folder, reach, **how: served.append(reach.bucket)
    )
    monkeypatch.setattr(S3Store, "get", lambda *asked, **how: pytest.fail("it was opened"))
    assert register.serve_store(Installation(tmp_path)) == []
    assert served == ["started", "first"]


@pytest.mark.rule(24)
def test_the_first_identity_is_kept_in_the_bucket_also_one_of_an_earlier_version(
    prefect_server: Server, tmp_path: Path
) -> None:
    """Also where the database is lost. A key of the user's own is kept in none, and neither is one
    that its user has kept out."""
    made = Installation(tmp_path)
    first = register.first_identity(made)
    assert (first.on_record, register.first_identity(made)) == (True, first)
    own = SSHIdentity(private_key=new_key_pair().private)
    for name, block, kept in (("torpors", first, True), ("users", own, False)):
        key = block.private_key.get_secret_value()
        _save_as_earlier(prefect_server.api_url, name, {"private_key": key})
        register.put_on_record(SSHIdentity.load(name))
        assert SSHIdentity.load(name).on_record == kept
    first.model_copy(update={"on_record": False}).save("out")
    register.put_on_record(SSHIdentity.load("out"))
    assert not SSHIdentity.load("out").on_record
    register.keep_identity(made, own)
    assert not register.first_identity(made).on_record


def _save_as_earlier(api: str, name: str, data: dict[str, str]) -> None:
    """A block as the versions before `torpor recover` saved it, with its schema of then."""
    SSHIdentity.register_type_and_schema()
    kind = ask("GET", f"{api}/block_types/slug/ssh-identity")["id"]
    fields = SSHIdentity.model_json_schema()
    fields = {**fields, "properties": {"private_key": fields["properties"]["private_key"]}}
    asked = {"fields": fields, "block_type_id": kind, "capabilities": [], "version": "earlier"}
    schema = ask("POST", f"{api}/block_schemas/", asked)["id"]
    ids = {"block_schema_id": schema, "block_type_id": kind}
    ask("POST", f"{api}/block_documents/", {"name": name, "data": data, **ids})


FLOW = """
from prefect import flow

@flow
def renewed(destroy: bool = True, more: int = 1):
    pass
"""


@pytest.mark.rule(20)
def test_a_new_version_changes_the_code_of_a_deployment_and_nothing_that_is_its_users(
    prefect_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register.make_pools()
    flow = ask("POST", f"{prefect_server.api_url}/flows/", {"name": "renewed"})
    theirs = {
        "paused": True,
        "parameters": {"destroy": False},
        "tags": ["mine", "torpor"],
        "concurrency_limit": 1,
        "concurrency_options": {"collision_strategy": "CANCEL_NEW", "grace_period_seconds": 90},
        "job_variables": {"env": {"HTTPS_PROXY": "http://proxy"}},
        "enforce_parameter_schema": False,
        "work_pool_name": "torpor-jobs",
        "work_queue_name": "high",
        "schedules": [{"schedule": {"cron": "0 5 29 2 *"}, "active": False, "slug": "mine"}],
    }
    old = {"flow_id": flow["id"], "name": "here", "entrypoint": "old.py:renewed", **theirs}
    url = f"{prefect_server.api_url}/deployments/"
    url += ask("POST", url, old)["id"]
    before = ask("GET", url)
    (tmp_path / "new.py").write_text(FLOW)
    new = {
        "name": "here",
        "entrypoint": "new.py:renewed",
        "description": "It has `more`.",
        "tags": ["torpor"],
        "parameters": {"destroy": True, "more": 2},
        "work_pool": {"name": "torpor", "job_variables": {"command": "run", "env": {}}},
        "concurrency_limit": {"limit": 8, "collision_strategy": "ENQUEUE"},
    }
    (tmp_path / "prefect.yaml").write_text(json.dumps({"deployments": [new]}))
    monkeypatch.setattr(register, "CHECKOUT", tmp_path)
    monkeypatch.setattr(register, "prefect_file", lambda: tmp_path / "prefect.yaml")
    register.deploy(Installation(tmp_path))
    after = ask("GET", url)
    by_workers = {"last_polled", "status"}  # other tests have workers at the same queue
    assert {field for field in after if after[field] != before[field]} - by_workers == {
        "updated",
        "entrypoint",
        "version",
        "description",
        "parameters",
        "parameter_openapi_schema",
        "pull_steps",
        "job_variables",
    }
    assert after["job_variables"] == {"command": "run", "env": {"HTTPS_PROXY": "http://proxy"}}
    assert after["parameters"] == {"destroy": False, "more": 2}
    assert [*after["parameter_openapi_schema"]["properties"]] == ["destroy", "more"]


def test_a_parameter_that_a_flow_no_longer_has_is_removed_also_from_a_user_s_own_deployment(
    prefect_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prefect would accept its runs and then fail each of them. One that has another name now
    keeps its value: a job that waits would lose the limit of what it may cost."""
    register.make_pools()
    api = f"{prefect_server.api_url}/deployments/"
    flow = ask("POST", f"{prefect_server.api_url}/flows/", {"name": "renewed"})
    cron = {"schedule": {"cron": "0 5 29 2 *"}, "active": False, "slug": "mine"}
    old = {
        "flow_id": flow["id"],
        "entrypoint": "newer.py:renewed",
        "parameters": {"destroy": False, "gate": True, "most_usd": 7.0},
        "schedules": [{**cron, "parameters": {"gate": True, "more": 3}}],
        "parameter_openapi_schema": {"type": "object", "properties": {"gate": {}, "more": {}}},
    }
    ours, own, other = (
        ask("POST", api, {**old, "name": name, **changes})["id"]
        for name, changes in (
            ("shipped", {"tags": ["torpor"], "work_pool_name": "torpor"}),
            ("own", {}),
            ("other", {"entrypoint": "my.py:f"}),
        )
    )
    start = {
        "parameters": {"more": 4, "gate": False, "most_usd": 5.0},
        "enforce_parameter_schema": False,
    }
    waiting = ask("POST", f"{api}{own}/create_flow_run", start)["id"]
    limited = FLOW.replace("more: int = 1", "more: int = 1, max_usd: float = 0.0")
    (tmp_path / "newer.py").write_text(limited)
    new = {"name": "shipped", "entrypoint": "newer.py:renewed", "description": "It has `more`."}
    (tmp_path / "prefect.yaml").write_text(json.dumps({"deployments": [new]}))
    monkeypatch.setattr(register, "CHECKOUT", tmp_path)
    monkeypatch.setattr(register, "prefect_file", lambda: tmp_path / "prefect.yaml")
    register.deploy(Installation(tmp_path))
    for deployment in (ours, own):
        after = ask("GET", api + deployment)
        (schedule,) = after["schedules"]
        assert after["parameters"] == {"destroy": False, "max_usd": 7.0}
        assert schedule["parameters"] == {"more": 3}
        assert [*after["parameter_openapi_schema"]["properties"]] == ["destroy", "more", "max_usd"]
        assert (schedule["schedule"]["cron"], schedule["active"]) == ("0 5 29 2 *", False)
    assert ask("GET", api + other)["parameters"] == old["parameters"]
    run = ask("GET", f"{prefect_server.api_url}/flow_runs/{waiting}")
    kept = {"destroy": False, "more": 4, "max_usd": 5.0}
    assert (run["parameters"], run["state_type"]) == (kept, "SCHEDULED")
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(":")[0] for line in sorted(said)] == [
        "deployment own of renewed: in this version most_usd is max_usd",
        "deployment own of renewed: this version has no gate",
        "deployment shipped of renewed: in this version most_usd is max_usd",
        "deployment shipped of renewed: this version has no gate",
    ]
    ask("DELETE", f"{prefect_server.api_url}/flow_runs/{waiting}")
    for deployment in (ours, own, other):
        ask("DELETE", api + deployment)


@pytest.mark.parametrize(
    ("theirs", "then"),
    [(None, RUN_COMMAND), (WATCH_COMMAND, RUN_COMMAND), ("mine", "mine")],
)
def test_a_pool_that_is_there_gets_a_command_if_it_has_none_and_keeps_what_is_its_users(
    prefect_server: Server, monkeypatch: pytest.MonkeyPatch, theirs: str | None, then: str
) -> None:
    changed: list[str] = []
    real = SyncPrefectClient.update_work_pool

    def update(client: SyncPrefectClient, name: str, changes: WorkPoolUpdate) -> None:
        changed.append(name)
        real(client, name, changes)

    register.make_pools()
    url = f"{prefect_server.api_url}/work_pools/torpor-jobs"
    usual = ask("GET", url)
    template = json.loads(json.dumps(usual["base_job_template"]))
    template["variables"]["properties"]["command"]["default"] = theirs
    ask("PATCH", url, {"base_job_template": template, "concurrency_limit": 3})
    monkeypatch.setattr(SyncPrefectClient, "update_work_pool", update)
    register.make_pools()
    pool = ask("GET", url)
    same = {name: usual[name] for name in ("base_job_template", "concurrency_limit")}
    ask("PATCH", url, same)
    template["variables"]["properties"]["command"]["default"] = then
    assert (pool["base_job_template"], pool["concurrency_limit"]) == (template, 3)
    assert changed == ["torpor-jobs"] * (theirs != then)


def test_the_guide_s_commands_add_scheduled_deployments(prefect_server: Server) -> None:
    register.make_pools()
    guide = (CHECKOUT / "docs" / "guide" / "backups.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^\.venv/bin/(prefect .* deploy .*)$", guide, re.MULTILINE)
    for command in commands:
        run_python(["-m", *shlex.split(command)], os.environ)
    found = {}
    for name in ("hibernate/mywork-evening", "backup/mywork-hourly"):
        made = ask("GET", f"{prefect_server.api_url}/deployments/name/{name}")
        (schedule,) = made["schedules"]
        found[name] = (schedule["schedule"]["cron"], schedule["parameters"], made["parameters"])
        assert (made["work_pool_name"], schedule["active"]) == ("torpor", True)
        ask("DELETE", f"{prefect_server.api_url}/deployments/{made['id']}")
    assert found == {
        "hibernate/mywork-evening": ("0 20 * * *", {}, {"workspace": "mywork"}),
        "backup/mywork-hourly": ("0 * * * *", {}, {"workspace": "mywork", "keep_hourly": 24}),
    }
    assert len(commands) == len(found)
