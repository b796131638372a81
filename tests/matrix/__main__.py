"""Every flow of a workspace, stopped in every step by the UI, Ctrl-C and a kill, and then started
again; and every two flows that change something, started at once.

    python -m tests.matrix [--only FLOW] [--by ui,ctrl-c,kill] [--phases scan,commit] [--pairs]
                           [--report FILE]

Prints a table. Ends with 1 if a byte differs, if a machine is alive that no open rental names, or
if a run neither ends nor is said to have died. ``--pairs``: the pairs alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fixtures.deployed import Deployed
from tests.fixtures.own_installation import installed_alone
from tests.fixtures.prefect_server import talking_to
from tests.fixtures.world import make_world, own_store
from tests.matrix.matrix import MEANS, Matrix, Row
from tests.matrix.uses import USES


def main(argv: list[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    means = [by for by in MEANS if by in given.by.split(",")]
    uses = [use for use in USES if given.only in ("", use.flow)]
    rows: list[Row] = []
    print("\n".join(Row.head()), flush=True)
    with _matrix("ui" in means and not given.pairs) as matrix:
        for row in matrix.pairs(uses) if given.pairs else matrix.stops(uses, means, given.phases):
            rows.append(row)
            print(row.line(), flush=True)
            if given.report:
                given.report.write_text("\n".join([*Row.head(), *(row.line() for row in rows), ""]))
    faults = [f"{row.what}, {row.stopped}: {fault}" for row in rows for fault in row.faults]
    print(f"\n{len(rows)} rows, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults else 0


@contextmanager
def _matrix(by_ui: bool) -> Iterator[Matrix]:
    with (
        tempfile.TemporaryDirectory(prefix="matrix-") as folder,
        own_store(Path(folder) / "store") as store,
        make_world(store.server) as world,
    ):
        if not by_ui:
            yield Matrix(world, None)
            return
        with installed_alone() as alone:
            alone.up()
            env = alone.environment()
            os.environ.update({name: env[name] for name in env if name.startswith("PREFECT_")})
            with talking_to(alone.installation, alone.server):
                yield Matrix(world, Deployed(alone.server.api_url))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--only", default="", metavar="FLOW", help="only this flow")
    parser.add_argument("--by", default=",".join(MEANS), help="how runs are stopped")
    parser.add_argument(
        "--phases", type=lambda text: text.split(","), default=[], help="only in these steps"
    )
    parser.add_argument("--pairs", action="store_true", help="two flows at once, and no stops")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
