from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torpor.machine.tree.disks import Mount, Mounts
from torpor.machine.tree.links_out import LinksOut
from torpor.machine.tree.names import Names
from torpor.machine.tree.walk import walk


class Linked:
    """A workspace in ``work``, and what lies beside it."""

    def __init__(self, top: Path) -> None:
        self.top = Path(os.path.realpath(top))
        self.work = self.top / "work"
        self.work.mkdir()
        self.mounts = [Mount("/", "overlay")]
        self.skipped: list[str] = []
        self.since_ns: int | None = 0
        self.older = False

    def begin(self) -> None:
        time.sleep(0.03)
        self.since_ns = time.time_ns()
        time.sleep(0.03)

    def write(self, path: str, content: bytes = b"xyz") -> Path:
        file = self.top / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def link(self, name: str, target: str | Path) -> None:
        link = self.work / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def find(self, stop: Callable[[], bool] = lambda: False) -> dict[str, tuple[str, int, int]]:
        """By the name of each link, where it leads, and the files and bytes there."""
        root = os.fsencode(self.work)
        entries = walk([root], Names(1), None, lambda: None).names.entries
        looks = LinksOut(
            [root], self.skipped, self.since_ns, Mounts(self.mounts), stop, older=self.older
        )
        links, self.count = looks.find(entries)
        return {
            os.path.relpath(link.link, self.work): (
                os.path.relpath(link.data.path, self.top), link.data.files, link.data.bytes,
            )
            for link in links
        }  # fmt: skip


@pytest.fixture
def linked(tmp_path: Path) -> Linked:
    return Linked(tmp_path)


@pytest.mark.parametrize("relative", [False, True])
def test_a_link_to_data_is_found_with_what_it_leads_to(linked: Linked, relative: bool) -> None:
    linked.begin()
    linked.write("nvme/checkpoints/1/weights", b"x" * 100)
    linked.write("nvme/checkpoints/2")
    target = "../nvme/checkpoints" if relative else linked.top / "nvme/checkpoints"
    linked.link("checkpoints", target)
    assert linked.find() == {"checkpoints": ("nvme/checkpoints", 2, 103)}


def test_a_link_to_data_from_before_a_restart_is_found_where_the_machine_is_its_users(
    linked: Linked,
) -> None:
    linked.write("nvme/checkpoints/1/weights")
    linked.link("checkpoints", linked.top / "nvme/checkpoints")
    linked.link("python", "/usr/bin/env")  # the system's, as of each virtual environment
    linked.begin()
    assert linked.find() == {}
    linked.older = True
    assert linked.find() == {"checkpoints": ("nvme/checkpoints", 1, 3)}


def test_a_link_to_a_file_and_one_through_another_link_are_found(linked: Linked) -> None:
    linked.begin()
    linked.write("far/model.bin")
    (linked.top / "short").symlink_to("far")
    linked.link("deep/in/model", "../../../short/model.bin")
    linked.link("near", "deep/in/model")
    assert linked.find() == {"deep/in/model": ("far/model.bin", 1, 3)}
    linked.link("out", "../far")
    linked.link("climbs", "out/../far/model.bin")  # as text it would stay in the workspace
    assert sorted(linked.find()) == ["climbs", "out"]
    assert linked.count == 3


def test_links_to_the_image_and_within_the_workspace_are_harmless(linked: Linked) -> None:
    linked.write("usr/bin/python3")
    linked.begin()
    linked.write("work/real/file")
    linked.link("venv/bin/python3", linked.top / "usr/bin/python3")
    linked.link("inside", "real")
    linked.link("absolute", linked.work / "real/file")
    linked.link("dangling", linked.top / "gone")
    linked.link("loop", "loop")
    linked.link("home", linked.top)  # the workspace is in it
    linked.link("process", "/proc/self/maps")
    assert linked.find() == {}


def test_what_may_be_lost_is_not_looked_at(linked: Linked) -> None:
    linked.begin()
    linked.write("data/cache/a")
    linked.write("data/b")
    linked.write(".cache/uv/a")
    linked.link("cache", "../data/cache")
    linked.link("data", "../data")
    linked.link("uv", "../.cache/uv")
    assert sorted(linked.find()) == ["cache", "data"]
    linked.skipped = [str(linked.top / "data/cache")]
    assert linked.find() == {"data": ("data", 1, 1 + 2)}
    linked.skipped = [str(linked.top / "data")]
    assert linked.find() == {}


@pytest.mark.rule(22)
def test_a_network_is_not_touched(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    linked.begin()
    linked.write("net/data/a")
    linked.write("data/net/a")
    linked.write("data/b")
    linked.mounts += [Mount(str(linked.top / "net"), "nfs4")]
    linked.mounts += [Mount(str(linked.top / "data/net"), "fuse.s3fs")]
    linked.link("net", "../net/data")
    linked.link("data", "../data")
    touched: list[str] = []
    for name in ("lstat", "readlink", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, real=real: touched.append(path) or real(path))
    assert linked.find() == {"data": ("data", 1, 3)}
    below = [path for path in touched if isinstance(path, str)]  # the walk itself takes bytes
    assert below
    assert not [path for path in below if "net" in path.removeprefix(str(linked.top)).split("/")]


def test_a_link_that_leads_where_nobody_may_look_counts_as_data_until_that_is_accepted(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked.begin()
    linked.write("secret/data")
    linked.link("data", "../secret/data")
    real = os.readlink

    def readlink(path: str) -> str:
        if path == str(linked.top / "secret/data"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)
    assert linked.find() == {"data": ("secret/data", 0, 0)}
    linked.skipped = [str(linked.top / "secret/data")]  # as the message names it
    assert linked.find() == {}


@pytest.mark.rule(22)
def test_what_was_not_looked_at_in_time_counts_as_data(linked: Linked) -> None:
    linked.write("large/file")
    linked.begin()
    linked.link("large", "../large")
    assert linked.find() == {}
    assert linked.find(stop=lambda: True) == {"large": ("large", 0, 0)}


def test_on_a_machine_of_ones_own_only_the_system_is_harmless(linked: Linked) -> None:
    linked.since_ns = None
    linked.write("data/of/years")
    linked.link("data", "../data")
    linked.link("python", "/usr/bin/env")
    assert sorted(linked.find()) == ["data"]
