"""What a machine is, for choosing a compatible one later. No secrets: values of environment
variables are kept only where the name is on a list of harmless ones."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from torpor.machine.tree.owned import RECORDS
from torpor.shared.values import Host

_HARMLESS: Final = re.compile(
    r"PATH|LANG|LC_\w+|TZ|SHELL|LD_LIBRARY_PATH|CUDA_(HOME|PATH|VERSION|VISIBLE_DEVICES)"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_CUDA)|PYTHONPATH|VIRTUAL_ENV"
    r"|CONDA_(PREFIX|DEFAULT_ENV)|HF_(HOME|HUB_CACHE)|TRANSFORMERS_CACHE|TORCH_HOME|XDG_\w+_(HOME|DIR)"
    r"|OMP_NUM_THREADS|NCCL_DEBUG"
)
_MOST_PACKAGES: Final = 20_000
_HEAD_BYTES: Final = 1 << 16
# importlib.metadata also parses the description, which takes ten times as long.
_NAME: Final = re.compile(r"^Name:\s*(\S+)", re.MULTILINE)
_VERSION: Final = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)


def record_environment() -> dict[str, Any]:
    """The machine's image, system, driver, CUDA and GPUs, read once by each agent; and the packages
    that are installed now."""
    packages = {"python_packages": _python_packages(), "apt_packages": _apt_packages()}
    return _record_machine() | packages


@functools.cache
def host() -> Host:
    """What frozen processes find on this machine."""
    return Host(platform.release(), _features(), _driver() or "", platform.machine())


@functools.cache
def _record_machine() -> dict[str, Any]:
    gpus = _gpus()
    return {
        "os": _os_release(),
        "kernel": host().kernel,
        "cpu_features": host().features,
        "architecture": host().architecture,
        "python": sys.version.split()[0],
        "image": _image(),
        "nvidia_driver": host().driver or None,
        "cuda": _cuda(),
        "gpus": [words for words, _ in gpus],
        "gpu_uuids": [uuid for _, uuid in gpus],
        "variables": {n: v for n, v in sorted(os.environ.items()) if _HARMLESS.fullmatch(n)},
        "variable_names": sorted(n for n in os.environ if not _HARMLESS.fullmatch(n)),
    }


def _os_release() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _image() -> str | None:
    """The container image, if the provider states it."""
    return os.environ.get("RUNPOD_IMAGE_NAME") or os.environ.get("VAST_IMAGE") or None


def _features() -> str:
    """The features of the first processor, in the kernel's names."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else ""


def _driver() -> str | None:
    text = _text(Path("/proc/driver/nvidia/version"))
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found.group(1) if found else None


def _cuda() -> str | None:
    text = _text(Path("/usr/local/cuda/version.json"))
    found = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', text)
    return found.group(1) if found else os.environ.get("CUDA_VERSION")


def _gpus() -> list[tuple[str, str]]:
    """The name, the memory and the UUID of each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,memory.total,uuid", "--format=csv,noheader"],
            capture_output=True,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.decode(errors="replace").splitlines()
    found = [line.rpartition(",") for line in lines if "," in line]
    return [(words.strip(), uuid.strip()) for words, _, uuid in found]


def python_places() -> list[str]:
    """Where the machine's own Python has its packages, without those of the agent, and without
    names that are no directories: an editable installation adds one, and the folder that it would
    be looked for in may have been removed."""
    bundle = os.path.realpath(sys.path[0])
    return [p for p in sys.path if os.path.isabs(p) and os.path.realpath(p) != bundle]


def package_places() -> list[str]:
    """These, and where pip puts the packages of a user who is not root."""
    user_site = site.getusersitepackages()
    return [*python_places(), *([user_site] if user_site not in sys.path else [])]


class PythonPackage(NamedTuple):
    """``record``: the path of its record. ``installer``: the program that says it installed it."""

    name: str
    version: str
    record: str
    installer: str


def packages_of_python(places: Sequence[str]) -> list[PythonPackage]:
    """The packages in ``places``; the first of a name counts, as for an import. A record that
    cannot be read, or that pip has moved aside (``~``), names none, whatever is in it."""
    found: dict[str, PythonPackage] = {}
    for place in places:
        names: list[str] = []
        with suppress(OSError):
            names = sorted(os.listdir(place))
        for name in names:
            if not name.endswith(RECORDS) or name.startswith("~"):
                continue
            record = f"{place}/{name}"
            files = (f"{record}/METADATA", f"{record}/PKG-INFO", record)
            head = next(filter(None, map(_head, files)), "").partition("\n\n")[0]
            named, version = _NAME.search(head), _VERSION.search(head)
            if named and version and len(found) < _MOST_PACKAGES:
                package = PythonPackage(
                    named[1], version[1], record, _head(f"{record}/INSTALLER").strip()
                )
                found.setdefault(package.name, package)
    return list(found.values())


def _head(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES).decode(errors="replace").replace("\r\n", "\n")
    except (OSError, ValueError):
        return ""


def _python_packages() -> dict[str, str]:
    """The packages of the machine's own Python, without those of the agent."""
    return {one.name: one.version for one in packages_of_python(python_places())}


def _apt_packages() -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in _text(Path("/var/lib/dpkg/status")).splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif line.startswith("Version: ") and name and len(found) < _MOST_PACKAGES:
            found[name] = line[9:]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
