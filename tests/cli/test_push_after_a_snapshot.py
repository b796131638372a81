"""`torpor push --delete` with the real snapshot that it takes before, of a machine of this host."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import flows
from tests.fixtures.plain_flows import plain
from tests.fixtures.world import World
from torpor_cli import copying
from torpor_cli.copying import Side, begin_argv, push


@pytest.mark.rule(23)
def test_what_exclude_names_stays_and_the_rest_goes(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = world.rent().id
    place = world.workspace(machine)
    opened = world.opened
    opened = replace(opened, spec=msgspec.structs.replace(opened.spec, exclude=["*.ckpt"]))
    argv = ["env", f"HOME={place.parent}", *begin_argv()]
    side = Side("demo", argv, list(opened.spec.paths))
    monkeypatch.setattr(copying, "machine_side", lambda workspace, machine: side)
    monkeypatch.setattr(copying, "connected", nullcontext)
    monkeypatch.setattr(flows, "backup", flows.backup.fn)
    folder = tmp_path / "proj"
    folder.mkdir()
    (folder / "train.py").write_text("text")
    there = place / "proj"
    (there / "runs" / "deep").mkdir(parents=True)
    for name in ("best.ckpt", "runs/old.txt", "runs/deep/last.ckpt", "first"):
        (there / name).write_text("there")
    (there / "second").hardlink_to(there / "first")
    (there / "link").symlink_to("first")
    with plain(opened):
        assert push(opened.spec.name, folder, delete=True) == 0
    names = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert names == {"train.py", "best.ckpt", "runs/deep/last.ckpt"}
    assert "names it, or it is new: best.ckpt, runs/deep/last.ckpt" in capsys.readouterr().err
