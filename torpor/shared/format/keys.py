"""Hashing and sealing: what a store's key turns into for one workspace."""

from __future__ import annotations

import os

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from torpor.shared.errors import WrongKey
from torpor.shared.values import WorkspaceName

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""How many bytes sealing adds to a chunk: nonce and tag."""

Buffer = bytes | bytearray | memoryview


def workspace_key(store_key: bytes, workspace: WorkspaceName) -> bytes:
    """The one key that a machine working on ``workspace`` gets (32 bytes)."""
    if len(store_key) != KEY_BYTES:
        raise WrongKey(f"a store key has {KEY_BYTES} bytes, this one has {len(store_key)}")
    return _derive("torpor v1 workspace", store_key + workspace.encode())


def records_key(store_key: bytes) -> bytes:
    """The key that seals block records. It is of the store alone: no machine gets it."""
    return _derive("torpor v1 block records", store_key)


class Seal:
    """Names chunks, and seals and opens them where the store has a key.

    Without a key, names are plain BLAKE3 and ``seal`` and ``open`` hand the bytes through.
    Thread-safe.
    """

    def __init__(self, key: bytes | None) -> None:
        self.sealed = key is not None
        self._names = None if key is None else _derive("torpor v1 names", key)
        self._aes = None if key is None else AESGCM(_derive("torpor v1 sealing", key))
        self.key_id = bytes(8) if key is None else _derive("torpor v1 key id", key)[:8]

    def name(self, plain: Buffer) -> bytes:
        """The chunk's name: 32 bytes of BLAKE3, keyed when sealed."""
        return self._hash(plain).digest()

    def digest(self, plain: Buffer) -> bytes:
        """The 16-byte digest of a whole small file."""
        return self._hash(plain).digest(length=16)

    def hasher(self) -> blake3:
        """An incremental hasher whose digest(length=16) equals ``digest``."""
        return self._hash(b"")

    def _hash(self, data: Buffer) -> blake3:
        return blake3(data) if self._names is None else blake3(data, key=self._names)

    def seal(self, data: Buffer, associated: bytes) -> Buffer:
        """nonce | ciphertext | tag, or ``data`` itself without a key."""
        if self._aes is None:
            return data
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._aes.encrypt(nonce, data, associated)

    def open(self, data: Buffer, associated: bytes) -> Buffer:
        """Undo ``seal``; raises WrongKey for bytes that another key sealed, or that were
        changed."""
        if self._aes is None:
            return data
        view = memoryview(data)
        if len(view) < SEAL_BYTES:
            raise WrongKey(f"{len(view)} bytes are too few to be sealed data")
        try:
            return self._aes.decrypt(bytes(view[:NONCE_BYTES]), view[NONCE_BYTES:], associated)
        except InvalidTag:
            raise WrongKey(
                "sealed data does not open: another key, or the bytes were changed"
            ) from None


def chunk_associated(name: bytes, pack_id: bytes, encoding: int, plain_bytes: int) -> bytes:
    """The associated data of a sealed chunk: its name, its pack, its encoding and its plain
    size."""
    return name + pack_id + bytes([encoding]) + plain_bytes.to_bytes(8, "little")


def _derive(context: str, material: bytes) -> bytes:
    return blake3(material, derive_key_context=context).digest()
