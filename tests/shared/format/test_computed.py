"""Sequences whose elements are made anew behave as lists do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fixtures.manifests import plain_entries
from torpor.machine.tree.names import Signature, Signatures
from torpor.shared.format.computed import SelectedElements
from torpor.shared.format.manifest import Content, Entries, ReadContents


def _signatures() -> Signatures:
    made = Signatures(3)
    made[1] = Signature(1, 2, 3, 4)
    return made


def _contents() -> ReadContents:
    made = ReadContents()
    for size in range(3):
        made.extend([Content(size, (), b"")])
    return made


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (Entries(plain_entries()), plain_entries()),
        (SelectedElements("abcdef", [1, 4, 2]), ["b", "e", "c"]),
        (_signatures(), [None, Signature(1, 2, 3, 4), None]),
        (_contents(), [Content(size, (), b"") for size in range(3)]),
    ],
)
def test_they_are_read_as_lists_are(made: Sequence[object], expected: list[object]) -> None:
    count = len(expected)
    assert len(made) == count
    assert list(made) == expected
    assert list(reversed(made)) == expected[::-1]
    assert [made[number] for number in range(-count, count)] == expected * 2
    assert list(made[1:]) == expected[1:]
    assert expected[-1] in made
    assert object() not in made
    for beyond in (count, -count - 1):
        with pytest.raises(IndexError):
            made[beyond]
