"""Nothing is written outside the target, whatever stands in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.manifests import entry
from tests.fixtures.trees import differences, facts
from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.pipeline.download import in_pieces
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, HOLE, SYMLINK, Entry, Extent

ENTRIES = [
    entry(DIRECTORY, b"", mode=0o755),
    entry(DIRECTORY, b"d", mode=0o755),
    entry(DIRECTORY, b"d/deep", mode=0o750),
    entry(FILE, b"d/whole", size=5, extents=(Extent(0, 0, 5),), mode=0o640),
    entry(FILE, b"d/pieces", size=12, extents=(Extent(0, 0, 5), Extent(HOLE, 0, 7)), mode=0o444),
    entry(FILE, b"d/empty"),
    entry(SYMLINK, b"d/link", target=b"/etc/passwd"),
    entry(HARDLINK, b"d/same", target=b"d/whole"),
]


def _writes(writer: TreeWriter, *, afresh: bool = True) -> list[Callable[[], object]]:
    """A whole restore, step by step."""
    by_path = {e.path: e for e in ENTRIES}
    return [
        lambda: writer.prepare(ENTRIES, in_pieces, afresh=afresh),
        lambda: writer.write_at(by_path[b"d/pieces"], 0, b"piece"),
        lambda: writer.write_whole(by_path[b"d/whole"], b"whole"),
        lambda: writer.finish(ENTRIES, in_pieces),
        writer.close,
    ]


def _restore(target: Path, *, afresh: bool = True) -> None:
    for step in _writes(TreeWriter([os.fsencode(target)]), afresh=afresh):
        step()


def test_a_tree_is_written(tmp_path: Path) -> None:
    target = tmp_path / "new/target"
    _restore(target)
    assert (target / "d/whole").read_bytes() == b"whole"
    assert (target / "d/pieces").read_bytes() == b"piece" + bytes(7)
    assert os.readlink(target / "d/link") == "/etc/passwd"
    assert os.path.samefile(target / "d/same", target / "d/whole")
    assert {e.path: e.mode for e in ENTRIES if e.kind in (FILE, DIRECTORY)} == {
        path: fact.mode
        for path, fact in facts(target).items()
        if fact.kind != "symlink" and path != b"d/same"
    }
    assert {fact.mtime_ns for fact in facts(target).values()} == {10**18}


def test_names_deeper_than_the_directories_that_are_kept_open_are_linked(tmp_path: Path) -> None:
    deep, other = (b"/".join([name] * 30) for name in (b"a", b"b"))
    entries = [entry(DIRECTORY, b"", mode=0o755)]
    for path in (deep, other):
        parts = path.split(b"/")
        entries += [
            entry(DIRECTORY, b"/".join(parts[:n]), mode=0o755) for n in range(1, len(parts))
        ]
    entries += [
        entry(FILE, deep, size=5, extents=(Extent(0, 0, 5),)),
        entry(HARDLINK, other, target=deep),
    ]
    writer = TreeWriter([os.fsencode(tmp_path)])
    writer.prepare(entries, in_pieces, afresh=True)
    writer.write_whole(entries[-2], b"whole")
    writer.finish(entries, in_pieces)
    writer.close()
    target = os.fsencode(tmp_path)
    assert os.path.samefile(os.path.join(target, deep), os.path.join(target, other))


@pytest.mark.parametrize("afresh", [True, False])
def test_written_again_over_any_interruption_it_is_the_same(tmp_path: Path, afresh: bool) -> None:
    _restore(tmp_path / "whole")
    expected = facts(tmp_path / "whole")
    for stop in range(5):
        target = tmp_path / f"stopped-{stop}"
        for step in _writes(TreeWriter([os.fsencode(target)]))[:stop]:
            step()
        _restore(target, afresh=afresh)
        assert differences(expected, facts(target)) == []


def test_what_an_unbelieved_restore_left_is_not_kept(tmp_path: Path) -> None:
    _restore(tmp_path / "target")
    (tmp_path / "target/d/pieces").write_bytes(b"piece of something else, and longer")
    _restore(tmp_path / "target")
    assert (tmp_path / "target/d/pieces").read_bytes() == b"piece" + bytes(7)


def test_a_file_is_private_until_it_is_complete(tmp_path: Path) -> None:
    writer = TreeWriter([os.fsencode(tmp_path)])
    prepare, write_at, *_ = _writes(writer)
    prepare()
    write_at()
    writer.close()
    assert (tmp_path / "d/pieces").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


# -- something else writes into the target

Swap = Callable[[Path, Path], None]
"""Changes the target; the second path is elsewhere, and must stay as it is."""


def _directory_to_symlink(target: Path, elsewhere: Path) -> None:
    os.rename(target / "d", target.parent / "moved-away")
    (target / "d").symlink_to(elsewhere)


def _deep_to_symlink(target: Path, elsewhere: Path) -> None:
    os.rmdir(target / "d/deep")
    (target / "d/deep").symlink_to(elsewhere / "deep")


def _target_to_symlink(target: Path, elsewhere: Path) -> None:
    os.rename(target, target.parent / "moved-away")
    target.symlink_to(elsewhere.parent)


def _file_to_symlink(name: str) -> Swap:
    def swap(target: Path, elsewhere: Path) -> None:
        (target / "d" / name).unlink(missing_ok=True)
        (target / "d" / name).symlink_to(elsewhere / name)

    return swap


def _file_to_dangling(target: Path, elsewhere: Path) -> None:
    for name in ("whole", "pieces", "empty", "same", "link"):
        (target / "d" / name).unlink(missing_ok=True)
        (target / "d" / name).symlink_to(elsewhere / "not-there-yet")


def _file_to_fifo(name: str) -> Swap:
    def swap(target: Path, _: Path) -> None:
        (target / "d" / name).unlink(missing_ok=True)
        os.mkfifo(target / "d" / name)

    return swap


def _file_to_directory(name: str) -> Swap:
    def swap(target: Path, _: Path) -> None:
        (target / "d" / name).unlink(missing_ok=True)
        (target / "d" / name).mkdir()

    return swap


SWAPS: dict[str, Swap] = {
    "directory": _directory_to_symlink,
    "deep": _deep_to_symlink,
    "target": _target_to_symlink,
    "dangling": _file_to_dangling,
    **{f"{name}-symlink": _file_to_symlink(name) for name in ("whole", "pieces", "empty", "same")},
    **{f"{name}-fifo": _file_to_fifo(name) for name in ("whole", "pieces", "empty")},
    **{f"{name}-directory": _file_to_directory(name) for name in ("whole", "pieces", "link")},
}


def _elsewhere(tmp_path: Path) -> Path:
    """Somebody else's files, under the very names that the restore uses."""
    elsewhere = tmp_path / "elsewhere/d"
    (elsewhere / "deep").mkdir(parents=True)
    for name in ("whole", "pieces", "empty", "same", "link"):
        (elsewhere / name).write_text(f"somebody else's {name}")
        (elsewhere / name).chmod(0o400)
    (elsewhere / "deep").chmod(0o511)
    elsewhere.chmod(0o755)
    return elsewhere


@pytest.mark.parametrize("swap", SWAPS, ids=list(SWAPS))
@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "going-on"])
@pytest.mark.parametrize("stage", [b"", b".stage"], ids=["named", "staged"])
def test_nothing_elsewhere_is_touched(
    tmp_path: Path, swap: str, resumed: bool, stage: bytes
) -> None:
    elsewhere = _elsewhere(tmp_path)
    for stop in range(5):
        target = tmp_path / f"{stop}/target"
        target.parent.mkdir()
        steps = _writes(TreeWriter([os.fsencode(target)], stage=stage))
        for step in steps[:stop]:
            step()
        if stop == 0:
            (target / "d/deep").mkdir(parents=True)
        SWAPS[swap](target, elsewhere)
        untouched = facts(tmp_path / "elsewhere")
        again = TreeWriter([os.fsencode(target)], stage=stage)
        rest = _writes(again, afresh=not stop) if resumed else steps[stop:]
        try:
            for step in rest:
                step()
        except InvalidInput as refused:
            says = str(refused)
            assert "something else" in says or "is not a directory" in says
        except PermissionError:
            assert swap == "whole-directory"  # Linux makes no hard links to directories
        assert differences(untouched, facts(tmp_path / "elsewhere")) == []


def test_what_was_swapped_is_named(tmp_path: Path) -> None:
    elsewhere = _elsewhere(tmp_path)
    target = tmp_path / "target"
    prepare, *_ = _writes(TreeWriter([os.fsencode(target)]))
    prepare()
    _directory_to_symlink(target, elsewhere)
    with pytest.raises(
        InvalidInput, match="'d' in the target is not what torpor found or made there"
    ):
        _restore(target)


# -- limits of the machine


def test_attributes_that_the_machine_refuses_are_warned_of(tmp_path: Path) -> None:
    writer = TreeWriter([os.fsencode(tmp_path)])
    odd: Entry = entry(
        FILE, b"odd", size=1, extents=(Extent(0, 0, 1),), xattrs=((b"nonsense.name", b"v"),)
    )
    writer.write_whole(odd, b"x")
    writer.close()
    assert writer.attributes.refused_xattrs == {(0, b"odd", b"nonsense.name")}
    (warning,) = writer.attributes.warnings
    assert "'odd': extended attribute nonsense.name is not restored" in warning


def test_a_full_disk_is_called_so(needs_server: None, tmp_path: Path) -> None:
    """A real limit of the file system, reached: a tmpfs of one page's worth of blocks."""
    script = """
import os, sys
from tests.fixtures.manifests import entry
from torpor.shared.errors import DiskFull
from torpor.shared.format.manifest import FILE, Extent
from torpor.machine.tree.write import TreeWriter
writer = TreeWriter([os.fsencode(sys.argv[1])])
big = entry(FILE, b"big", size=1 << 20, extents=(Extent(0, 0, 1 << 20),))
try:
    writer.write_whole(big, b"x" * (1 << 20))
except DiskFull as full:
    print(full)
"""
    mount = 'mount -t tmpfs -o size=256k none "$1" && exec "$0" -c "$2" "$1"'
    argv = ["unshare", "--mount", "sh", "-c", mount, sys.executable, str(tmp_path), script]
    if os.geteuid() != 0:
        argv.insert(1, "--map-root-user")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "the machine's disk is full" in done.stdout
    assert "'big'" in done.stdout
