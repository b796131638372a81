"""The key that signs the records of a store without an encryption key: a Secret block.

With an encryption key, that key signs. Without one, the first run that opens the store makes a
random key and saves it as the Secret block ``torpor-records-...``, one for each bucket and prefix.
Two control sides that use one plain store need the same value: copy the block before the second one
uses the store. Where the block is lost, `torpor up --believe-records` signs the store's records
with a new key, once their user has looked at what they say.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

from prefect.blocks.system import Secret
from pydantic import SecretStr

from blocks.reference import load_named, saved_names
from torpor.control.store.signatures import ROOT_BYTES
from torpor.shared.errors import InvalidInput

_NAME: Final = "torpor-records-"


def secret_name(bucket: str, prefix: str) -> str:
    """The name of the Secret block of this plain store."""
    return _NAME + sha256(_place(bucket, prefix).encode()).hexdigest()[:16]


def records_key(bucket: str, prefix: str) -> bytes:
    """The key of this plain store; made where there is none. InvalidInput where the block holds
    something else."""
    name, of = secret_name(bucket, prefix), f"the plain store {_place(bucket, prefix)}"
    try:
        found = load_named(Secret, name, of=of)
    except InvalidInput:
        if name in saved_names(Secret):
            raise
        made: Secret[Any] = Secret(value=SecretStr(secrets.token_hex(ROOT_BYTES)))
        with suppress(ValueError):  # another run has made it meanwhile: a name is there once
            made.save(name)
        found = load_named(Secret, name, of=of)
    text = str(found.get())
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != ROOT_BYTES:
        raise InvalidInput(
            f"{of}: the block secret/{name} holds no key of {ROOT_BYTES} bytes in hexadecimal, "
            "which signs torpor's records: put the value of your other control side there, or "
            "delete the block and run `torpor up --believe-records`"
        )
    return key


def _place(bucket: str, prefix: str) -> str:
    return "/".join(filter(None, [bucket, prefix.strip("/")]))
