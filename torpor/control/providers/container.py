"""What the user's provider block adds to each container that it rents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from torpor.control.variables import Secrets, is_variable
from torpor.shared.errors import InvalidInput
from torpor.shared.values import machine_path

_TAKEN: Final = re.compile(
    # a login session sets its own
    r"_|HOME|LOGNAME|MAIL|(?:OLD)?PWD|PATH|SHELL|SHLVL|SSH_.*|TERM|USER"
    r"|ld_path|ld_preload|saves|RUNPOD_POD_USER"  # the container's start script sets its own
    # with these variables a machine ends itself
    r"|CONTAINER_(?:ID|API_KEY)|RUNPOD_(?:POD_ID|API_KEY)"
)
_SHORT: Final = 6
"""Characters below which a secret value is not hidden: a short value, such as 1 or debug, is also a
part of other words."""
_SYSTEM: Final = re.compile(
    r"/|/(?:root|home|home/[^/]+)|/(?:root|home/[^/]+)/\.(?:ssh|torpor)(?:/.*)?|/(?:bin|boot|dev|etc|lib\w*|proc|run|sbin|sys|tmp|usr|var)(?:/.*)?"
)
"""Directories where no volume may be mounted: it would hide what a machine needs, or take its
keys."""
_MOST_PORTS: Final = 32
_SSH: Final = 22


class Volume(msgspec.Struct, frozen=True):
    """A volume of the user's, by its name or id at the market, and where it is mounted. torpor
    leaves what is on it alone: no snapshot holds it, and no end of a machine deletes it."""

    name: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Container:
    """``env``: environment variables. ``ports``: TCP ports to open beside the one of SSH.
    ``login``: the login to a private registry, as the market's API takes it. ``volumes``: what is
    mounted."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ports: Sequence[int] = ()
    login: str = field(default="", repr=False)
    volumes: Sequence[Volume] = ()

    def __post_init__(self) -> None:
        for name, value in self.env.items():
            _check_variable(name, value)
        if _SSH in self.ports or len(set(self.ports)) < len(self.ports):
            raise InvalidInput("ports: name each port once, and leave out 22: SSH has it")
        if len(self.ports) > _MOST_PORTS or not all(0 < port < 1 << 16 for port in self.ports):
            raise InvalidInput(f"ports: name at most {_MOST_PORTS} ports, from 1 to 65535")

    @property
    def secrets(self) -> Secrets:
        """The values that no message may quote, whatever a market repeats."""
        password = re.search(r" -p (\S+)", self.login)  # in the form of ``docker login``
        words = {**self.env, "password": password[1] if password else ""}
        return Secrets({name: word for name, word in words.items() if len(word) >= _SHORT})


PLAIN: Final = Container()


def volume(text: str) -> Volume:
    """The volume of a text such as NAME:/PATH. Raises InvalidInput."""
    name, _, path = text.strip().partition(":")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,252}", name) or not path.startswith("/"):
        raise InvalidInput(
            f"{text!r} is no volume: write its name and where it is mounted, as in my-data:/data"
        )
    path = machine_path(path)
    if _SYSTEM.fullmatch(path):
        raise InvalidInput(
            f"{text!r} hides a folder of the system: mount it elsewhere, as on /data"
        )
    return Volume(name, path)


def _check_variable(name: str, value: object) -> None:
    """Raise InvalidInput for a variable, without its value, which may be a secret."""
    if not is_variable(name) or _TAKEN.fullmatch(name):
        raise InvalidInput(
            f"env: a container cannot be given the variable {name[:80]!r}: use letters, digits "
            "and _, not TORPOR_ in front, and no name that every session or the market sets, such "
            "as PATH or RUNPOD_API_KEY"
        )
    if not isinstance(value, str) or re.search(r"[\0\r\n]", value):
        raise InvalidInput(
            f"env: the value of {name} must be one line of text: write a number in quotes, and put "
            "what has several lines into a file of the workspace"
        )
