"""Keys and sealing. How keys follow from the store's: test_vectors.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.shared.errors import WrongKey
from torpor.shared.format.keys import SEAL_BYTES, Seal, workspace_key
from torpor.shared.values import WorkspaceName

KEY = workspace_key(bytes(range(32)), WorkspaceName("demo"))


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_store_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(WrongKey, match=f"this one has {length}"):
        workspace_key(bytes(length), WorkspaceName("demo"))


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
    assert seal.seal(plain, b"place") != sealed  # a nonce is used once
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WrongKey):
        seal.open(sealed, b"place")
