"""Keys that people hold: the store key itself, or a key that opens a key object of the store.

The text of a key says which kind it is, so nobody ever guesses: a key that opens a key object is
never taken for a store key because its key object was not seen.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from torpor.shared.errors import InvalidInput, WrongKey
from torpor.shared.format.keys import KEY_BYTES, NONCE_BYTES, SEAL_BYTES

OPENS: Final = "torpor-opens"
"""What the text of a key begins with that opens a key object."""
ITSELF: Final = "torpor-store"
"""What the text of a store key begins with on a recovery sheet. Base64 and hexadecimal of 32 bytes
are the same key without a checksum."""
MOST_LABEL: Final = 60

_SUM_BYTES: Final = 3
_GROUP: Final = 4  # characters
_ID: Final = re.compile(r"[0-9a-f]{32}")
_LIKE: Final = str.maketrans("018", "OIB")  # base32 has none of these digits


class KeyObject(msgspec.Struct, frozen=True):
    """What a key object says: the store key, sealed for one key of a user. ``replaces``: the id of
    the key that a rotation takes away for this one; empty if it came beside the others."""

    version: int
    id: str
    label: str
    made_unix: int
    replaces: str
    sealed: bytes

    @property
    def associated(self) -> bytes:
        """Everything but the sealed bytes, as AES-GCM authenticates it."""
        said = b"torpor v1 key object" + self.made_unix.to_bytes(8, "little")
        for text in (self.id, self.label, self.replaces):
            said += len(text.encode()).to_bytes(8, "little") + text.encode()
        return said


@dataclass(frozen=True)
class UserKey:
    """A key as a user has it. ``opens``: it opens a key object; else it is the store key."""

    secret: bytes = field(repr=False)
    opens: bool

    @classmethod
    def new(cls) -> UserKey:
        """A random key that opens a key object, once one is made for it."""
        return cls(secrets.token_bytes(KEY_BYTES), opens=True)

    @classmethod
    def of(cls, text: str) -> UserKey:
        """The key of this text. Raises InvalidInput, which never repeats the text."""
        compact = "".join(text.split())
        letters = compact.replace("-", "").upper().translate(_LIKE)
        for prefix in (OPENS, ITSELF):
            typed = prefix.replace("-", "").upper()
            if letters.startswith(typed):
                return cls._grouped(prefix, letters.removeprefix(typed))
        return cls(_decoded(compact), opens=False)

    @classmethod
    def _grouped(cls, prefix: str, letters: str) -> UserKey:
        try:
            found = base64.b32decode(letters)
        except (ValueError, binascii.Error):
            found = b""
        key, checksum = found[:KEY_BYTES], found[KEY_BYTES:]
        if len(found) != KEY_BYTES + _SUM_BYTES or checksum != _checksum(prefix, key):
            groups = (KEY_BYTES + _SUM_BYTES) * 8 // 5 // _GROUP
            raise InvalidInput(
                f"this key that begins with {prefix} has a typing mistake: {groups} groups of "
                f"{_GROUP} letters follow, of A to Z and 2 to 7, and the last letters are the "
                f"checksum of all. This one has {len(letters)} letters. Compare it with your sheet"
            )
        return cls(key, opens=prefix == OPENS)

    @property
    def text(self) -> str:
        """The key in groups of letters, with a checksum."""
        prefix = OPENS if self.opens else ITSELF
        letters = base64.b32encode(self.secret + _checksum(prefix, self.secret)).decode()
        groups = [letters[at : at + _GROUP] for at in range(0, len(letters), _GROUP)]
        return "-".join([prefix, *groups])

    @cached_property
    def id(self) -> str:
        """The name of its key object, which says nothing of the key."""
        return _derive("torpor v1 id of a user key", self.secret)[:16].hex()

    def seal(self, store_key: bytes, label: str, made_unix: int, replaces: str = "") -> KeyObject:
        """The key object by which this key opens the store of this store key, and each copy."""
        bare = KeyObject(1, self.id, label, made_unix, replaces, b"")
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + self._aes.encrypt(nonce, store_key, bare.associated)
        return msgspec.structs.replace(bare, sealed=sealed)

    def open(self, found: KeyObject) -> bytes:
        """The store key. WrongKey where the key object is of another key, or was changed."""
        sealed = found.sealed
        same = hmac.compare_digest(found.id.encode(), self.id.encode())
        if not same or len(sealed) != KEY_BYTES + SEAL_BYTES or not 0 <= found.made_unix < 2**63:
            raise WrongKey("it is no key object of this key")
        try:
            return self._aes.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], found.associated)
        except InvalidTag:
            raise WrongKey("it was changed") from None

    @property
    def _aes(self) -> AESGCM:
        return AESGCM(_derive("torpor v1 sealing of a store key", self.secret))


def is_key_id(text: str) -> bool:
    """Whether a key object can have this id."""
    return bool(_ID.fullmatch(text))


def checked_label(text: str) -> str:
    """A label for people; raises InvalidInput."""
    label = text.strip()
    if not label or len(label) > MOST_LABEL or not label.isprintable():
        raise InvalidInput(f"a label is 1 to {MOST_LABEL} characters of one line, such as escrow")
    return label


def _checksum(prefix: str, key: bytes) -> bytes:
    return _derive("torpor v1 checksum of a key", prefix.encode() + key)[:_SUM_BYTES]


def _decoded(compact: str) -> bytes:
    """32 bytes from base64 or hexadecimal."""
    try:
        if len(compact) == 2 * KEY_BYTES:
            key = bytes.fromhex(compact)
        else:
            padded = compact.rstrip("=") + "=" * (-len(compact.rstrip("=")) % 4)
            key = base64.b64decode(padded.translate({ord("-"): "+", ord("_"): "/"}), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidInput(
            f"an encryption key is {KEY_BYTES} random bytes in base64 (44 characters) or "
            f"hexadecimal (64), or begins with {OPENS} or {ITSELF}; this text of {len(compact)} "
            "characters is not. Make one with ObjectStore.new_encryption_key()"
        )
    return key


def _derive(context: str, material: bytes) -> bytes:
    return blake3(material, derive_key_context=context).digest()
