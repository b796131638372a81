"""C and Python read the entries of a manifest alike, whatever they say."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.fixtures.manifests import PLAIN, honest, object_of, plain_entries
from torpor.machine.tree.names import Names
from torpor.shared.errors import ManifestInvalid
from torpor.shared.format import rows
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.manifest import (
    FILE,
    HARDLINK,
    Content,
    Entries,
    Entry,
    Extent,
    Manifest,
    ReadContents,
    decode_manifest,
    described,
    encode_manifest,
)

_HOSTILE: list[Any] = [
    *(-(1 << 63), -2, -1, 0, 1, 3, 4, 0o7777, 0o10000, (1 << 32) - 2, (1 << 32) - 1, 1 << 50),
    *((1 << 50) + 1, (1 << 63) - 1, (1 << 64) - 1, None, 0.5, "text", [], [[]], {}, True, False),
    *(b"", b".", b"..", b"a/..", b"/a", b"a//b", b"a/", b"a\0", b"x" * 255, b"x" * 256),
    *(b"none/file", b"d", b"d/a", b"d" * 16, b"y" * 4095, b"y" * 4096, b"\xff\xfe"),
    [[0, 0, 100]], [[0, 0, 0]], [[-1, 0, 100]], [[-1, 1, 100]], [[2, 0, 100]], [[0, 1, 100]],
    [[1, 0, 1 << 62], [1, 0, 1 << 62]], [[0, 0]], [[b"n", b"v"]], [[b"n", b"v"]] * 2, [[b"", b""]],
    [[b"%d" % n, b"v" * 70_000] for n in range(2)], [[b"%d" % n, b""] for n in range(17)],
]  # fmt: skip


def _plain() -> Manifest:
    return honest(roots=["~/a", "~/b"], entries=plain_entries())


def _without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "entries_library", lambda: None)


def _verdict(blob: bytes) -> Manifest | str:
    try:
        manifest, _ = decode_manifest(blob, PLAIN, "it")
        check_manifest(manifest, "it")
    except ManifestInvalid as refusal:
        return str(refusal)
    return manifest


def _says(manifest: Manifest) -> list[object]:
    """What is learned of the entries."""
    entries = manifest.entries
    assert isinstance(entries, Entries)
    names = Names.of(len(manifest.roots), entries, bytes(range(1, 33)) * len(entries))
    return [
        [*entries],
        entries.totals(len(manifest.chunks)),
        described(entries),
        [[names.find(item.root, item.path) for item in entries], names.marks],
    ]


def _fields(manifest: Manifest) -> list[Any]:
    found: list[Any] = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    return found


def _lying(dice: random.Random) -> bytes:
    """A manifest of which an entry or two say something else."""
    fields = _fields(_plain())
    lines: list[list[Any]] = fields[7]
    for _ in range(dice.choice((1, 1, 1, 2))):
        at = dice.randrange(len(lines))
        change = dice.randrange(8)
        if change == 0:
            lines.insert(dice.randrange(len(lines) + 1), lines[at])
        elif change == 1:
            del lines[at]
        elif change == 2:
            other = dice.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif change == 3:
            lines[at] = lines[at][: dice.randrange(1, 13)] + [0] * dice.randrange(2)
        else:
            lines[at] = [*lines[at]]
            lines[at][dice.randrange(len(lines[at]))] = dice.choice(_HOSTILE)
    return msgspec.msgpack.encode(fields)


def _broken(dice: random.Random) -> bytes:
    """A manifest with some other bytes among its entries."""
    body = bytearray(msgspec.msgpack.encode(_plain()))
    start = body.index(b"user.a") - 150
    for _ in range(dice.choice((1, 1, 2, 4))):
        body[dice.randrange(start, len(body) - 300)] = dice.randrange(256)
    return bytes(body)


def test_what_torpor_writes_is_read_without_an_object_for_each_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [item for item in plain_entries() if item.kind != HARDLINK and not item.changed]
    blob, _ = encode_manifest(honest(roots=["~/a", "~/b"], entries=entries), PLAIN)
    monkeypatch.setattr(Entries, "__iter__", None)
    found = _verdict(blob)
    assert isinstance(found, Manifest)
    assert isinstance(found.entries, Entries)
    files = sum(item.kind == FILE for item in entries)
    assert found.entries.totals(len(found.chunks)).files == files
    assert described(found.entries).kinds.count(FILE) == files
    assert Names.of(2, found.entries).find(1, b"a") == len(entries) - 1


@pytest.mark.rule(7)
@pytest.mark.parametrize("made", [_lying, _broken])
def test_c_and_python_agree_on_manifests_that_lie(
    made: Callable[[random.Random], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = 0
    for seed in range(3000):
        blob = object_of(made(random.Random(seed)))
        in_c = _verdict(blob)
        said = _says(in_c) if isinstance(in_c, Manifest) else in_c
        with monkeypatch.context() as patch:
            _without_library(patch)
            in_python = _verdict(blob)
            expected = _says(in_python) if isinstance(in_python, Manifest) else in_python
        assert said == expected, seed
        accepted += isinstance(in_c, Manifest)
    assert 100 < accepted < 2500


def test_names_that_do_not_fit_at_once_are_listed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Entries(_plain().entries)
    changed = bytearray(len(entries))
    expected = list(entries.listed(changed))
    monkeypatch.setattr(rows, "PLACES", 2)
    monkeypatch.setattr(rows, "NAMES_BYTES", 1)
    assert list(entries.listed(bytearray(len(entries)))) == expected
    assert [n for n, mark in enumerate(changed) if mark] == [8]
    runs = [(place.path, place.names.split(b"\0")) for place in expected if place.is_run]
    assert runs[2] == (b"d/e", [b"%03d" % number for number in range(40)])


def _filled(entries: Entries) -> list[Entry]:
    contents, at = ReadContents(), [-1] * len(entries)
    files = [number for number, item in enumerate(entries) if item.kind == FILE]
    for number in reversed(files[1:]):
        at[number] = len(contents)
        content = Content(1 << number, (Extent(number, 5, 1 << number),), b"n" * 16, True)
        contents.extend([content])
    return list(entries.filled(contents, array("q", at)))


def test_what_does_not_fit_the_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Entries(plain_entries())
    with pytest.raises(ValueError, match="1 values for"):
        list(entries.listed(bytearray(1)))
    for _ in range(2):
        with pytest.raises(ValueError):
            entries.filled(ReadContents(), array("q"))
        _without_library(monkeypatch)


def test_content_is_put_in_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Entries(_plain().entries)
    in_c = _filled(entries)
    assert in_c[2] == entries[2]  # without new content
    assert in_c[3].size == 8
    assert in_c[3].extents == (Extent(3, 5, 8),)
    _without_library(monkeypatch)
    assert _filled(entries) == in_c


def test_a_chunk_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Entries(_plain().entries)
    for _ in range(2):
        with pytest.raises(IndexError):
            entries.totals(1)
        _without_library(monkeypatch)
