"""Packs in a store, compared with what was written."""

from __future__ import annotations

import hashlib

import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.store.packs import compare_packs, stored_packs
from torpor.shared.format.names import new_pack_key
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.snapshot import PackClaim

WORKSPACE = WorkspaceName("demo")
BODY = b"a pack"
MD5 = hashlib.md5(BODY, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize(
    ("size", "md5", "is_hidden", "found"),
    [
        (6, MD5, False, "whole"),
        (6, "0" * 32, False, "missing"),
        (7, MD5, False, "missing"),
        (6, MD5, True, "unsure"),
        (7, MD5, True, "missing"),
    ],
    ids=["as written", "another MD5", "another size", "a hidden MD5", "both"],
)
def test_a_pack_whose_md5_is_hidden_is_neither_missing_nor_proven(
    memory_store: MemoryStore, size: int, md5: str, is_hidden: bool, found: str
) -> None:
    key = new_pack_key(WORKSPACE)
    memory_store.put(key, BODY)
    if is_hidden:
        memory_store.hide_md5(key)
    there = stored_packs(memory_store, WORKSPACE)
    missing, unsure = compare_packs(there, [PackClaim(key, size, md5)])
    assert missing == ([key] if found == "missing" else [])
    assert unsure == ([key] if found == "unsure" else [])


def test_a_pack_that_no_listing_shows_is_missing(memory_store: MemoryStore) -> None:
    gone = PackClaim(new_pack_key(WORKSPACE), len(BODY), MD5)
    memory_store.put(new_pack_key(WORKSPACE), BODY)
    assert compare_packs(stored_packs(memory_store, WORKSPACE), [gone]) == ([gone.key], [])
