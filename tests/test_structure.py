"""The rooms of the project: who may import whom, and what runs on a machine."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

from torpor.shared.codecs.encodings import ENCODINGS

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("torpor", "gpu_kernels", "blocks", "tasks", "flows", "deployments", "benchmarks")

FLOORS: dict[str, dict[str, set[str]]] = {
    "shared": {  # runs on the machine and beside the flows
        "plain_text": set(),
        "errors": {"plain_text"},
        "values": {"errors"},
        "codecs": {"values", "errors"},
        "format": {"codecs", "values", "errors"},
        "wire": {"values", "errors"},
        "transfer": {"values", "errors"},
    },
    "machine": {  # runs on the rented machine
        "tree": set(),
        "pipeline": {"tree"},
        "sampler": set(),
        "checkpoint": set(),
        "agent": {"checkpoint", "pipeline", "sampler", "supervisor", "tree"},
        "supervisor": {"checkpoint", "sampler"},
    },
    "control": {  # runs beside the flows; no machine gets it
        "ports": set(),
        "processes": set(),
        "reports": set(),
        "losses": {"reports"},
        "time_zones": set(),
        "store_prices": set(),
        "store": {"ports", "processes"},
        "supervision": {"own_server"},
        "own_server": {"processes"},
        "own_packages": set(),
        "disk_space": set(),
        "front_page": {"alerts", "overview", "reports", "watch_report"},
        "hosts": {"store"},
        "idleness": set(),
        "alerts": {
            "disk_space",
            "money",
            "overview",
            "reconciliation",
            "rental",
            "reports",
            "supervision",
            "watch_report",
        },
        "variables": set(),
        "jobs": {"rental", "reports", "safety", "store", "variables"},
        "deploy": {"reports", "safety", "store", "upkeep", "variables"},
        "overview": {"reports"},
        "machine_use": set(),
        "watch_report": {"idleness", "machine_use", "reconciliation", "reports"},
        "metrics": {"alerts", "jobs", "machine_use", "money", "overview", "watch_report"},
        "safety": {"store"},
        "reconciliation": {"providers", "rental", "reports"},
        "upkeep": {"losses", "safety", "reports", "store", "time_zones"},
        "providers": {"safety", "ports", "processes", "variables"},
        "rental": {"providers", "remote", "reports", "safety", "store"},
        "measure": {"processes", "store", "store_prices"},
        "money": {"measure", "rental", "reports", "store", "store_prices", "time_zones"},
        "compare": {"measure", "providers", "rental", "reports", "store_prices"},
        "remote": {"safety", "store"},
        "recovery": {"jobs", "rental", "reports", "store", "upkeep"},
        "smoke": {"providers", "remote", "rental", "reports", "safety"},
    },
}
"""The floors of torpor, their rooms, and which rooms of its floor a room may import. ``machine``
and ``control`` may import everything of ``shared``, and nothing of each other."""
USES_KERNELS = {
    "shared.codecs",
    "shared.format",
    "machine.tree",
    "machine.pipeline",
    "machine.agent",
    "control.remote",
}

ABOVE: dict[str, set[str]] = {
    "gpu_kernels": set(),
    "torpor": {"gpu_kernels"},
    "blocks": {"torpor"},
    "tasks": {"torpor", "blocks"},
    "flows": {"torpor", "blocks", "tasks"},
    "deployments": {"torpor", "blocks", "tasks", "flows"},
    "torpor_cli": {"torpor", "blocks", "tasks", "flows", "deployments"},
    "benchmarks": {"torpor", "gpu_kernels", "blocks", "tasks", "flows", "deployments"},
}
"""Which of our packages a package may import."""

SHIPPED = {"blake3", "zstandard", "lz4", "msgspec", "cryptography", "certifi", "pynvml"}
"""What the agent's bundle brings to a machine, besides Python itself."""

MEANINGLESS = {"utils", "util", "helper", "helpers", "common", "misc"}
"""A module of this name may hold anything."""


def _modules(*tops: str) -> Iterator[Path]:
    for top in tops:
        yield from sorted((ROOT / top).rglob("*.py"))


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path), str(path))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that ``path`` imports, anywhere in it; and whether as soon as it is loaded."""
    at_once = {id(node) for node in _at_once(_tree(path))}
    found = []
    for node in _nodes(path):
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


def _floor_and_room(path: Path) -> tuple[str, str]:
    floor, room = path.relative_to(ROOT / "torpor").parts[:2]
    return floor, room.removesuffix(".py")


def _rooms() -> Iterator[tuple[Path, str, str]]:
    """Every module of torpor, with its floor and its room."""
    for path in _modules("torpor"):
        if path.name != "__init__.py" or len(path.relative_to(ROOT / "torpor").parts) > 2:
            yield path, *_floor_and_room(path)


@pytest.mark.parametrize("top", TOPS)
def test_packages_import_downwards(top: str) -> None:
    allowed = ABOVE[top] | {top}
    for path in _modules(top):
        for name, _ in _imports(path):
            package = name.split(".")[0]
            assert package not in TOPS or package in allowed, f"{path} imports {name}"
            assert package != "tests", f"{path} imports {name}"


def test_only_the_benchmarks_own_tests_import_benchmarks() -> None:
    own = ROOT / "tests" / "benchmarks"
    for path in _modules("tests"):
        for name, _ in _imports(path):
            assert name.split(".")[0] != "benchmarks" or own in path.parents, f"{path}: {name}"


def test_floors_and_rooms_import_downwards() -> None:
    for path, floor, room in _rooms():
        for name, _ in _imports(path):
            package, _, rest = name.partition(".")
            if package == "gpu_kernels":
                assert f"{floor}.{room}" in USES_KERNELS, f"{path} imports {name}"
            if package != "torpor":
                continue
            other_floor, _, rest = rest.partition(".")
            other = rest.partition(".")[0]
            if other_floor == floor:
                assert other == room or other in FLOORS[floor][room], f"{path} imports {name}"
            else:
                assert floor != "shared" and other_floor == "shared", f"{path} imports {name}"


def test_the_rooms_are_those_of_the_design() -> None:
    found: dict[str, set[str]] = {}
    for _, floor, room in _rooms():
        found.setdefault(floor, set()).add(room)
    assert found == {floor: set(rooms) for floor, rooms in FLOORS.items()}
    for rooms in FLOORS.values():  # and no two may import each other
        for room, below in rooms.items():
            for other in below:
                assert room not in rooms[other]


def test_floors_and_the_engine_itself_hold_no_code() -> None:
    for package in (ROOT / "torpor", *(ROOT / "torpor" / floor for floor in FLOORS)):
        assert _imports(package / "__init__.py") == []


@pytest.mark.parametrize("top", ["blocks", "tasks", "flows", "deployments"])
def test_nothing_beside_the_flows_imports_what_runs_on_machines(top: str) -> None:
    for path in _modules(top):
        for name, _ in _imports(path):
            assert not name.startswith("torpor.machine"), f"{path} imports {name}"


def test_each_flow_has_a_file_of_its_name_and_is_alone_in_it() -> None:
    for path in (ROOT / "flows").glob("*.py"):
        if path.name != "__init__.py":
            functions = [node for node in _tree(path).body if isinstance(node, ast.FunctionDef)]
            flows = [
                function.name
                for function in functions
                if any("flow(" in ast.unparse(decorator) for decorator in function.decorator_list)
            ]
            assert flows == [path.stem], path


def test_the_engine_knows_nothing_of_prefect() -> None:
    for path in _modules("torpor", "gpu_kernels"):
        for name, _ in _imports(path):
            assert name.split(".")[0] not in ("prefect", "prefect_aws", "pydantic"), path


def test_values_and_format_and_codecs_do_no_io() -> None:
    doors = {"socket", "subprocess", "http", "urllib", "shutil", "pathlib", "tempfile", "asyncio"}
    for path, floor, room in _rooms():
        if floor == "shared" and room in ("errors", "values", "format", "codecs"):
            for name, _ in _imports(path):
                assert name.split(".")[0] not in doors, f"{path} imports {name}"


# -- what runs on machines


def _sent() -> list[Path]:
    """Every module of ours that is sent to a machine."""
    return list(_modules("torpor/shared", "torpor/machine", "gpu_kernels"))


def _of_the_agent() -> set[Path]:
    """What the agent may import of that: all but the kernels' own suites, which use NumPy."""
    pending, seen = list(_modules("torpor/shared", "torpor/machine")), set[Path]()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for name, _ in _imports(path):
            parts = name.split(".")
            if parts[0] == "gpu_kernels":
                below = (ROOT.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))
                found = (file for at in below for file in (at / "__init__.py", Path(f"{at}.py")))
                pending += filter(Path.is_file, found)
    return seen


def test_the_agent_runs_on_python_3_10() -> None:
    late = re.compile(r"\b(tomllib|ExceptionGroup|TaskGroup|datetime\.UTC|typing\.Self)\b")
    for path in _sent():
        text = path.read_text()
        tree = ast.parse(text, str(path), feature_version=(3, 10))
        assert not late.search(text), f"{path}: {late.search(text)}"
        for name, _ in _imports(path):
            assert name not in _LATER, f"{path} imports {name}"
        if len(tree.body) > 1 and len(text.splitlines()) > 3:
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
            # CuPy is for the GPU's worker, a process of its own under a Python that has it
            known = known or (package == "cupy" and path == ROOT / "gpu_kernels/cuda.py")
            assert known or not at_once, f"{path} imports {name} as soon as it is loaded"


def test_the_agent_never_loads_cupy_and_with_it_the_driver() -> None:
    for path in _modules("torpor"):
        names = [name for name, _ in _imports(path)]
        assert not [n for n in names if n.startswith(("cupy", "gpu_kernels.cuda"))], path


def test_the_bundle_brings_what_the_agent_imports() -> None:
    wheels = (ROOT / "torpor/machine/wheels.txt").read_text()
    brought = set(re.findall(r"^([\w-]+)==", wheels, re.MULTILINE))
    brought = {"pynvml" if name == "nvidia-ml-py" else name for name in brought}
    assert brought >= SHIPPED
    assert brought - SHIPPED == {"cffi", "pycparser"}  # of cryptography


# -- what every module keeps to


def test_no_module_has_a_name_that_says_nothing() -> None:
    for path in _modules(*TOPS, "tests"):
        assert not MEANINGLESS & {path.stem, path.stem.rpartition("_")[2]}, path


def test_types_are_learned_before_threads_decode_into_them() -> None:
    """In every function, which any thread may call; what runs at import runs once."""
    found = 0
    for path in _modules(*TOPS):
        functions = [node for node in _nodes(path) if isinstance(node, ast.FunctionDef)]
        for call in (n for function in functions for n in ast.walk(function)):
            if not isinstance(call, ast.Call) or path.name == "values.py":
                continue
            called = ast.unparse(call.func)
            if re.fullmatch(r"msgspec\.(convert|\w+\.(decode|Decoder))", called):
                kinds = [word.value for word in call.keywords if word.arg == "type"]
                kinds += call.args[0 if called.endswith("Decoder") else 1 :]
                for kind in map(ast.unparse, kinds):
                    assert kind.startswith(("learned(", "dict[str,")), (
                        f"{path}:{call.lineno}: {kind}"
                    )
                    found += 1
    assert found > 20


def test_tests_keep_to_what_is_public() -> None:
    """A private name of ours in a test hinders whoever changes how something is done."""
    for path in _modules("tests"):
        if str(path.relative_to(ROOT / "tests")) not in _SEE_PRIVATE_NAMES:
            assert not (names := sorted(_private_names(path))), f"{path}: {names}"


_SEE_PRIVATE_NAMES = {
    # what a hostile caller would use
    "control/test_safety.py",
    "control/upkeep/test_verification.py",
    # what is held, which only its holder knows
    "gpu_kernels/test_kernels.py",
    "machine/agent/test_daemon.py",
    "machine/agent/test_gpu.py",
    "machine/agent/test_gpu_worker.py",
    "machine/agent/test_passing.py",
    # a moment of a run that nothing else marks
    "flows/test_fleet.py",
    "flows/test_replicate.py",
    "machine/agent/test_path_restores.py",
}
_PATCHING = (".setattr", ".delattr", "patch.object", "patch")
_OF_LIBRARIES = {"_fields", "_exit", "_asdict", "_replace", "_logo_url"}
_OF_LIBRARIES |= {"_attr_to_rest_field", "_rest_name", "_visibility"}  # Microsoft's models


def _private_names(path: Path) -> Iterator[str]:
    """Names with an underscore that this test takes or patches, and that are not its own."""
    names = set()
    own = _OF_LIBRARIES | {
        node.name for node in _nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for node in _nodes(path):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TOPS:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_PATCHING):
            words = (one.value for one in node.args[:2] if isinstance(one, ast.Constant))
            names |= {str(word).rpartition(".")[2] for word in words}
    return (name for name in names - own if name.startswith("_") and not name.startswith("__"))


def test_nothing_is_left_to_do() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in set(_modules(*TOPS, "tests")) - {Path(__file__).resolve()}:
        assert not words.search(_text(path)), path


@pytest.mark.parametrize("top", TOPS)
def test_our_packages_are_those_of_this_checkout(top: str) -> None:
    """``tasks``, ``flows`` and others exist on the package index too."""
    module = importlib.import_module(top)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)


# -- the format and the code say the same


def test_the_format_names_every_encoding() -> None:
    text = (ROOT / "docs/format.md").read_text()
    rows = re.findall(r"^\| (\d) \| `(\w+)` \| .+ \| (no|yes) \| (CPU|GPU) \|$", text, re.MULTILINE)
    assert rows == [
        (str(one.code), one.name, "yes" if one.needs_layout else "no", one.written_by)
        for one in ENCODINGS.values()
    ]


def test_the_format_s_numbers_are_the_code_s() -> None:
    from torpor.shared.format.manifest import MAX_BODY_BYTES, MAX_CHUNK_BYTES, VERSION
    from torpor.shared.format.sizes import BIG_FILE_BYTES, CHUNK_BYTES, GROUP_BYTES, PACK_BYTES
    from torpor.shared.values import GIB, MIB

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


def test_every_file_of_ours_is_in_the_package() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for top in ("torpor", "flows", "tasks", "blocks"):
        others = {
            str(path.relative_to(ROOT / top))
            for path in (ROOT / top).rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        }
        assert others == set(named["package-data"].get(top, ()))
