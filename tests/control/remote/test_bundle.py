"""Bundles: the same inputs give the same bytes, for this platform and for others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from torpor.control.remote.bundle import KEPT_BUNDLES, Platform, content_hash, make_bundle
from torpor.shared.errors import InvalidInput, MachineUnfit

_PROJECT = Path(__file__).resolve().parents[3]
_HERE = Platform((sys.version_info[0], sys.version_info[1]), "x86_64")
_ELF_MACHINE = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


def test_the_same_inputs_give_the_same_bundle(
    agent_source: Path, bundle_cache: Path, tmp_path: Path
) -> None:
    first = make_bundle(_HERE, source=agent_source, cache=bundle_cache)
    copied = shutil.copytree(agent_source, tmp_path / "elsewhere")
    (copied / "torpor" / "__pycache__").mkdir()
    (copied / "torpor" / "__pycache__" / "x.pyc").write_bytes(b"junk")
    other = make_bundle(_HERE, source=copied, cache=tmp_path / "cache")
    assert (first.hash, first.sha256) == (other.hash, other.sha256)
    (copied / "torpor" / "shared" / "errors.py").write_text("# changed\n")
    assert make_bundle(_HERE, source=copied, cache=tmp_path / "cache").hash != first.hash


def test_the_content_hash_cannot_be_shifted() -> None:
    assert content_hash({"a": b"bc"}) != content_hash({"ab": b"c"})
    assert content_hash({"a": b"", "b": b""}) == content_hash({"b": b"", "a": b""})


@pytest.mark.parametrize("platform", [Platform((3, 12), "aarch64"), Platform((3, 10), "x86_64")])
def test_a_bundle_for_another_machine(
    platform: Platform, agent_source: Path, bundle_cache: Path
) -> None:
    made = make_bundle(platform, source=agent_source, cache=bundle_cache)
    libraries, names = [], set()
    with tarfile.open(made.archive) as tar:
        for member in tar:
            names.add(member.name)
            assert member.isfile() and (member.uid, member.mtime) == (0, 0)
            if member.name.endswith(".so"):
                library = ELFFile(tar.extractfile(member))
                assert library["e_machine"] == _ELF_MACHINE[platform.machine]
                loaded = [part["p_offset"] + part["p_filesz"] for part in library.iter_segments()]
                # all that is loaded, and nothing else
                assert (max(loaded), library.num_sections()) == (member.size, 0)
                libraries.append(member.name)
    assert len(libraries) >= 6
    assert {"__main__.py", "torpor/machine/agent/daemon.py", "blake3/__init__.py"} <= names
    assert any("LICENSE" in name for name in names)
    for unwanted in ("__pycache__", "/tests/", "RECORD", "INSTALLER"):
        assert not any(unwanted in name for name in names), unwanted


@pytest.mark.parametrize("gpu", [True, False])
def test_kernels_for_a_gpu_go_only_where_one_is(
    agent_source: Path, bundle_cache: Path, tmp_path: Path, gpu: bool
) -> None:
    source = shutil.copytree(agent_source, tmp_path / "source")
    built = source / "gpu_kernels" / "built"
    built.mkdir(parents=True)
    for name in ("planes.fatbin", "rans.fatbin", "other.fatbin"):
        (built / name).write_bytes(b"kernels")
    platform = Platform(_HERE.python, _HERE.machine, gpu)
    made = make_bundle(platform, source=source, cache=bundle_cache)
    with tarfile.open(made.archive) as tar:
        sent = {name for name in tar.getnames() if name.endswith(".fatbin")}
    both = {f"gpu_kernels/built/{room}.fatbin" for room in ("planes", "rans")}
    assert sent == (both if gpu else set())


def test_a_bundle_holds_two_floors_the_kernels_and_wheels_and_nothing_else(
    bundle_cache: Path,
) -> None:
    made = make_bundle(_HERE, cache=bundle_cache)
    assert made.archive.stat().st_size < 16 << 20
    with tarfile.open(made.archive) as tar:
        names = set(tar.getnames())
    wheels = next(
        (bundle_cache / "wheels").glob(f"cp{_HERE.python[0]}{_HERE.python[1]}-x86_64-*[!k]")
    )
    brought = {path.name for path in wheels.iterdir()}
    ours = {name for name in names if name.split("/")[0] not in brought}
    sent = ("torpor/shared/", "torpor/machine/", "gpu_kernels/")
    assert {name for name in ours if not name.startswith(sent)} == {
        "__main__.py", "torpor/__init__.py"
    }  # fmt: skip
    for folder in sent:  # whole: every module is there
        modules = {str(path.relative_to(_PROJECT)) for path in (_PROJECT / folder).rglob("*.py")}
        assert modules and modules <= ours


def test_the_agent_loads_from_its_bundle_alone(bundle_cache: Path, tmp_path: Path) -> None:
    made = make_bundle(_HERE, cache=bundle_cache)
    with tarfile.open(made.archive) as tar:
        tar.extractall(tmp_path)  # noqa: S202 - our own archive; Debian's 3.11.2 has no filters
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from torpor.machine.agent import attach, daemon, operations;"
        "bad = {'asyncssh', 'prefect', 'boto3', 'pydantic', 'pandas'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    argv = [sys.executable, "-I", "-S", "-c", program, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("python", "machine"), [((3, 9), "x86_64"), ((3, 11), "i686"), ((3, 11), "armv7l")]
)
def test_a_platform_without_wheels_is_named(python: tuple[int, int], machine: str) -> None:
    with pytest.raises(MachineUnfit, match="wheels"):
        Platform(python, machine)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ("blake3==0.0.0.999 --hash=sha256:{zeros}\n", "package index"),
        ("certifi=={version} --hash=sha256:{zeros}\n", r"(?i)hash"),
        ("certifi=={version}\n", r"(?i)hash"),
    ],
)
def test_a_wheel_that_is_not_the_one_that_was_pinned_goes_to_no_machine(
    pins: str, says: str, agent_source: Path, tmp_path: Path
) -> None:
    """It would run there beside the only copy of a user's work."""
    source = shutil.copytree(agent_source, tmp_path / "source")
    wheels = source / "torpor" / "machine" / "wheels.txt"
    (version,) = re.findall(r"^certifi==(\S+)", wheels.read_text(), re.MULTILINE)
    wheels.write_text(pins.format(version=version, zeros="0" * 64))
    with pytest.raises(InvalidInput, match=says):
        make_bundle(_HERE, source=source, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "wheels").glob("cp*[!k]"))  # nothing half-made


def test_wheels_that_came_with_the_packages_are_not_fetched(
    agent_source: Path, bundle_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_bundle(_HERE, source=agent_source, cache=bundle_cache)
    source = shutil.copytree(agent_source, tmp_path / "source")
    shutil.copytree(bundle_cache / "wheels", source / "wheels")
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:1")
    assert make_bundle(_HERE, source=source, cache=tmp_path / "cache").hash == made.hash
    assert not (tmp_path / "cache" / "wheels").exists()


def test_the_cache_is_bounded(
    agent_source: Path, bundle_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(_HERE, source=agent_source, cache=bundle_cache)
    for folder in (bundle_cache / "wheels").iterdir():  # as if there were none to send
        (tmp_path / "cache" / "wheels" / folder.name).mkdir(parents=True)
    source = shutil.copytree(agent_source, tmp_path / "source")
    for number in range(KEPT_BUNDLES + 3):
        (source / "torpor" / "shared" / "errors.py").write_text(f"# {number}\n")
        made = make_bundle(_HERE, source=source, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "bundles").iterdir())) == KEPT_BUNDLES
    assert made.archive.exists()
