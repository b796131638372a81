from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from torpor.machine.tree.disks import Mount, Mounts
from torpor.machine.tree.left_behind import Found, Look, UserNames, Where

SYSTEM = "/usr/lib/python3/dist-packages"


class Made:
    """A machine in a folder: what ``image`` writes came with it, what ``write`` writes did not."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.mounts = [Mount("/", "overlay")]
        self.since_ns = 0

    def write(self, path: str, content: bytes = b"x") -> None:
        file = self.top / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def image(self, *paths: str) -> None:
        for path in paths:
            self.write(path)

    def begin(self) -> None:
        """The image is unpacked: what comes now is the user's."""
        time.sleep(0.03)  # more than the kernel's tick
        self.since_ns = time.time_ns()
        time.sleep(0.03)

    def look(
        self,
        *skipped: str,
        made_again: Sequence[str] = (),
        stop: Callable[[], bool] = lambda: False,
        recorded: str = SYSTEM,
        disks_since_ns: int | None = None,
        kept_apt: Sequence[str] = (),
        kept_pip: Sequence[str] = (),
    ) -> Found:
        disks_ns = self.since_ns if disks_since_ns is None else disks_since_ns
        where = Where(
            "/",
            self.since_ns,
            disks_ns,
            list(skipped),
            [recorded],
            made_again=[*made_again],
            kept_apt=[*kept_apt],
            kept_pip=[*kept_pip],
        )
        return Look(where, Mounts(self.mounts), stop, str(self.top)).run()

    def user_names(self, *skipped: str, most: int = 100) -> UserNames:
        where = Where("/", self.since_ns, self.since_ns, list(skipped), [], home="/root")
        return Look(where, Mounts(self.mounts), lambda: False, str(self.top)).user_names(most)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    machine = Made(tmp_path)
    machine.image("/root/.bashrc", "/etc/passwd", "/usr/bin/python3", "/opt/tool/bin/tool")
    return machine


@pytest.mark.rule(22)
def test_an_untouched_image_has_nothing_worth_a_line(made: Made) -> None:
    made.begin()
    for noise in (
        "/var/log/syslog", "/run/sshd.pid", "/etc/resolv.conf", "/root/.ssh/authorized_keys",
        "/root/.bash_history", "/proc/1/stat", "/usr/lib/python3/__pycache__/os.pyc",
        "/var/lib/systemd/random-seed", "/root/.torpor/agent.log",
    ):  # fmt: skip
        made.write(noise)
    found = made.look("/root/.torpor")
    assert (found.total.files, found.folders, found.settings, found.packages) == (0, [], [], [])
    assert found.complete


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["/data/runs/1/a", "/data/runs/2/a"], ["/data/runs"]),
        (["/root/train.py", "/root/data/a"], ["/root", "/root/data"]),
        (["/home/ann/.cache/huggingface/hub/a"], ["/home/ann/.cache/huggingface/hub"]),
        (["/opt/conda/envs/x/bin/a", "/opt/conda/envs/x/lib/b"], ["/opt/conda/envs/x"]),
        (["/workspace/a", "/srv/b"], ["/workspace", "/srv"]),
        (["/usr/local/bin/mine"], ["/usr/local/bin"]),
        (["/var/lib/docker/volumes/db/_data/a"], ["/var/lib/docker/volumes/db/_data"]),
        (["/mnt/nvme/checkpoints/a", "/mnt/nvme/b/c"], ["/mnt/nvme/checkpoints", "/mnt/nvme/b"]),
        (["/big/" + "/".join("abcdefghijkl") + "/file"], ["/big/a/b/c/d/e/f/g"]),
    ],
)
def test_files_are_grouped_as_a_person_would_name_them(
    made: Made, files: list[str], named: list[str]
) -> None:
    made.mounts.append(Mount("/mnt/nvme", "ext4"))
    made.begin()
    for path in files:
        made.write(path, b"x" * (100_000 if path.startswith("/var") else 3))
    found = made.look()
    assert sorted(folder.path for folder in found.folders) == sorted(named)
    assert found.total.files == len(files)
    assert found.total.newest_unix > made.since_ns / 1e9


def test_on_disks_that_outlive_a_restart_what_is_older_than_the_machine_is_named(
    made: Made,
) -> None:
    """The user of an adopted machine has restarted it: its own disk is new, the others are not."""
    made.mounts += [Mount("/workspace", "ext4"), Mount("/usr", "ext4")]
    made.image("/workspace/runs/a", "/srv/of-the-image", "/usr/lib/big.so")
    made.begin()
    assert made.look().total.files == 0
    assert [folder.path for folder in made.look(disks_since_ns=0).folders] == ["/workspace/runs"]


def test_the_largest_come_first_and_the_total_has_all(made: Made) -> None:
    made.begin()
    for number in range(30):
        made.write(f"/data{number}/file", b"x" * (number + 1))
    found = made.look()
    assert [folder.bytes for folder in found.folders] == list(range(30, 10, -1))
    assert found.total.bytes == sum(range(31))


@pytest.mark.rule(22)
def test_what_the_image_brought_is_not_left_behind_and_what_was_changed_in_it_is(
    made: Made,
) -> None:
    made.image("/opt/app/data.db", "/opt/app/old", "/usr/local/lib/a.py", "/usr/local/lib/b.py")
    made.begin()
    with open(made.top / "opt/app/data.db", "ab") as file:  # its directory does not change
        file.write(b"more")
    os.utime(made.top / "opt/app/data.db", (1, 1))  # as tar and rsync set it
    with open(made.top / "usr/local/lib/a.py", "ab") as file:
        file.write(b"edited")
    found = made.look()
    assert {folder.path: folder.files for folder in found.folders} == {
        "/opt/app": 1,
        "/usr/local/lib": 1,
    }


def test_caches_that_are_made_again_stand_apart(made: Made) -> None:
    made.begin()
    made.write("/root/.cache/pip/http/1", b"x" * 10)
    made.write("/root/.cache/uv/2", b"x" * 20)
    made.write("/var/cache/apt/archives/a.deb", b"x" * 30)
    found = made.look()
    assert [(cache.path, cache.bytes) for cache in found.caches] == [
        ("/var/cache", 30), ("/root/.cache/uv", 20), ("/root/.cache/pip", 10),
    ]  # fmt: skip
    assert found.total.files == 0


def test_what_packages_own_is_named_by_package(made: Made) -> None:
    made.image("/var/lib/dpkg/info/old.list", f"{SYSTEM}/other.py")
    made.begin()
    big = b"x" * 100_000
    status = (
        "Package: jq\nStatus: install ok installed\nVersion: 1.6-2\n\n"
        "Package: old\nVersion: 1\nConffiles:\n /etc/old.conf {md5}\n /etc/same.conf {md5}\n\n"
    ).format(md5=hashlib.md5(b"as it came", usedforsecurity=False).hexdigest())
    made.write("/var/lib/dpkg/status", status.encode())
    owned = "/usr/bin/jq\n/opt/jq/data\n/etc/jq\n" + f"{SYSTEM}/jq-1.6.egg-info\n"
    made.write("/var/lib/dpkg/info/jq.list", owned.encode())
    made.write("/var/lib/dpkg/info/libjq1.list", b"/usr/lib/libjq.so\n")
    made.write(
        "/var/lib/apt/extended_states",
        b"Package: jq\nAuto-Installed: 0\n\nPackage: libjq1\nAuto-Installed: 1\n",
    )
    made.write("/etc/jq")
    made.write("/usr/lib/libjq.so", big)
    (made.top / SYSTEM[1:] / "jq-1.6.egg-info").mkdir(parents=True)
    for path in ("/usr/bin/jq", "/opt/jq/data", "/usr/bin/mine", f"{SYSTEM}/new/a.py"):
        made.write(path, big)
    made.write(f"{SYSTEM}/new/edited.py", big + b"by hand")
    record = (
        b"new/a.py,sha256=0,100000\nnew/edited.py,sha256=0,100000\nnew-2.0.dist-info/RECORD,,\n"
    )
    made.write(f"{SYSTEM}/new-2.0.dist-info/RECORD", record)
    made.write("/opt/env/lib/python3.12/site-packages/numpy-2.1.dist-info/RECORD", b"")
    made.write("/opt/env/lib/python3.12/site-packages/scipy-1.0.dist-info/RECORD", b"")
    made.write("/etc/old.conf", b"edited")
    made.write("/etc/same.conf", b"as it came")
    made.write("/etc/systemd/system/mine.service")
    made.write("/var/spool/cron/crontabs/root")
    found = made.look()
    assert found.packages == [
        "jq 1.6-2 (apt)",
        "new 2.0 (pip)",
        "numpy 2.1 and 1 more (pip in /opt/env/lib/python3.12/site-packages, in no record)",
    ]
    assert found.settings == [
        "/etc/old.conf", "/etc/systemd/system/mine.service", "/var/spool/cron/crontabs/root",
    ]  # fmt: skip
    assert sorted(folder.path for folder in found.folders) == [
        "/opt/env/lib/python3.12/site-packages", "/usr/bin", f"{SYSTEM}/new",
    ]  # fmt: skip
    assert found.total.files == 4  # two records, one program, one edited module
    found = made.look(kept_apt=["jq"], kept_pip=["numpy"])  # what the snapshot names
    assert (found.kept, found.kept_count) == (["jq 1.6-2 (apt)"], 1)
    assert [name.split()[0] for name in found.packages] == ["new", "numpy"]


def test_a_user_who_was_added_is_named_and_one_of_the_image_is_not(made: Made) -> None:
    made.image("/home/ubuntu/.profile")
    made.begin()
    made.write(
        "/etc/passwd",
        b"root:x:0:0::/root:/bin/bash\nubuntu:x:1000:1000::/home/ubuntu:/bin/bash\n"
        b"ann:x:1001:1001::/home/ann:/bin/bash\nsshd:x:105:65534::/run/sshd:/bin/false\n",
    )
    made.write("/home/ann/.profile")
    assert made.look().settings == ["user ann"]


@pytest.mark.rule(22)
def test_each_disk_is_looked_at_once_and_no_network_is_touched(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.mounts += [
        Mount("/disk", "ext4", "8:16"),
        Mount("/home/ann/again", "ext4", "8:16", "/part"),  # a directory of /disk
        Mount("/net", "nfs4"),
        Mount("/opt/bucket", "fuse.rclone"),
        Mount("/run/user/0", "tmpfs"),
    ]
    made.begin()
    for path in ("/disk/part/a", "/home/ann/again/a", "/net/a", "/opt/bucket/a", "/run/user/0/a"):
        made.write(path)
    touched: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: touched.append(str(path)) or scandir(path))
    found = made.look()
    assert [folder.path for folder in found.folders] == ["/disk/part"]
    assert [words.partition(" ")[0] for words in found.unseen] == ["/net", "/opt/bucket"]
    assert not [path for path in touched if path.endswith(("/net", "/bucket", "/again"))]


def test_the_workspace_is_left_out_also_where_its_disk_is_mounted_twice(made: Made) -> None:
    made.mounts.append(Mount("/srv/data", "ext4"))
    made.begin()
    made.write("/disk/ws/file")
    made.write("/disk/ws/data/file")
    made.write("/disk/other")
    (made.top / "work").symlink_to(made.top / "disk/ws")  # another name of the same directory
    assert [folder.files for folder in made.look("/work").folders] == [1]


def test_a_hard_link_counts_once_and_a_symbolic_link_and_a_socket_not(made: Made) -> None:
    made.begin()
    made.write("/data/a", b"xyz")
    os.link(made.top / "data/a", made.top / "data/b")
    (made.top / "data/c").symlink_to("/etc/passwd")
    os.mkfifo(made.top / "data/d")
    assert (made.look().total.files, made.look().total.bytes) == (1, 3)


@pytest.mark.rule(22)
def test_a_look_that_is_stopped_says_what_it_has_found_until_then(made: Made) -> None:
    made.begin()
    made.write("/data/a", b"xyz")
    for number in range(20):
        made.write(f"/home/user{number}/file")
    asked = iter(range(100))
    found = made.look(stop=lambda: next(asked) > 8)
    assert not found.complete
    assert found.folders[0].path == "/home/user0"  # homes come first
    assert 0 < found.total.files < 21
    assert found.user_unseen == ["the look at the homes did not come to its end"]


@pytest.mark.rule(22)
def test_a_users_own_files_in_a_home_are_told_from_settings_caches_and_the_image(
    made: Made,
) -> None:
    made.image("/root/examples/intro.ipynb", "/home/ann/README")
    made.begin()
    own = ("/root/train.py", "/root/proj/a.py", "/root/proj/.git/HEAD", "/home/ann/x/y/z")
    others = (
        "/root/.bashrc", "/root/.config/tool/a", "/root/.vscode-server/bin/a", "/root/.local/lib/a",
        "/root/.cache/huggingface/hub/a", "/root/venv/pyvenv.cfg", "/root/venv/lib/a.py",
        "/root/miniconda3/conda-meta/history", "/root/miniconda3/lib/a.so",
        "/root/app/node_modules/a", "/root/workspace/kept", "/data/a", "/root/accepted.txt",
        "/root/torpor-ollama/bin/ollama",
    )  # fmt: skip
    for path in (*own, *others):
        made.write(path)
    found = made.look("/root/workspace", "/root/accepted.txt", made_again=["/root/torpor-ollama"])
    assert {one.path: one.files for one in found.user_files} == {
        "/root/train.py": 1, "/root/proj": 2, "/home/ann/x": 1,
    }  # fmt: skip
    assert (found.user_total.files, found.user_unseen) == (4, [])
    assert found.total.files == len(own) + len(others) - 2  # all of it is lost, and counted once


def test_the_names_of_a_users_own_files_are_those_that_count_with_links_and_empty_ones(
    made: Made,
) -> None:
    made.image("/root/examples/intro.ipynb")
    made.begin()
    own = ("/root/train.py", "/root/proj/.git/HEAD", "/root/examples/mine.ipynb")
    others = (
        "/root/.bashrc", "/root/.config/a", "/root/venv/pyvenv.cfg", "/root/app/node_modules/a",
        "/root/workspace/kept", "/root/accepted.txt", "/data/a", "/root/proj/__pycache__/a.pyc",
    )  # fmt: skip
    for path in (*own, *others):
        made.write(path)
    made.write("/root/proj/__init__.py", b"")
    (made.top / "root/proj/link").symlink_to("nowhere")
    os.link(made.top / "root/train.py", made.top / "root/proj/same.py")
    os.mkfifo(made.top / "root/proj/pipe")
    found = made.user_names("/root/workspace", "/root/accepted.txt")
    beside = {"/root/proj/__init__.py", "/root/proj/link", "/root/proj/same.py"}
    assert {*found.names} == {*own, *beside}
    assert found.bytes == len(own) + len("nowhere")
    assert (found.elsewhere, found.unseen) == ([], [])


def test_the_names_of_own_files_end_at_a_number_and_name_other_homes(made: Made) -> None:
    made.begin()
    for number in range(5):
        made.write(f"/root/{number}.py")
    made.write("/home/ann/notes")
    assert made.user_names().elsewhere == ["/home/ann/notes"]
    assert made.user_names(most=3).unseen == ["the look at the homes did not come to its end"]


@pytest.mark.rule(22)
def test_a_directory_of_a_home_that_cannot_be_read_leaves_unknown_what_is_the_users(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.image("/root/of-the-image/a", "/home/bob/a")
    made.begin()
    made.write("/root/database/a")
    closed = {str(made.top / path) for path in ("root/database", "root/of-the-image", "home/bob")}
    scandir = os.scandir

    def refused(path: str) -> Any:
        if str(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert made.look().user_unseen == ["/root/database: Permission denied"]


def test_a_name_of_any_bytes_is_shown(made: Made) -> None:
    made.begin()
    odd = os.fsencode(made.top) + b"/data/\xff\n"
    os.makedirs(odd)
    with open(odd + b"/file", "wb") as file:
        file.write(b"x" * 100)
    assert [folder.path for folder in made.look().folders] == ["/data/\\xff\n"]
