"""Of a name that the kernel does not show, nothing is known: it is refused or named, not left out.

The errors are put in place of what the kernel answers for one path.
"""

from __future__ import annotations

import builtins
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.manifests import entry
from torpor.machine.agent.losses import first_start_ns, machine_began_ns
from torpor.machine.supervisor.folder import AutosaveFolder
from torpor.machine.tree import mappings
from torpor.machine.tree.absence import is_there
from torpor.machine.tree.attributes import Attributes
from torpor.machine.tree.compare import compare_tree
from torpor.machine.tree.disks import Mount, Mounts
from torpor.machine.tree.left_behind import Found, Look, Where
from torpor.machine.tree.links_out import LinksOut
from torpor.machine.tree.names import Names, Signature
from torpor.machine.tree.read import read_at
from torpor.machine.tree.vanished import disks
from torpor.machine.tree.walk import Walk, walk
from torpor.shared.errors import WorkspaceInvalid
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import DIRECTORY, FILE
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.losses import LinkOut

UNKNOWN = [
    errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT,
    errno.ENOTCONN,
]  # fmt: skip
"""What says nothing of a name."""


class Kernel:
    """Answers for one path with an error, whatever is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def fails(self, call: str, at: Path | bytes, number: int) -> None:
        real, wanted = getattr(os, call), os.fsencode(at)

        def answer(name: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(name, int) and os.fsencode(name) == wanted:
                raise OSError(number, os.strerror(number), name)
            return real(name, *args, **options)

        self._monkeypatch.setattr(os, call, answer)

    def fails_for_entries(self, place: Path, name: str, number: int) -> None:
        """A name that a directory lists, and that the kernel shows no more."""
        real = os.scandir

        class Listing:
            def __init__(self, entries: Any) -> None:
                self._entries = entries

            def __enter__(self) -> Iterator[Any]:
                return iter([_Hidden(e, number) if e.name == name else e for e in self._entries])

            def __exit__(self, *error: object) -> None:
                self._entries.close()

        def answer(path: Any) -> Any:
            found = real(path)
            return Listing(found) if os.fsencode(path) == os.fsencode(place) else found

        self._monkeypatch.setattr(os, "scandir", answer)


class _Hidden:
    def __init__(self, entry: os.DirEntry[str], number: int) -> None:
        self.name, self.path, self._number = entry.name, entry.path, number

    def is_dir(self, **options: bool) -> bool:
        return False

    def stat(self, **options: bool) -> os.stat_result:
        raise OSError(self._number, os.strerror(self._number), self.path)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    root = Path(os.path.realpath(tmp_path)) / "work"
    root.mkdir()
    (root / "model").write_bytes(b"weights")
    os.setxattr(root / "model", "user.x", b"y")
    return root


def _walk(root: Path) -> Walk:
    return walk([os.fsencode(root)], Names(1), None, lambda: None)


def _refused(root: Path, number: int) -> None:
    words = f"attributes of {root / 'model'} cannot be read: {os.strerror(number)}"
    with pytest.raises(WorkspaceInvalid, match=words):
        _walk(root)


@pytest.mark.rule(3)
@pytest.mark.parametrize(
    "number", [*UNKNOWN, errno.E2BIG, errno.EPERM, errno.ERANGE, errno.ENODATA]
)
def test_attributes_that_are_not_listed_are_refused_by_name(
    kernel: Kernel, work: Path, number: int
) -> None:
    kernel.fails("listxattr", work / "model", number)
    _refused(work, number)


@pytest.mark.parametrize("number", [*UNKNOWN, errno.EPERM, errno.ERANGE, errno.ENOTSUP])
def test_an_attribute_without_its_value_is_refused_by_name(
    kernel: Kernel, work: Path, number: int
) -> None:
    kernel.fails("getxattr", work / "model", number)
    _refused(work, number)


@pytest.mark.parametrize(
    ("call", "number", "found"),
    [
        ("listxattr", errno.ENOTSUP, [b"", b"model"]),  # the file system has none
        ("getxattr", errno.ENODATA, [b"", b"model"]),  # removed since it was listed
        ("listxattr", errno.ENOENT, [b""]),  # the file is gone, or a directory above
        ("getxattr", errno.ENOTDIR, [b""]),
    ],
)
def test_attributes_that_are_surely_not_there_are_none(
    kernel: Kernel, work: Path, call: str, number: int, found: list[bytes]
) -> None:
    kernel.fails(call, work / "model", number)
    entries = _walk(work).names.entries
    assert [(e.path, e.xattrs) for e in entries] == [(path, ()) for path in found]


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_link_that_cannot_be_read_is_refused_by_name(
    kernel: Kernel, work: Path, number: int
) -> None:
    (work / "link").symlink_to("model")
    kernel.fails("readlink", work / "link", number)
    with pytest.raises(WorkspaceInvalid, match=f"link cannot be read: {os.strerror(number)}"):
        _walk(work)


def test_a_link_that_was_replaced_since_it_was_listed_is_gone(kernel: Kernel, work: Path) -> None:
    (work / "link").symlink_to("model")
    kernel.fails("readlink", work / "link", errno.EINVAL)
    assert [e.path for e in _walk(work).names.entries] == [b"", b"model"]


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_name_that_cannot_be_looked_at_is_refused(
    kernel: Kernel, work: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("torpor.machine.tree.batch.disk_library", lambda: None)
    kernel.fails("stat", b"model", number)
    with pytest.raises(
        WorkspaceInvalid, match=f"{work}/model cannot be read: {os.strerror(number)}"
    ):
        _walk(work)


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_directory_that_cannot_be_opened_is_refused_by_name(
    kernel: Kernel, work: Path, number: int
) -> None:
    (work / "below").mkdir()
    kernel.fails("open", work / "below", number)
    with pytest.raises(WorkspaceInvalid, match=f"below cannot be read: {os.strerror(number)}"):
        _walk(work)


def test_more_names_of_attributes_than_the_kernel_lists_are_refused() -> None:
    """64 KiB of them; tmpfs lets one set more."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder, "model")
        file.touch()
        for number in range(300):
            os.setxattr(file, b"user.%s%04d" % (b"x" * 236, number), b"1")
        _refused(Path(folder), errno.E2BIG)


@pytest.mark.parametrize("number", [*UNKNOWN, errno.ELOOP, errno.ENXIO])
def test_a_file_that_cannot_be_opened_is_refused_by_name(
    kernel: Kernel, work: Path, number: int
) -> None:
    seen = Signature.of(os.lstat(work / "model"))
    kernel.fails("open", work / "model", number)
    with pytest.raises(WorkspaceInvalid, match=f"model cannot be read: {os.strerror(number)}"):
        read_at(os.fsencode(work), b"model", 0, 7, seen)


def test_what_is_no_regular_file_any_more_is_gone(work: Path) -> None:
    seen = Signature.of(os.lstat(work / "model"))
    for make in (lambda: None, lambda: (work / "model").symlink_to("x")):
        (work / "model").unlink(missing_ok=True)
        make()
        assert read_at(os.fsencode(work), b"model", 0, 7, seen).gone


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_restored_attribute_that_cannot_be_read_is_a_difference(
    kernel: Kernel, work: Path, number: int
) -> None:
    held = entry(FILE, b"model", size=7, xattrs=((b"user.x", b"y"),))
    kernel.fails("listxattr", work / "model", number)
    compared = compare_tree(
        [entry(DIRECTORY, b""), held], [], [os.fsencode(work)], Seal(None), full=False,
        attributes=Attributes(), progress=lambda size: None, check=lambda: None,
    )  # fmt: skip
    words = f"has extended attributes that cannot be read: {os.strerror(number)}"
    assert words in compared.differences[-1]


def test_an_attribute_that_a_sync_cannot_remove_is_named(
    monkeypatch: pytest.MonkeyPatch, work: Path
) -> None:
    def answer(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "listxattr", answer)
    attributes = Attributes()
    fd = os.open(work / "model", os.O_RDONLY)
    attributes.apply(fd, entry(FILE, b"model"), replacing=True)
    os.close(fd)
    assert "'model': extended attributes that it may have from before" in attributes.warnings[-1]


# -- what a snapshot lacks


def _links(work: Path) -> list[LinkOut]:
    mounts = Mounts([Mount("/", "overlay")])
    entries = _walk(work).names.entries
    return LinksOut([os.fsencode(work)], [], 0, mounts, lambda: False).find(entries)[0]


@pytest.fixture
def data(work: Path) -> Path:
    """A directory outside of the workspace, to which a link of it leads."""
    place = work.with_name("data")
    place.mkdir()
    (place / "a").write_bytes(b"x")
    (work / "link").symlink_to(place)
    return place


@pytest.mark.rule(3)
@pytest.mark.parametrize("number", UNKNOWN)
@pytest.mark.parametrize("call", ["readlink", "lstat", "scandir"])
def test_data_behind_a_link_that_cannot_be_looked_at_is_named(
    kernel: Kernel, work: Path, data: Path, call: str, number: int
) -> None:
    assert [link.data.files for link in _links(work)] == [1]
    kernel.fails(call, data, number)
    assert [(link.data.path, link.data.files) for link in _links(work)] == [(str(data), 0)]


def test_a_link_to_nothing_has_nothing_behind_it(work: Path) -> None:
    (work / "link").symlink_to(work.with_name("none"))
    (work / "other").symlink_to(work / "../work/model/below")
    assert _links(work) == []


def test_a_file_that_goes_meanwhile_hides_no_other_behind_a_link(
    kernel: Kernel, work: Path, data: Path
) -> None:
    (data / "b").write_bytes(b"x")
    (data / "c").write_bytes(b"x")
    kernel.fails_for_entries(data, "b", errno.ENOENT)
    assert [link.data.files for link in _links(work)] == [2]


def _left(top: Path, *disks: str) -> Found:
    mounts = Mounts([Mount("/", "overlay"), *(Mount(disk, "ext4") for disk in disks)])
    return Look(Where("/", 0, 0, [], []), mounts, lambda: False, str(top)).run()


@pytest.mark.parametrize("number", UNKNOWN)
@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("stat", "/mnt/disk"),
        ("scandir", "/mnt/disk"),
        ("scandir", "/var/lib/db"),
        ("scandir", "/usr/lib/x"),
    ],
)
def test_a_place_of_the_machine_that_cannot_be_looked_at_is_named(
    kernel: Kernel, work: Path, call: str, place: str, number: int
) -> None:
    (work / place[1:]).mkdir(parents=True)
    kernel.fails(call, work / place[1:], number)
    named = [f"{place}: {os.strerror(number)}"]
    for_root_alone = number == errno.EACCES and place.startswith(("/var/", "/usr/"))
    assert _left(work, "/mnt/disk").unseen == ([] if for_root_alone else named)


def test_a_file_that_goes_meanwhile_hides_no_other_of_the_machine(
    kernel: Kernel, work: Path
) -> None:
    place = work / "data"
    place.mkdir()
    for name in "abc":
        (place / name).write_bytes(b"x")
    kernel.fails_for_entries(place, "b", errno.ENOENT)
    (folder,) = (f for f in _left(work).folders if f.path == "/data")
    assert folder.files == 2


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_start_of_the_machine_that_is_unknown_is_early(
    kernel: Kernel, work: Path, number: int
) -> None:
    key = work / "ssh_host_rsa_key"
    key.touch()
    assert first_start_ns(1 << 62, work) > 0
    kernel.fails("stat", key, number)
    assert first_start_ns(1 << 62, work) == 0


def test_without_its_marker_and_its_start_everything_of_the_machine_is_new(
    monkeypatch: pytest.MonkeyPatch, work: Path
) -> None:
    real = open

    def answer(path: Any, *args: Any, **options: Any) -> Any:
        if path == "/proc/1/stat":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **options)

    monkeypatch.setattr(builtins, "open", answer)
    assert machine_began_ns(work) == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM])
def test_a_process_whose_mappings_cannot_be_read_is_not_taken_for_one_without(
    monkeypatch: pytest.MonkeyPatch, work: Path, number: int
) -> None:
    (work / "7").mkdir()
    (work / "7/comm").write_text("train")
    monkeypatch.setattr(mappings, "PROC", work)
    assert [*mappings.mapped_for_writing()] == []  # without `maps`, it has ended
    (work / "7/maps").touch()
    real = Path.read_bytes

    def answer(path: Path) -> bytes:
        if path.name == "maps":
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", answer)
    with pytest.raises(OSError, match=os.strerror(number)):
        [*mappings.mapped_for_writing()]


# -- what was there before


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_disk_that_the_workspace_may_be_on_is_not_taken_for_none(
    kernel: Kernel, work: Path, number: int
) -> None:
    kernel.fails("lstat", work, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        disks([os.fsencode(work)], None)


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_process_whose_folder_cannot_be_looked_at_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    """Autosaves would end without a word."""
    (tmp_path / "autosaves").mkdir()
    folder = AutosaveFolder(tmp_path, WorkspaceName("mywork"))
    folder.make()
    lock = folder.take()
    assert lock is not None and folder.is_locked_by(lock)

    def answer(path: Path, **options: bool) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", answer)
        patched.setattr(Path, "stat", answer)
        with pytest.raises(OSError, match=os.strerror(number)):
            folder.is_locked_by(lock)
        with pytest.raises(OSError, match=os.strerror(number)):
            folder.identity()
    os.unlink(folder.path / "alive")
    folder.path.rmdir()
    assert not folder.is_locked_by(lock)
    os.close(lock)


@pytest.mark.parametrize("number", UNKNOWN)
def test_is_there_knows_or_raises(kernel: Kernel, work: Path, number: int) -> None:
    (work / "link").symlink_to("nowhere")
    assert is_there(work / "model") and is_there(work / "link")
    assert not is_there(work / "none") and not is_there(work / "model/below")
    kernel.fails("lstat", work / "model", number)
    with pytest.raises(OSError, match=os.strerror(number)):
        is_there(work / "model")
