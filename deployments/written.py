"""What the last registration of this very code has written at the server, so that the next one need
not write it again: `torpor up` after a reboot changes nothing, and loading 26 flows takes seconds.

Only what is found exactly as it was written counts. After any change of the code, of Prefect, of
the server or of a deployment, registering writes as the first time.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Final

import msgspec
import prefect
from prefect.client.schemas.responses import DeploymentResponse

from deployments.installation import (
    CHECKOUT,
    Installation,
    code_version,
    prefect_file,
    write_whole,
)
from torpor.shared.values import learned

_NAME: Final = "registered.json"


class Written(msgspec.Struct, frozen=True):
    """``code``: the digest of the code that wrote the deployments, and of where. ``deployments``:
    what of each belongs to the code, by its full name."""

    code: str = ""
    deployments: dict[str, str] = {}

    @classmethod
    def read(cls, installation: Installation, api_url: str) -> Written:
        """The earlier registration, as far as it still counts; empty after a change of the code or
        of the server."""
        try:
            blob = (installation.folder / _NAME).read_bytes()
            found = msgspec.json.decode(blob, type=learned(cls))
        except (OSError, msgspec.MsgspecError):
            return cls()
        return found if found.code == _code(api_url) else cls()

    @classmethod
    def keep(
        cls, installation: Installation, api_url: str, there: Mapping[str, DeploymentResponse]
    ) -> None:
        """Note that all of this code is registered, with what the server has now."""
        written = cls(_code(api_url), {name: _digest(one) for name, one in there.items()})
        write_whole(installation.folder / _NAME, msgspec.json.encode(written).decode())

    def holds(self, name: str, there: DeploymentResponse) -> bool:
        """Whether the server has the deployment exactly as it was written."""
        return self.deployments.get(name) == _digest(there)


def _digest(there: DeploymentResponse) -> str:
    """The digest of what belongs to the code in a deployment, as register.py writes it."""
    ours = there.model_dump(
        mode="json",
        include={"entrypoint", "version", "description", "parameter_openapi_schema", "pull_steps"},
    )
    return hashlib.sha256(msgspec.json.encode(ours, order="sorted")).hexdigest()


def _code(api_url: str) -> str:
    """The digest of every file that decides what is registered, of Prefect and Python, and of
    where."""
    found = hashlib.sha256(prefect_file().read_bytes())
    where = (api_url, str(CHECKOUT), prefect.__version__, sys.version, sys.executable)
    for word in (*where, code_version(CHECKOUT)):
        found.update(word.encode() + b"\0")
    return found.hexdigest()
