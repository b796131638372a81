"""Which losses between two snapshots count as missed, and which their user wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec
import pytest

from tests.fixtures.manifests import PLAIN, entry, honest
from torpor.shared.format import missed as room
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    Chunk,
    Entries,
    Extent,
    Manifest,
    Pack,
    decode_manifest,
    encode_manifest,
)
from torpor.shared.format.missed import (
    FEW_NAMES,
    Missing,
    Tree,
    missed,
    missing_record,
    recorded_missing,
)
from torpor.shared.format.rows import NotPlain

ROOT, OTHER = "~/workspace", "~/data"
Files = Mapping[str, int | str]
"""The sizes of files, or their content, by path."""


def _manifest(files: Files, *more: Files, missing: Sequence[Missing] = ()) -> Manifest:
    """A snapshot of these files in the first root, and of ``more`` in the second."""
    contents = [content for of in (files, *more) for content in of.values()]
    texts = sorted({content for content in contents if isinstance(content, str)})
    chunks = [
        Chunk(text.encode().ljust(32), 100, 0, 0, 100 * n, 100) for n, text in enumerate(texts)
    ]
    roots = [ROOT, OTHER][: 1 + len(more)]
    entries = []
    for number, of in enumerate((files, *more)):
        entries.append(entry(DIRECTORY, b"", root=number))
        for directory, names in groupby(sorted(of), key=lambda path: path.rpartition("/")[0]):
            if directory:
                entries.append(entry(DIRECTORY, directory.encode(), root=number))
            for name in names:
                content = of[name]
                size = 100 if isinstance(content, str) else content
                chunk = texts.index(content) if isinstance(content, str) else -1
                extents = (Extent(chunk, 0, size),) if size else ()
                entries.append(entry(FILE, name.encode(), root=number, size=size, extents=extents))
    packs = [Pack(b"p" * 16, 100 * len(chunks), b"m" * 16)] if chunks else []
    return honest(
        roots=roots,
        entries=entries,
        chunks=chunks,
        packs=packs,
        environment=missing_record(missing),
    )


def _lost(before: Manifest, now: Manifest) -> tuple[int, int] | None:
    """As from the store, and as of entries that no torpor has written in this order."""
    read = [
        Tree(decode_manifest(encode_manifest(m, PLAIN)[0], PLAIN, "it")[0]) for m in (before, now)
    ]
    found = missed(*read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entries, "listed", _not_plain)
        apart = missed(Tree(before), Tree(now))
    assert found == apart
    return found and (found.files, found.size)


def _not_plain(*_: object) -> None:
    raise NotPlain


def _some(folder: str, count: int, size: int = 1) -> dict[str, int | str]:
    return {f"{folder}/{number}": size for number in range(count)}


@pytest.mark.rule(13)
def test_more_than_half_of_the_files_is_missed_and_less_is_deleted() -> None:
    mine = _some("code", 20)
    assert _lost(_manifest({**mine, **_some("data", 21)}), _manifest(mine)) == (21, 21)
    assert _lost(_manifest({**mine, **_some("data", 20)}), _manifest(mine)) is None
    few = _some("data", FEW_NAMES - 1)
    assert _lost(_manifest(few), _manifest({"notes": 1})) is None


def test_more_than_half_of_the_bytes_is_missed_unless_new_ones_took_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _manifest({"checkpoint-1": 2000, "notes": 1})
    assert _lost(before, _manifest({"notes": 1})) is None
    monkeypatch.setattr(room, "FEW_BYTES", 1000)
    assert _lost(before, _manifest({"notes": 1})) == (1, 2000)
    assert _lost(before, _manifest({"checkpoint-2": 2000, "notes": 1})) is None


def test_a_file_that_has_a_new_name_is_not_missed_and_each_new_file_stands_for_one() -> None:
    data = {f"data/{number}": f"content {number}" for number in range(20)}
    moved = {name.replace("data", "again"): content for name, content in data.items()}
    assert _lost(_manifest(data, {}), _manifest({}, moved)) is None
    same: Files = dict.fromkeys(data, "the same")
    assert _lost(_manifest(same, {}), _manifest({}, {"copy": "the same"})) == (19, 1900)


def test_what_was_frozen_of_programs_is_gone_once_they_go_on() -> None:
    frozen = _some(".torpor-process/0123456789ab", 20, 100)
    assert _lost(_manifest({**frozen, "notes": 1}), _manifest({"notes": 1})) is None


def test_a_root_that_is_named_no_more_and_a_disk_that_is_not_there_are_missed_at_any_size() -> None:
    mine = _some("code", 20)
    assert _lost(_manifest(mine, {"a": 1}), _manifest(mine)) == (1, 1)
    before = _manifest({**mine, "disk/a": 5, "code/more": 1})
    assert _lost(before, _manifest(mine)) is None
    assert _lost(before, _manifest(mine, missing=[Missing(0, b"disk")])) == (1, 5)
    assert _lost(before, _manifest(mine, missing=[Missing(0, b"dis")])) is None
    assert _lost(before, _manifest(mine, missing=[Missing(0, b"")])) == (2, 6)
    assert _lost(before, _manifest(mine, missing=[Missing(0, b"", 30, 30)])) is None  # no disk


def test_a_record_of_another_shape_says_that_nothing_is_missing() -> None:
    for said in (7, [[0]], [[0, 5]], [[9, b"disk"]], [[-1, b""]], {"a": 1}):
        manifest = msgspec.structs.replace(honest(), environment={"missing": said})
        assert recorded_missing(manifest) == []
