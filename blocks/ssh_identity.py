"""The block of an SSH identity: the private key that torpor logs in with."""

from __future__ import annotations

import re
from typing import Final, Self

import asyncssh
from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, HttpUrl, SecretStr, field_validator

from blocks.reference import LOGOS
from torpor.control.remote.ssh import Identity
from torpor.shared.errors import InvalidInput

_COMMENT: Final = "torpor"
"""Of the keys that torpor makes."""
_ARMOUR: Final = re.compile(
    r"\s*(-----BEGIN (?P<kind>[A-Z0-9 ]+)-----)(?P<body>.*?)(-----END (?P=kind)-----)\s*", re.DOTALL
)


class SSHIdentity(Block):
    """The SSH key that torpor uses to log in to machines. Its public half goes onto machines.

    Example:
        Make a key, and show its public half:
        ```python
        from blocks import SSHIdentity

        SSHIdentity.generate().save("default")

        identity = SSHIdentity.load("BLOCK_NAME")
        print(identity.public_key)
        ```
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name = "SSH Identity"
    _block_type_slug = "ssh-identity"
    _logo_url = HttpUrl(f"{LOGOS}/secret.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    private_key: SecretStr = Field(
        description="The whole text of an OpenSSH private key file, from BEGIN to END.",
    )
    passphrase: SecretStr | None = Field(
        default=None, description="The passphrase of the key, if it has one."
    )
    on_record: bool = Field(
        default=False,
        title="Keep in the bucket",
        description=(
            "Keep the private key, sealed, beside the snapshots of the workspaces that use it, so "
            "that `torpor recover` on another host can log in to machines that stand. No machine "
            "can open it; the passphrase is never kept. On for a key that torpor has made; off for "
            "one of your own, of which you keep a copy yourself. A store without an encryption key "
            "keeps none."
        ),
    )

    @classmethod
    def generate(cls) -> Self:
        """A new ed25519 key without a passphrase."""
        key = asyncssh.generate_private_key("ssh-ed25519", comment=_COMMENT)
        private_key = SecretStr(key.export_private_key().decode("ascii"))
        return cls(private_key=private_key, on_record=True)

    @property
    def public_key(self) -> str:
        """The line for ``authorized_keys``. Raises InvalidInput if the key does not open."""
        return self.identity().public_key()

    @property
    def is_generated(self) -> bool:
        """Whether torpor has made the key, by its comment."""
        try:
            return self.public_key.endswith(f" {_COMMENT}")
        except InvalidInput:
            return False

    def identity(self) -> Identity:
        """The identity as the SSH client takes it."""
        return Identity(
            private_key=self.private_key.get_secret_value(),
            passphrase=None if self.passphrase is None else self.passphrase.get_secret_value(),
        )

    @field_validator("private_key", mode="after")
    @classmethod
    def _in_lines(cls, value: SecretStr) -> SecretStr:
        """Restore the line breaks, which a form's password box removes from a pasted key."""
        match = _ARMOUR.fullmatch(value.get_secret_value())
        if match is None:
            raise ValueError(
                "a private key goes from -----BEGIN ... PRIVATE KEY----- to -----END ...-----; "
                "give the whole text of the file (not the .pub file)"
            )
        # an old PEM key with headers, which only line breaks separate from the key
        if ":" in match["body"]:
            return value
        body = "".join(match["body"].split())
        lines = [match[1], *(body[i : i + 70] for i in range(0, len(body), 70)), match[4]]
        return SecretStr("\n".join(lines) + "\n")

    @field_validator("passphrase", mode="after")
    @classmethod
    def _none_when_empty(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value is not None and value.get_secret_value() else None
