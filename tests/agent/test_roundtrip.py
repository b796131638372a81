"""A workspace comes back as it was: every kind of entry, with and without a key."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.stores import Server
from tests.fixtures.trees import (
    content,
    differences,
    facts,
    kept,
    let_settle,
    plant_every_kind,
    set_xattr,
)
from torpor.format.manifest import decode_manifest
from torpor.format.names import manifest_key
from torpor.store.s3 import S3Store

KEY = bytes(range(32))
sealed_or_not = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])


@sealed_or_not
def test_every_kind_of_entry_comes_back(seaweed: Server, tmp_path: Path, key: bytes | None) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    plant_every_kind(was)
    before = kept(was)
    store = seaweed.store()
    let_settle()
    one = Engine(store, tmp_path / "one", key)
    snapshot = one.snapshot([was])
    assert differences(before, kept(was)) == []  # being read leaves no trace

    other = Engine(store, tmp_path / "other", key)
    finished = other.restore(snapshot, [back])
    assert differences(before, facts(back)) == []
    assert finished["warnings"] == []

    blob = store.get(manifest_key(WORKSPACE, snapshot), max_bytes=1 << 30)
    manifest, _ = decode_manifest(blob, other.seal, "it")
    assert {(s.path, s.kind) for s in manifest.skipped} == {
        (b"fifo", "fifo"),
        (b"socket", "socket"),
    }
    assert _reads_nothing(other, back)
    shutil.rmtree(was)
    shutil.rmtree(back)


def test_two_roots_come_back_apart(seaweed: Server, tmp_path: Path) -> None:
    roots, backs = [[tmp_path / side / name for name in "ab"] for side in ("was", "back")]
    for number, root in enumerate(roots):
        root.mkdir(parents=True)
        (root / "same-name").write_bytes(content(number, 5000))
        (root / "only" / f"in-{number}").mkdir(parents=True)
    before = [kept(root) for root in roots]
    let_settle()
    engine = Engine(seaweed.store(), tmp_path / "home")
    engine.restore(engine.snapshot(roots), backs)
    for was, back in zip(before, backs, strict=True):
        assert differences(was, facts(back)) == []


def test_an_excluded_name_is_not_kept(seaweed: Server, tmp_path: Path) -> None:
    was, back = tmp_path / "was", tmp_path / "back"
    for name in ("kept/a.py", "kept/a.pyc", "cache/b", "deep/cache/c", "only/this/d", "this/e"):
        (was / name).parent.mkdir(parents=True, exist_ok=True)
        (was / name).write_text(name)
    let_settle()
    engine = Engine(seaweed.store(), tmp_path / "home")
    engine.restore(engine.snapshot([was], ["*.pyc", "cache", "only/this"]), [back])
    files = {p for p, f in facts(back).items() if f.kind == "file"}
    assert files == {b"kept/a.py", b"this/e"}


# -- generated trees


Plant = Callable[[Path, list[bytes], list[bytes]], None]
"""Puts something below a root; knows its directories and its files so far."""

_names = (
    st.one_of(
        st.binary(min_size=1, max_size=6),
        st.sampled_from([b"n" * 255, b"new\nline", b"\xff\xfe", b" ", b"...", b"a", b"b", b"c"]),
    )
    .map(lambda name: name.replace(b"/", b"-").replace(b"\0", b"0"))
    .filter(lambda name: name not in (b".", b".."))
)
_sizes = st.sampled_from([0, 0, 1, 5, 100, 4095, 4096, 70_000, (1 << 20) - 1, 1 << 20, 9_000_000])
_times = st.integers(-2_000_000_000 * 10**9, 4_000_000_000 * 10**9)
_modes = st.sampled_from([0o644, 0o755, 0, 0o400, 0o4711, 0o2750, 0o1777])
_spots = st.integers(0, 1000)
_seeds = st.integers(0, 5)


def _pick(among: list[bytes], spot: int) -> bytes:
    return among[spot % len(among)]


@st.composite
def _plants(draw: st.DrawFn) -> Plant:
    kind = draw(st.sampled_from(["file", "file", "file", "directory", "symlink", "link", "sparse"]))
    name, spot, other = draw(_names), draw(_spots), draw(_spots)
    size, seed, when, mode = draw(_sizes), draw(_seeds), draw(_times), draw(_modes)
    target = draw(st.binary(min_size=1, max_size=30)).replace(b"\0", b"/")

    def plant(root: Path, directories: list[bytes], files: list[bytes]) -> None:
        full = os.path.join(_pick(directories, spot), name)
        if os.path.lexists(full):
            return
        if kind == "directory":
            os.mkdir(full)
            directories.append(full)
        elif kind == "symlink":
            os.symlink(target, full)
        elif kind == "link" and files:
            os.link(_pick(files, other), full)
        else:
            with open(full, "wb") as file:
                if kind == "sparse":
                    file.truncate(size * 3)
                    file.seek(size)
                file.write(content(seed, min(size, 70_000) if kind == "sparse" else size))
            if seed == 0:
                set_xattr(full, "user.seed", name[:50])
            os.chmod(full, mode)
            os.utime(full, ns=(0, when))
            files.append(full)

    return plant


_trees = st.lists(_plants(), min_size=1, max_size=14)

_CHANGES = [
    "append",
    "truncate",
    "rewrite",
    "rewrite and set the time back",
    "delete",
    "rename",
    "chmod",
    "xattr",
    "to a symlink",
    "to a directory",
    "new hard link",
    "touch",
]
_changes = st.lists(st.tuples(st.sampled_from(_CHANGES), _spots, _seeds), max_size=6)


def _build(root: Path, plants: list[Plant]) -> None:
    root.mkdir()
    (root / "seed").write_bytes(b"a root is never empty")
    directories, files = [os.fsencode(root)], [os.fsencode(root / "seed")]
    for plant in plants:
        plant(root, directories, files)
    for number, directory in enumerate(reversed(directories[1:])):
        os.chmod(directory, 0o500 + number % 64)
        os.utime(directory, ns=(0, number * 10**17 + 1))


def _change(root: Path, change: str, spot: int, seed: int) -> None:
    at = os.fsencode(root)
    paths = sorted(
        p for p, f in facts(root).items() if p not in (b"", b"seed") and f.kind != "directory"
    )
    if not paths:
        return
    full = os.path.join(at, _pick(paths, spot))
    is_link = os.path.islink(full)
    st_was = os.lstat(full)
    if change == "delete":
        os.unlink(full)
    elif change == "rename":
        os.rename(full, os.path.join(at, b"renamed-%d" % seed))
    elif change == "to a symlink":
        os.unlink(full)
        os.symlink(b"seed", full)
    elif change == "to a directory":
        os.unlink(full)
        os.mkdir(full)
    elif change == "new hard link" and not is_link:
        with_number = os.path.join(at, b"linked-%d-%d" % (seed, spot))
        if not os.path.lexists(with_number):
            os.link(full, with_number)
    elif is_link:
        return
    elif change == "chmod":
        os.chmod(full, 0o600 + seed)
    elif change == "xattr":
        set_xattr(full, "user.changed", b"%d" % seed)
    elif change == "touch":
        os.utime(full)
    elif change == "truncate":
        os.truncate(full, st_was.st_size // 2)
    elif change == "append":
        with open(full, "ab") as file:
            file.write(content(seed + 10, 100))
    else:
        with open(full, "r+b") as file:
            file.write(content(seed + 20, min(st_was.st_size, 10_000)))
        if change.endswith("back"):
            os.utime(full, ns=(st_was.st_atime_ns, st_was.st_mtime_ns))


@pytest.fixture(scope="module")
def bucket(seaweed: Server) -> str:
    return seaweed.bucket()


@settings(
    max_examples=10,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(plants=_trees, changes=_changes, sealed=st.booleans())
def test_any_tree_and_any_change_comes_back(
    seaweed: Server,
    bucket: str,
    tmp_path: Path,
    plants: list[Plant],
    changes: list[tuple[str, int, int]],
    sealed: bool,
) -> None:
    here = tmp_path / "example"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    prefix = f"p{random.SystemRandom().randrange(1 << 60)}"
    store = S3Store.connect(seaweed.settings(bucket, prefix))
    key = KEY if sealed else None
    was = here / "was"
    _build(was, plants)
    first_facts = facts(was)
    engine = Engine(store, here / "home", key)
    let_settle()
    first = engine.snapshot([was])

    for change in changes:
        _change(was, *change)
    second_facts = facts(was)
    let_settle()
    second = engine.snapshot([was])
    assert differences(second_facts, facts(was)) == []

    other = Engine(store, here / "other", key)
    other.restore(first, [here / "first"])
    assert differences(first_facts, facts(here / "first")) == []
    other.restore(second, [here / "second"])
    assert differences(second_facts, facts(here / "second")) == []
    assert _reads_nothing(other, here / "second")


def _reads_nothing(engine: Engine, root: Path) -> bool:
    """Whether the snapshot of a tree that was just restored is an increment of nothing."""
    run = engine.begin([root])
    scan = engine.scan(run, 1)
    engine.call("snapshot.end", run=run, committed=False)
    return (scan["read_files"], scan["read_bytes"], scan["parts"]) == (0, 0, [])
