"""What the user's patterns bring first, and what comes with it."""

from __future__ import annotations

import pytest

from tests.fixtures.manifests import entry
from torpor.machine.tree.first import MOST_HOPS, First, find_first
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


def _paths(found: First, tree: list[Entry]) -> dict[bytes, int]:
    return {tree[number].path: rank for number, rank in found.ranks.items()}


def _passages(found: First, tree: list[Entry]) -> set[bytes]:
    return {tree[number].path for number in found.passages}


def test_without_patterns_nothing_comes_first() -> None:
    assert find_first(TREE, []) == First({}, set(), [])


def test_a_directory_comes_with_everything_below_it() -> None:
    found = find_first(TREE, ["models/llama"])
    below = {b"models/llama", b"models/llama/a.gguf", b"models/llama/b.gguf"}
    assert _paths(found, TREE) == dict.fromkeys(below, 0)
    assert _passages(found, TREE) == {b"", b"models"}


def test_patterns_give_the_order_and_the_first_that_matches_counts() -> None:
    found = find_first(TREE, ["*.txt", "models/*", "b.gguf"])
    ranks = _paths(found, TREE)
    assert ranks[b"models/notes.txt"] == 0
    assert ranks[b"models/llama/a.gguf"] == ranks[b"models/llama/b.gguf"] == 1
    assert found.unmatched == []


def test_a_directory_above_is_complete_when_nothing_else_is_below_it() -> None:
    found = find_first(TREE, ["models/*"])
    assert b"models" in _paths(found, TREE)
    assert _passages(found, TREE) == {b""}
    everything = find_first(TREE, ["serve.py", "data", "models"])
    assert (len(everything.ranks), everything.passages) == (len(TREE), set())


def test_a_pattern_that_names_nothing_is_reported() -> None:
    found = find_first(TREE, ["nothing", "/", "serve.py", ""])
    assert found.unmatched == ["nothing", "/", ""]
    assert b"serve.py" in _paths(found, TREE)
    assert find_first(TREE, ["nothing"]).ranks == {}


@pytest.mark.parametrize("pattern", ["data", "serve.py", "same"])
def test_all_names_of_a_file_come_together(pattern: str) -> None:
    ranks = _paths(find_first(TREE, [pattern]), TREE)
    assert ranks[b"serve.py"] == ranks[b"data/same"] == 0


def test_a_file_takes_the_best_place_of_its_names() -> None:
    ranks = _paths(find_first(TREE, ["data/same", "serve.py"]), TREE)
    assert ranks[b"serve.py"] == ranks[b"data/same"] == 0


def test_names_of_one_root_are_not_those_of_another() -> None:
    tree = [*TREE, entry(DIRECTORY, b"", root=1), entry(FILE, b"other", root=1)]
    found = find_first(tree, ["other"])
    assert found.passages == set()
    assert found.ranks == {len(TREE) + 1: 0, len(TREE): 1}


# -- symlinks


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


def test_a_symlink_brings_what_it_leads_to() -> None:
    tree = _cache((b"model", b"../blobs/aa"), (b"out", b"/etc/passwd"), (b"gone", b"nowhere"))
    found = find_first(tree, ["snapshots"])
    assert b"blobs/aa" in _paths(found, tree)
    assert b"blobs/bb" not in _paths(found, tree)
    assert _passages(found, tree) == {b"", b"blobs"}


def test_a_symlink_brings_a_directory_whole_but_none_above_itself() -> None:
    tree = _cache((b"all", b"../blobs"), (b"up", b".."), (b"self", b"."))
    assert {b"blobs", b"blobs/aa", b"blobs/bb"} <= _paths(find_first(tree, ["all"]), tree).keys()
    assert _paths(find_first(tree, ["up", "self"]), tree).keys() == {
        b"snapshots/up",
        b"snapshots/self",
    }


def test_symlinks_to_symlinks_are_followed_so_far() -> None:
    links = [(b"%02d" % n, b"%02d" % (n + 1)) for n in range(MOST_HOPS + 2)]
    tree = _cache(*links)
    found = _paths(find_first(tree, ["00"]), tree)
    assert found.keys() == {b"snapshots/%02d" % n for n in range(MOST_HOPS + 1)}
    round_about = _cache((b"a", b"b"), (b"b", b"a"))
    assert {b"snapshots/a", b"snapshots/b"} <= _paths(
        find_first(round_about, ["a"]), round_about
    ).keys()
