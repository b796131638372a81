"""`torpor run`: what it sends, rents, runs and brings, and what it refuses before that."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows
from blocks import Workspace
from flows.procedures import listing
from tasks.alert_server import Sleeping
from tasks.prefect_alerts import PrefectAlerts
from torpor.control.jobs.records import is_job_id
from torpor.control.upkeep.differences import ListedEntry
from torpor.control.upkeep.reports import BackupReport
from torpor.shared.errors import (
    InvalidInput,
    JobFailed,
    MachineUnreachable,
    NewerFiles,
    NoOffer,
    RunCancelled,
    UnsavedWork,
    WorkspaceAwake,
    WorkspaceBusy,
)
from torpor.shared.values import WantChange
from torpor_cli import copying, logins
from torpor_cli.app import app
from torpor_cli.exit_codes import REFUSED, explained
from torpor_cli.folder_workspace import name_for
from torpor_cli.running import argv_of

MACHINE = SimpleNamespace(id="m-1", price_usd_h=0.5)
COMMAND = ["--", "python", "train.py"]


REAL = {
    what: getattr(flow, "fn", flow)
    for what, flow in {
        "wake": flows.wake,
        "create": flows.create,
        "store": flows.backup,
        "hibernate": flows.hibernate,
        "job": flows.job,
        "bring": flows.restore_path,
    }.items()
}


class _NoRecord(dict[str, Any]):
    def __missing__(self, job: str) -> None:
        return None


def _rental(job: str) -> Any:
    return SimpleNamespace(job=job, state="handed over", machine="m-1")


class Here:
    """A folder on this host, and what a run of it did, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = name_for(folder)
        self.did: list[Any] = []
        self.saved: dict[str, Workspace] = {}
        self.machines: list[Any] = []
        self.snapshots: list[str] = []
        self.open_jobs: list[Any] = []
        self.rentals: list[Any] = []
        self.queued: set[str] = set()
        self.entries: list[Any] = []
        self.records: dict[str, Any] = defaultdict(lambda: SimpleNamespace(ended=False))
        self.given: dict[str, dict[str, Any]] = {}
        self.fails: dict[str, BaseException] = {}
        self.job = SimpleNamespace(id="3f2a9c81d04e", final="S2", newest="S2", saves=1)
        self.sleeping = Sleeping()
        self.warnings: list[str] = []
        self.copied = copying.Copied(2, 20, 0, (), 0)

    def does(self, what: str, **given: Any) -> None:
        if what in REAL:
            inspect.signature(REAL[what]).bind(**given)  # the flow takes all of it
        self.did.append(what)
        self.given[what] = given
        if what in self.fails:
            raise self.fails[what]

    @property
    def sent(self) -> tuple[str, ...]:
        return self.given["send"]["folder"].names  # type: ignore[no-any-return]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """A folder with a program, one workspace that is asleep somewhere else, and one offer."""
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "data.csv").write_text("1,2\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path / "state"))
    seen = Here(folder.resolve())
    seen.saved["base"] = Workspace(name="base", store="r2", provider="vast-provider/default")
    jobs = SimpleNamespace(open=lambda: seen.open_jobs, of=lambda job: seen.records[job])

    rentals = SimpleNamespace(open=lambda: seen.rentals)

    def wakes(what: str) -> Callable[..., Any]:
        def woken(**given: Any) -> Any:
            seen.does(what, **given)
            seen.machines.append(MACHINE)
            seen.rentals = [_rental(given["job"])]
            return SimpleNamespace(id=MACHINE.id, machine=MACHINE.id)

        return woken

    def backup(**given: Any) -> BackupReport:
        seen.does("store", **given)
        return BackupReport("w", None, None, [], [])  # type: ignore[arg-type]

    def hibernate(**given: Any) -> None:
        seen.does("hibernate", **given)
        seen.machines.clear()

    def job(**given: Any) -> Any:
        seen.does("job", **given)
        return SimpleNamespace(job=seen.job, rows=list, title=lambda: "done")

    def bring(**given: Any) -> Any:
        seen.does("bring", **given)
        return SimpleNamespace(files=1, bytes=10, moved_aside="", warnings=seen.warnings)

    def send(folder: copying.Folder, workspace: str, into: str) -> copying.Copied:
        seen.does("send", folder=folder, workspace=workspace, into=into)
        return seen.copied

    def offers(workspace: Any, *given: Any, **more: Any) -> Any:
        seen.does("offers", workspace=workspace, given=given, **more)
        offer = SimpleNamespace(offer=SimpleNamespace(bound_usd_h=0.5))
        rows = [{"market": "vast", "$/h": "0.500"}]
        return SimpleNamespace(
            rows=lambda: rows, title=lambda: "1 fits", fitting=[offer], max_price_usd_h=None
        )

    def save(block: Workspace, name: str) -> None:
        seen.saved[name] = block

    monkeypatch.setattr(flows, "wake", wakes("wake"))
    monkeypatch.setattr(flows, "create", wakes("create"))
    monkeypatch.setattr(flows, "backup", backup)
    monkeypatch.setattr(flows, "hibernate", hibernate)
    monkeypatch.setattr(flows, "job", job)
    monkeypatch.setattr(flows, "restore_path", bring)
    monkeypatch.setattr(copying, "send", send)
    monkeypatch.setattr(logins, "has_ssh", lambda: True)
    monkeypatch.setattr(listing, "list_logins", lambda name: [*seen.machines])
    monkeypatch.setattr(listing, "list_snapshots", lambda name: seen.snapshots)
    monkeypatch.setattr(listing, "list_entries", lambda name: seen.entries)
    monkeypatch.setattr(listing, "list_offers", offers)
    monkeypatch.setattr(
        "tasks.workspace_blocks.open_workspace",
        lambda name: SimpleNamespace(jobs=jobs, rentals=rentals),
    )
    monkeypatch.setattr("tasks.job_listing.is_queued", lambda job: job in seen.queued)
    monkeypatch.setattr("tasks.jobs.check_environment", lambda env, secrets: None)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: [*seen.saved])
    monkeypatch.setattr(Workspace, "of", lambda name: seen.saved[name])
    monkeypatch.setattr(Workspace, "save", save)
    monkeypatch.setattr(Workspace, "delete", lambda name: seen.saved.pop(name))
    monkeypatch.setattr("torpor_cli.flow_runs.connected", lambda: nullcontext("http://ui"))
    monkeypatch.setattr("torpor_cli.running.connected", nullcontext)
    monkeypatch.setattr(PrefectAlerts, "sleeping", lambda self: seen.sleeping)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "y")
    return seen


def _run(*arguments: str) -> None:
    app(["run", *arguments], exit_on_error=False, print_error=False)


def test_a_first_run_makes_a_workspace_rents_sends_stores_and_runs(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("--gpu", "RTX 4090", "--env", "LR=1", "--max-hours", "90m", *COMMAND)
    assert here.did == ["offers", "create", "send", "store", "job"]
    said = "".join(capsys.readouterr())
    assert f"Rent a machine for {here.name} at 0.500 $/h, 12.00 $ a day" in said
    assert "another one whenever one is lost" in said
    assert f"goes to /workspace of workspace {here.name} (new): 2 files" in said
    assert here.saved[here.name].store == "r2"
    assert here.given["create"] == {
        "workspace": here.name,
        "gpu": "RTX 4090",
        "job": here.given["job"]["job"],
        "max_usd": 0.0,
        "agreed_usd_h": 0.5,  # as the question named it
    }
    assert is_job_id(here.given["job"]["job"])
    assert (here.sent, here.given["send"]["into"]) == (("data.csv", "train.py"), "/workspace")
    job = here.given["job"]
    assert (job["workspace"], job["command"]) == (here.name, ["python", "train.py"])
    assert (job["env"], job["gpu"], job["max_hours"]) == (["LR=1"], "RTX 4090", 1.5)


def test_a_run_says_before_it_rents_where_nobody_ends_a_machine_that_it_leaves(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.sleeping = Sleeping("", (here.name,))
    _run(*COMMAND)
    assert "--idle hibernate" not in capsys.readouterr().err
    here.machines.clear()
    here.sleeping = Sleeping("", ("other",))
    monkeypatch.setattr("builtins.input", lambda asked: "")
    with pytest.raises(RunCancelled):
        _run(*COMMAND)
    said = capsys.readouterr().err
    assert "watch looks at other workspaces only: other" in said
    assert f"an idle machine of {here.name} stays and costs money" in said
    assert "`torpor up --idle hibernate`" in said


def test_a_second_run_wakes_the_same_workspace(here: Here) -> None:
    _run("--yes", *COMMAND)
    here.machines.clear()
    here.did.clear()
    here.snapshots.append("S1")
    _run("--yes", *COMMAND)
    assert here.did == ["wake", "send", "store", "job"]
    assert sorted(here.saved) == ["base", here.name]


def test_a_machine_that_is_awake_is_stored_before_its_files_are_replaced(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.saved[here.name] = Workspace(name=here.name, paths=["~/w"])
    here.machines.append(MACHINE)
    _run(*COMMAND)
    assert here.did == ["store", "send", "store", "job"]
    assert "the job runs on the machine that workspace" in capsys.readouterr().err
    here.fails["send"] = MachineUnreachable("the line broke")
    with pytest.raises(MachineUnreachable):
        _run(*COMMAND)
    assert "Machine m-1 of workspace" in capsys.readouterr().err
    assert here.given["send"]["into"] == "~/w"


def test_a_no_leaves_nothing_behind(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: "")
    with pytest.raises(RunCancelled, match="nothing was rented"):
        _run(*COMMAND)
    assert (here.did, [*here.saved]) == (["offers"], ["base"])


def test_ctrl_c_at_the_question_leaves_nothing_behind(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(asked: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run(*COMMAND)
    assert (here.did, [*here.saved]) == (["offers"], ["base"])
    assert "is awake" not in capsys.readouterr().err


def test_a_detached_job_begins_once_the_files_are_there(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[Any] = []

    def submit(name: str, **given: Any) -> Any:
        begun.append((name, [*here.did], given["parameters"]["command"]))
        return SimpleNamespace(id="0f8fad5b-d9cb-469f-a165-70867728950e", name="eager-owl")

    monkeypatch.setattr(flows, "job", SimpleNamespace(name="job"))
    monkeypatch.setattr("prefect.deployments.run_deployment", submit)
    monkeypatch.setattr("tasks.own_deployments.check_own", lambda name: None)
    _run("--yes", "--detach", *COMMAND)
    assert begun == [("job/job", ["create", "send", "store"], ["python", "train.py"])]
    said = capsys.readouterr().out
    assert f"torpor job log {here.name} " in said and f"torpor job cancel {here.name} " in said


def test_json_is_all_that_standard_output_has(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.machines.append(MACHINE)
    here.saved[here.name] = Workspace(name=here.name)
    _run("--json", "--bring", "outputs", *COMMAND)
    assert here.did == ["store", "send", "store", "job", "bring"]
    assert json.loads(capsys.readouterr().out)


def test_no_machine_on_sale_and_nobody_at_the_terminal_leave_nothing_behind(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="add --yes"):
        _run(*COMMAND)
    here.fails["offers"] = NoOffer("none fits")
    with pytest.raises(NoOffer):
        _run(*COMMAND)
    assert (here.did, [*here.saved]) == (["offers", "offers"], ["base"])


def test_a_dry_run_shows_offers_and_makes_nothing(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("--gpu", "L40S", "--dry-run", *COMMAND)
    assert (here.did, [*here.saved]) == (["offers"], ["base"])
    assert here.given["offers"]["workspace"].name == here.name
    assert here.given["offers"]["given"][2] == WantChange("L40S")
    said = capsys.readouterr().out
    assert f"{here.name}, which would be made" in said
    assert "2 files, 13 bytes at most" in said and "0.500" in said
    _run("--dry-run", "--json", *COMMAND)
    said = json.loads(capsys.readouterr().out)
    assert (said["workspace"], said["is_new"], said["files"]) == (here.name, True, 2)
    assert said["command"] == ["python", "train.py"]


def test_torpor_yaml_says_all_that_options_say(here: Here) -> None:
    (here.folder / "torpor.yaml").write_text(
        "workspace: mywork\nresources:\n  gpu: L40S\n  spot: allowed\nenv:\n  A: 1\n  B: 1\n"
        "secrets:\n  HF_TOKEN: hugging-face\nrun: python train.py\nmax_hours: 2\n"
        "save_minutes: 5\nbring: [outputs]\n"
    )
    _run("--yes", "--env", "B=2")
    assert here.saved["mywork"].spot == "allowed"
    job = here.given["job"]
    assert job["workspace"] == "mywork"
    assert job["command"] == argv_of("", "python train.py", [])
    assert (job["env"], job["secrets"]) == (["A=1", "B=2"], ["HF_TOKEN=hugging-face"])
    assert (job["spot"], job["max_hours"], job["save_minutes"]) == ("allowed", 2.0, 5.0)
    assert here.given["create"]["gpu"] == "L40S"
    assert here.did[-1] == "bring"


def test_options_count_more_than_torpor_yaml(here: Here) -> None:
    (here.folder / "torpor.yaml").write_text(
        "workspace: mywork\nrun: python train.py\nresources:\n  gpu: L40S\nbring: [a]\n"
        "max_hours: 2\n"
    )
    given = ["--gpu", "H100", "--workspace", "other", "--bring", "b", "--max-hours", "1h"]
    _run("--yes", *given, "--", "true")
    job = here.given["job"]
    assert (job["workspace"], job["command"], job["gpu"]) == ("other", ["true"], "H100")
    assert (job["max_hours"], here.given["bring"]["path"]) == (1.0, "/workspace/b")


def test_another_file_is_named_in_its_errors(here: Here) -> None:
    (here.folder / "gpu.yaml").write_text("runn: x\n")
    with pytest.raises(InvalidInput, match=r"gpu\.yaml, line 1, key runn"):
        _run("--file", "gpu.yaml")
    with pytest.raises(InvalidInput, match=r"nosuch\.yaml cannot be read"):
        _run("--file", "nosuch.yaml", *COMMAND)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "nothing is to be run"),
        (["--gpu", "24 potatoes", *COMMAND], "not understood"),
        (["train.yaml"], "`torpor run --file train.yaml` reads"),
        (["--max-hours", "0s", *COMMAND], "must be more than 0"),
        (["--env", "LR", *COMMAND], "'LR' has no value"),
        (["--max-usd", "0", *COMMAND], "is 0: give dollars, more than 0"),
        (["--retries", "101", *COMMAND], "from 0 to 100"),
        (["--bring", "../x", *COMMAND], "no path below the folder"),
        (["--bring", "a/.GIT/hooks", *COMMAND], "git runs what a machine writes"),
        (["--bring", "x", "--detach", *COMMAND], "brings nothing"),
        (["--workspace", "../x", *COMMAND], "not a workspace name"),
    ],
)
def test_a_mistake_is_found_before_anything_is_asked(
    here: Here, given: list[str], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        _run("--yes", *given)
    assert (here.did, [*here.saved]) == ([], ["base"])


def test_nothing_is_brought_through_a_symlink_out_of_the_folder(here: Here, tmp_path: Path) -> None:
    """A torpor.yaml of somebody else could name a file that logs in or runs here."""
    (tmp_path / "keys").mkdir()
    (here.folder / ".gitignore").write_text("link\n")
    (here.folder / "link").symlink_to(tmp_path / "keys")
    (here.folder / "torpor.yaml").write_text("bring: [link/authorized_keys]\n")
    with pytest.raises(InvalidInput, match=r"link/authorized_keys is not brought: .*keys"):
        _run("--yes", *COMMAND)
    assert here.did == []
    _run("--yes", "--bring", "link", *COMMAND)  # the link itself is renamed, and not followed
    assert here.did[-1] == "bring"


def test_a_home_is_not_sent(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here.folder))
    with pytest.raises(InvalidInput, match="is your home"):
        _run("--yes", *COMMAND)
    assert here.did == []


def test_a_host_without_ssh_rents_nothing(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "has_ssh", lambda: False)
    with pytest.raises(InvalidInput):
        _run("--yes", *COMMAND)
    assert here.did == []


def test_files_that_may_hold_credentials_are_named_and_not_sent(here: Here) -> None:
    (here.folder / ".env").write_text("TOKEN=hunter2\n")
    (here.folder / "certs").mkdir()
    (here.folder / "certs" / "server.pem").write_text("x")
    with pytest.raises(InvalidInput, match=r"2 of the files .*: \.env, certs/server\.pem\. ") as no:
        _run("--yes", *COMMAND)
    assert "hunter2" not in str(no.value)
    assert here.did == []
    (here.folder / ".gitignore").write_text(".env\n")
    _run("--yes", "--accept-secret", "certs/*.pem", *COMMAND)
    assert here.sent == (".gitignore", "certs/server.pem", "data.csv", "train.py")


def test_the_question_names_all_secrets_that_the_command_gets(
    here: Here, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.folder / ".env").write_text("TOKEN=hunter2\n")
    (here.folder / "torpor.yaml").write_text("secrets:\n  X: any-block\n  Y: other\n")
    given = ["--accept-secret", ".env", "--accept-secret", "HF_TOKEN", "--env", "HF_TOKEN=hunter2"]
    gets = (
        "and give its command the variable HF_TOKEN, the file .env, the Secret block any-block as "
        "X, the Secret block other as Y"
    )
    later = "at what it costs then (max_price_usd_h of the workspace limits that)"
    _run(*given, *COMMAND)
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"another one whenever one is lost, {later}, {gets}?" in said
    assert "hunter2" not in said
    _run(*given, *COMMAND)  # on the machine that is awake by now
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"hibernate that afterwards, {gets}?" in said
    _run("--dry-run", *given, *COMMAND)
    assert "the Secret block any-block as X" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    here.did.clear()
    with pytest.raises(InvalidInput, match=r"any-block.* add --yes"):
        _run(*given, *COMMAND)
    assert here.did == []
    _run("--yes", *given, *COMMAND)
    assert f"--yes: run the job, {gets}" in capsys.readouterr().err


def test_no_file_of_a_folder_accepts_credentials(here: Here) -> None:
    (here.folder / ".env").write_text("TOKEN=hunter2\n")
    (here.folder / "torpor.yaml").write_text("accept_secrets: ['*']\n")
    with pytest.raises(InvalidInput, match="the option --accept-secret alone"):
        _run("--yes", *COMMAND)
    assert here.did == []


def test_a_run_asks_before_it_uses_and_ends_a_machine_that_is_awake(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.saved["mywork"] = Workspace(name="mywork")
    here.machines.append(MACHINE)
    (here.folder / "torpor.yaml").write_text("workspace: mywork\nrun: ./theirs\n")
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "")
    with pytest.raises(RunCancelled, match="no job was begun"):
        _run()
    said = " ".join("".join(capsys.readouterr()).split())
    assert "all that runs there ends then, such as kernels and tmux" in said
    assert "Run the job on the machine of mywork, and hibernate that afterwards?" in said
    assert "warning: no job was begun" not in said  # it has changed nothing there
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="add --yes"):
        _run()
    assert here.did == []


def test_what_gave_way_to_results_is_never_sent(here: Here) -> None:
    """Also where git tracks it. What is brought may be an input of the command, too."""
    aside = "outputs.before-20261129T164432Z-48e531f3"
    for folder in ("outputs", aside):
        (here.folder / folder).mkdir()
        (here.folder / folder / "model.pt").write_text("x")
    subprocess.run(["git", "init", "--quiet"], cwd=here.folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=here.folder, check=True)
    _run("--yes", "--bring", "outputs/", *COMMAND)
    assert here.sent == ("data.csv", "outputs/model.pt", "train.py")
    assert (here.given["send"]["folder"].files, here.given["send"]["folder"].bytes) == (3, 14)


def test_the_keys_of_torpor_itself_are_never_sent(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(here.folder / "state"))
    (here.folder / "state" / "stores").mkdir(parents=True)
    (here.folder / "state" / "stores" / "mywork").write_text("x")
    _run("--yes", *COMMAND)
    assert here.sent == ("data.csv", "train.py")


def test_no_command_runs_with_files_that_are_newer_on_the_machine_unless_a_person_agrees(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where an older file was put back here with its time: the machine has other code."""
    here.saved[here.name] = Workspace(name=here.name, paths=["~/my w"])
    here.copied = copying.Copied(0, 0, 1, ("train.py",), 2)
    with pytest.raises(NewerFiles, match=r"not this folder's: train\.py and 1 more\. ") as no:
        _run("--yes", *COMMAND)
    assert f"`torpor push {here.name} --to '~/my w' --overwrite`" in str(no.value)
    assert explained(no.value)[0] == REFUSED
    assert here.did == ["create", "send", "hibernate"]  # what it has rented
    ended = {"workspace": here.name, "machine": "m-1", "only_if_unused": True}
    assert here.given["hibernate"] == ended
    said = " ".join(capsys.readouterr().err.split())
    assert "machine m-1, which this command has rented, is stored and ended" in said
    assert (
        f"workspace {here.name} sleeps again: machine m-1 has ended after 0 min, and cost 0.00 $"
        in said
    )
    assert "is awake" not in said
    answers = ["y", "n"]
    monkeypatch.setattr("builtins.input", lambda asked: answers.pop(0))
    with pytest.raises(NewerFiles, match="not this folder's"):
        _run(*COMMAND)
    assert "job" not in here.did and here.machines == []
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "y")
    _run(*COMMAND)
    assert here.did[-1] == "job"
    said = " ".join("".join(capsys.readouterr()).split())
    assert "Run the command with the version on the machine of these?" in said


@pytest.mark.rule(5)
def test_a_machine_that_was_awake_before_stays_where_a_run_refuses(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.saved[here.name] = Workspace(name=here.name)
    here.machines.append(MACHINE)
    here.copied = copying.Copied(0, 0, 1, ("train.py",), 1)
    with pytest.raises(NewerFiles):
        _run("--yes", *COMMAND)
    assert here.did == ["store", "send"] and here.machines == [MACHINE]
    assert "Machine m-1 of workspace" in capsys.readouterr().err


def test_newer_files_of_the_newest_snapshot_are_seen_before_anything_is_rented(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.saved[here.name] = Workspace(name=here.name, paths=["~/w/"])
    here.snapshots.append("S1")
    train, data = ((here.folder / one).stat() for one in ("train.py", "data.csv"))
    here.entries = [
        _entry("~/w/train.py", train.st_size, train.st_mtime_ns + 1),
        _entry("~/w/data.csv", data.st_size, data.st_mtime_ns),
        _entry("~/w/other", 1, data.st_mtime_ns + 10**9),
    ]
    with pytest.raises(NewerFiles, match=r"not this folder's: train\.py\. `torpor wake") as no:
        _run("--yes", *COMMAND)
    assert (explained(no.value)[0], here.did) == (REFUSED, [])
    here.copied = copying.Copied(1, 10, 0, ("train.py",), 1)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda words: asked.append(words) or "y")
    _run(*COMMAND)
    assert here.did == ["offers", "wake", "send", "store", "job"]
    questions = " ".join(" ".join(asked).split())
    assert questions.count("of these?") == 1 and "in the newest snapshot of these?" in questions
    os.utime(here.folder / "train.py")
    here.machines.clear()
    here.copied = copying.Copied(1, 10, 0, (), 0)
    _run("--yes", *COMMAND)
    assert here.did[-1] == "job"


def _entry(path: str, size: int, mtime_ns: int) -> ListedEntry:
    return ListedEntry(path, "file", size, "0644", 0, 0, mtime_ns, "", False)


def test_a_run_that_asks_nothing_warns_where_nothing_limits_its_price(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("--yes", *COMMAND)
    assert "nothing limits the price" in capsys.readouterr().err
    _run("--yes", "--max-usd", "5", *COMMAND)
    here.saved[here.name] = Workspace(name=here.name, max_price_usd_h=0.6)
    _run("--yes", *COMMAND)
    here.machines.clear()
    here.saved[here.name] = Workspace(name=here.name)
    _run(*COMMAND)
    assert "nothing limits the price" not in capsys.readouterr().err


def test_a_job_that_has_not_ended_keeps_its_files(here: Here) -> None:
    here.open_jobs.append(SimpleNamespace(id="3f2a9c81d04e", state="running"))
    with pytest.raises(WorkspaceBusy, match=r"job 3f2a9c81d04e of .* is running.*job cancel"):
        _run("--yes", *COMMAND)
    assert (here.did, [*here.saved]) == ([], ["base"])


def test_a_workspace_on_several_machines_is_refused(here: Here) -> None:
    here.machines += [MACHINE, SimpleNamespace(id="m-2")]
    with pytest.raises(InvalidInput, match="m-1, m-2"):
        _run("--yes", *COMMAND)
    assert here.did == []


def test_the_money_and_the_retries_of_a_job_are_those_of_a_run(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    (here.folder / "torpor.yaml").write_text("max_usd: 2\nretries: 3\n")
    _run("--yes", *COMMAND)
    job = here.given["job"]
    assert (job["max_usd"], job["retries"], here.given["create"]["max_usd"]) == (2, 3, 2)
    here.machines.clear()
    here.snapshots.append("S1")
    _run("--max-usd", "5", "--retries", "0", *COMMAND)
    assert (here.given["job"]["max_usd"], here.given["job"]["retries"]) == (5, 0)
    wake = here.given["wake"]
    assert (wake["max_usd"], wake["job"]) == (5, here.given["job"]["job"])
    assert here.given["offers"]["max_usd"] == 5  # the question names what this money pays for


@pytest.mark.parametrize(
    "variable",
    [
        "HF_TOKEN=x",
        "AWS_SECRET_ACCESS_KEY=x",
        "MY_TOKEN=x",
        "DB_PASSWORD=x",
        "WHERE=postgres://ada:hunter2@db/x",
        "A=hf_0123456789abcdefghij",
        "A=-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_a_variable_that_may_be_a_secret_is_named_and_not_recorded(
    here: Here, variable: str
) -> None:
    name, _, value = variable.partition("=")
    (here.folder / "torpor.yaml").write_text(f"env:\n  {name}: '{value}'\n")
    with pytest.raises(InvalidInput, match=f"{name} may hold a secret.* --secret {name}=") as no:
        _run("--yes", *COMMAND)
    assert value == "x" or value not in str(no.value)
    assert here.did == []
    with pytest.raises(InvalidInput, match="may hold a secret"):
        _run("--yes", "--env", variable, *COMMAND)
    _run("--yes", "--accept-secret", name, *COMMAND)
    assert here.given["job"]["env"] == [variable]


def test_variables_that_name_no_secret_are_taken(here: Here) -> None:
    given = ["MAX_TOKENS=5", "TOKENIZERS_PARALLELISM=false", "URL=https://host/a:b@c", "KEY=1"]
    given += ["HF_TOKEN="]
    _run("--yes", *[word for one in given for word in ("--env", one)], *COMMAND)
    assert here.given["job"]["env"] == given


@pytest.mark.rule(5)
@pytest.mark.parametrize("moment", ["send", "store"])
def test_ctrl_c_names_the_machine_that_is_left_awake_with_its_price(
    here: Here, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    here.fails[moment] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _run("--yes", *COMMAND)
    said = capsys.readouterr().err
    assert f"Machine m-1 of workspace {here.name} is awake, and costs 0.500 $/h" in said
    assert f"`torpor hibernate {here.name}` stores and ends it" in said
    assert "job" not in here.did and "hibernate" not in here.did
    assert here.name in here.saved


@pytest.mark.rule(5)
@pytest.mark.parametrize("moment", ["send", "store"])
def test_what_a_run_has_rented_sleeps_again_where_it_fails_before_its_job(
    here: Here, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    here.fails[moment] = MachineUnreachable("the line broke")
    with pytest.raises(MachineUnreachable, match="the line broke"):
        _run("--yes", *COMMAND)
    assert here.did[-1] == "hibernate" and here.machines == []
    assert "sleeps again" in capsys.readouterr().err
    for fault in (UnsavedWork("a mount is in no snapshot"), KeyboardInterrupt()):
        here.fails["hibernate"] = fault
        error = MachineUnreachable if isinstance(fault, Exception) else KeyboardInterrupt
        with pytest.raises(error):
            _run("--yes", *COMMAND)
        said = capsys.readouterr().err
        assert f"Machine m-1 of workspace {here.name} is awake, and costs 0.500 $/h" in said
        assert "sleeps again" not in said
        here.machines.clear()
    assert "job" not in here.did


@pytest.mark.parametrize("how", ["create", "wake"])
def test_a_machine_that_a_wake_handed_over_before_it_failed_sleeps_again(
    here: Here, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And none that another command has woken meanwhile."""
    here.snapshots += ["S1"] * (how == "wake")
    fails_for: list[str] = []

    def failing(**given: Any) -> None:
        here.machines.append(MACHINE)
        job = (fails_for or [given["job"]])[0]
        here.rentals = [_rental(job)]
        raise MachineUnreachable("its book could not be given")

    monkeypatch.setattr(flows, how, failing)
    with pytest.raises(MachineUnreachable):
        _run("--yes", *COMMAND)
    assert here.did == ["hibernate"] and here.given["hibernate"]["machine"] == "m-1"
    fails_for.append("another")
    with pytest.raises(MachineUnreachable):
        _run("--yes", *COMMAND)
    assert here.did == ["hibernate"] and here.machines == [MACHINE]


def test_a_job_that_is_refused_before_its_record_leaves_no_machine_awake(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.records = _NoRecord()
    here.fails["job"] = InvalidInput("such a job cannot be")
    with pytest.raises(InvalidInput):
        _run("--yes", *COMMAND)
    assert here.did == ["create", "send", "store", "job", "hibernate"] and here.machines == []
    here.fails["job"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _run("--yes", *COMMAND)
    assert here.did[-1] == "job"
    assert f"`torpor hibernate {here.name}` stores and ends it" in capsys.readouterr().err


def test_only_the_machine_that_a_run_has_rented_sleeps_again(here: Here) -> None:
    """Another one of the workspace stands beside it by now."""
    here.fails["send"] = MachineUnreachable("the line broke")
    create = flows.create

    def create_beside(**given: Any) -> Any:
        made = create(**given)
        here.machines.append(SimpleNamespace(id="m-2", price_usd_h=9.0))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows, "create", create_beside)
        with pytest.raises(MachineUnreachable):
            _run("--yes", *COMMAND)
    assert here.given["hibernate"]["machine"] == "m-1"


@pytest.mark.parametrize("knows", ["the store is away", "a run of it waits", "no server"])
def test_a_machine_whose_job_may_have_begun_is_left_to_it(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], knows: str
) -> None:
    class Records(dict[str, Any]):
        def __missing__(self, job: str) -> None:
            if knows == "the store is away":
                raise MachineUnreachable(knows)

    def fails(**given: Any) -> None:
        if knows == "a run of it waits":
            here.queued.add(given["job"])
        if knows == "no server":
            monkeypatch.setattr("torpor_cli.running.connected", _away)
        raise fault

    here.records = Records()
    monkeypatch.setattr(flows, "job", fails)
    for fault in (MachineUnreachable("the line broke"), KeyboardInterrupt()):
        monkeypatch.setattr("torpor_cli.running.connected", nullcontext)
        with pytest.raises(type(fault)):
            _run("--yes", *COMMAND)
        said = capsys.readouterr().err
        assert f"`torpor status` shows whether {here.name} is awake" in said
        assert "no job was begun" not in said and "hibernate" not in here.did
        here.machines.clear()


def _away() -> None:
    raise MachineUnreachable("the server is away")


def test_an_error_that_nobody_foresaw_leaves_no_machine_awake(here: Here) -> None:
    here.records = _NoRecord()
    here.fails["job"] = RuntimeError("a fault in the code")
    with pytest.raises(RuntimeError):
        _run("--yes", *COMMAND)
    assert here.did[-1] == "hibernate" and here.machines == []


def test_who_agrees_to_use_some_newer_files_agrees_to_no_others(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host has stored the workspace while the question was open."""
    here.saved[here.name] = Workspace(name=here.name, paths=["~/w"])
    here.snapshots.append("S1")
    train = (here.folder / "train.py").stat()
    here.entries = [_entry("~/w/train.py", train.st_size, train.st_mtime_ns + 1)]
    here.copied = copying.Copied(1, 10, 0, ("data.csv",), 1)
    answers = ["y", "y", "n"]
    monkeypatch.setattr("builtins.input", lambda words: answers.pop(0))
    with pytest.raises(NewerFiles, match=r"not this folder's: data\.csv"):
        _run(*COMMAND)
    assert answers == [] and "job" not in here.did


@pytest.mark.parametrize("how", ["create", "wake"])
def test_a_machine_that_was_handed_over_when_the_wake_was_interrupted_is_named(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    def interrupted(**given: Any) -> None:
        here.machines.append(MACHINE)
        here.rentals = [_rental(given["job"])]
        raise KeyboardInterrupt

    here.snapshots += ["S1"] * (how == "wake")
    monkeypatch.setattr(flows, how, interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run("--yes", *COMMAND)
    said = capsys.readouterr().err
    assert f"Machine m-1 of workspace {here.name} is awake, and costs 0.500 $/h" in said
    here.machines.clear()

    def away(name: str) -> list[Any]:
        if len(looks) > 1:
            raise MachineUnreachable("the store is away")
        looks.append(name)
        return []

    looks: list[str] = []
    monkeypatch.setattr(flows, how, interrupted)
    looks.append("")
    monkeypatch.setattr(listing, "list_logins", away)
    with pytest.raises(KeyboardInterrupt):
        _run("--yes", *COMMAND)
    assert "is awake is not known (the store is away): `torpor status`" in capsys.readouterr().err


def test_a_wake_that_fails_says_nothing_of_a_machine(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.fails["create"] = NoOffer("sold")
    with pytest.raises(NoOffer):
        _run("--yes", *COMMAND)
    assert "is awake" not in capsys.readouterr().err
    assert here.did == ["create"]


def test_a_machine_that_ends_while_it_is_stored_begins_no_job(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "backup", lambda **given: "it is asleep")
    with pytest.raises(WorkspaceAwake, match="has ended meanwhile"):
        _run("--yes", *COMMAND)
    assert "job" not in here.did


def test_two_runs_of_one_folder_do_not_meet(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(**given: Any) -> None:
        with pytest.raises(WorkspaceBusy, match="another `torpor run`"):
            _run("--yes", *COMMAND)

    monkeypatch.setattr(flows, "job", again)
    _run("--yes", *COMMAND)


def test_results_come_from_the_last_snapshot_of_the_job_and_overwrite_nothing(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.warnings = ["outputs/.git was left out"]
    _run("--yes", "--bring", "a/outputs/", "--bring", "a/outputs/x", *COMMAND)
    assert here.did.count("bring") == 1
    assert here.given["bring"] == {
        "workspace": here.name,
        "path": "/workspace/a/outputs",
        "into": str(here.folder / "a"),
        "snapshot": "S2",
        "machine": "here",
        "move_aside": True,
        "leave_git": True,
    }
    said = capsys.readouterr().err
    assert "a/outputs of snapshot S2 is here: 1 files" in said
    assert "torpor: warning: a/outputs: outputs/.git was left out" in said


def test_a_run_that_fails_before_its_job_has_ended_brings_no_earlier_results(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.fails["job"] = MachineUnreachable("the store is away")
    with pytest.raises(MachineUnreachable):
        _run("--yes", "--bring", "outputs", *COMMAND)
    assert "bring" not in here.did
    said = capsys.readouterr().err
    assert "nothing was brought: the job has not ended" in said
    assert f"`torpor status` shows whether {here.name} is awake" in said


def test_results_of_a_command_that_failed_are_brought_and_its_failure_counts(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**given: Any) -> None:
        here.records[given["job"]] = SimpleNamespace(ended=True, final="S3")
        raise JobFailed("it ended with status 1")

    monkeypatch.setattr(flows, "job", fails)
    with pytest.raises(JobFailed):
        _run("--yes", "--bring", "outputs", *COMMAND)
    assert here.given["bring"]["snapshot"] == "S3"


def test_what_was_not_brought_makes_a_run_fail_with_the_way_to_it(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.fails["bring"] = InvalidInput("no such path")
    with pytest.raises(Exception, match=f"`torpor snapshots {here.name} S2` lists it"):
        _run("--yes", "--bring", "a", "--bring", "b", *COMMAND)
    said = capsys.readouterr().err
    assert "a was not brought: no such path" in said and "b was not brought" in said


def test_a_job_without_a_save_brings_no_earlier_results(here: Here) -> None:
    """Its newest snapshot is the one that it began from."""
    here.job = SimpleNamespace(id="x", final=None, newest="S1", saves=0)
    with pytest.raises(Exception, match="no snapshot has the results of this job"):
        _run("--yes", "--bring", "outputs", *COMMAND)
    assert "bring" not in here.did


def test_ctrl_c_during_the_job_says_how_results_come_later(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.fails["job"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _run("--yes", "--bring", "outputs", *COMMAND)
    said = capsys.readouterr().err
    assert (
        f"`torpor restore {here.name} outputs {here.folder} --move-aside --leave-git` brings it"
        in said
    )


# -- the command that the job runs


def test_the_command_is_passed_on_word_by_word() -> None:
    assert argv_of("", "python other.py", ["python", "a b.py"]) == ["python", "a b.py"]


def test_lines_stop_at_the_first_one_that_fails(tmp_path: Path) -> None:
    assert _done(argv_of("", "echo 1\nfalse | true\necho 2\n", []), tmp_path) == (1, "1\n")
    assert _done(argv_of("", "cat <<END\n$0 'x'\nEND\nexit 7\n", []), tmp_path) == (
        7,
        "torpor-run 'x'\n",
    )


def test_the_setup_runs_before_the_command_and_its_failure_ends_both(tmp_path: Path) -> None:
    assert _done(argv_of("echo setup; cd /\n", "", ["sh", "-c", 'echo "$1"; pwd', "_", "a  b"]),
                 tmp_path) == (0, f"setup\na  b\n{tmp_path}\n")  # fmt: skip
    assert _done(argv_of("exit 3", "echo run", []), tmp_path) == (3, "")
    assert _done(argv_of("echo 1", "echo 2; exit 4", []), tmp_path) == (4, "1\n2\n")


def test_a_command_after_a_setup_finds_what_the_setup_has_found(tmp_path: Path) -> None:
    """A login's files may put another Python first."""
    (tmp_path / ".bash_profile").write_text("export FOUND=conda\nfalse\n")
    argv = argv_of("echo $FOUND", "", ["sh", "-c", "echo $FOUND"])
    assert _done(argv, tmp_path) == (0, "conda\nconda\n")
    assert _done(argv_of("", "echo $FOUND", []), tmp_path) == (0, "conda\n")


def _done(argv: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        argv,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
