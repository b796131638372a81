"""How many bytes of a real environment a program uses, as the snapshot after it says.

    python -m benchmarks.learned --wheels FOLDER [--keep NAME]

FOLDER as for benchmarks.embeddings. The workspace holds an environment with PyTorch and
transformers, and a small model. It wakes, a program computes an embedding with both, and it
hibernates: its snapshot says which files were used. The flow runs without Prefect.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.deploy import NAME, opened_here, used_bytes
from benchmarks.embeddings import TORCH, TRANSFORMERS, unpack_model
from benchmarks.kept import write_result
from flows import create, hibernate, wake
from tasks.plain_runner import PlainRunner
from torpor.control.measure.host import host_facts

_PROGRAM: Final = """\
import sys, torch
from transformers import AutoModel, AutoTokenizer
tokens = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1]).eval()
with torch.inference_mode():
    print(model(**tokens("a machine sleeps", return_tensors="pt")).last_hidden_state.shape)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.folder, options.wheels.resolve())
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(folder: Path, wheels: Path) -> dict[str, Any]:
    """The plain bytes of the workspace by whether the program used them."""
    with opened_here(folder) as (opened, _, place), PlainRunner(opened):
        create.fn(NAME)
        workspace = _workspace(place)
        unpack_model(wheels, workspace / "model")
        subprocess.run([sys.executable, "-m", "venv", str(workspace / "venv")], check=True)
        install = ["install", "--quiet", "--no-index", "--find-links", str(wheels)]
        _run(workspace, "-m", "pip", *install, TORCH, TRANSFORMERS)
        hibernate.fn(NAME)
        wake.fn(NAME)
        workspace = _workspace(place)
        _run(workspace, "-B", "-c", _PROGRAM, str(workspace / "model"))
        hibernate.fn(NAME)
        return {"benchmark": "learned", "host": host_facts(), "used_bytes": used_bytes(opened)}


def _workspace(place: Path) -> Path:
    (home,) = (place / "m").glob("m-*/home")
    return home / "workspace"


def _run(workspace: Path, *arguments: str) -> None:
    subprocess.run([str(workspace / "venv" / "bin" / "python"), *arguments], check=True)


if __name__ == "__main__":
    main()
