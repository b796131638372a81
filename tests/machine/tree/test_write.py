"""Nothing is written outside the target, whatever stands in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.manifests import entry
from tests.fixtures.trees import differences, facts
from torpor.machine.pipeline.download import in_pieces
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, HOLE, SYMLINK, Extent

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

pytestmark = pytest.mark.usefixtures("each_language")


def _writes(writer: TreeWriter, *, afresh: bool = True) -> list[Callable[[], object]]:
    """A whole restore, step by step."""
    by_path = {e.path: e for e in ENTRIES}
    return [
        lambda: writer.prepare(ENTRIES, in_pieces, afresh=afresh),
        lambda: writer.write_at(by_path[b"d/pieces"], 0, b"piece"),
        lambda: writer.write_files([(by_path[b"d/whole"], 3)], b"...whole..."),
        lambda: writer.finish(ENTRIES, in_pieces),
        writer.close,
    ]


def _restore(target: Path, *, afresh: bool = True) -> None:
    for step in _writes(TreeWriter([os.fsencode(target)]), afresh=afresh):
        step()


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
    writer.write_files([(entries[-2], 0)], b"whole")
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


def _file_to_dangling(target: Path, elsewhere: Path) -> None:
    for name in ("whole", "pieces", "empty", "same", "link"):
        (target / "d" / name).unlink(missing_ok=True)
        (target / "d" / name).symlink_to(elsewhere / "not-there-yet")


def _file_to(name: str, kind: str) -> Swap:
    def swap(target: Path, elsewhere: Path) -> None:
        victim = target / "d" / name
        victim.unlink(missing_ok=True)
        if kind == "symlink":
            victim.symlink_to(elsewhere / name)
        elif kind == "fifo":
            os.mkfifo(victim)
        else:
            victim.mkdir()

    return swap


SWAPS: dict[str, Swap] = {
    "directory": _directory_to_symlink,
    "deep": _deep_to_symlink,
    "target": _target_to_symlink,
    "dangling": _file_to_dangling,
    **{
        f"{name}-{kind}": _file_to(name, kind)
        for kind, names in (
            ("symlink", ("whole", "pieces", "empty", "same")),
            ("fifo", ("whole", "pieces", "empty")),
            ("directory", ("whole", "pieces", "link")),
        )
        for name in names
    },
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


@pytest.mark.rule(7)
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
        first = TreeWriter([os.fsencode(target)], stage=stage)
        steps = _writes(first)
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
        finally:
            first.close()
            again.close()
        assert differences(untouched, facts(tmp_path / "elsewhere")) == []


def test_what_was_swapped_is_named(tmp_path: Path) -> None:
    target = tmp_path / "target"
    _writes(TreeWriter([os.fsencode(target)]))[0]()
    _directory_to_symlink(target, _elsewhere(tmp_path))
    says = "'d' in the target is not what torpor found or made there"
    with pytest.raises(InvalidInput, match=says):
        _restore(target)
