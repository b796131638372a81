"""A reader of snapshots, written from docs/format.md and docs/planes.md alone; no torpor in it.

python tests/independent_reader.py FOLDER WORKSPACE SNAPSHOT TARGET... < KEY_OR_DEV_NULL
FOLDER holds a store's objects as files. A refusal names its rule in docs/format.md.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import lz4.block
import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MIB = 1 << 20
FILE, DIRECTORY, SYMLINK, HARDLINK = range(4)
WIDTHS, TURNED = (1, 1, 2, 2, 4, 8, 2, 4, 8), (2, 3, 4)  # by element code
WORKSPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SNAPSHOT = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")
Get = Callable[[str, int, int | None], bytes]  # name, first byte, how many (None: all)


def _record(name: str, /, *late: tuple[str, Any, Any], **fields: Any) -> Any:
    """An array with these fields in order; ``late`` ones may be missing at its end."""
    both = [*fields.items(), *late]
    return msgspec.defstruct(name, both, array_like=True, forbid_unknown_fields=True)


# fmt: off
Extent = _record("Extent", chunk=int, offset=int, length=int)
Entry = _record(
    "Entry", ("extents", list[Extent], []), ("target", bytes, b""), ("digest", bytes, b""),
    ("xattrs", list[tuple[bytes, bytes]], []), ("changed", bool, False),
    kind=int, root=int, path=bytes, mode=int, uid=int, gid=int, mtime_ns=int, size=int)
Chunk = _record("Chunk", name=bytes, plain=int, encoding=int, pack=int, offset=int, stored=int)
Pack = _record("Pack", id=bytes, size=int, md5=bytes)
Skipped = _record("Skipped", root=int, path=bytes, kind=str)
Manifest = _record(
    "Manifest", workspace=str, snapshot=str, parent=str | None, run=str, created_unix=int,
    machine=str, roots=list[str], entries=list[Entry], chunks=list[Chunk], packs=list[Pack],
    skipped=list[Skipped], environment=dict[str, Any], statistics=dict[str, int])
# fmt: on


class RefusedError(Exception):
    """What a reader refuses; begins with the rule."""


def require(holds: Any, rule: str, what: object = "") -> None:
    if not holds:
        raise RefusedError(f"{rule}: {what}")


def derived(use: str, material: bytes) -> bytes:
    return blake3(material, derive_key_context=f"torpor v1 {use}").digest()


def store_key_of(blob: bytes, user_key: bytes) -> bytes:
    """The store key in a key object; raises for what is no key object of this key."""
    record = msgspec.json.decode(msgspec.json.decode(blob, type=dict[str, msgspec.Raw])["record"])
    sealed, said = base64.b64decode(record["sealed"]), b"torpor v1 key object"
    said += record["made_unix"].to_bytes(8, "little")
    for text in (record["id"], record["label"], record["replaces"]):
        said += len(text.encode()).to_bytes(8, "little") + text.encode()
    own = blake3(user_key, derive_key_context="torpor v1 id of a user key").digest()[:16].hex()
    if (record["version"], record["id"]) != (1, own):
        raise RefusedError(f"key object: version {record['version']}, id {record['id']}")
    aes = AESGCM(blake3(user_key, derive_key_context="torpor v1 sealing of a store key").digest())
    return aes.decrypt(sealed[:12], sealed[12:], said)


class Keys:
    def __init__(self, store_key: bytes | None, workspace: str) -> None:
        self.names, self.sealing, self.id = None, None, bytes(8)
        if store_key is not None:
            key = derived("workspace", store_key + workspace.encode())
            self.names, self.sealing = derived("names", key), derived("sealing", key)
            self.id = derived("key id", key)[:8]

    def name(self, plain: bytes) -> bytes:
        return (blake3(plain, key=self.names) if self.names else blake3(plain)).digest()

    def open(self, sealed: bytes, associated: bytes, rule: str) -> bytes:
        if self.sealing is None:
            return sealed
        require(len(sealed) >= 28, rule, "too short to be sealed")
        try:
            return AESGCM(self.sealing).decrypt(sealed[:12], sealed[12:], associated)
        except InvalidTag:
            raise RefusedError(f"{rule}: does not open") from None


def _unpacked(frame: bytes, size: int, rule: str = "C6", bomb: bool = False) -> bytes:
    try:
        require(zstandard.frame_content_size(frame) == size, "O9" if bomb else rule, "its size")
        require(not bomb or size <= max(16 * MIB, 1000 * len(frame)), "O10")
        plain = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError(f"{rule}: {error}") from None
    return plain


def read_manifest(blob: bytes, keys: Keys, workspace: str, snapshot: str) -> Manifest:
    require(len(blob) >= 60 and blob[:8] == b"TORPOR\r\n", "O1")
    version, flags, size, root, key_id = struct.unpack_from("<HHQ32s8s", blob, 8)
    require(version == 1, "O2", version)
    require(flags in (0, 1), "O3", flags)
    require(size <= 2048 * MIB, "O4", size)
    require(flags or not any(key_id), "O5")
    require(bool(flags) == (keys.sealing is not None), "O6")
    require(key_id == keys.id, "O7")
    frame = keys.open(blob[60:], blob[:60], "O8")
    body = _unpacked(frame, size, "O11", bomb=True)
    require(keys.name(body) == root, "O12")
    try:
        manifest = msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"O13: {error}") from None
    require((manifest.workspace, manifest.snapshot) == (workspace, snapshot), "O14")
    require(len(manifest.roots) <= 100_000 and len(manifest.skipped) <= 1_000_000, "O16")
    require(max(len(manifest.environment), len(manifest.statistics)) <= 10_000, "O16")
    hashes = len(manifest.chunks) + len(manifest.packs)
    require((hashes - 100_000) * 24 <= len(frame), "O16")
    require(_values(manifest.environment, 8) <= 200_000, "O17")
    check_claims(manifest)
    return manifest


def _values(value: Any, depth: int) -> int:
    """How many values there are in it, with itself and keys."""
    if not isinstance(value, (list, dict)):
        require(value is None or isinstance(value, (bool, int, float, str, bytes)), "O17")
        return 1
    require(depth > 0, "O17")
    if isinstance(value, list):
        return 1 + sum(_values(one, depth - 1) for one in value)
    require(all(isinstance(key, str) for key in value), "O17")
    return 1 + sum(1 + _values(one, depth - 1) for one in value.values())


def check_claims(m: Manifest) -> None:
    require(WORKSPACE.fullmatch(m.workspace) and 0 <= m.created_unix < 253_402_300_800, "M1")
    require(all(SNAPSHOT.fullmatch(i) for i in (m.snapshot, m.parent) if i is not None), "M1")
    for pack in m.packs:
        require(len(pack.id) == len(pack.md5) == 16 and pack.size >= 0, "M2", pack)
    require(len({pack.id for pack in m.packs}) == len(m.packs), "M3")
    for chunk in m.chunks:
        require(len(chunk.name) == 32 and 0 < chunk.plain <= 16 * MIB, "M4", chunk)
        require(0 <= chunk.encoding <= 4, "M6", chunk)
        require(0 <= chunk.pack < len(m.packs), "M7", chunk)
        room = m.packs[chunk.pack].size - chunk.offset
        require(chunk.offset >= 0 and 0 < chunk.stored <= room, "M8", chunk)
        require(chunk.stored <= chunk.plain + 28, "M9", chunk)
    require(len({chunk.name for chunk in m.chunks}) == len(m.chunks), "M5")
    for one, two in pairwise(sorted(m.chunks, key=lambda c: (c.pack, c.offset))):
        require(one.pack != two.pack or one.offset + one.stored <= two.offset, "M10", two)
    distinct = set(m.roots) - {""}
    require(distinct and len(distinct) == len(m.roots) and "\0" not in "".join(distinct), "M11")
    seen: list[dict[bytes, int]] = [{} for _ in m.roots]
    for entry in m.entries:
        require(0 <= entry.root < len(seen), "M12", entry)
        _check_entry(entry, seen[entry.root], m.chunks)
        seen[entry.root][entry.path] = entry.kind
    require(all(kinds.get(b"") == DIRECTORY for kinds in seen), "M14")
    for skipped in m.skipped:
        require(0 <= skipped.root < len(seen), "M12", skipped)
        _check_path(skipped.path)


def _check_path(path: bytes) -> None:
    require(len(path) <= 1 << 16 and b"\0" not in path, "M15", path[:80])
    for name in path.split(b"/"):
        require(name not in (b"", b".", b"..") and len(name) <= 255, "M15", path)


def _check_entry(entry: Entry, seen: dict[bytes, int], chunks: Sequence[Chunk]) -> None:
    require(entry.path not in seen, "M13", entry)
    require(entry.path or entry.kind == DIRECTORY, "M14", entry)
    if entry.path:
        _check_path(entry.path)
        require(seen.get(entry.path.rpartition(b"/")[0]) == DIRECTORY, "M16", entry)
    require(FILE <= entry.kind <= HARDLINK, "M17", entry)
    require(entry.kind != HARDLINK or seen.get(entry.target) == FILE, "M18", entry)
    text = 0 < len(entry.target) <= 4095 and b"\0" not in entry.target
    require(entry.kind != SYMLINK or text, "M19", entry)
    require(entry.kind in (SYMLINK, HARDLINK) or not entry.target, "M20", entry)
    require(0 <= entry.mode <= 0o7777, "M21", entry)
    require(0 <= min(entry.uid, entry.gid) <= max(entry.uid, entry.gid) <= 2**32 - 2, "M22", entry)
    for name, value in entry.xattrs:
        require(0 < len(name) <= 255 and b"\0" not in name and len(value) <= 1 << 16, "M23", name)
    require(len(dict(entry.xattrs)) == len(entry.xattrs), "M23", entry)
    require(entry.kind == FILE or not (entry.size or entry.extents or entry.digest), "M24", entry)
    require(0 <= entry.size <= 1 << 50 and len(entry.digest) in (0, 16), "M25", entry)
    for extent in entry.extents:
        number, offset, length = extent.chunk, extent.offset, extent.length
        require(length > 0, "M26", entry)
        require(number != -1 or offset == 0, "M27", entry)
        require(-1 <= number < len(chunks), "M28", entry)
        if number >= 0:
            require(0 <= offset <= offset + length <= chunks[number].plain, "M29", entry)
            require(length == chunks[number].plain or entry.digest, "M30", entry)
    require(sum(extent.length for extent in entry.extents) == entry.size, "M31", entry)


def read_chunk(chunk: Chunk, pack_id: bytes, stored: bytes, keys: Keys) -> bytes:
    require(len(stored) == chunk.stored, "C1", "the pack ends before the chunk does")
    place = chunk.name + pack_id + struct.pack("<BQ", chunk.encoding, chunk.plain)
    plain = decode(chunk.encoding, keys.open(stored, place, "C2"), chunk.plain)
    require(keys.name(plain) == chunk.name, "C7")
    return plain


def decode(encoding: int, stored: bytes, size: int) -> bytes:
    rule, plain = f"C{min(encoding, 3) + 3}", stored
    try:
        if encoding == 1:
            plain = lz4.block.decompress(stored, uncompressed_size=size)
        elif encoding == 2:
            plain = _unpacked(stored, size, rule)
        elif encoding > 2:
            plain = _planes(stored, size, methods=encoding - 1)
    except (lz4.block.LZ4BlockError, struct.error) as error:
        raise RefusedError(f"{rule}: {error}") from None
    require(len(plain) == size, rule, "another size")
    return plain


def _planes(stream: bytes, size: int, methods: int) -> bytes:
    version, zero, count = struct.unpack_from("<BBH", stream)
    require(version == 1 and zero == 0 and 1 <= count <= 4096 and size <= 1 << 30, "C6", "header")
    runs = [struct.unpack_from("<BI", stream, 4 + 5 * n) for n in range(count)]
    for code, length in runs:
        require(code <= 8 and length and length % WIDTHS[code] == 0, "C6", "run")
    require(sum(length for _, length in runs) == size, "C6", "runs make another size")
    kinds = sorted({code for code, _ in runs})
    head = 4 + 5 * count
    at = head + 5 * sum(WIDTHS[code] for code in kinds)
    joined = {}
    for code in kinds:
        elements = sum(length for kind, length in runs if kind == code) // WIDTHS[code]
        planes = []
        for _ in range(WIDTHS[code]):
            method, length = struct.unpack_from("<BI", stream, head)
            require(method < methods, "C6", "method")
            head, at, stored = head + 5, at + length, stream[at : at + length]
            if method:
                stored = (_unpacked if method == 1 else _rans)(stored, elements)
            require(len(stored) == elements, "C6", "plane of another size")
            planes.append(stored)
        cut = np.stack([np.frombuffer(plane, np.uint8) for plane in reversed(planes)], axis=1)
        if code in TURNED:
            tops = cut.view("<u2")[:, -1]
            tops[:] = tops >> 1 | tops << 15
        joined[code] = BytesIO(cut.tobytes())
    require(at == len(stream), "C6", "planes do not fill the stream")
    return b"".join(joined[code].read(length) for code, length in runs)


def _rans(stream: bytes, n: int) -> bytes:
    magic, version, g, held, present, total = struct.unpack_from("<2sBBIII", stream)
    require((magic, version, held) == (b"tR", 1, n) and 12 <= g <= 15, "C6", "rANS header")
    blocks, segments = -(-n >> 17), -(-n >> g)
    sizes = (16, 32 * blocks, 128 * segments, 2 * segments, 2 * present, 2 * total)
    ends = np.cumsum(sizes)
    require(ends[-1] == len(stream), "C6", "rANS sections")
    parts = [stream[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    bits = np.unpackbits(np.frombuffer(parts[1], np.uint8), bitorder="little").reshape(-1, 256)
    x = np.frombuffer(parts[2], "<u4").astype(np.int64).reshape(segments, 32)
    counts, freqs, words = (np.frombuffer(part, "<u2").astype(np.int64) for part in parts[3:])
    symbols = np.minimum(n - (np.arange(segments) << g), 1 << g)
    fits = bits.sum() == present and counts.sum() == total and (counts <= symbols).all()
    require(fits, "C6", "rANS counts")
    freq = np.zeros((blocks, 256), np.int64)
    freq[bits == 1] = freqs
    require((freqs >= 1).all() and (freq.sum(axis=1) == 1 << 11).all(), "C6", "rANS tables")
    require(((x >= 1 << 15) & (x < 1 << 31)).all(), "C6", "rANS first states")
    first = np.cumsum(freq, axis=1) - freq
    owner = np.stack([np.repeat(np.arange(256), row) for row in freq])
    block = (np.arange(segments) << g >> 17)[:, None]
    starts, taken = np.cumsum(counts) - counts, np.zeros(segments, np.int64)
    plain = np.zeros((segments, 1 << g), np.uint8)
    for i in range(0, 1 << g, 32):
        active = i + np.arange(32) < symbols[:, None]
        slot = x & 2047
        plain[:, i : i + 32] = s = owner[block, slot]
        new = freq[block, s] * (x >> 11) + slot - first[block, s]
        short = active & (new < 1 << 15)
        order = taken[:, None] + np.cumsum(short, axis=1)  # of the word that each lane takes
        taken += short.sum(axis=1)
        require((taken <= counts).all(), "C6", "rANS segment takes too many words")
        new[short] = new[short] << 16 | words[(starts[:, None] + order - 1)[short]]
        x = np.where(active, new, x)
    require((taken == counts).all() and (x == 1 << 15).all(), "C6", "rANS last states")
    return plain.tobytes()[:n]


def restore(m: Manifest, get: Get, keys: Keys, targets: Sequence[bytes]) -> None:
    real = [os.path.join(os.path.realpath(target), b"") for target in targets]
    nested = any(a.startswith(b) for a in real for b in real if a is not b)
    require(len(targets) == len(m.roots) and not nested, "targets", "one for each root, apart")
    require(not any(os.path.exists(t) and os.listdir(t) for t in real), "targets", "not empty")
    try:
        _write(m, get, keys, real)
    except BaseException:
        for target in real:
            shutil.rmtree(target, ignore_errors=True)
        raise


def _write(m: Manifest, get: Get, keys: Keys, targets: Sequence[bytes]) -> None:
    full = [os.path.join(targets[e.root], e.path) for e in m.entries]
    uses: dict[int, list[tuple[bytes, int, Extent]]] = {}
    for entry, path in zip(m.entries, full, strict=True):
        if entry.kind == DIRECTORY:
            os.makedirs(path, 0o700, exist_ok=not entry.path)
        elif entry.kind == FILE:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os.truncate(path, entry.size)
            starts = accumulate((extent.length for extent in entry.extents), initial=0)
            for extent, at in zip(entry.extents, starts, strict=False):
                uses.setdefault(extent.chunk, []).append((path, at, extent))
    uses.pop(-1, None)  # holes are there already
    for number, places in sorted(uses.items()):
        chunk, pack = m.chunks[number], m.packs[m.chunks[number].pack].id
        name = f"workspaces/{m.workspace}/packs/{pack.hex()[:2]}/{pack.hex()}"
        plain = read_chunk(chunk, pack, get(name, chunk.offset, chunk.stored), keys)
        for path, at, extent in places:
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(plain[extent.offset : extent.offset + extent.length])
    for kind in (FILE, HARDLINK, SYMLINK, DIRECTORY):
        for entry, path in reversed(list(zip(m.entries, full, strict=True))):
            if entry.kind == kind == HARDLINK:
                os.link(os.path.join(targets[entry.root], entry.target), path)
            elif entry.kind == kind:
                if kind == SYMLINK:
                    os.symlink(entry.target, path)
                elif entry.digest:
                    whole = keys.name(Path(os.fsdecode(path)).read_bytes())
                    require(whole[:16] == entry.digest, "digest", entry.path)
                _dress(entry, path)


def _dress(entry: Entry, path: bytes) -> None:
    if os.geteuid() == 0:
        os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    for name, value in entry.xattrs:
        try:
            os.setxattr(path, name, value, follow_symlinks=False)
        except OSError as error:
            print(f"{path!r}: {name!r} is not restored: {error}", file=sys.stderr)
    if entry.kind != SYMLINK:
        os.chmod(path, entry.mode)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)


def read_file(folder: Path, name: str, offset: int, length: int | None) -> bytes:
    with open(folder / name, "rb") as file:
        file.seek(offset)
        return file.read(length)


if __name__ == "__main__":
    where, workspace, snapshot, *targets = sys.argv[1:]
    keys, get = Keys(sys.stdin.buffer.read() or None, workspace), partial(read_file, Path(where))
    blob = get(f"workspaces/{workspace}/snapshots/{snapshot}", 0, None)
    manifest = read_manifest(blob, keys, workspace, snapshot)
    restore(manifest, get, keys, [os.fsencode(target) for target in targets])
