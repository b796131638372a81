"""The ready-made stacks. They are the user's once they are saved: `make up` never changes them.

Where commands, environment variables, health and completion shapes come from:

* llama.cpp: a real server from the same wheel (benchmarks/deploy.py).
* ollama: docs/linux.mdx (the archive, and `ollama serve`), docs/faq.mdx (OLLAMA_HOST and
  OLLAMA_MODELS) and docs/api.md (`/api/version`, `/api/generate` with `stream`, `response`) of
  ollama/ollama at fb30760; v0.30.10 is a tag there. It asks for no key on its own machine.
* vLLM: docs/serving/online_serving/openai_compatible_server.md (`vllm serve`, `/v1/completions`),
  docs/usage/security.md (`/health` without a key, VLLM_API_KEY as a bearer token for `/v1`),
  docs/deployment/docker.md (VLLM_CACHE_ROOT keeps what was compiled; the image; HF_TOKEN) and
  completion/protocol.py (`choices[].text`) of vllm-project/vllm. 0.30.0 is on PyPI. It is built for
  CUDA 13, which needs driver 580 or newer; the image has a tag v0.30.0-cu129 for older ones.
* Jupyter: operators/security.rst of jupyter-server (token), and the list of docker-stacks' images.

The last three were not run. Their images' tags were seen in others' compose files and Dockerfiles;
no registry was asked. Each meets a server of its shape in tests/flows/test_deploy_stacks.py.
"""

from __future__ import annotations

import json
from typing import Final

from blocks import Stack

_VENV: Final = [
    "sh", "-euc",
    'python3 -m venv "$1"; into="$1"; shift; "$into/bin/pip" install --no-cache-dir "$@"',
    "sh", "{environment}",
]  # fmt: skip
_LLAMA_CPP: Final = """\
import signal, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostnames = sys.argv[1], int(sys.argv[2]), ["127.0.0.1"]
params.n_gpu_layers, params.n_ctx = 999, int(sys.argv[3])
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
"""
_OLLAMA_SETUP: Final = """\
case "$(uname -m)" in aarch64) arch=arm64 ;; *) arch=amd64 ;; esac
mkdir -p "$1"
curl -fsSL "https://github.com/ollama/ollama/releases/download/v$2/ollama-linux-$arch.tar.zst" |
    zstd -d | tar -x -C "$1"
"$1/bin/ollama" --version
"""
_OLLAMA_PULL: Final = """\
"$1" serve &
trap 'kill "$!"' EXIT
until "$1" list >/dev/null 2>&1; do kill -0 "$!"; sleep 0.2; done
"$1" pull "$2"
"""
_OLLAMA_ENV: Final = ["env", "OLLAMA_HOST=127.0.0.1:{port}", "OLLAMA_MODELS={model_path}"]


def ready_made() -> dict[str, Stack]:
    """By the name of the block."""
    return {"llama-cpp": _llama_cpp(), "vllm": _vllm(), "ollama": _ollama(), "pytorch": _pytorch()}


def _llama_cpp() -> Stack:
    return Stack(
        setup=[*_VENV, "xllamacpp==2026.10.11549"],
        environment=["~/torpor-llama-cpp"],
        relocatable=True,
        model_path="models/model.gguf",
        server=["{bin}python3", "-c", _LLAMA_CPP, "{model_path}", "{port}", "4096"],
        port=8080,
        health="/health",
        proof_path="/v1/completions",
        proof_body=json.dumps({"prompt": "Hello", "max_tokens": 1}),
        proof_answer="usage.completion_tokens",
    )


def _vllm() -> Stack:
    return Stack(
        image="vllm/vllm-openai:v0.30.0",
        setup=[*_VENV, "vllm==0.30.0"],
        setup_minutes=60,
        environment=["~/torpor-vllm"],
        model="Qwen/Qwen2.5-0.5B-Instruct",
        model_path="models/qwen2.5-0.5b-instruct",
        fetch=["{bin}hf", "download", "{model}", "--local-dir", "{model_path}"],
        server=[
            "env", "VLLM_CACHE_ROOT={environment}/cache",
            "{bin}vllm", "serve", "{model_path}", "--served-model-name", "{model}",
            "--host", "127.0.0.1", "--port", "{port}",
        ],
        port=8000,
        health="/health",
        ready_minutes=30,
        proof_path="/v1/completions",
        proof_body=json.dumps({"model": "{model}", "prompt": "Hello", "max_tokens": 8}),
        proof_answer="choices.0.text",
    )  # fmt: skip


def _ollama() -> Stack:
    return Stack(
        image="ollama/ollama:0.30.10",
        setup=["sh", "-euc", _OLLAMA_SETUP, "sh", "{environment}", "0.30.10"],
        environment=["~/torpor-ollama"],
        relocatable=True,
        model="qwen2.5:0.5b",
        model_path="models/ollama",
        fetch=[*_OLLAMA_ENV, "sh", "-euc", _OLLAMA_PULL, "sh", "{bin}ollama", "{model}"],
        server=[*_OLLAMA_ENV, "{bin}ollama", "serve"],
        port=11434,
        health="/api/version",
        proof_path="/api/generate",
        proof_body=json.dumps({"model": "{model}", "prompt": "Hello", "stream": False}),
        proof_answer="response",
    )


def _pytorch() -> Stack:
    return Stack(
        image="quay.io/jupyter/pytorch-notebook:cuda12-2025-08-18",
        setup=[*_VENV, "torch==2.15.0", "jupyterlab==4.6.6"],
        environment=["~/torpor-pytorch"],
        model_path="",
        server=[
            "{bin}python3", "-m", "jupyterlab", "--no-browser", "--allow-root",
            "--ServerApp.ip=127.0.0.1", "--ServerApp.port={port}", "--ServerApp.port_retries=0",
            "--ServerApp.root_dir={workspace}",
        ],
        port=8888,
        health="/api",
        proof_method="GET",
        proof_path="/api",
        proof_answer="version",
    )  # fmt: skip
