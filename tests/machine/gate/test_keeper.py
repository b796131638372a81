"""A command behind the gate waits for each file that a restore still has to name."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.waiting import until
from torpor.machine.gate.calls import this_machine
from torpor.machine.gate.keeper import STILL_S, Keeper
from torpor.machine.gate.listener import Listener, why_not
from torpor.machine.gate.record import GateRecord
from torpor.machine.supervisor.command import Command

MISSING = ["model", "d/one", "d/two", "bin/run", "bin/interpreter"]


class Gate:
    """A workspace in which the files ``MISSING`` are still to be restored, and one command."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        for name in ("d", "bin"):
            (self.work / name).mkdir(parents=True)
        (self.work / "link").symlink_to("d/one")
        (folder / "outside").symlink_to(self.work)
        (folder / "home/workspaces/demo").mkdir(parents=True)
        self.home = folder / "home"
        self.record = GateRecord(self.home, "demo")
        paths = {n: os.fsencode(self.work / name) for n, name in enumerate(MISSING)}
        self.record.begin(b"id", paths)
        self.log = folder / "log"
        self.command: Command | None = None

    def start(self, *argv: str, still_s: float = STILL_S) -> Command:
        machine = this_machine()
        assert machine is not None
        keepers: list[threading.Thread] = []
        self.noted: list[str] = []

        def keep(listener: int) -> None:
            record = GateRecord(self.home, "demo")
            keeper = Keeper(Listener(listener), machine, record, self.noted.append, still_s)
            keepers.append(threading.Thread(target=keeper.run, daemon=True))
            keepers[0].start()

        log = os.open(self.log, os.O_RDWR | os.O_CREAT, 0o600)
        self.command = Command([*argv], str(self.work), log, dict(os.environ), keep)
        os.close(log)
        assert self.command.go() == ""
        self.keeper = keepers[0]
        return self.command

    def shell(self, script: str, still_s: float = STILL_S) -> Command:
        return self.start("/bin/sh", "-c", script, still_s=still_s)

    def waits_for(self, *names: str) -> None:
        """The command waits for these, and for nothing else by now."""
        wanted: list[int] = []

        def look() -> bool:
            wanted.extend(self.record.wanted.new())
            return len(wanted) >= len(names)

        until(look, f"the command waits for {names}")
        assert sorted(MISSING[number] for number in wanted) == sorted(names)

    def give(self, name: str, data: str, mode: int = 0o644) -> None:
        staged = self.work.parent / "staged"
        staged.write_text(data)
        staged.chmod(mode)
        staged.rename(self.work / name)
        self.record.give([MISSING.index(name)])
        self.record.moved()

    def ends(self) -> str:
        """What the command says when it has ended, with nobody left to keep the gate for."""
        command = self.command
        assert command is not None
        until(lambda: command.poll() is not None, "the command ends")
        self.keeper.join()
        return self.log.read_text()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.record.end()


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


@pytest.mark.parametrize(
    "script",
    [
        "cat model",
        "cat ../outside/model",
        "cat < model",
        "cd d; cat ../model",
        "cat $PWD/d/../model",
    ],
)
def test_a_file_is_read_when_it_is_there(gate: Gate, script: str) -> None:
    gate.shell(script)
    gate.waits_for("model")
    gate.give("model", "all of it")
    assert gate.ends() == "all of it"


@pytest.mark.parametrize(
    "look",
    ["os.stat(name).st_size", "os.path.getsize(name)", "os.access(name, os.R_OK) and 9",
     "os.open(name, os.O_WRONLY | os.O_CREAT) and os.stat(name).st_size",
     "os.rename(name, name + '2') or os.stat(name + '2').st_size",
     "os.unlink(name) or os.path.lexists(name) or 9",
     "os.chmod(name, 0o600) or 9", "os.chmod('d/../model', 0o600, dir_fd=os.open('.', 0)) or 9",
     "os.chown(name, -1, -1) or 9", "os.lchown(name, -1, -1) or 9", "os.utime(name) or 9",
     "os.listxattr(name) and 9 or 9", "os.listxattr(name, follow_symlinks=False) and 9 or 9",
     "os.setxattr(name, 'user.x', b'y') or len(os.getxattr(name, 'user.x')) + 8",
     "call('inotify_add_watch', call('inotify_init'), name, 2) + 8",
     "call('rmdir', name) + 10", "call('mknod', name, 0o100600, 0) + 10"],
)  # fmt: skip
def test_no_look_at_a_file_finds_it_missing(gate: Gate, look: str) -> None:
    code = (
        "import ctypes, os\n"
        "def call(function, *of):\n"
        "    of = [a.encode() if isinstance(a, str) else a for a in of]\n"
        "    return getattr(ctypes.CDLL(None), function)(*of)\n"
    )
    gate.start(*_python(f"{code}name = 'model'; print({look})"))
    gate.waits_for("model")
    gate.give("model", "all of it")
    assert gate.ends() == "9\n"


def test_a_symlink_is_there_and_leads_to_a_file_that_is_waited_for(gate: Gate) -> None:
    gate.shell("readlink link; cat link")
    gate.waits_for("d/one")
    gate.give("d/one", "one")
    assert gate.ends() == "d/one\none"


def test_a_directory_is_listed_when_its_files_are_there(gate: Gate) -> None:
    gate.start(*_python("import os; print(sorted(os.listdir('d')))"))
    gate.waits_for("d/one", "d/two")
    gate.give("d/one", "1")
    gate.give("d/two", "2")
    assert gate.ends() == "['one', 'two']\n"


def test_a_script_waits_for_its_interpreter(gate: Gate) -> None:
    gate.shell("exec bin/run")
    gate.waits_for("bin/run")
    gate.give("bin/run", f"#!{gate.work}/bin/interpreter\n", 0o755)
    gate.waits_for("bin/interpreter")
    gate.give("bin/interpreter", "#!/bin/sh\necho it runs\n", 0o755)
    assert gate.ends() == "it runs\n"


def test_what_is_no_file_of_the_restore_is_there_or_not_at_once(gate: Gate) -> None:
    gate.shell("echo new > own; cat own; test -e d/three || echo none; ls -d d; cat /dev/null")
    assert gate.ends() == "new\nnone\nd\n"
    assert gate.record.wanted.new() == []


def test_a_file_that_was_given_and_removed_is_not_waited_for(gate: Gate) -> None:
    gate.shell("cat model; rm model; test -e model || echo gone")
    gate.waits_for("model")
    gate.give("model", "here ")
    assert gate.ends() == "here gone\n"


@pytest.mark.parametrize("how", ["the restore ends", "nothing moves"])
def test_what_never_comes_is_an_error(gate: Gate, how: str) -> None:
    code = (
        "for look in (lambda: open('model'), lambda: open('model', 'w'), lambda: open('d/one')):\n"
        "    try: look()\n"
        "    except OSError as error: print(error.errno)\n"
        "open('own', 'w')"
    )
    gate.start(*_python(code), still_s=0.3 if how == "nothing moves" else STILL_S)
    if how == "the restore ends":
        gate.waits_for("model")
        gate.record.end()
    assert gate.ends() == f"{errno.EIO}\n" * 3
    assert (gate.work / "own").exists()


def test_the_gate_stays_open_after_the_restore(gate: Gate) -> None:
    gate.shell("cat model; until test -e go; do sleep 0.02; done; ls d; cat d/nothing 2>&1")
    gate.waits_for("model")
    for name in MISSING:
        gate.give(name, "x")
    gate.record.end()
    (gate.work / "go").touch()
    assert gate.ends().startswith("xone\ntwo\ncat: ")


def test_a_command_that_is_killed_while_it_waits_is_forgotten(gate: Gate) -> None:
    command = gate.shell("cat model & wait")
    gate.waits_for("model")
    os.killpg(command.id.pid, 9)
    gate.ends()


def test_a_name_that_is_removed_after_the_restore_is_missing_at_once(gate: Gate) -> None:
    """Also where the restore has gone on without the gate."""
    gate.shell("cat model; cat model 2>&1")
    gate.waits_for("model")
    gate.record.end()
    until(lambda: "Input/output error" in gate.log.read_text(), "the first try has failed")
    gate.record.complete(b"another", len(MISSING))
    assert gate.ends().count("Input/output error") == 2
    gate.record.complete(b"id", len(MISSING))
    gate.shell("cat model")
    assert "No such file" in gate.ends()


@pytest.mark.parametrize(
    "call",
    [
        "l.open(ctypes.c_char_p(-1), 0)",
        "l.open(ctypes.c_char_p((1 << 63) - 1), 0)",
        "l.syscall(217, -1, 0, 0)",
        "os.mkfifo('fifo', 0o777) or l.execl(b'fifo', b'fifo', None)",
        "[os.mkfifo('f', 0o777), os.open('f', os.O_RDWR), l.execl(b'f', b'f', None)][2]",
        "l.execl(b'd', b'd', None)",
    ],
)
def test_no_odd_call_ends_the_keeper(gate: Gate, call: str) -> None:
    gate.start(
        *_python(f"import ctypes, os; l = ctypes.CDLL(None); print({call}, open('model').read())")
    )
    gate.waits_for("model")
    gate.give("model", "comes")
    assert gate.ends() == "-1 comes\n"


def test_a_full_disk_ends_no_keeper(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it cannot ask for comes in its turn, and it asks again."""
    want, full = GateRecord.want, threading.Event()

    def wants(record: GateRecord, numbers: Iterable[int]) -> None:
        if not full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        want(record, numbers)

    monkeypatch.setattr(GateRecord, "want", wants)
    gate.shell("cat model; cat d/one")
    until(lambda: gate.noted, "it notes the fault")
    gate.give("model", "here ")
    until(lambda: "here" in gate.log.read_text(), "the first file is there")
    full.set()
    gate.waits_for("d/one")
    gate.give("d/one", "and here")
    assert gate.ends() == "here and here"
    assert len(gate.noted) == 1 and "No space left" in gate.noted[0]


def test_a_fault_of_the_record_ends_no_keeper(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([RuntimeError("odd"), None, OSError(errno.EMFILE, "too many")])
    moved = GateRecord.moved_ns

    def moved_ns(record: GateRecord) -> int | None:
        if fault := next(looks, None):
            raise fault
        return moved(record)

    gate.shell("cat model")
    gate.waits_for("model")
    monkeypatch.setattr(GateRecord, "moved_ns", moved_ns)
    until(lambda: len(gate.noted) == 2, "both faults are noted")
    gate.give("model", "here")
    assert gate.ends() == "here"


def test_running_a_directory_leaves_no_descriptor_open(gate: Gate) -> None:
    before = len(os.listdir("/proc/self/fd"))
    runs = "print([l.execl(b'd', b'd', None) for _ in range(3)])"
    gate.start(*_python(f"import ctypes; l = ctypes.CDLL(None); {runs}"))
    assert gate.ends() == "[-1, -1, -1]\n"
    assert len(os.listdir("/proc/self/fd")) == before


def test_io_uring_is_refused(gate: Gate) -> None:
    code = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(425, 1, 0)); "
    gate.start(*_python(code + "print(ctypes.get_errno())"))
    assert gate.ends() == f"-1\n{errno.ENOSYS}\n"


def test_a_machine_says_why_it_has_no_gate(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() == ""
    code = f"import sys; sys.path[:0] = {sys.path!r}\n"
    code += "from torpor.machine.gate.listener import why_not; print(why_not())"
    gate.record.end()
    gate.start(*_python(code))  # a second listener
    assert "listens to system calls already" in gate.ends()
    monkeypatch.setattr("subprocess.Popen", _refused)
    assert "cannot start `sleep`" in why_not()
    monkeypatch.undo()
    monkeypatch.setattr("torpor.machine.gate.listener.listen", _refused)
    assert why_not().startswith("the machine or its container forbids")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert why_not().startswith("the gate knows no")


def _refused(*_: object) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")
