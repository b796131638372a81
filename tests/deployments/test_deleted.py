"""What was deleted in the UI, and a server that torpor shares: `make up`, really run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from deployments.installation import CHECKOUT
from tests.fixtures.own_installation import Alone
from tests.fixtures.prefect_api import ask
from tests.fixtures.waiting import until

BEGUN = ("RUNNING", "COMPLETED")
SUBMITTED = {"workspace": "no-such-workspace", "command": ["true"]}
"""Its run begins, and then fails."""


class Shared:
    """The server, as somebody with its login uses it."""

    def __init__(self, alone: Alone) -> None:
        self.alone = alone

    def ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        server = self.alone.server
        return ask(verb, f"{server.api_url}/{path}", body, by=server.login)

    def deployment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"deployments/name/{name}")
        return found

    def delete_block(self, slug: str, name: str) -> None:
        path = f"block_types/slug/{slug}/block_documents/name/{name}"
        self.ask("DELETE", f"block_documents/{self.ask('GET', path)['id']}")

    def schedule(self, name: str) -> None:
        """Switch the schedule on, every ten seconds."""
        deployment = self.deployment(name)
        (schedule,) = deployment["schedules"]
        path = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
        self.ask("PATCH", path, {"active": True, "schedule": {"interval": 10}})

    def runs(self, name: str) -> list[dict[str, Any]]:
        wanted = {"id": {"any_": [self.deployment(name)["id"]]}}
        found: list[dict[str, Any]] = self.ask("POST", "flow_runs/filter", {"deployments": wanted})
        return found

    def see_the_next_run_of_each_schedule(self) -> None:
        for name in ("watch/watch", "backup/backup-all"):
            known = {run["id"] for run in self.runs(name) if run["state_type"] in BEGUN}
            until(partial(self._begun, name, known), f"the next run of {name} begins", every_s=0.5)

    def _begun(self, name: str, known: set[str]) -> bool:
        return any(
            run["state_type"] in BEGUN and run["id"] not in known and run["auto_scheduled"]
            for run in self.runs(name)
        )


@pytest.fixture
def shared(alone: Alone) -> Iterator[Shared]:
    alone.up()
    yield Shared(alone)


def test_up_makes_again_what_was_deleted_and_every_schedule_s_next_run_begins(
    shared: Shared,
) -> None:
    alone, wanted = shared.alone, yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())
    for name in ("watch/watch", "backup/backup-all"):
        shared.schedule(name)
    identity_path = "block_types/slug/ssh-identity/block_documents/name/default"
    identity_path += "?include_secrets=true"
    identity = shared.ask("GET", identity_path)["data"]
    kept = alone.installation.identity_file
    assert kept.read_text().strip() == identity["private_key"].strip()
    assert kept.stat().st_mode & 0o777 == 0o600

    # One kind at a time: a pool, a queue, a block, a deployment, and a run that waits meanwhile.
    shared.ask("PATCH", "work_pools/torpor-jobs", {"is_paused": True})
    job = shared.deployment("job/job")["id"]
    given = {"parameters": SUBMITTED, "work_queue_name": "low"}
    waits = shared.ask("POST", f"deployments/{job}/create_flow_run", given)["id"]
    shared.ask("DELETE", "work_pools/torpor")
    shared.ask("DELETE", "work_pools/torpor-jobs/queues/normal")
    shared.ask("DELETE", "work_pools/torpor-jobs/queues/low")
    shared.delete_block("ssh-identity", "default")
    shared.ask("DELETE", f"deployments/{shared.deployment('wake/wake')['id']}")
    said = alone.up()
    for made in (
        "work pool torpor",
        "work queue normal of torpor-jobs",
        "block ssh-identity/default",
        "deployment wake/wake",
    ):
        assert f"{made}: it was missing" in said
    for name in ("watch/watch", "backup/backup-all", "hibernate/hibernate", "job/job"):
        assert f"deployment {name}: is run by our workers again" in said
    assert "the work pool torpor-jobs is paused" in said
    assert shared.ask("GET", identity_path)["data"] == identity
    assert shared.ask("GET", f"flow_runs/{waits}")["state_type"] == "CANCELLED"
    (again,) = (run for run in shared.runs("job/job") if run["id"] != waits)
    assert (again["work_queue_name"], again["parameters"]["command"]) == ("low", ["true"])
    shared.ask("PATCH", "work_pools/torpor-jobs", {"is_paused": False})
    shared.see_the_next_run_of_each_schedule()
    begun = ("RUNNING", "FAILED", "COMPLETED")
    until(
        lambda: shared.ask("GET", f"flow_runs/{again['id']}")["state_type"] in begun,
        "the job that waited in the deleted queue begins",
        every_s=0.5,
    )

    # Everything at once.
    for deployment in shared.ask("POST", "deployments/filter", {}):
        shared.ask("DELETE", f"deployments/{deployment['id']}")
    for block in shared.ask("POST", "block_documents/filter", {}):
        shared.ask("DELETE", f"block_documents/{block['id']}")
    for pool in ("torpor", "torpor-jobs"):
        shared.ask("DELETE", f"work_pools/{pool}")
    said = alone.up()
    assert "the schedule of deployment backup/backup-all is off" in said
    assert shared.ask("GET", identity_path)["data"] == identity
    for one in wanted["deployments"]:
        function = one["entrypoint"].rpartition(":")[2].replace("_", "-")
        found = shared.deployment(f"{function}/{one['name']}")
        assert found["work_pool_name"] == one["work_pool"]["name"]
    for name in ("watch/watch", "backup/backup-all"):
        shared.schedule(name)
    shared.see_the_next_run_of_each_schedule()


def test_a_team_s_deployments_of_our_names_stay_as_they_are(shared: Shared) -> None:
    wanted = yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())["deployments"]
    shared.ask("POST", "work_pools/", {"name": "team", "type": "process"})
    for deployment in shared.ask("POST", "deployments/filter", {}):
        shared.ask("DELETE", f"deployments/{deployment['id']}")
    theirs = {}
    for one in wanted:
        function = one["entrypoint"].rpartition(":")[2]
        flow = shared.ask("POST", "flows/", {"name": function.replace("_", "-")})["id"]
        made = {
            "name": one["name"],
            "flow_id": flow,
            "entrypoint": one["entrypoint"],
            "work_pool_name": "team",
            "parameters": {"db": "prod"},
            "tags": ["team"],
            "paused": True,
            "schedules": [{"schedule": {"cron": "0 2 * * *"}, "active": True}],
        }
        name = f"{function.replace('_', '-')}/{one['name']}"
        shared.ask("POST", "deployments/", made)
        theirs[name] = shared.deployment(name)
    blocks = shared.ask("POST", "block_documents/filter", {})
    with pytest.raises(AssertionError) as refused:
        shared.alone.up()
    said = str(refused.value)
    assert "neither changes nor starts them: " in said
    assert f"; and {len(theirs) - 5} more" in said
    assert "in the work pool team, tags: team" in said
    assert "a Prefect server of its own" in said
    assert {name: shared.deployment(name) for name in theirs} == theirs
    assert shared.ask("POST", "block_documents/filter", {}) == blocks
    with pytest.raises(AssertionError, match=r"nor starts them: backup/backup \("):
        shared.alone.python(
            "from torpor_cli.flow_runs import Options, run\n"
            'run("backup", Options(detach=True), workspace="demo")'
        )
    assert not any(shared.runs(name) for name in ("backup/backup", "job/job"))
