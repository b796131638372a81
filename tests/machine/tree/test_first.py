"""What the user's patterns bring first, and what comes with it."""

from __future__ import annotations

import pytest

from tests.fixtures.manifests import entry
from torpor.machine.tree.first import MOST_HOPS, find_first
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, SYMLINK, Entry

TREE = [
    entry(DIRECTORY, b""),
    entry(FILE, b"serve.py"),
    entry(DIRECTORY, b"data"),
    entry(FILE, b"data/rows.csv"),
    entry(HARDLINK, b"data/same", target=b"serve.py"),
    entry(DIRECTORY, b"models"),
    entry(DIRECTORY, b"models/llama"),
    entry(FILE, b"models/llama/a.gguf"),
    entry(FILE, b"models/llama/b.gguf"),
    entry(FILE, b"models/notes.txt"),
]


def _cache(*links: tuple[bytes, bytes]) -> list[Entry]:
    """A Hugging Face cache: snapshots are symlinks to blobs."""
    return [
        entry(DIRECTORY, b""),
        entry(DIRECTORY, b"blobs"),
        entry(FILE, b"blobs/aa"),
        entry(FILE, b"blobs/bb"),
        entry(DIRECTORY, b"snapshots"),
        *(entry(SYMLINK, b"snapshots/" + name, target=target) for name, target in links),
    ]


OUT = _cache((b"model", b"../blobs/aa"), (b"out", b"/etc/passwd"), (b"gone", b"nowhere"))
ROUND = _cache((b"all", b"../blobs"), (b"up", b".."), (b"self", b"."), (b"a", b"b"), (b"b", b"a"))
LLAMA = [b"models/llama", b"models/llama/a.gguf", b"models/llama/b.gguf"]
SAME = {b"serve.py": 0, b"data/same": 0}


@pytest.mark.parametrize(
    ("tree", "patterns", "ranks", "passages", "unmatched"),
    [
        (TREE, [], {}, [], []),
        (TREE, ["models/llama"], dict.fromkeys(LLAMA, 0), [b"", b"models"], []),
        # patterns give the order, and the first that matches counts
        (
            TREE, ["*.txt", "models/*", "b.gguf"],
            {b"models/notes.txt": 0, **dict.fromkeys(LLAMA, 1), b"models": 3}, [b""], [],
        ),
        # a directory above is complete when nothing else is below it
        (
            TREE, ["serve.py", "data", "models"],
            {
                b"": 3, **SAME, b"data": 1, b"data/rows.csv": 1, b"models": 2,
                b"models/notes.txt": 2, **dict.fromkeys(LLAMA, 2),
            },
            [], [],
        ),
        (
            TREE, ["nothing", "/", "serve.py", ""], dict.fromkeys(SAME, 2), [b"", b"data"],
            ["nothing", "/", ""],
        ),
        # all names of a file come together, at the best place of them
        (TREE, ["data"], {**SAME, b"data": 0, b"data/rows.csv": 0}, [b""], []),
        (TREE, ["same"], SAME, [b"", b"data"], []),
        (TREE, ["data/same", "serve.py"], SAME, [b"", b"data"], []),
        # a symlink brings what it leads to
        (
            OUT, ["snapshots"],
            dict.fromkeys([b"blobs/aa", b"snapshots", *(name.path for name in OUT[5:])], 0),
            [b"", b"blobs"], [],
        ),
        # a directory whole, but none above itself
        (
            ROUND, ["all"],
            dict.fromkeys([b"snapshots/all", b"blobs", b"blobs/aa", b"blobs/bb"], 0),
            [b"", b"snapshots"], [],
        ),
        (
            ROUND, ["up", "self", "a"],
            {b"snapshots/up": 0, b"snapshots/self": 1, b"snapshots/a": 2, b"snapshots/b": 2},
            [b"", b"snapshots"], [],
        ),
    ],
)  # fmt: skip
def test_patterns_bring_first_what_belongs_to_them(
    tree: list[Entry],
    patterns: list[str],
    ranks: dict[bytes, int],
    passages: list[bytes],
    unmatched: list[str],
) -> None:
    found = find_first(tree, patterns)
    assert {tree[number].path: rank for number, rank in found.ranks.items()} == ranks
    assert {tree[number].path for number in found.passages} == {*passages}
    assert found.unmatched == unmatched


def test_names_of_one_root_are_not_those_of_another() -> None:
    tree = [*TREE, entry(DIRECTORY, b"", root=1), entry(FILE, b"other", root=1)]
    found = find_first(tree, ["other"])
    assert found.passages == set()
    assert found.ranks == {len(TREE) + 1: 0, len(TREE): 1}


def test_symlinks_to_symlinks_are_followed_so_far() -> None:
    tree = _cache(*((b"%02d" % n, b"%02d" % (n + 1)) for n in range(MOST_HOPS + 2)))
    found = {tree[number].path for number in find_first(tree, ["00"]).ranks}
    assert found == {b"snapshots/%02d" % n for n in range(MOST_HOPS + 1)}
