"""The workspace of a folder: its name, what it takes from another, and one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blocks import Workspace
from torpor.shared.errors import InvalidInput, WorkspaceBusy
from torpor.shared.values import workspace_name
from torpor_cli.folder_workspace import block_for, checked_folder, held, name_for
from torpor_cli.torpor_yaml import TorporYaml, parse

NAME = "train-1f0c2b7a"


def test_a_folder_has_one_name_and_another_folder_of_that_name_another(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "train", tmp_path / "b" / "train"
    assert name_for(one) == name_for(one)
    assert name_for(one) != name_for(other)
    assert name_for(one).startswith("train-")


@pytest.mark.parametrize("name", ["My Träining_2.0", "---", "数据", "x" * 200, "Ä" * 80, "a\udcff"])
def test_any_folder_has_a_name_that_a_workspace_may_have(tmp_path: Path, name: str) -> None:
    assert workspace_name(name_for(tmp_path / name)) == name_for(tmp_path / name)


def test_a_host_is_told_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "machine-id"
    monkeypatch.setattr("torpor_cli.folder_workspace.MACHINE_ID", here)
    names = []
    for host in ("one", "two"):
        here.write_text(f"{host}\n")
        names.append(name_for(tmp_path))
    here.unlink()
    for host in ("three", "four"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names.append(name_for(tmp_path))
    assert len({*names}) == 4


@pytest.mark.parametrize("folder", ["/", "/etc", "/usr", "/tmp", "/var/tmp"])
def test_a_folder_of_the_system_is_no_project(folder: str) -> None:
    with pytest.raises(InvalidInput, match="change into the folder of your project"):
        checked_folder(Path(folder))


def test_a_home_and_what_is_above_it_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "me"
    (home / "train").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (home / "link").symlink_to("..")
    for folder in (home, home.parent, tmp_path, home / "link" / "me"):
        with pytest.raises(InvalidInput, match="sends all"):
            checked_folder(folder)
    assert checked_folder(home / "link" / "me" / "train") == home / "train"


def test_the_folder_of_torpor_itself_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    (tmp_path / "keys").mkdir()
    for folder in (tmp_path, tmp_path / "keys"):
        with pytest.raises(InvalidInput, match="no machine gets it"):
            checked_folder(folder)


def test_a_second_run_is_refused_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    with held(NAME):
        with pytest.raises(WorkspaceBusy, match=f"as process {os.getpid()}: wait"), held(NAME):
            pass
        with held("another"):
            pass
    with held(NAME):
        pass


def test_a_run_that_was_killed_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    script = (
        "import os, signal\nfrom torpor_cli.folder_workspace import held\n"
        f"with held({NAME!r}): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with held(NAME):
        pass


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Workspace]:
    """The workspaces that are saved, by their names."""
    blocks: dict[str, Workspace] = {}

    def of(name: str) -> Workspace:
        if name not in blocks:
            raise InvalidInput(f"there is no block workspace/{name}")
        return blocks[name]

    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: [*blocks])
    monkeypatch.setattr(Workspace, "of", of)
    return blocks


def _rents(name: str, **more: object) -> Workspace:
    settings: dict[str, object] = {"store": "r2", "provider": "vast-provider/default"}
    return Workspace(name=name, **(settings | more))  # type: ignore[arg-type]


def test_a_new_workspace_takes_store_market_and_limits_and_nothing_else(
    saved: dict[str, Workspace],
) -> None:
    saved["base"] = _rents(
        "base", max_price_usd_h=0.6, gpu="H100", programs=["jupyter lab"], paths=["/data"]
    )
    saved["demo"] = Workspace(name="demo")
    block, is_new = block_for(NAME, parse("resources:\n  spot: allowed\n  disk_gib: 50\n"))
    assert is_new
    assert (block.name, block.paths) == (NAME, ["/workspace"])
    assert (block.store, block.provider) == ("r2", "vast-provider/default")
    assert (block.max_price_usd_h, block.spot, block.disk_gib) == (0.6, "allowed", 50)
    assert (block.gpu, block.programs) == ("", [])


def test_torpor_yaml_counts_more_than_the_workspace_that_is_taken_from(
    saved: dict[str, Workspace],
) -> None:
    saved["base"] = _rents("base", max_price_usd_h=0.6)
    block, _ = block_for(NAME, parse("resources:\n  max_price_usd_h: 2\n  gpu: L40S\n"))
    assert (block.max_price_usd_h, block.gpu) == (2.0, "L40S")


def test_the_workspace_of_the_demo_counts_where_there_is_no_other(
    saved: dict[str, Workspace],
) -> None:
    saved["demo"] = Workspace(name="demo")
    block, is_new = block_for(NAME, TorporYaml())
    assert (is_new, block.provider, block.paths) == (
        True, "local-provider/default", ["~/workspace"],
    )  # fmt: skip


def test_of_workspaces_that_differ_one_is_to_be_named(saved: dict[str, Workspace]) -> None:
    saved["base"], saved["dear"] = _rents("base"), _rents("dear", max_price_usd_h=30.0)
    with pytest.raises(InvalidInput, match=r"`like: base` in torpor.yaml.* There are base, dear"):
        block_for(NAME, TorporYaml())
    block, _ = block_for(NAME, parse("like: dear\n"))
    assert block.max_price_usd_h == 30.0
    with pytest.raises(InvalidInput, match="no block workspace/nosuch"):
        block_for(NAME, parse("like: nosuch\n"))


def test_without_any_workspace_init_is_named(saved: dict[str, Workspace]) -> None:
    with pytest.raises(InvalidInput, match="`torpor init mywork` asks for both"):
        block_for(NAME, TorporYaml())


def test_a_saved_workspace_is_used_as_it_is(saved: dict[str, Workspace]) -> None:
    saved[NAME] = _rents(NAME, spot="allowed", gpu="H100")
    project = parse("resources:\n  spot: allowed\n  gpu: L40S\n")
    assert block_for(NAME, project) == (saved[NAME], False)


@pytest.mark.parametrize(
    ("line", "edit"),
    [
        ("max_price_usd_h: 0.6", f"`torpor edit {NAME} max_price_usd_h=0.6`"),
        ("regions: [US East, DE]", f"`torpor edit {NAME} 'regions=US East' regions=DE`"),
        ("spot: never", f"`torpor edit {NAME} spot=never`"),
        ('image: "ours:1"', f"`torpor edit {NAME} image=ours:1`"),
        ('cuda: ""', f"`torpor edit {NAME} cuda=`"),
    ],
)
def test_a_saved_workspace_that_differs_is_not_changed_and_the_command_is_named(
    saved: dict[str, Workspace], line: str, edit: str
) -> None:
    saved[NAME] = _rents(NAME, spot="only", cuda="12.4")
    with pytest.raises(InvalidInput) as refused:
        block_for(NAME, parse(f"run: x\nresources:\n  {line}\n"))
    key = line.partition(":")[0]
    assert str(refused.value).startswith(f"torpor.yaml, line 3, key resources.{key}: {key} is ")
    assert edit in str(refused.value)
