"""Machines where the agent cannot run: each is recognized before anything is sent."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from tests.fixtures.sshd import Sshd
from torpor.control.remote import probe as probe_module
from torpor.control.remote.session import SshSession
from torpor.shared.errors import DiskFull, InvalidInput, MachineUnfit

_FACTS: dict[str, Any] = {
    "version": [3, 11, 2],
    "home": "/root/.torpor",
    "executable": "/usr/bin/python3",
    "implementation": "CPython",
    "system": "Linux",
    "machine": "x86_64",
    "bits": 64,
    "missing": [],
    "libc": "glibc 2.36",
    "free_bytes": 1 << 40,
    "writable": True,
    "in_the_way": False,
    "noexec": False,
    "nvidia": False,
    "bundles": [],
    "user_home": "/root",
    "cuda": 0,
}


def _fake_python(sshd: Sshd, **facts: Any) -> str:
    """A program on the machine that gives the probe this answer."""
    answer = json.dumps({**_FACTS, **facts})
    path = sshd.folder / f"python-{len(os.listdir(sshd.folder))}"
    path.write_text(f"#!{sys.executable}\nprint('torpor-probe ' + {answer!r})\n")
    path.chmod(0o755)
    return str(path)


def _open(sshd: Sshd, *candidates: str, **options: Any) -> None:
    SshSession.open(sshd.endpoint, sshd.identity, candidates=candidates, **options).close()


def test_a_machine_without_python_is_refused(sshd: Sshd) -> None:
    with pytest.raises(MachineUnfit, match=r"\(Linux \w+\) has no Python") as unfit:
        _open(sshd, "no-such-python", "/no/such/python3")
    assert "3.10 to 3.14" in str(unfit.value) and str(sshd.port) in str(unfit.value)
    assert not (sshd.home / ".torpor").exists()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"version": [3, 8, 18]}, "Python 3.8.18"),
        ({"missing": ["lzma"]}, "Python 3.11.2 without the modules lzma"),
        ({"implementation": "PyPy"}, "64-bit PyPy 3.11.2 on Linux"),
        ({"bits": 32}, "32-bit CPython 3.11.2 on Linux"),
        ({"libc": ""}, "Python 3.11.2 with no glibc (musl?)"),
        (None, "no answer (exit 3), and it printed: pyenv: version not installed"),
    ],
)
def test_a_python_that_does_not_fit_is_named_and_a_good_one_behind_it_is_found(
    facts: dict[str, Any] | None, words: str, sshd: Sshd, agent_source: Path, bundle_cache: Path
) -> None:
    if facts is None:
        odd = str(sshd.folder / "shim")
        Path(odd).write_text("#!/bin/sh\necho 'pyenv: version not installed' >&2\nexit 3\n")
        Path(odd).chmod(0o755)
    else:
        odd = _fake_python(sshd, **facts)
    with pytest.raises(MachineUnfit) as unfit:
        _open(sshd, odd, "no-such-python")
    assert f"It has {odd}: {words}; no-such-python: not found. Install" in str(unfit.value)
    assert not (sshd.home / ".torpor").exists()
    _open(sshd, odd, sys.executable, source=agent_source, cache=bundle_cache)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"libc": ""}, "musl"),
        ({"libc": "glibc 2.12"}, r"glibc 2\.12"),
        ({"bits": 32}, "32-bit"),
        ({"implementation": "PyPy"}, "PyPy"),
        ({"system": "Darwin"}, "Darwin"),
        ({"machine": "riscv64"}, "riscv64"),
        ({"missing": ["ssl", "zlib"]}, "ssl, zlib"),
        ({"writable": False}, "cannot be written"),
        ({"noexec": True}, "mounted noexec"),
        ({"in_the_way": True}, "cannot be written"),
    ],
)
def test_an_unfit_machine_is_refused(sshd: Sshd, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(MachineUnfit, match=words):
        _open(sshd, _fake_python(sshd, **facts))
    assert not (sshd.home / ".torpor").exists()


@pytest.mark.rule("H5")
@pytest.mark.parametrize(
    "told",
    [
        '{"version": 5}',
        "[" * 200_000,
        '{"version": ' + "[" * 5_000 + "]" * 5_000 + "}",
        "[" + "{}," * 80_000 + "{}]",
        json.dumps({**_FACTS, "bundles": 5}),
        json.dumps({**_FACTS, "free_bytes": -1}),
        json.dumps({**_FACTS, "free_bytes": float("nan")}),
        json.dumps({**_FACTS, "libc": "glibc " + "9" * 5_000}),
        json.dumps({**_FACTS, "libc": "glibc 2.x"}),
        json.dumps({**_FACTS, "home": 7}),
        json.dumps({"version": [3, 11, 2]}),
    ],
)
def test_an_answer_that_no_probe_gives_makes_the_machine_unfit(sshd: Sshd, told: str) -> None:
    answer = sshd.folder / "answer"
    answer.write_text(f"torpor-probe {told}\n")
    liar = sshd.folder / "python-that-lies"
    liar.write_text(f"#!/bin/sh\ncat {answer}\n")
    liar.chmod(0o755)
    with pytest.raises(MachineUnfit):
        _open(sshd, str(liar))
    assert not (sshd.home / ".torpor").exists()


@pytest.mark.rule("H5")
@pytest.mark.parametrize("told", ["[" * 100_000, "[]", '{"error": 5}', '{"error": {"type": []}}'])
def test_an_answer_that_no_installation_gives_makes_the_machine_unfit(
    sshd: Sshd, told: str, agent_source: Path, bundle_cache: Path
) -> None:
    """Its probe is honest."""
    answers = [sshd.folder / "probe", sshd.folder / "install"]
    answers[0].write_text("torpor-probe " + json.dumps({**_FACTS, "home": str(sshd.home)}) + "\n")
    answers[1].write_text(f"torpor-install {told}\n")
    liar = sshd.folder / "python-that-lies"
    liar.write_text(f"#!/bin/sh\ncat {answers[0]}\nmv {answers[1]} {answers[0]}\ncat >/dev/null\n")
    liar.chmod(0o755)
    with pytest.raises(MachineUnfit, match="answers what torpor's installation does not say"):
        _open(sshd, str(liar), source=agent_source, cache=bundle_cache)


@pytest.mark.parametrize("nvidia", [True, False])
def test_a_gpu_is_known_by_its_device_file(nvidia: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = msgspec.convert({**_FACTS, "nvidia": nvidia}, probe_module.MachineFacts)
    machine = probe_module.check(told, "python3", "here")
    assert machine.platform.gpu is nvidia
    exists = Mock(return_value=nvidia)
    monkeypatch.setattr(os.path, "exists", exists)
    monkeypatch.setattr(sys, "argv", ["probe", "~/.torpor"])
    said = io.StringIO()
    with redirect_stdout(said):
        exec(probe_module.SCRIPT, {})  # noqa: S102  (as the machine runs it)
    facts = json.loads(said.getvalue().split("torpor-probe ")[1])
    assert facts["nvidia"] is nvidia
    assert exists.call_args_list[0].args == ("/dev/nvidiactl",)


def test_no_space(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiskFull, match="5 MiB are free"):
        _open(sshd, _fake_python(sshd, free_bytes=5 << 20))
    monkeypatch.setattr(probe_module, "NEEDED_BYTES", 1 << 62)  # the real probe, a huge need
    with pytest.raises(DiskFull, match="larger disk"):
        _open(sshd, sys.executable)
    assert not (sshd.home / ".torpor").exists()


def test_space_that_ends_while_installing(
    sshd: Sshd, agent_source: Path, bundle_cache: Path
) -> None:
    full = sshd.folder / "full"
    full.mkdir()
    (full / ".torpor-home").touch()
    (full / "bundles").symlink_to("/dev/full")
    with pytest.raises(MachineUnfit, match="cannot be installed"):
        _open(sshd, sys.executable, home=str(full), source=agent_source, cache=bundle_cache)


def test_a_folder_that_is_not_ours_is_left_alone(
    sshd: Sshd, agent_source: Path, bundle_cache: Path
) -> None:
    (sshd.home / "thesis.txt").write_text("the only copy")
    with pytest.raises(MachineUnfit, match="not torpor's"):
        _open(sshd, sys.executable, home="~/", source=agent_source, cache=bundle_cache)
    assert os.listdir(sshd.home) == ["thesis.txt"]


@pytest.mark.parametrize("home", ["relative", "~other/x", "/a\nb", "/a\0b"])
def test_an_invalid_agent_folder_is_refused(sshd: Sshd, home: str) -> None:
    with pytest.raises(InvalidInput, match="must begin with"):
        _open(sshd, sys.executable, home=home)


def test_words_in_a_home_are_never_run(sshd: Sshd, agent_source: Path, bundle_cache: Path) -> None:
    home = sshd.folder / "a 'b' $(touch ran) ;touch ran"
    _open(sshd, sys.executable, home=str(home), source=agent_source, cache=bundle_cache)
    assert (home / "machine-id").exists()
    assert not list(sshd.folder.rglob("ran"))
