"""A target that cannot hold one value gets all the others; the snapshot keeps the whole truth."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.kill_points import OF_TREES, killed_at
from tests.fixtures.limited import Limited
from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import (
    Machines,
    Two,
    Waking,
    begin_from,
    manifest_of,
    put_manifest,
    waking_of,
)
from tests.fixtures.trees import Tree, content, facts, let_settle
from torpor.machine.tree.abilities import EVERYTHING, Needs, probe, remove_left
from torpor.shared.errors import DiskFull, MachineUnfit
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    SYMLINK,
    Entry,
    encode_manifest,
)
from torpor.shared.values import MIB

ODD_NS = 1_700_000_001_987_654_321
BIG = b"v" * 3000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of six names, a large attribute, times to the nanosecond, a hole, a symlink."""
    was = tmp_path / "was"
    (was / "d").mkdir(parents=True)
    (was / "big").write_bytes(content(1, 3 * MIB))
    (was / "d/small").write_bytes(content(2, 3000))
    os.setxattr(was / "d/small", "user.big", BIG)
    with (was / "named").open("wb") as file:
        file.truncate(2 * MIB)
        os.pwrite(file.fileno(), content(3, MIB), MIB)
    for number in range(5):
        os.link(was / "named", was / f"named-{number}")
    (was / "a:b").write_bytes(b"odd")
    (was / "link").symlink_to("d/small")
    os.chown(was / "d/small", 1234, 5678)
    (was / "d/small").chmod(0o640)
    for path in ("named", "link", "big", "d/small", "d", "."):
        os.utime(was / path, ns=(ODD_NS, ODD_NS), follow_symlinks=False)
    let_settle()
    return was


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many inodes."""
    place = tmp_path / "few"
    place.mkdir()

    def mount(inodes: int) -> Path:
        argv = ["mount", "-t", "tmpfs", "-o", f"size=200m,nr_inodes={inodes}", "none", str(place)]
        subprocess.run(argv, check=True)
        return place

    yield mount
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def waking(machines: Machines, memory_store: MemoryStore, source: Path) -> Waking:
    return waking_of(machines, memory_store, source)


def _wake(waking: Waking, first: tuple[str, ...] = ()) -> list[str]:
    """Wake it, and return what the wake warns of."""
    if first:
        waking.use(first)
        waking.fetch(waking.parts(first=False))
    else:
        waking.begin()
        waking.fetch()
    finished = waking.run.finish()
    assert waking.run.check(full=True).differences == []
    waking.run.end()
    return finished.warnings


def _content_of(tree: Tree) -> dict[bytes, tuple[str, str]]:
    return {path: (fact.kind, fact.content) for path, fact in tree.items()}


@pytest.mark.parametrize("first", [(), ("named*", "d")], ids=["together", "in order"])
def test_what_a_target_cannot_hold_is_named_and_the_rest_is_right(
    waking: Waking, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...]
) -> None:
    before = {e.path: e for e in manifest_of(waking.engine, waking.snapshot).entries}
    Limited(step_ns=10**9, xattr_bytes=1000, names=4).begin(monkeypatch)
    said = "\n".join(_wake(waking, first))
    assert "'d/small': extended attribute user.big is not restored: 3,000 bytes are too" in said
    assert "holds: 1 s" in said
    assert "'named-3', 'named-4': the hard link is a file of its own here" in said
    back = facts(waking.back)
    assert _content_of(back) == _content_of(waking.truth)
    assert back[b"d/small"].mtime_ns == ODD_NS - ODD_NS % 10**9
    assert back[b"named-4"].links == (b"named-3", b"named-4")
    assert back[b"named-4"].data == waking.truth[b"named-4"].data  # its hole is one again
    # The next snapshot of this machine still has what it could not hold.
    let_settle()
    (waking.back / "big").write_bytes(content(9, 3 * MIB))
    os.utime(waking.back / "big", ns=(0, 0))
    with (waking.back / "named-4").open("r+b") as file:
        file.write(b"edited")
    let_settle()
    again = waking.engine.snapshot([waking.back])
    after = {e.path: e for e in manifest_of(waking.engine, again).entries}
    assert after[b"d/small"].xattrs == before[b"d/small"].xattrs
    assert after[b"d/small"].mtime_ns == before[b"link"].mtime_ns == ODD_NS
    assert after[b"big"].mtime_ns == 0
    assert (after[b"named-0"].kind, after[b"named-0"].target) == (HARDLINK, b"named")
    assert after[b"named-3"].kind == FILE
    assert after[b"named-3"].digest != after[b"named"].digest or (
        after[b"named-3"].extents != after[b"named"].extents
    )


def test_where_there_are_no_hard_links_owners_or_modes_their_files_are_whole(
    waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    Limited(step_ns=2 * 10**9, names=0, owners=False, modes=False).begin(monkeypatch)
    said = "\n".join(_wake(waking))
    assert "modes are not restored" in said
    assert "'named-0', 'named-1', 'named-2', 'named-3', 'named-4': the hard link is a file" in said
    if os.geteuid() == 0:
        assert "'d/small': the owner 1234:5678 is not restored: Operation not permitted" in said
    back = facts(waking.back)
    assert _content_of(back) == _content_of(waking.truth)
    assert back[b"named-4"].links == (b"named-4",)


def test_a_changed_file_is_found_also_where_the_target_holds_less(
    waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    Limited(step_ns=10**9, names=4).begin(monkeypatch)
    waking.begin()
    waking.fetch()
    waking.run.finish()
    os.utime(waking.back / "d/small", ns=(0, ODD_NS - 2 * 10**9))
    (waking.back / "named-4").write_bytes(b"x")
    found = "\n".join(waking.run.check(full=True).differences)
    assert "d/small: has mtime" in found
    assert "named-4: has 1 bytes" in found


def test_a_sync_on_such_a_machine_expects_no_more_than_its_wake(
    machines: Machines, memory_store: MemoryStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, woken = (machines(memory_store, source.with_name(name)) for name in ("first", "woken"))
    snapshot = first.snapshot([source])
    (source / "a:b").write_bytes(b"changed")
    os.setxattr(source / "a:b", "user.big", BIG)
    let_settle()
    later = first.snapshot([source])
    shutil.rmtree(source)
    Limited(step_ns=10**9, xattr_bytes=1000, owners=False).begin(monkeypatch)
    woken.restore(snapshot, [source])
    done = woken.sync(later)  # which compares every name in the end
    assert "'a:b': extended attribute user.big is not restored" in "\n".join(done.warnings)
    assert (source / "a:b").read_bytes() == b"changed"


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (Limited(file_bytes=2 * MIB), "'big' has 3,145,728 bytes, which the file system of"),
        (Limited(odd=b":"), "'a:b' has a name, which the file system of"),
    ],
    ids=["size", "name"],
)
def test_a_file_that_a_target_cannot_hold_is_named_before_anything_is_fetched(
    waking: Waking, monkeypatch: pytest.MonkeyPatch, limit: Limited, says: str
) -> None:
    limit.begin(monkeypatch)
    with pytest.raises(MachineUnfit, match=says) as refused:
        waking.begin()
    assert "nothing was written" in str(refused.value)
    assert not waking.back.exists()


def test_names_that_differ_in_case_alone_are_refused_where_they_would_be_one_file(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry(DIRECTORY, b""), entry(FILE, b"Makefile"), entry(FILE, b"makefile")]
    put_manifest(engine, blob := _blob(entries))
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: real(os.fsencode(path).lower()))
    with pytest.raises(MachineUnfit, match="'Makefile' and 'makefile' would be one file in"):
        begin_from(engine, blob, tmp_path / "back")
    assert not real(tmp_path / "back")


def test_values_beyond_this_kernels_own_file_system_are_named(
    engine: Engine, tmp_path: Path
) -> None:
    """On ext4: 60,000 bytes of an attribute are ENOSPC, and no time is before 1901."""
    old_ns, far_ns = -5_000_000_000_123_456_789, 16_800_000_000_123_456_789
    entries = [
        entry(DIRECTORY, b"", mtime_ns=far_ns),
        entry(FILE, b"attribute", xattrs=((b"user.x", b"v" * 60_000),), mtime_ns=ODD_NS),
        entry(FILE, b"far", mtime_ns=far_ns),
        entry(SYMLINK, b"link", target=b"far", mtime_ns=old_ns),
        entry(FILE, b"old", mtime_ns=old_ns),
    ]
    put_manifest(engine, blob := _blob(entries))
    run, _ = begin_from(engine, blob, back := tmp_path / "back")
    said = "\n".join(run.finish().warnings)
    assert run.check(full=True).differences == []
    has_time = os.lstat(back / "old").st_mtime_ns == old_ns
    assert has_time or "'old'" in said
    has_attribute = os.listxattr(back / "attribute") == ["user.x"]
    assert has_attribute or "'attribute': extended attribute user.x is not restored" in said
    assert os.lstat(back / "attribute").st_mtime_ns == ODD_NS


def test_a_disk_without_inodes_enough_is_said_before_anything_is_fetched(
    engine: Engine, few: Callable[[int], Path]
) -> None:
    entries = [entry(DIRECTORY, b""), *(entry(FILE, b"%03d" % n) for n in range(100))]
    put_manifest(engine, blob := _blob(entries))
    back = few(50) / "back"
    with pytest.raises(DiskFull, match=r"can hold \d+ more files \(inodes\) and the snap"):
        begin_from(engine, blob, back)
    assert not back.exists()


def test_a_disk_that_runs_out_of_inodes_on_the_way_is_not_called_too_small(
    engine: Engine, few: Callable[[int], Path]
) -> None:
    entries = [entry(DIRECTORY, b""), *(entry(FILE, b"%03d" % n) for n in range(100))]
    put_manifest(engine, blob := _blob(entries))
    place = few(130)
    run, _ = begin_from(engine, blob, place / "back")
    hogs = []
    with suppress(OSError):
        for number in range(100):
            (place / f"hog-{number}").touch(exist_ok=False)
            hogs.append(place / f"hog-{number}")
    with pytest.raises(DiskFull, match=r"no more files \(it has no inode left\) at '0"):
        run.finish()
    for hog in hogs:
        hog.unlink()
    run.finish()
    assert run.check(full=True).differences == []


# -- ACLs that a directory hands down


def _acl(user: int, owner: int = 7, others: int = 7, rest: int = 5) -> bytes:
    """What setfacl -m u:USER:... sets: what the owner, USER and the group, and the rest may do."""
    entries = [(1, owner, -1), (2, others, user), (4, others, -1), (16, others, -1), (32, rest, -1)]
    packed = (struct.pack("<HHI", tag, may, who & 0xFFFFFFFF) for tag, may, who in entries)
    return struct.pack("<I", 2) + b"".join(packed)


@pytest.mark.parametrize("first", [(), ("d",)], ids=["together", "in order"])
def test_an_acl_of_the_directory_above_gives_nobody_access_to_restored_files(
    waking: Waking, first: tuple[str, ...]
) -> None:
    os.setxattr(waking.back.parent, "system.posix_acl_default", _acl(4711))
    waking.back.mkdir()
    _wake(waking, first)
    waking.is_back()


def test_an_acl_of_a_directory_gives_nobody_access_to_synced_files(two: Two) -> None:
    os.setxattr(two.root / "d", "system.posix_acl_default", _acl(4711))
    two.sync(discard_local=True)


def test_what_a_killed_probe_left_is_removed(waking: Waking) -> None:
    waking.back.mkdir()
    left = 0
    for step in itertools.count(1):
        if not killed_at(step, waking.begin_again, OF_TREES):
            break
        left += _has_probe(waking.back)
    assert left > 3
    waking.engine.restart()
    _wake(waking)
    waking.is_back()


def test_a_snapshot_after_a_killed_probe_is_without_what_that_left(two: Two) -> None:
    sync = partial(two.sync, discard_local=True)
    for step in itertools.count(1):
        assert killed_at(step, sync, OF_TREES)
        if _has_probe(two.root):
            break
    two.engine.restart()
    two.engine.snapshot([two.root])
    assert not _has_probe(two.root)


def test_where_a_probe_cannot_be_noted_nothing_is_tried_or_left(tmp_path: Path) -> None:
    """As on a full disk, and where a command has removed torpor's folder."""
    able = probe(os.fsencode(tmp_path), os.fsencode(tmp_path), Needs(), tmp_path / "gone/note")
    assert able == EVERYTHING
    assert not [*tmp_path.iterdir()]
    remove_left(tmp_path)  # no file: it keeps no run from beginning
    assert tmp_path.is_dir()


def test_an_attribute_that_came_with_the_target_is_a_difference(waking: Waking) -> None:
    waking.begin()
    waking.fetch()
    waking.run.finish()
    acl = _acl(4711, owner=6, others=4, rest=0)  # the mode of the file, and one user more
    os.setxattr(waking.back / "d/small", "system.posix_acl_access", acl)
    (found,) = waking.run.check(full=False).differences
    assert found.endswith(
        "small: has extended attributes that the snapshot has not: system.posix_acl_access"
    )


def _has_probe(place: Path) -> bool:
    return any(name.startswith(".torpor-probe-") for name in os.listdir(place))


def _blob(entries: list[Entry]) -> bytes:
    return encode_manifest(honest(entries=entries, chunks=[], packs=[]), PLAIN)[0]
