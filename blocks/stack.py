"""The block of a stack: a server, its environment, and a request that proves that it works."""

from __future__ import annotations

import json
from typing import Final, Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, field_validator, model_validator

from blocks.machine_paths import MachinePaths
from blocks.reference import LOGOS, Reference, load
from blocks.secret_variables import checked_secrets, load_secrets
from blocks.workspace import open_provider
from torpor.control.deploy import stack
from torpor.control.variables import Secrets
from torpor.shared.errors import InvalidInput

_HIGHEST_PORT: Final = 65535


class Stack(Block):
    """A server to deploy on a machine, such as vLLM, and all that it needs there.

    Commands are lists: the program and each argument as an item of its own. No shell runs them.
    They may hold these names: {environment}, the first environment path; {bin}, its folder bin with
    a slash, or nothing where the image holds the software; {workspace}, the first path of the
    workspace; {model}; {model_path}; {port}.

    Example:
        Serve another model with a copy of a ready-made stack:
        ```python
        from blocks import Stack

        stack = Stack.load("BLOCK_NAME")
        stack.model = "Qwen/Qwen2.5-0.5B-Instruct"
        stack.save("my-vllm")
        ```
    """

    _block_type_name = "Stack"
    _block_type_slug = "stack"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    image: str = Field(
        default="",
        title="Official image",
        description="The image that holds the software, for the strategies official and setup.",
    )
    own_image: str = Field(
        default="",
        description="An image of your own that holds the software, for the strategy own.",
    )
    minimal_image: str = Field(
        default="",
        description="A small image for the strategy stored. Empty: the provider's usual one.",
    )
    setup: list[str] = Field(
        default_factory=list,
        title="Setup command",
        description=(
            "The command that makes the environment: the program and each argument as an item of "
            "its own. No shell runs it."
        ),
    )
    setup_minutes: float = Field(
        default=60.0,
        gt=0,
        le=24 * 60,
        title="Setup timeout (minutes)",
        description="The time limit of the setup command, and of the fetch command, in minutes.",
    )
    environment: MachinePaths = Field(
        default_factory=list,
        title="Environment paths",
        description=(
            "The directories that the setup command fills, and nothing else uses: absolute paths, "
            "or paths that begin with ~/."
        ),
    )
    relocatable: bool = Field(
        default=False,
        description=(
            "The environment works under another home directory, so that users of other names "
            "share it."
        ),
    )
    trusts: list[Reference] = Field(
        default_factory=list,
        title="Trusted alike",
        description=(
            "Provider blocks, as type/name, that share one stored environment: whoever controls a "
            "machine of one may put code into it that runs on the others. Empty: each account has "
            "its own; at Vast.ai, RunPod and TensorDock each workspace."
        ),
    )
    model: str = Field(
        default="",
        description="A Hugging Face repository, an ollama tag, or any name. May stay empty.",
    )
    model_path: str = Field(
        default="models",
        description="Where the model is, below the first path of the workspace.",
    )
    fetch: list[str] = Field(
        default_factory=list,
        title="Fetch command",
        description=(
            "The command that fetches the model into the model path. It runs unless the workspace "
            "holds a model that it has fetched. Empty: the workspace holds the model."
        ),
    )
    server: list[str] = Field(
        min_length=1,
        title="Server command",
        description="The command that serves. It starts in the first path of the workspace.",
    )
    secrets: list[str] = Field(
        default_factory=list,
        description=(
            "Environment variables of all three commands, each as NAME=BLOCK: the variable, and "
            "the name of the Secret block that holds its value, such as HF_TOKEN=hugging-face."
        ),
    )
    bearer: str = Field(
        default="",
        title="Bearer token",
        description=(
            "The variable among the secrets that the server asks for as a bearer token. Empty: it "
            "asks for none."
        ),
    )
    port: int = Field(
        ge=1024,
        le=_HIGHEST_PORT,
        description=(
            "The port that the server listens on. Let it listen on 127.0.0.1 only: you reach it "
            "through SSH."
        ),
    )
    health: str = Field(
        default="/health",
        title="Health path",
        description="The path that answers 200 once the server is ready.",
    )
    ready_minutes: float = Field(
        default=15.0,
        gt=0,
        le=24 * 60,
        title="Ready timeout (minutes)",
        description="How long the server may take to become ready, in minutes.",
    )
    proof_method: Literal["GET", "POST"] = Field(
        default="POST",
        description="The method of the request that proves that the server works.",
    )
    proof_path: str = Field(default="/v1/completions", description="The path of that request.")
    proof_body: str = Field(
        default="", description="The JSON body of that request. Empty: it has none."
    )
    proof_answer: str = Field(
        min_length=1,
        description=(
            "Where the answer's JSON must hold something, such as choices.0.text: names and "
            "positions with dots between them."
        ),
    )

    @classmethod
    def of(cls, value: Stack | str) -> Stack:
        """The block itself, or the saved block of that name; raises InvalidInput."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise InvalidInput(
                f"a stack is a Stack block or its name, not a {type(value).__name__}"
            )
        return load(value.strip(), (cls,), of="")

    def value(self) -> stack.Stack:
        """The stack as a plain value, with its secrets and the accounts that it trusts alike;
        InvalidInput where one is missing."""
        name = self._block_document_name or "unnamed"
        trusts = [open_provider(one, of=f"stack {name}").identity for one in self.trusts]
        return stack.Stack(
            name=name,
            trusts=tuple(trusts),
            image=self.image,
            own_image=self.own_image,
            minimal_image=self.minimal_image,
            setup=list(self.setup),
            setup_timeout_s=self.setup_minutes * 60,
            environment=list(self.environment),
            relocatable=self.relocatable,
            model=self.model,
            model_path=self.model_path,
            fetch=list(self.fetch),
            server=list(self.server),
            secrets=Secrets(load_secrets(self.secrets, of=f"stack {name}"), self.bearer),
            port=self.port,
            health=self.health,
            ready_timeout_s=self.ready_minutes * 60,
            proof=stack.Proof(
                self.proof_method,
                self.proof_path,
                json.loads(self.proof_body) if self.proof_body else None,
                self.proof_answer,
            ),
        )

    @field_validator(
        "image", "own_image", "minimal_image", "model", "bearer", "proof_answer", mode="after"
    )
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @field_validator("setup", "fetch", "server", mode="after")
    @classmethod
    def _argv(cls, value: list[str]) -> list[str]:
        if value and not value[0]:
            raise ValueError("a command's first item is the program and cannot be empty")
        return value

    @field_validator("environment", mode="after")
    @classmethod
    def _placed(cls, value: list[str]) -> list[str]:
        for path in value:
            if not all(path.strip("/").partition("/")[::2]):
                raise ValueError(
                    f"{path!r} is not a directory of an environment: write ~/name, or an absolute "
                    "path of two or more names"
                )
        return value

    @field_validator("secrets", mode="after")
    @classmethod
    def _of_blocks(cls, value: list[str]) -> list[str]:
        return checked_secrets(value)

    @model_validator(mode="after")
    def _known_bearer(self) -> Stack:
        if self.bearer and self.bearer not in {line.partition("=")[0] for line in self.secrets}:
            raise ValueError(f"the bearer token {self.bearer!r} is not a variable of the secrets")
        return self

    @field_validator("model_path", mode="after")
    @classmethod
    def _within(cls, value: str) -> str:
        if value.startswith(("/", "~")) or ".." in value.split("/") or "\0" in value:
            raise ValueError(f"{value!r} is not below the workspace: write a path such as models")
        return value.strip("/")

    @field_validator("health", "proof_path", mode="after")
    @classmethod
    def _of_url(cls, value: str) -> str:
        if not value.startswith("/") or not value.isascii() or any(c <= " " for c in value):
            raise ValueError(f"{value!r} is not the path of a URL: begin with /, without spaces")
        return value

    @field_validator("proof_body", mode="after")
    @classmethod
    def _json(cls, value: str) -> str:
        if value.strip():
            try:
                json.loads(value)
            except ValueError as error:
                raise ValueError(f"the body is not JSON: {error}") from None
        return value.strip()
