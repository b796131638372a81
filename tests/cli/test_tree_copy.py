"""What stands at the target of a copy, whatever the line or the other side does."""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from torpor_cli import tree_copy
from torpor_cli.tree_copy import (
    KEPT_BYTES,
    Broken,
    Entry,
    Refused,
    Report,
    Source,
    Stream,
    Target,
    Wishes,
    leads_out,
    receive,
    send,
    serve,
)

DATA, END = b"d", b"e"
PLAIN = Wishes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "x.txt").write_text("hello")
    (folder / "a" / "b" / "run.sh").write_text("#!/bin/sh")
    (folder / "a" / "b" / "run.sh").chmod(0o4755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("a/x.txt")
    (folder / os.fsdecode(b"odd \n\xff")).write_text("odd")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def copied(
    source: Path, target: Path, wishes: Wishes = PLAIN, protected: frozenset[str] = frozenset()
) -> Report:
    there, back = os.pipe(), os.pipe()
    with (
        open(there[0], "rb") as heard,
        open(back[1], "wb") as said,
        open(back[0], "rb") as answers,
        open(there[1], "wb") as asks,
        ThreadPoolExecutor(1) as beside,
    ):
        whole = Target(str(target))
        received = beside.submit(receive, Stream(heard, said), whole, wishes)
        told = send(
            Stream(answers, asks),
            [Source(str(source), "")],
            protected=lambda there: {entry.name for entry in there} & protected,
        )
        assert received.result() == told
    return told


def told_by_hand(
    target: Path, entries: list[Any], *frames: tuple[bytes, bytes], wishes: Wishes = PLAIN
) -> Report:
    """Receive what a sender of our own says."""
    script = BytesIO()
    by_hand = Stream(BytesIO(), script)
    by_hand.send_list(entries)
    by_hand.send([[], 0])
    by_hand.send_list([])  # nothing is to be deleted
    for kind, payload in frames:
        by_hand.write(kind, payload)
    return receive(Stream(BytesIO(script.getvalue()), BytesIO()), Target(str(target)), wishes)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_tree_arrives_with_modes_links_and_odd_names_and_is_not_sent_twice(
    source: Path, target: Path
) -> None:
    report = copied(source, target)
    assert (report.files, report.failed_count, report.bytes) == (4, 0, 17)
    assert names_in(target) == names_in(source)
    assert os.readlink(target / "link") == "a/x.txt"
    assert stat.S_IMODE((target / "a/b/run.sh").stat().st_mode) == 0o755, "and no setuid"
    again = copied(source, target)
    assert (again.files, again.bytes, again.unchanged) == (0, 0, 4)
    (source / "a/x.txt").chmod(0o600)
    copied(source, target)
    assert stat.S_IMODE((target / "a/x.txt").stat().st_mode) == 0o600


def test_what_is_newer_at_the_target_stays_unless_it_is_to_be_replaced(
    source: Path, target: Path
) -> None:
    copied(source, target)
    (target / "a/x.txt").write_text("edited there")
    os.utime(source / "a/x.txt", ns=(1, 1))
    assert copied(source, target).newer == ["a/x.txt"]
    assert (target / "a/x.txt").read_text() == "edited there"
    assert copied(source, target, Wishes(overwrite=True)).files == 1
    assert (target / "a/x.txt").read_text() == "hello"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "a//x", "", ".", "x\0y", "a/"])
def test_a_name_that_leads_out_of_the_target_ends_the_copy(target: Path, name: str) -> None:
    with pytest.raises(Refused, match="leads out of the target"):
        told_by_hand(target, [Entry("f", name, 0o644, 1, 1, "")], (DATA, b"x"), (END, b""))
    assert not target.exists()


@pytest.mark.parametrize(
    ("to", "names"), [("", {"x"}), ("", set()), ("y", {"x"}), ("y", {"x", ".ssh"}), ("y", None)]
)
def test_a_sender_brings_nothing_beside_what_was_asked_for(
    target: Path, to: str, names: set[str] | None
) -> None:
    script = BytesIO()
    by_hand = Stream(BytesIO(), script)
    by_hand.send_list([Entry("f", name, 0o644, 1, 1, "") for name in ("x", ".ssh/config")])
    by_hand.send([[], 0])
    heard = Stream(BytesIO(script.getvalue()), BytesIO())
    with pytest.raises(Refused, match=r"what was not asked for: '(\.ssh|x)'"):
        receive(heard, Target(str(target), to), PLAIN, names=names)
    assert not target.exists()


@pytest.mark.parametrize(
    "entry", [[], ["f"], "text", ["f", 1, 2, 3, 4, ""], ["f", "a", 0, -1, 0, ""], None]
)
def test_an_entry_that_is_none_ends_the_copy(target: Path, entry: Any) -> None:
    with pytest.raises(Refused):
        told_by_hand(target, [entry])


def test_a_list_that_would_fill_the_memory_ends_the_copy(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [Entry("f", f"{number:090}", 0o644, 0, 1, "") for number in range(20)]
    monkeypatch.setattr(tree_copy, "MOST_LIST_BYTES", 2000)
    with pytest.raises(Refused, match="the names in one copy have more than 2,000 bytes"):
        told_by_hand(target, many)
    for entry in (
        Entry("f", "x" * 4097, 0o644, 0, 1, ""),
        Entry("l", "x", 0o644, 0, 1, "x" * 4097),
        ["f", "x", 0o644, 0, 1, "", *([[]] * 10)],
        ["f", [[]], 0o644, 0, 1, ""],
    ):
        with pytest.raises(Refused, match="no part of a copy"):
            told_by_hand(target, [entry])
    assert not target.exists()


def test_what_a_receiver_reports_is_kept_in_part(source: Path) -> None:
    many = ["x" * 5000] * 100
    script = BytesIO()
    for answer in ([], [], [0, 0, 0, *[many, 100] * 4, many, ""]):
        Stream(BytesIO(), script).send(answer)
    report = send(Stream(BytesIO(script.getvalue()), BytesIO()), [Source(str(source), "")])
    for names in (report.newer, report.kept, report.failed, report.gone):
        assert names == ["x" * 4000] * 20
    assert report.failed_count == 100


def test_files_get_no_mode_beside_those_that_are_wished(target: Path) -> None:
    entries = [Entry("d", "a", 0o777, 0, 1, ""), Entry("f", "a/x", 0o777, 1, 1, "")]
    frames = [(DATA, b"x"), (END, b"")]
    wishes = Wishes(modes=0o750)
    told_by_hand(target, entries, *frames, wishes=wishes)
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o750
    assert stat.S_IMODE((target / "a/x").stat().st_mode) == 0o750
    (target / "a/x").chmod(0o754)
    assert told_by_hand(target, entries, wishes=wishes).unchanged == 1
    assert stat.S_IMODE((target / "a/x").stat().st_mode) == 0o754, "a person's own"


def test_nothing_is_written_through_a_symlink_of_the_target(tmp_path: Path, target: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    target.mkdir()
    (target / "way").symlink_to(outside)
    report = told_by_hand(target, [Entry("f", "way/x", 0o644, 1, 1, "")])
    assert report.failed == ["way/x (there, a directory above it is a symlink or a file)"]
    assert names_in(outside) == set()


def test_nothing_is_written_through_a_symlink_that_the_same_copy_brings(
    tmp_path: Path, target: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    entries = [
        Entry("l", "way", 0o777, 0, 1, str(outside)),
        Entry("f", "way/x", 0o644, 1, 1, ""),
    ]
    told_by_hand(target, entries, (DATA, b"x"), (END, b""))
    assert names_in(outside) == set()


@pytest.mark.parametrize(
    ("name", "to", "out"),
    [
        ("a", "b/c", False),
        ("a/b", "../c", False),
        ("a", "../c", True),
        ("a/b", "../../c", True),
        ("a", "/etc/passwd", True),
        ("a/b", "c/../../d", True),  # c may be a symlink
    ],
)
def test_links_that_lead_out_of_a_copy_are_found(name: str, to: str, out: bool) -> None:
    assert leads_out(name, to) is out


def test_links_that_lead_out_of_a_copy_are_left_out_where_that_is_wished(target: Path) -> None:
    entries = [Entry("l", "a", 0o777, 0, 1, "../x"), Entry("l", "b", 0o777, 0, 1, "x")]
    report = told_by_hand(target, entries, wishes=Wishes(inner_links=0))
    assert report.failed == ["a (a link out of the copy, to ../x)"]
    assert names_in(target) == {"b"}


def test_a_copy_that_breaks_leaves_no_half_file_and_goes_on_where_it_stopped(
    source: Path, target: Path
) -> None:
    content = os.urandom(KEPT_BYTES + 100)
    big = source / "big"
    big.write_bytes(content)
    info = big.stat()
    entry = Entry("f", "big", 0o644, info.st_size, info.st_mtime_ns, "")
    with pytest.raises(Broken):
        told_by_hand(target, [entry], (DATA, content[:KEPT_BYTES]))
    assert not (target / "big").exists()
    assert len(names_in(target)) == 1
    report = copied(source, target)
    assert (target / "big").read_bytes() == content
    assert report.bytes == 17 + 100
    assert names_in(target) == names_in(source)


@pytest.mark.parametrize(
    "answers",
    [
        [{"not": "a list"}],
        [[], [[0, -1]], []],
        [[], [[7, 0]], []],
        [[], [["0", 0]], []],
        [[5], []],
        [["x"], []],
        [[["f", "//x", 0, 0, 0, ""]], []],
        [[["f", "../x", 0, 0, 0, ""]], []],
        [[], [], {}],
        [[], [], ["text"] * 13],
        [[], [], [0, 0, 0, [1], 0, [], 0, [], 0, [], 0, [], ""]],
    ],
)
def test_a_receiver_that_answers_what_no_receiver_does_ends_the_copy(
    source: Path, answers: list[Any]
) -> None:
    script = BytesIO()
    for answer in answers:
        Stream(BytesIO(), script).send(answer)
    with pytest.raises(Refused, match=r"no part of a copy|leads out of the target"):
        send(Stream(BytesIO(script.getvalue()), BytesIO()), [Source(str(source), "")])


def test_words_that_are_no_frame_end_the_copy(target: Path) -> None:
    for said in (b"Welcome to Ubuntu\n", b"j\0\0\0\x04{{{{", b"j\xff\xff\xff\xff"):
        with pytest.raises(Refused, match="no part of a copy"):
            receive(Stream(BytesIO(said), BytesIO()), Target(str(target)), PLAIN)


def test_what_broke_early_leaves_nothing(target: Path) -> None:
    with pytest.raises(Broken):
        told_by_hand(target, [Entry("f", "x", 0o644, 9, 1, "")], (DATA, b"half"))
    assert names_in(target) == set()


def test_a_full_disk_ends_the_copy_and_names_the_file(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    entries = [Entry("f", name, 0o644, 1, 1, "") for name in ("a", "b")]
    monkeypatch.setattr("torpor_cli.tree_copy.os.write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{target}/a'"):
        told_by_hand(target, entries, (DATA, b"x"), (END, b""), (DATA, b"x"), (END, b""))
    assert names_in(target) == set()


def test_what_somebody_wrote_meanwhile_stays(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def somebody_writes(done: int, total: int) -> None:
        (target / "x").write_text("mine")

    script = BytesIO()
    by_hand = Stream(BytesIO(), script)
    by_hand.send_list([Entry("f", "x", 0o644, 1, 1, "")])
    by_hand.send([[], 0])
    by_hand.send_list([])
    by_hand.write(DATA, b"x")
    by_hand.write(END)
    heard = Stream(BytesIO(script.getvalue()), BytesIO())
    report = receive(heard, Target(str(target)), PLAIN, moved=somebody_writes)
    assert report.failed == ["x (somebody has written there meanwhile)"]
    assert (target / "x").read_text() == "mine"
    assert names_in(target) == {"x"}


def test_two_copies_of_the_same_files_at_a_time_both_end_well(source: Path, target: Path) -> None:
    """The other one is done before this one has compared, and named its own."""

    def other_is_quicker(done: int, total: int) -> None:
        if (target / "link").is_symlink():
            return
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)

    there, back = os.pipe(), os.pipe()
    with (
        open(there[0], "rb") as heard,
        open(back[1], "wb") as said,
        open(back[0], "rb") as answers,
        open(there[1], "wb") as asks,
        ThreadPoolExecutor(1) as beside,
    ):
        sent = beside.submit(send, Stream(answers, asks), [Source(str(source), "")])
        to = Target(str(target))
        report = receive(Stream(heard, said), to, PLAIN, moved=other_is_quicker)
        assert sent.result() == report
    assert (report.files, report.failed) == (4, [])
    assert names_in(target) == names_in(source)


def test_a_copy_waits_for_a_file_that_an_earlier_connection_still_holds(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line broke, and the machine has not noticed yet."""
    content = os.urandom(KEPT_BYTES)
    entry = Entry("f", "x", 0o644, len(content) + 1, 1, "")
    with pytest.raises(Broken):
        told_by_hand(target, [entry], (DATA, content))
    (part,) = names_in(target)
    with open(target / part, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr("torpor_cli.tree_copy.time.sleep", lambda seconds: held.close())
        report = told_by_hand(target, [entry], (DATA, b"x"), (END, b""))
    assert (report.files, report.bytes, report.failed) == (1, 1, [])
    assert (target / "x").read_bytes() == content + b"x"


def test_what_a_copy_left_is_removed_by_a_copy_of_another_version(
    source: Path, target: Path
) -> None:
    """What another copy holds stays, and so does what was left of other files lately."""
    begun = os.urandom(KEPT_BYTES)

    def left_of(name: str) -> str:
        before = names_in(target)
        with pytest.raises(Broken):
            told_by_hand(
                target, [Entry("f", name, 0o644, 2 * KEPT_BYTES, 1 << 61, "")], (DATA, begun)
            )
        (part,) = names_in(target) - before - {name.rpartition("/")[0]}
        return part

    copied(source, target)
    whole = names_in(target)
    stale, held = left_of("a/x.txt"), left_of("a/b/run.sh")
    young, old, own = left_of("a/gone"), left_of("a/b/gone"), left_of("other")
    os.utime(target / old, (1, 1))
    mine = target / "a" / ".torpor-notes.part"
    mine.write_text("a person's")
    with open(target / held, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert copied(source, target, Wishes(dry_run=True)).unchanged == 4
        assert {stale, held, young, old, own} <= names_in(target)
        assert copied(source, target).unchanged == 4
    assert names_in(target) == whole | {held, young, own, "a/.torpor-notes.part"}


def test_two_copies_of_one_file_at_a_time_do_not_mix(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_copy, "LOCK_WAIT_S", 0.0)
    content = os.urandom(KEPT_BYTES)
    entry = Entry("f", "x", 0o644, len(content) + 1, 1, "")
    with pytest.raises(Broken):
        told_by_hand(target, [entry], (DATA, content))
    (part,) = names_in(target)
    with open(target / part, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        report = told_by_hand(target, [entry], (DATA, b"x"), (END, b""))
    assert report.failed == ["x (another copy is writing it)"]
    assert (target / part).read_bytes() == content


def test_a_file_that_became_shorter_while_it_was_read_does_not_arrive(target: Path) -> None:
    entry = Entry("f", "x", 0o644, 9, 1, "")
    report = told_by_hand(target, [entry], (DATA, b"half"), (END, b"it became shorter"))
    assert report.failed == ["x (it became shorter)"]
    assert names_in(target) == set()


@pytest.mark.parametrize("data", [b"more", b"l"])
def test_a_file_of_another_size_than_was_said_does_not_arrive(target: Path, data: bytes) -> None:
    with pytest.raises(Refused, match="of a file than it had said"):
        told_by_hand(target, [Entry("f", "x", 0o644, 2, 1, "")], (DATA, data), (END, b""))
    assert names_in(target) == set()


def test_delete_takes_what_was_not_sent_and_leaves_what_is_protected(
    source: Path, target: Path
) -> None:
    copied(source, target)
    (target / "old").mkdir()
    (target / "old" / "file").write_text("old")
    (target / "results").mkdir()
    (target / "results" / "kept").write_text("kept")
    assert copied(source, target).gone == []
    protected = frozenset({"results/kept"})
    would = copied(source, target, Wishes(delete=True, dry_run=True), protected)
    assert set(would.gone) == {"old/file", "old", "results"} and (target / "old").exists()
    report = copied(source, target, Wishes(delete=True), protected)
    assert report.gone == ["old/file", "old"]
    assert names_in(target) == names_in(source) | {"results", "results/kept"}


def test_delete_takes_the_other_name_of_a_file_that_the_same_copy_replaced(
    source: Path, target: Path, tmp_path: Path
) -> None:
    target.mkdir()
    (target / "link").write_text("there")
    os.utime(target / "link", ns=(1, 1))
    os.link(target / "link", target / "z")
    before_ns = (target / "z").stat().st_ctime_ns + 1
    clock = tmp_path / "clock"
    while not clock.exists() or clock.stat().st_ctime_ns < before_ns:
        clock.write_text("the clock of the file system goes in steps")
    report = copied(source, target, Wishes(delete=True, before_ns=before_ns))
    assert (report.kept, report.gone) == ([], ["z"])
    assert (target / "link").read_text() == "hello"


def test_delete_does_nothing_where_nothing_is_sent_or_something_fails(
    source: Path, target: Path, tmp_path: Path
) -> None:
    copied(source, target)
    (tmp_path / "nothing").mkdir()
    (target / "mine").write_text("mine")
    with pytest.raises(Refused, match="--delete would delete all"):
        told_by_hand(target, [], wishes=Wishes(delete=True))
    os.mkfifo(source / "pipe")
    report = copied(source, target, Wishes(delete=True))
    assert report.failed == ["pipe (a device, a pipe or a socket)"]
    assert (target / "mine").exists()


def test_a_dry_run_changes_nothing_and_names_what_it_would_copy(source: Path, target: Path) -> None:
    report = copied(source, target, Wishes(dry_run=True))
    assert report.files == 4 and "a/x.txt" in report.names
    assert not target.exists()


def test_a_directory_in_the_way_of_a_file_is_named(source: Path, target: Path) -> None:
    (target / "link").mkdir(parents=True)
    assert copied(source, target).failed == ["link (there, it is a directory)"]
    assert (target / "a/x.txt").read_text() == "hello"


def asked(request: dict[str, Any]) -> Any:
    """What a machine's side answers."""
    script, answers = BytesIO(), BytesIO()
    Stream(BytesIO(), script).send({"roots": ["~"], **request})
    serve(Stream(BytesIO(script.getvalue()), answers))
    return Stream(BytesIO(answers.getvalue()), BytesIO()).expect()


def test_the_jupyter_server_that_runs_is_found_and_one_that_has_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        running = {"port": server.getsockname()[1], "token": "0a", "base_url": "/"}
        ended = {**running, "token": "old", "pid": 2**22 + 1}
        (tmp_path / "jpserver-1.json").write_text(json.dumps({**running, "pid": os.getpid()}))
        (tmp_path / "jpserver-2.json").write_text(json.dumps(ended))
        (tmp_path / "jpserver-3.json").write_text("{")
        (tmp_path / "notes.json").write_text("{}")
        assert asked({"do": "jupyter"}) == running
    with pytest.raises(Refused, match="none is installed"):
        asked({"do": "jupyter"})


def test_a_jupyter_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "jupyter-lab").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "jupyter-lab").chmod(0o755)
    with pytest.raises(Refused, match="jupyter-lab ended with status 3"):
        asked({"do": "jupyter"})


def test_places_are_below_the_workspace_s_first_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    roots = ["~/workspace", "/data"]
    for path, where in {
        "a/b": "/home/ada/workspace/a/b",
        "./": "/home/ada/workspace/",
        "~/x": "/home/ada/x",
        "/data/": "/data/",
        "../x": "/home/ada/x",
    }.items():
        assert asked({"do": "place", "path": path, "roots": roots}) == where


def test_what_runs_on_a_machine_needs_python_s_own_library_alone() -> None:
    text = Path(tree_copy.__file__).read_text()
    names = [
        name
        for node in ast.walk(ast.parse(text, feature_version=(3, 8)))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert names and {name.split(".")[0] for name in names} <= sys.stdlib_module_names
