"""Keys and sealing."""

from __future__ import annotations

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.shared.errors import WrongKey
from torpor.shared.format.keys import SEAL_BYTES, Seal, chunk_associated, workspace_key
from torpor.shared.values import WorkspaceName

STORE_KEY = bytes(range(32))
DEMO = WorkspaceName("demo")
KEY = workspace_key(STORE_KEY, DEMO)


def _derived(context: str, material: bytes) -> bytes:
    return blake3(material, derive_key_context=context).digest()


def test_keys_are_derived_as_the_format_says() -> None:
    assert _derived("torpor v1 workspace", STORE_KEY + b"demo") == KEY
    seal = Seal(KEY)
    assert seal.key_id == _derived("torpor v1 key id", KEY)[:8]
    assert seal.name(b"x") == blake3(b"x", key=_derived("torpor v1 names", KEY)).digest()
    sealed = bytes(seal.seal(b"plain", b"with"))
    aes = AESGCM(_derived("torpor v1 sealing", KEY))
    assert aes.decrypt(sealed[:12], sealed[12:], b"with") == b"plain"


def test_another_workspace_has_another_key() -> None:
    assert workspace_key(STORE_KEY, WorkspaceName("demo2")) != KEY
    assert Seal(workspace_key(STORE_KEY, WorkspaceName("demo2"))).name(b"x") != Seal(KEY).name(b"x")


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_store_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(WrongKey, match=f"this one has {length}"):
        workspace_key(bytes(length), DEMO)


def test_without_a_key_names_are_stock_blake3() -> None:
    seal = Seal(None)
    assert seal.name(b"x") == blake3(b"x").digest()
    assert seal.seal(b"x", b"") == b"x" == seal.open(b"x", b"")
    assert seal.key_id == bytes(8)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_the_incremental_hasher_agrees(key: bytes | None) -> None:
    seal = Seal(key)
    hasher = seal.hasher()
    for piece in (b"one", b"", b"two"):
        hasher.update(piece)
    assert hasher.digest(length=16) == seal.digest(b"onetwo") == seal.name(b"onetwo")[:16]


@settings(max_examples=100)
@given(plain=st.binary(max_size=200), data=st.data())
def test_changed_sealed_bytes_do_not_open(plain: bytes, data: st.DataObject) -> None:
    seal = Seal(KEY)
    sealed = bytearray(seal.seal(plain, b"place"))
    assert len(sealed) == len(plain) + SEAL_BYTES
    assert seal.open(sealed, b"place") == plain
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WrongKey):
        seal.open(sealed, b"place")


def test_a_chunk_does_not_open_in_another_s_place() -> None:
    seal = Seal(KEY)
    right = chunk_associated(b"n" * 32, b"p" * 16, 2, 1000)
    sealed = seal.seal(b"plain", right)
    for wrong in (
        chunk_associated(b"m" * 32, b"p" * 16, 2, 1000),
        chunk_associated(b"n" * 32, b"q" * 16, 2, 1000),
        chunk_associated(b"n" * 32, b"p" * 16, 1, 1000),
        chunk_associated(b"n" * 32, b"p" * 16, 2, 1001),
    ):
        with pytest.raises(WrongKey):
            seal.open(sealed, wrong)
    assert seal.open(sealed, right) == b"plain"


@pytest.mark.parametrize("length", [0, 1, 11, 12, 27])
def test_too_few_bytes_do_not_open(length: int) -> None:
    with pytest.raises(WrongKey, match="too few"):
        Seal(KEY).open(bytes(length), b"")
