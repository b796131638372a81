"""Files of a snapshot come to the host of the flow, from a real store and without a rental."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flows import restore_path
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.world import World


@pytest.mark.rule(23)
def test_results_come_here_without_a_machine_of_the_workspace(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TORPOR_STATE", raising=False)
    place = world.workspace(world.rent().id)
    (place / "results").mkdir(parents=True)
    (place / "results/model.bin").write_bytes(b"weights" * 100_000)
    (place / "results/newest").symlink_to("model.bin")
    for name in (".git", ".GIT"):
        (place / "results/sub" / name / "hooks").mkdir(parents=True)
    (place / "results/sub/.git/hooks/post-checkout").write_text("hostile")
    os.link(place / "results/sub/.git/hooks/post-checkout", place / "results/sub/hook")
    (place / "results/sub/.git/HEAD").write_text("hostile")
    (place / "results/bare/head").mkdir(parents=True)
    (place / "results/bare/HEAD").symlink_to("refs/heads/main")
    hibernate_plainly(world.opened)
    report = run_plainly(
        world.opened, restore_path, path="results", into="~/from torpor", machine="here"
    )
    there = tmp_path / "from torpor/results"
    assert (report.machine, report.restored_to, report.files) == ("here", str(there), 3)
    assert (there / "newest").read_bytes() == b"weights" * 100_000
    report = run_plainly(
        world.opened, restore_path, path="results", into="~/mine", machine="here", leave_git=True
    )
    names = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*")}
    assert names == {
        f"results{name}"
        for name in ("", "/model.bin", "/newest", "/sub", "/sub/hook", "/bare", "/bare/head")
    }
    assert (tmp_path / "mine/results/sub/hook").read_text() == "hostile"
    left_out = [words.partition(" ")[0] for words in report.warnings]
    assert left_out == ["results/bare/HEAD", "results/sub/.GIT", "results/sub/.git"]
    run_plainly(
        world.opened,
        restore_path,
        path="results/sub/.git",
        into="~",
        machine="here",
        leave_git=True,
    )
    assert (tmp_path / ".git/HEAD").read_text() == "hostile", "as it was named"
    assert world.machines() == [] and world.opened.rentals.open() == []
    served = tmp_path / "state/torpor/here"
    assert served.stat().st_mode & 0o077 == 0, "the keys of its SSH server lie where others write"
    assert [*served.glob("m-*")] == []
