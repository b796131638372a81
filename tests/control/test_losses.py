from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from torpor.control.losses import clean, is_accepted, judge_losses, left_behind, size
from torpor.shared.values import GIB, WorkspaceName, WorkspaceSpec
from torpor.shared.wire.losses import LeftBehind, LinkOut, Losses, summarised, summary

SPEC = WorkspaceSpec(WorkspaceName("demo"), ["~/workspace"])
NEWEST = 1_800_000_000.0


def _left(path: str, count: int = 3_100_000_000, files: int = 2) -> LeftBehind:
    return LeftBehind(path, files, count, NEWEST)


def _losses(*folders: LeftBehind, **changes: Any) -> Losses:
    total = _left("/", sum(left.bytes for left in folders), sum(left.files for left in folders))
    plain = Losses(True, total, list(folders), [], [], 0, [], 0, [], 0, [])
    return msgspec.structs.replace(plain, **changes)


LINK = LinkOut("/root/workspace/checkpoints", _left("/mnt/nvme/checkpoints"))


def test_the_lines_name_what_is_left_the_largest_ten_and_their_sum() -> None:
    lost = judge_losses(_losses(), SPEC)
    assert (lost.lines, lost.keep) == ([], [])
    folders = [_left(f"/data/{number}") for number in range(12)]
    lines = judge_losses(_losses(*folders), SPEC).lines
    newest = "newest 2027-01-15 08:00 UTC"
    assert lines[0] == f"37.2 GB in 24 files, {newest} outside of the workspace, in:"
    assert lines[1] == "/data/0: 3.1 GB in 2 files, newest 2027-01-15 08:00 UTC"
    assert lines[11:] == ["2 more directories"]


def test_packages_settings_caches_and_what_was_not_seen_have_a_line_each() -> None:
    lost = judge_losses(
        _losses(
            caches=[_left("/root/.cache/pip", 2000)],
            settings=["/etc/fstab"],
            setting_count=1,
            packages=[f"p{number} 1.0 (apt)" for number in range(8)],
            package_count=30,
            unseen=["/net (nfs4: it does not end with this machine)"],
            complete=False,
        ),
        SPEC,
    )
    assert lost.lines == [
        "caches, which are made again: /root/.cache/pip (2.0 kB)",
        "settings of the system that were added or changed: /etc/fstab",
        "packages that were added, and that a wake does not install: p0 1.0 (apt), p1 1.0 (apt), "
        "p2 1.0 (apt), p3 1.0 (apt), p4 1.0 (apt), and 25 more",
        "not looked at: /net (nfs4: it does not end with this machine)",
        "the look was cut short by its time limit: there may be more",
    ]
    assert lost.keep == []


def test_a_block_that_keeps_the_environment_says_which_packages_come_back() -> None:
    packages = ["torch 2.4.0 and 9 more (pip in /opt/conda, in no record)", "tzdata 2 (apt)"]
    spec = WorkspaceSpec(WorkspaceName("demo"), ["/w"], environment="keep")
    losses = _losses(packages=packages, package_count=2, kept=["jq 1.6 (apt)"], kept_count=24)
    lost = judge_losses(losses, spec)
    assert lost.lines == [
        "packages that were added, and that a wake puts back where it can: jq 1.6 (apt), and 23 "
        "more",
        "packages that were added, and that a wake does not install: torch 2.4.0 and 9 more (pip "
        "in /opt/conda, in no record), tzdata 2 (apt)",
    ]
    (line,) = judge_losses(losses, SPEC).lines  # without it, none comes back
    assert line.startswith("packages that were added, and that a wake does not install: jq 1.6 ")
    assert line.endswith("and 23 more")


def test_a_link_to_data_keeps_the_machine_by_default() -> None:
    lost = judge_losses(_losses(links=[LINK], link_count=4), SPEC)
    (reason,) = lost.keep
    assert reason.startswith(
        "/root/workspace/checkpoints is a link to /mnt/nvme/checkpoints, 3.1 GB in 2 files"
    )
    assert "3 more links" in reason
    assert "`paths`" in reason
    assert "`accept_lost`" in reason


@pytest.mark.parametrize(
    ("rule", "gib", "complete", "keeps"),
    [
        ("report", 0.0, True, False),
        ("report", 0.0, False, False),
        ("refuse", 2.0, True, True),
        ("refuse", 4.0, True, False),
        ("refuse", 4.0, False, True),  # unknown is not nothing
    ],
)
def test_a_block_may_refuse_losses_above_a_size(
    rule: Any, gib: float, complete: bool, keeps: bool
) -> None:
    spec = msgspec.structs.replace(SPEC, left_behind=rule, left_behind_gib=gib)
    losses = _losses(_left("/data", 3 * GIB), complete=complete)
    assert bool(judge_losses(losses, spec).keep) == keeps


def test_what_keeps_a_machine_names_a_users_own_files_first_and_counts_the_rest() -> None:
    own = [_left(f"/root/{number}") for number in range(7)]
    folders = [_left("/data"), *(_left(f"{one.path}/deep") for one in own)]
    total = LeftBehind("/", 40, 9 * GIB, 0.0)
    spec = msgspec.structs.replace(SPEC, left_behind="refuse")
    losses = msgspec.structs.replace(
        _losses(*folders), user_files=own[:2], user_total=LeftBehind("/", 14, GIB, 0.0), total=total
    )
    lost = judge_losses(losses, spec)
    (reason,) = lost.keep
    named = re.findall(r"(/\S+) \(3", reason)
    assert named == ["/root/0", "/root/1", "/data", "/root/2/deep", "/root/3/deep"]
    assert "and 30 more files, and the block allows" in reason
    assert "/root/1 (3.1 GB in 2 files) and 10 more files" in lost.user_files
    assert not lost.storable  # the machine is kept in any case


def test_to_accept_a_directory_is_not_to_accept_what_its_links_lead_to() -> None:
    spec = msgspec.structs.replace(SPEC, accept_lost=["/root/workspace"])
    assert judge_losses(_losses(links=[LINK], link_count=1), spec).keep


@pytest.mark.parametrize(
    ("accepted", "path", "says"),
    [
        (["/data"], "/data", True),
        (["/data/"], "/data/raw", True),
        (["/data"], "/database", False),
        (["/"], "/data", True),
        (["~/old"], "~/old/x", True),
        ([], "/data", False),
    ],
)
def test_a_directory_is_accepted_with_what_is_in_it(
    accepted: list[str], path: str, says: bool
) -> None:
    assert is_accepted(accepted, path) == says


@pytest.mark.rule(22)
def test_a_machines_names_break_no_line_and_no_table() -> None:
    hostile = "/data/\x1b[2J\n| `x` | \u202e" + "y" * 1000
    lost = judge_losses(_losses(_left(hostile)), SPEC)
    (line,) = lost.lines
    assert line.isprintable()
    assert "|" not in line
    assert len(line) < 300
    assert clean("\ud800") == " "


@pytest.mark.rule(22)
def test_a_wake_says_what_was_left_behind_and_believes_no_record() -> None:
    losses = _losses(_left("/data"), links=[LINK], link_count=1)
    environment = {"os": "Debian", **summary(losses)}
    said = left_behind(environment)
    assert said[0] == (
        "when the machine of this snapshot was destroyed, 3.1 GB in /data (3.1 GB) were outside "
        "of the workspace: they are not in this snapshot"
    )
    assert said[1].startswith("/root/workspace/checkpoints is a link to /mnt/nvme/checkpoints")
    assert left_behind({}) == []
    assert left_behind(summary(_losses())) == []
    for lie in ("x", {"complete": 1}, {**environment["left_behind"], "link_count": -1}):
        assert summarised({"left_behind": lie}) is None
    assert [size(n) for n in (999, 1000, 1_500_000)] == ["999 bytes", "1.0 kB", "1.5 MB"]
