"""A stack: what a server needs on a machine, and which commands a strategy makes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from torpor.control.variables import Secrets
from torpor.shared.errors import InvalidInput
from torpor.shared.values import BASE, WorkspaceName, overlap, tidy_path, workspace_name

StrategyName = Literal["official", "setup", "own", "stored"]


class Strategy(msgspec.Struct, frozen=True):
    """How the software gets onto the machine. ``image``: the field of the stack that names the
    image. ``sets_up``: the setup command runs, or its result is restored. ``keeps``: that result is
    kept in the store."""

    words: str
    image: Literal["image", "own_image", "minimal_image"]
    sets_up: bool = False
    keeps: bool = False


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "official": Strategy("the official image", "image"),
    "setup": Strategy(
        "the official image, and the setup command at each start", "image", sets_up=True
    ),
    "own": Strategy("an image of your own", "own_image"),
    "stored": Strategy(
        "a minimal image, and the environment from the store",
        "minimal_image",
        sets_up=True,
        keeps=True,
    ),
}


def strategy_named(name: str) -> Strategy:
    """The strategy of that name; InvalidInput for any other text."""
    if name not in STRATEGIES:
        raise InvalidInput(f"{name!r} is not a strategy: use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


class Proof(msgspec.Struct, frozen=True):
    """A request that proves that the server works. ``body`` is JSON, or None. ``answer``: where the
    answer's JSON must hold something that is not empty, such as choices.0.text."""

    method: Literal["GET", "POST"]
    path: str
    body: Any
    answer: str


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The block of a stack without Prefect. Commands may hold the names that ``StackPaths.filled``
    knows."""

    name: str
    image: str
    own_image: str
    minimal_image: str
    setup: list[str]
    setup_timeout_s: float
    environment: list[str]
    relocatable: bool
    trusts: tuple[str, ...] = ()  # identities of accounts whose machines are trusted alike
    model: str
    model_path: str
    fetch: list[str]
    server: list[str]
    port: int
    health: str
    ready_timeout_s: float
    proof: Proof
    secrets: Secrets = Secrets()

    def image_for(self, strategy: Strategy) -> str:
        """The image of a new machine; InvalidInput where the stack names none."""
        image = str(getattr(self, strategy.image))
        if not image and strategy.image != "minimal_image":
            title = strategy.image.replace("_", " ")
            raise InvalidInput(
                f"stack {self.name} has no {title} for a new machine: fill in that field of the "
                "stack. A machine that runs already needs none: `wake` the workspace, then deploy "
                "it again"
            )
        return image

    @property
    def needs_model_there(self) -> bool:
        """Whether the stack's server reads a model that no command of the stack can bring."""
        return not (self.fetch or self.setup) and any(
            "{model_path}" in word for word in self.server
        )

    def check(self, strategy: Strategy) -> None:
        """InvalidInput where the stack lacks what its commands or the strategy need."""
        used = [*self.fetch, *self.server, msgspec.json.encode(self.proof.body).decode()]
        if not self.model and any("{model}" in word for word in used):
            raise InvalidInput(
                f"stack {self.name} names no model, and its commands use {{model}}: fill in "
                "`model`. Nothing was rented"
            )
        if strategy.sets_up and not (self.setup and self.environment):
            raise InvalidInput(
                f"stack {self.name} has no setup command or no environment path. The strategies "
                "`setup` and `stored` need both: fill them in. Where the machine, its image or the "
                "workspace has the software, use `official` or `own`"
            )


@dataclass(frozen=True)
class EnvironmentFacts:
    """What an environment depends on, besides the commands that make it. ``cuda``: the major
    version that the driver supports; 0 without a GPU."""

    python: tuple[int, int]
    glibc: str
    machine: str
    cuda: int
    user_home: str


def sharers(stack: Stack, account: str, many_owners: bool, workspace: WorkspaceName) -> str:
    """Who uses an environment that a machine of this account makes for this workspace. Whoever
    controls that machine can put anything into the environment, and it runs with the secrets of all
    who use it."""
    if account in stack.trusts:
        return " and ".join(sorted(set(stack.trusts)))
    return f"{workspace} at {account}" if many_owners else account


def base_name(
    stack: Stack, facts: EnvironmentFacts, shared_by: str, key_id: str = ""
) -> WorkspaceName:
    """The name of the workspace that keeps this stack's environment for such machines. The control
    side chooses it, and a machine can write under no other name. ``shared_by``: see ``sharers``.
    ``key_id``: of the store's key, because another key cannot open it."""
    key = {
        "shared by": shared_by,
        "setup": stack.setup,
        "image": stack.minimal_image,
        "environment": stack.environment,
        "python": facts.python,
        "glibc": facts.glibc,
        "machine": facts.machine,
        "cuda": facts.cuda,
        "key": key_id,
        # The scripts of a virtual environment contain the path of the environment.
        "home": "" if stack.relocatable else facts.user_home,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return workspace_name(BASE + digest[:32])


@dataclass(frozen=True)
class StackPaths:
    """Where the files of a stack are on a machine."""

    stack: Stack
    home: str
    workspace: str
    sets_up: bool

    @property
    def environment(self) -> list[str]:
        return [self.absolute(path) for path in self.stack.environment]

    @property
    def model_path(self) -> str:
        return f"{self.absolute(self.workspace)}/{self.stack.model_path}".rstrip("/")

    def absolute(self, path: str) -> str:
        return self.home + path[1:] if path.startswith("~/") else path

    def filled(self, argv: list[str]) -> list[str]:
        """A command with its names filled in, each item on its own."""
        return [self._fill(item) for item in argv]

    def body(self, value: Any) -> Any:
        """``value`` with the names in its texts filled in."""
        if isinstance(value, str):
            return self._fill(value)
        if isinstance(value, list):
            return [self.body(item) for item in value]
        if isinstance(value, dict):
            return {name: self.body(item) for name, item in value.items()}
        return value

    def _fill(self, text: str) -> str:
        environment = self.environment[0] if self.stack.environment else ""
        names = {
            "{environment}": environment,
            "{bin}": f"{environment}/bin/" if self.sets_up else "",
            "{workspace}": self.absolute(self.workspace),
            "{model}": self.stack.model,
            "{model_path}": self.model_path,
            "{port}": str(self.stack.port),
        }
        for name, value in names.items():
            text = text.replace(name, value)
        return text


def check_apart(environment: list[str], workspace: list[str]) -> None:
    """InvalidInput where a directory of the environment is one of the workspace, or within one, or
    the other way round: each snapshot must hold its own."""
    for path in environment:
        for other in workspace:
            if overlap(tidy_path(path), tidy_path(other)):
                raise InvalidInput(
                    f"the environment path {path} and the workspace path {other} overlap: give the "
                    "stack a directory of its own"
                )
