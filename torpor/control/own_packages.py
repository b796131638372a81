"""Whether `flows`, `tasks` and the others that Python finds are torpor's own: the names are common,
and a folder of the user's comes first."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

NAMES: Final = ("flows", "tasks", "blocks", "deployments", "gpu_kernels")


def check_own_packages() -> None:
    """Raise ImportError, which says what was found instead, where one of the packages is another
    program's."""
    ours = Path(__file__).resolve().parents[2]
    for name in NAMES:
        spec = find_spec(name)
        found = [
            Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()
        ]
        if (ours / name).resolve() not in found:
            where = found[0] if found else "nowhere"
            raise ImportError(
                f"torpor needs its own package {name!r} in {ours}, and Python found {where}: start "
                "your program in another folder, or rename that one, or start flows without an "
                "import, by prefect.deployments.run_deployment('wake/wake', ...)"
            )
