"""The rooms of the project: who may import whom, and what every module keeps to."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from torpor.codecs.codec import Codec
from torpor.codecs.planes import PLANES, RANS
from torpor.codecs.stock import LZ4, RAW, ZSTD
from torpor.format.checks import KNOWN_ENCODINGS

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("torpor", "gpu_kernels", "blocks", "tasks", "flows", "deployments", "benchmarks")

ENGINE = {
    "errors": set(),
    "values": {"errors"},
    "ports": set(),
    "format": {"values", "errors"},
    "reports": {"values", "errors"},
    "tree": {"format", "values", "errors"},
    "store": {"format", "ports", "values", "errors"},
    "codecs": {"format", "values", "errors", "gpu_kernels"},
    "pipeline": {"tree", "store", "codecs", "format", "values", "errors", "gpu_kernels"},
    "agent": {"pipeline", "tree", "store", "codecs", "format", "values", "errors", "gpu_kernels"},
    # the control side's rooms; no machine gets them
    "ledger": {"store", "format", "values", "errors"},
    "safety": {"store", "format", "values", "errors"},
    "reconciliation": {"ledger", "reports", "values", "errors"},
    "upkeep": {"ledger", "safety", "reports", "store", "format", "values", "errors"},
    "providers": {"safety", "ports", "values", "errors"},
    "measure": {"agent", "codecs", "providers", "store", "values", "errors"},
    "remote": {"agent", "safety", "store", "format", "values", "errors", "gpu_kernels"},
}
"""Which rooms of torpor a room may import."""

ABOVE: dict[str, set[str]] = {
    "gpu_kernels": set(),
    "torpor": {"gpu_kernels"},
    "blocks": {"torpor"},
    "tasks": {"torpor", "blocks"},
    "flows": {"torpor", "blocks", "tasks"},
    "deployments": {"torpor", "blocks", "tasks", "flows"},
    "benchmarks": {"torpor", "gpu_kernels", "blocks", "tasks", "flows", "deployments"},
}
"""Which of our packages a package may import."""

SHIPPED = {"blake3", "zstandard", "lz4", "msgspec", "cryptography", "certifi"}
"""What the agent's bundle brings to a machine, besides Python itself."""

BANNED = {"utils", "util", "base", "manager", "service", "helper", "helpers", "common", "misc"}
MOST_LINES = 600


def _modules(*tops: str) -> Iterator[Path]:
    for top in tops:
        yield from sorted((ROOT / top).rglob("*.py"))


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that ``path`` imports, anywhere in it; and whether as soon as it is loaded."""
    tree = ast.parse(path.read_text(), str(path))
    at_once = {id(node) for node in _at_once(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in at_once) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found += [(f"{node.module}.{alias.name}", id(node) in at_once) for alias in node.names]
    return found


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _at_once(child)


def _room(path: Path) -> str:
    return path.relative_to(ROOT / "torpor").parts[0].removesuffix(".py")


@pytest.mark.parametrize("top", TOPS)
def test_packages_import_downwards(top: str) -> None:
    allowed = ABOVE[top] | {top}
    for path in _modules(top):
        for name, _ in _imports(path):
            package = name.split(".")[0]
            assert package not in TOPS or package in allowed, f"{path} imports {name}"
            assert package != "tests" or top == "benchmarks", f"{path} imports {name}"


def test_rooms_of_the_engine_import_downwards() -> None:
    for path in _modules("torpor"):
        room = _room(path)
        if room == "__init__":
            assert _imports(path) == []
            continue
        for name, _ in _imports(path):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0] if package == "torpor" else package
            if package in ("torpor", "gpu_kernels") and target != room:
                assert target in ENGINE[room], f"{path} imports {name}"


def test_the_rooms_are_those_of_the_design() -> None:
    found = {_room(path) for path in _modules("torpor")} - {"__init__"}
    assert found == set(ENGINE)
    for room, below in ENGINE.items():  # and no two may import each other
        for other in below & set(ENGINE):
            assert room not in ENGINE[other]


def test_the_engine_knows_nothing_of_prefect() -> None:
    for path in _modules("torpor", "gpu_kernels"):
        for name, _ in _imports(path):
            assert name.split(".")[0] not in ("prefect", "prefect_aws", "pydantic"), path


def test_values_and_format_and_codecs_do_no_io() -> None:
    doors = {"socket", "subprocess", "http", "urllib", "shutil", "pathlib", "tempfile", "asyncio"}
    for path in _modules("torpor"):
        if _room(path) in ("errors", "values", "format", "codecs"):
            for name, _ in _imports(path):
                assert name.split(".")[0] not in doors, f"{path} imports {name}"


# -- what runs on machines


def _path_of(name: str) -> Path | None:
    """The file of one of our modules, for ``a.b`` and for ``a.b.name_in_it``."""
    parts = name.split(".")
    for count in (len(parts), len(parts) - 1):
        base = ROOT.joinpath(*parts[:count])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def _of_the_agent() -> set[Path]:
    """Every module of ours that the agent's program may import, directly or not."""
    pending = [ROOT / "torpor/agent/__main__.py", *(ROOT / "torpor/agent").glob("*.py")]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for name, _ in _imports(path):
            if name.split(".")[0] in TOPS and (found := _path_of(name)) is not None:
                pending.append(found)
    return seen


def test_what_the_agent_imports_is_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in _of_the_agent()}
    assert {"torpor/agent/daemon.py", "torpor/tree/walk.py", "torpor/errors.py"} <= names
    assert not any(name.startswith(("torpor/remote", "torpor/providers")) for name in names)


def test_the_agent_runs_on_python_3_10() -> None:
    late = re.compile(r"\b(tomllib|ExceptionGroup|TaskGroup|datetime\.UTC|typing\.Self)\b")
    for path in _of_the_agent():
        text = path.read_text()
        tree = ast.parse(text, str(path), feature_version=(3, 10))
        assert not late.search(text), f"{path}: {late.search(text)}"
        for name, _ in _imports(path):
            assert name not in _LATER, f"{path} imports {name}"
        if tree.body and len(text.splitlines()) > 3:
            assert "from __future__ import annotations" in text, path


_LATER = {
    "datetime.UTC",
    "enum.StrEnum",
    "typing.Self",
    "typing.assert_never",
    "typing.LiteralString",
    "typing.NotRequired",
    "typing.Unpack",
    "typing.override",
    "itertools.batched",
    "asyncio.timeout",
    "asyncio.TaskGroup",
    "contextlib.chdir",
    "hashlib.file_digest",
    "tomllib",
}
"""In the standard library since 3.11 or later."""


def test_the_agent_imports_what_its_bundle_brings() -> None:
    for path in _of_the_agent():
        for name, at_once in _imports(path):
            package = name.split(".")[0]
            known = package in sys.stdlib_module_names or package in SHIPPED or package in TOPS
            # what a machine may happen to have (a GPU's libraries) is looked for, not relied on
            assert known or not at_once, f"{path} imports {name} as soon as it is loaded"


def test_the_bundle_brings_what_the_agent_imports() -> None:
    wheels = (ROOT / "torpor/agent/wheels.txt").read_text()
    brought = set(re.findall(r"^(\w+)==", wheels, re.MULTILINE))
    assert brought >= SHIPPED
    assert brought - SHIPPED == {"cffi", "pycparser"}  # of cryptography


# -- what every module keeps to


def test_no_module_is_over_600_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in _modules(*TOPS, "tests")
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is_and_is_named_for_one_thing() -> None:
    for path in _modules(*TOPS, "tests"):
        assert path.stem not in BANNED, path
        assert not path.stem.endswith(tuple(f"_{word}" for word in BANNED)), path
    for path in _modules(*TOPS):
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_nothing_is_left_to_do() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in set(_modules(*TOPS, "tests")) - {Path(__file__).resolve()}:
        assert not words.search(path.read_text()), path


@pytest.mark.parametrize("top", TOPS)
def test_our_packages_are_those_of_this_checkout(top: str) -> None:
    """``tasks``, ``flows`` and others exist on the package index too."""
    module = importlib.import_module(top)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)


# -- the format and the code say the same


def test_the_format_names_every_encoding() -> None:
    text = (ROOT / "docs/format.md").read_text()
    rows = dict(re.findall(r"^\| (\d) \| `(\w+)` \|", text, re.MULTILINE))
    codecs: tuple[Codec, ...] = (RAW, LZ4, ZSTD)
    named = {str(codec.code): codec.name for codec in codecs}
    named |= {str(codec.code): codec.name for codec in (PLANES, RANS)}
    assert rows == named
    assert {int(code) for code in rows} == KNOWN_ENCODINGS


def test_the_format_s_numbers_are_the_code_s() -> None:
    from torpor.format.manifest import MAX_BODY_BYTES, MAX_CHUNK_BYTES, VERSION
    from torpor.pipeline.upload import PACK_BYTES
    from torpor.tree.plan import BIG_FILE_BYTES, CHUNK_BYTES, GROUP_BYTES
    from torpor.values import GIB, MIB

    text = re.sub(r"\s+", " ", (ROOT / "docs/format.md").read_text())
    for said in (
        f"# The snapshot format, version {VERSION}",
        f"at most {MAX_CHUNK_BYTES // MIB} MiB of plain bytes",
        f"A file of {BIG_FILE_BYTES // MIB} MiB or more is cut",
        f"multiples of {CHUNK_BYTES // MIB} MiB",
        f"shared chunks of at most {GROUP_BYTES // MIB} MiB",
        f"close a pack at {PACK_BYTES // MIB} MiB",
        f"at most {MAX_BODY_BYTES // GIB} GiB",
    ):
        assert said in text, said
