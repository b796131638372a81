from __future__ import annotations

import os
from pathlib import Path

import pytest

from torpor.control.providers.removal import remove_tree


def test_a_tree_of_any_depth_goes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    fd = os.open(root, os.O_RDONLY)
    for _ in range(3000):  # deeper than the recursion limit and than PATH_MAX
        os.mkdir("dd", dir_fd=fd)
        below = os.open("dd", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    remove_tree(root)
    assert not root.exists()


def test_modes_do_not_keep_a_tree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("")
    (root / "a" / "b" / "file").chmod(0)
    for path in (root / "a" / "b", root / "a", root):
        path.chmod(0)
    remove_tree(root)
    assert not root.exists()


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_text("kept")
    outside.chmod(0o500)
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "a" / "link").symlink_to(outside / "deep")
    (root / "a" / "hard").hardlink_to(outside / "file")
    (root / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "a" / "fifo")
    remove_tree(root)
    assert not root.exists()
    assert (outside / "file").read_text() == "kept"
    assert (outside / "deep").is_dir()
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("kept")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link"):
        remove_tree(tmp_path / "link")
    assert (tmp_path / "real" / "file").read_text() == "kept"


def test_any_bytes_in_names_and_names_of_our_own(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path / "root")
    for name in (b"\xff\n", b".removed.1", b".removed.2/.removed.1/x", b"a" * 255 + b"/b"):
        os.makedirs(os.path.join(root, name))
    Path(tmp_path / "root" / ".removed.3").write_text("a file")
    remove_tree(tmp_path / "root")
    assert not os.path.lexists(root)


def test_gone_already_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")
