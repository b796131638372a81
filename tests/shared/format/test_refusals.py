"""Every rule of docs/format.md, "What a reader refuses": the document, the code and these agree."""

from __future__ import annotations

import ast
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zstandard

from tests.fixtures.manifests import LIES, MISNAMED, PLAIN, Lie, entry, honest, object_of
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.codecs.stock import LZ4, ZSTD
from torpor.shared.errors import ManifestInvalid, SnapshotDamaged, SnapshotError, WrongKey
from torpor.shared.format import checks
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.chunks import open_chunk
from torpor.shared.format.keys import Seal, chunk_associated
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Chunk,
    Extent,
    Manifest,
    Skipped,
    decode_manifest,
    encode_manifest,
)
from torpor.shared.values import GIB, KIB, MIB

ROOT = Path(__file__).resolve().parents[3]
SEALED = Seal(bytes(range(32)))
OTHER = Seal(b"k" * 32)
BODY = msgspec.msgpack.encode(honest())
FIELDS: list[Any] = msgspec.to_builtins(honest(), builtin_types=(bytes,))

_RESTORES = "tests/machine/agent/test_hostile_restores.py"
ELSEWHERE = {
    "O14": f"{_RESTORES}::test_what_is_not_the_snapshot_is_refused",
    "O15": f"{_RESTORES}::test_a_manifest_that_was_replaced_is_refused",
    "C1": f"{_RESTORES}::test_a_damaged_pack_is_named_and_its_files_are_not_written",
}
"""Rules that need a store and a machine to break."""


# -- the object


class BadObject(NamedTuple):
    """An object that must be refused, and what the refusal says."""

    rule: str
    blob: Callable[[], bytes]
    says: str
    seal: Seal = PLAIN
    error: type[SnapshotError] = ManifestInvalid


def _frame(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)


def _header(**lies: Any) -> Callable[[], bytes]:
    return lambda: object_of(BODY, **lies)


def _body(value: Any) -> Callable[[], bytes]:
    return lambda: object_of(msgspec.msgpack.encode(value))


def _with_first_entry(first: list[Any]) -> list[Any]:
    return [*FIELDS[:7], [first, *FIELDS[7][1:]], *FIELDS[8:]]


def _sizeless() -> bytes:
    frame = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(BODY)
    return object_of(BODY, frame=frame)


def _of_a_dictionary() -> bytes:
    samples = [b"entry %d of a tree" % n * 20 for n in range(2000)]
    words = zstandard.train_dictionary(4096, samples)
    return object_of(BODY, frame=zstandard.ZstdCompressor(dict_data=words).compress(BODY))


def _bomb() -> bytes:
    size = 17 * MIB
    return object_of(b"", frame=_frame(bytes(size)), body_bytes=size)


def _array(row: bytes, count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + row * count


def _with(field: str, packed: bytes) -> Callable[[], bytes]:
    """An honest manifest but for the bytes of one field."""
    at = Manifest.__struct_fields__.index(field)
    before, after = (
        b"".join(map(msgspec.msgpack.encode, fields)) for fields in (FIELDS[:at], FIELDS[at + 1 :])
    )
    return lambda: object_of(bytes([0x90 | len(FIELDS)]) + before + packed + after)


_ENCODE = msgspec.msgpack.encode
FIGURES = {str(number): number for number in range(10_001)}
BOMBS = {
    "arrays in the environment": _with("environment", b"\x81\xa1x" + _array(b"\x90", 16_000_000)),
    "maps in the environment": _with("environment", b"\x81\xa1x" + _array(b"\x80", 16_000_000)),
    "maps in maps": _with("environment", b"\x81\xa1x" + _array(b"\x81\xa1y\x80", 4_000_000)),
    "entries": _with("entries", _array(b"\x90", 16_000_000)),
    "roots": _with("roots", _array(b"\xa2~a", 5_000_000)),
    "skipped names": _with("skipped", _array(b"\x93\0\xc4\0\xa0", 2_000_000)),
    "chunks": _with("chunks", _array(_ENCODE([b"", 0, 0, 0, 0, 0]), 1_500_000)),
    "packs": _with("packs", _array(_ENCODE([b"", 0, b""]), 2_000_000)),
    "figures": _with("statistics", b"\xdf" + struct.pack(">I", 2_000_000) + b"\xa0\0" * 2_000_000),
    "fields": lambda: object_of(_array(b"\xc0", 16_000_000)),
}


@pytest.mark.rule("H11")
@pytest.mark.parametrize("kind", BOMBS)
def test_a_manifest_of_a_few_kilobytes_takes_few_megabytes(kind: str) -> None:
    """It took 5 GB of the control side, which reads what machines write."""
    blob = BOMBS[kind]()
    assert len(blob) < 64 * KIB
    tracemalloc.start()
    try:
        with pytest.raises(ManifestInvalid):
            decode_manifest(blob, PLAIN, "it")
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def test_the_largest_environment_that_an_agent_records_is_read() -> None:
    packages = {f"package-{n}": "1.2.3" for n in range(20_000)}
    facts = {"python_packages": packages, "apt_packages": packages, "used": bytes(10_000_000)}
    deep: dict[str, Any] = {"a": {"b": [{"c": [{"d": [1.5, None, True, b"x", -(10**18)]}]}]}}
    manifest = honest(environment=facts | deep | {"long": "x" * 70_000, "e": list(range(-40, 300))})
    blob = encode_manifest(manifest, PLAIN)[0]
    assert decode_manifest(blob, PLAIN, "it")[0].environment == manifest.environment
    assert decode_manifest(blob, PLAIN, "it", ("e", "f"))[0].environment == {
        "e": manifest.environment["e"]
    }


FIRST, *REST = FIELDS[7]
OBJECTS = [
    BadObject("O1", lambda: b"", "not a torpor manifest"),
    BadObject("O1", lambda: object_of(BODY)[:59], "not a torpor manifest"),
    BadObject("O1", _header(magic=b"TORPOR\n\n"), "not a torpor manifest"),
    BadObject("O2", _header(version=0), "format version 0"),
    BadObject("O2", _header(version=2), "this torpor reads version 1: use a newer"),
    BadObject("O3", _header(flags=2), "unknown flags"),
    BadObject("O3", _header(flags=0x8000), "unknown flags"),
    BadObject("O4", _header(body_bytes=2 * GIB + 1), "refused"),
    BadObject("O4", _header(body_bytes=(1 << 64) - 1), "refused"),
    BadObject("O5", _header(key_id=b"\0" * 7 + b"\1"), "is not sealed and names a key"),
    BadObject(
        "O6", lambda: object_of(BODY, SEALED), "is sealed, and the store block has no key",
        PLAIN, WrongKey,
    ),
    BadObject(
        "O6", lambda: object_of(BODY), "is not sealed, and the store block has a key",
        SEALED, WrongKey,
    ),
    BadObject(
        "O7", lambda: object_of(BODY, SEALED), "sealed with another key", OTHER, WrongKey
    ),
    BadObject(
        "O8", lambda: object_of(BODY, OTHER, key_id=SEALED.key_id), "does not open", SEALED
    ),
    BadObject("O8", lambda: object_of(BODY, SEALED)[:-1], "does not open", SEALED),
    BadObject("O8", lambda: object_of(BODY, SEALED)[:70], "too few to be sealed", SEALED),
    BadObject(
        "O8", lambda: object_of(BODY, SEALED, associated=b"another"), "does not open", SEALED
    ),
    BadObject("O8", _header(flags=1, key_id=SEALED.key_id), "does not open", SEALED),
    BadObject("O9", _header(body_bytes=len(BODY) - 1), "not as long as it says"),
    BadObject("O9", _header(body_bytes=len(BODY) + 1), "not as long as it says"),
    BadObject("O9", _header(body_bytes=0), "not as long as it says"),
    BadObject("O9", _sizeless, "not as long as it says"),
    BadObject(
        "O9", _header(frame=b"\x50\x2a\x4d\x18\4\0\0\0skip" + _frame(BODY)), "not as long"
    ),
    BadObject("O10", _bomb, "as a bomb"),
    BadObject("O11", _header(frame=b""), "damaged"),
    BadObject("O11", _header(frame=_frame(BODY)[:-1]), "damaged"),
    BadObject("O11", _header(frame=_frame(BODY) + b"\0"), "unused data"),
    BadObject("O11", _header(frame=_frame(BODY) * 2), "unused data"),
    BadObject("O11", _of_a_dictionary, "ictionary"),
    BadObject("O12", _header(root=bytes(32)), "does not match its root hash"),
    BadObject("O12", lambda: object_of(BODY, SEALED, root=bytes(32)), "root hash", SEALED),
    BadObject("O13", lambda: object_of(b"\xc1"), "is not a manifest"),
    BadObject("O13", lambda: object_of(BODY + b"\0"), "trailing"),
    BadObject("O13", lambda: object_of(BODY[:-1]), "is not a manifest"),
    BadObject("O13", _body([*FIELDS, 0]), "is not a manifest"),
    BadObject("O13", _body(FIELDS[:-1]), "is not a manifest"),
    BadObject("O13", _body([*FIELDS[:4], "1800000000", *FIELDS[5:]]), "is not a manifest"),
    BadObject("O13", _body(_with_first_entry([*FIRST, 0])), "is not a manifest"),
    BadObject("O16", BOMBS["roots"], "of `roots`, at most 100000"),
    BadObject("O16", BOMBS["skipped names"], "of `skipped`, at most 1000000"),
    BadObject("O16", _with("statistics", _ENCODE(FIGURES)), "of `statistics`, at most 10000"),
    BadObject("O16", BOMBS["chunks"], "chunks and packs in"),
    BadObject("O13", BOMBS["entries"], "in fewer bytes than they have"),
    BadObject("O17", BOMBS["arrays in the environment"], "more than 200000 values"),
    BadObject("O17", _with("environment", b"\x81\xa1x" + b"\x91" * 8 + b"\xc0"), "no reader takes"),
    BadObject("O17", _with("environment", b"\x81\xa1x\x81\1\2"), "no reader takes"),
    BadObject("O17", _with("environment", b"\x81\xa1x\xd4\5\0"), "no reader takes"),
    BadObject("O13", _body(_with_first_entry(FIRST[:7])), "is not a manifest"),
    *(
        BadObject("O13", _body([*FIELDS[:n], [[*FIELDS[n][0], 0]], *FIELDS[n + 1 :]]), "length")
        for n in (8, 9)  # chunks and packs
    ),
]  # fmt: skip


@pytest.mark.parametrize("bad", OBJECTS, ids=lambda bad: f"{bad.rule}-{bad.says}")
def test_a_bad_object_is_refused(bad: BadObject) -> None:
    with pytest.raises(bad.error) as refused:
        decode_manifest(bad.blob(), bad.seal, "snapshot 17")
    assert bad.says in str(refused.value)
    assert str(refused.value).startswith("snapshot 17 ")


def test_an_entry_may_end_after_its_size() -> None:
    blob = object_of(msgspec.msgpack.encode(_with_first_entry(FIRST[:8])))
    assert decode_manifest(blob, PLAIN, "it")[0] == honest()


# -- the claims


def _refusal(lie: Lie) -> ManifestInvalid:
    blob, _ = encode_manifest(lie.make(), PLAIN)
    manifest, _ = decode_manifest(blob, PLAIN, "it")  # the lie is in the claims, not in the types
    with pytest.raises(ManifestInvalid) as refused:
        check_manifest(manifest, "snapshot 17")
    return refused.value


@pytest.mark.rule(7, "H10")
@pytest.mark.parametrize("lie", [*MISNAMED, *LIES], ids=lambda lie: f"{lie.rule}-{lie.name}")
def test_a_lie_is_refused(lie: Lie) -> None:
    refused = str(_refusal(lie))
    assert lie.says in refused
    assert refused.startswith("snapshot 17 is refused: ")
    assert refused.endswith("; nothing was written")


def test_every_refusal_of_claims_has_a_lie() -> None:
    source = ast.parse(Path(checks.__file__).read_text())
    refusals = {
        node.lineno
        for node in ast.walk(source)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") == "_Refused"
    }
    reached = set()
    for lie in (*MISNAMED, *LIES):
        cause = _refusal(lie).__context__
        assert cause is not None
        trace = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None
        reached.add(trace.tb_lineno)
    assert reached == refusals


# -- chunks


class BadChunk(NamedTuple):
    """Stored bytes that must be refused as a chunk of ``PLAINTEXT``, and what the refusal says."""

    rule: str
    encoding: int
    stored: bytes
    says: str
    seal: Seal = PLAIN


PLAINTEXT = b"the plain bytes of a chunk, " * 100
SIZE = len(PLAINTEXT)
PACK = b"p" * 16


def _lz4(plain: bytes) -> bytes:
    return bytes(LZ4.encode(plain))


def _zstd(plain: bytes) -> bytes:
    return bytes(ZSTD.encode(plain))


def _sealed(stored: bytes, *, seal: Seal = SEALED, **place: Any) -> bytes:
    """As the chunk of PLAINTEXT in PACK, or at another ``place``."""
    right = {"name": SEALED.name(PLAINTEXT), "pack_id": PACK, "encoding": 0, "plain_bytes": SIZE}
    return bytes(seal.seal(stored, chunk_associated(**{**right, **place})))


def _sizeless_zstd() -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(PLAINTEXT)


def _chunk_of_a_dictionary() -> bytes:
    words = zstandard.train_dictionary(4096, [b"the plain %d bytes" % n * 20 for n in range(2000)])
    return zstandard.ZstdCompressor(dict_data=words).compress(PLAINTEXT)


def _wrong_planes() -> bytes:
    stream = RANS.encode(PLAINTEXT, [Run(SIZE, Element.BYTES)])
    assert stream is not None
    return b"\2" + bytes(stream)[1:]


CHUNKS = [
    BadChunk("C2", 0, _sealed(PLAINTEXT, seal=OTHER), "does not open", SEALED),
    BadChunk("C2", 0, _sealed(PLAINTEXT, name=b"n" * 32), "does not open", SEALED),
    BadChunk("C2", 0, _sealed(PLAINTEXT, pack_id=b"q" * 16), "does not open", SEALED),
    BadChunk("C2", 0, _sealed(PLAINTEXT, encoding=1), "does not open", SEALED),
    BadChunk("C2", 0, _sealed(PLAINTEXT, plain_bytes=SIZE + 1), "does not open", SEALED),
    BadChunk("C2", 0, _sealed(PLAINTEXT)[:-1], "does not open", SEALED),
    BadChunk("C2", 0, bytes(27), "too few", SEALED),
    BadChunk("C3", 0, PLAINTEXT[:-1], "is stored as"),
    BadChunk("C3", 0, PLAINTEXT + b"x", "is stored as"),
    BadChunk("C4", 1, b"\xff" * 50, "does not decode"),
    BadChunk("C4", 1, _lz4(PLAINTEXT)[:-1], "does not decode"),
    BadChunk("C4", 1, _lz4(PLAINTEXT) + b"\0", "does not decode"),
    BadChunk("C4", 1, _lz4(PLAINTEXT[:-1]), "decodes to"),
    BadChunk("C4", 1, _lz4(PLAINTEXT + b"x"), "does not decode"),
    BadChunk("C4", 1, struct.pack("<I", SIZE) + _lz4(PLAINTEXT), "does not decode"),
    BadChunk("C5", 2, _zstd(PLAINTEXT)[:-1], "does not decode"),
    BadChunk("C5", 2, _zstd(PLAINTEXT) + b"\0", "unused data"),
    BadChunk("C5", 2, _zstd(PLAINTEXT) + _zstd(b"more"), "unused data"),
    BadChunk("C5", 2, _zstd(PLAINTEXT[:-1]), "another length"),
    BadChunk("C5", 2, b"\x50\x2a\x4d\x18\0\0\0\0" + _zstd(PLAINTEXT), "another length"),
    BadChunk("C5", 2, _sizeless_zstd(), "another length"),
    BadChunk("C5", 2, _chunk_of_a_dictionary(), "ictionary"),
    BadChunk("C6", 3, _wrong_planes(), "version 2 is unknown"),
    BadChunk("C6", 4, _wrong_planes(), "version 2 is unknown"),
    BadChunk("C7", 0, PLAINTEXT[:-1] + b"x", "does not match its hash"),
    BadChunk("C7", 2, _zstd(PLAINTEXT[:-1] + b"x"), "does not match its hash"),
    BadChunk("C7", 0, _sealed(PLAINTEXT[:-1] + b"x"), "does not match its hash", SEALED),
]


@pytest.mark.parametrize("bad", CHUNKS, ids=lambda bad: f"{bad.rule}-{bad.encoding}-{bad.says}")
def test_a_bad_chunk_is_refused(bad: BadChunk) -> None:
    name = bad.seal.name(PLAINTEXT)
    chunk = Chunk(name, SIZE, bad.encoding, 0, 0, len(bad.stored))
    with pytest.raises((SnapshotDamaged, WrongKey)) as refused:
        open_chunk(chunk, PACK, bad.stored, bad.seal)
    assert bad.says in str(refused.value)


def test_a_frame_with_a_checksum_is_taken() -> None:
    stored = zstandard.ZstdCompressor(write_checksum=True).compress(PLAINTEXT)
    chunk = Chunk(PLAIN.name(PLAINTEXT), SIZE, ZSTD.code, 0, 0, len(stored))
    assert open_chunk(chunk, PACK, stored, PLAIN) == PLAINTEXT


# -- the limits themselves are taken


def test_names_and_numbers_at_their_limits_are_taken() -> None:
    longest = b"n" * 255
    entries = [
        *honest().entries,
        entry(DIRECTORY, longest, mode=0o7777, uid=(1 << 32) - 2, gid=(1 << 32) - 2),
        entry(FILE, longest + b"/" + longest, xattrs=((b"u" * 255, bytes(65536)),)),
        entry(FILE, b"vast", size=1 << 50, extents=(Extent(-1, 0, 1 << 50),)),
        entry(FILE, b"past", mtime_ns=-(1 << 63)),
        entry(FILE, b"future", mtime_ns=(1 << 64) - 1),
        entry(SYMLINK, b"far", target=b"t" * 4095),
    ]
    skipped = [Skipped(0, b"gone/" + longest, "fifo"), Skipped(0, b"d", "anything")]
    check_manifest(honest(entries=entries, skipped=skipped, created_unix=253_402_300_799), "it")


@pytest.mark.parametrize(
    ("pack_bytes", "first", "second"),
    [
        (300, {}, {}),
        (328, {}, {"stored": 228}),  # sealed
        (1000, {"offset": 700}, {"offset": 3}),  # in any order, with gaps
        *((300, {}, {"encoding": code}) for code in ENCODINGS),
    ],
)
def test_chunks_at_their_limits_are_taken(
    pack_bytes: int, first: dict[str, int], second: dict[str, int]
) -> None:
    changed = zip(honest().chunks, (first, second), strict=True)
    chunks = [msgspec.structs.replace(chunk, **changes) for chunk, changes in changed]
    packs = [msgspec.structs.replace(honest().packs[0], size=pack_bytes)]
    check_manifest(honest(packs=packs, chunks=chunks), "it")


# -- the document


def test_the_document_lists_what_is_refused_and_nothing_else() -> None:
    text = (ROOT / "docs/format.md").read_text()
    listed = re.findall(r"^\| ([OMC]\d+) \|", text, re.MULTILINE)
    tried = {bad.rule for bad in (*OBJECTS, *MISNAMED, *LIES, *CHUNKS)} | set(ELSEWHERE)
    assert len(listed) == len(set(listed))
    assert set(listed) == tried


@pytest.mark.parametrize("where", ELSEWHERE.values(), ids=ELSEWHERE)
def test_rules_that_need_a_machine_are_tested_there(where: str) -> None:
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
