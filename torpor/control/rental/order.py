"""The order of a rental. Its host key is derived from the SSH identity, so that no secret is
stored, and the key is known before the machine exists."""

from __future__ import annotations

import base64
import hashlib
import textwrap

import asyncssh
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Order
from torpor.shared.values import Label, Want


class HostKey(msgspec.Struct, frozen=True):
    """``private`` is installed on the machine; ``public`` is what its SSH server must show."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"HostKey({self.public})"


def host_key_of(identity: asyncssh.SSHKey, label: Label) -> HostKey:
    """The key of the rental with this label, the same bytes each time: a market refuses an
    idempotency token that comes with another start script. A host key reveals nothing about
    ``identity``, or about another rental's key."""
    return _derived(identity, "torpor host key", label.owner, label.workspace, label.rental)


def jump_host_key_of(identity: asyncssh.SSHKey) -> HostKey:
    """The key of the jump host before all machines of ``identity``, the same bytes each time: any
    run may make the jump host again."""
    return _derived(identity, "torpor jump host key")


def order_for(
    offer: Offer, label: Label, identity: asyncssh.SSHKey, want: Want | None = None
) -> Order:
    """The order to send to the offer's provider; ``identity`` will log in."""
    want = want or Want()
    return Order(
        offer=offer,
        label=label,
        public_key=identity.export_public_key().decode("ascii").strip(),
        host_key=host_key_of(identity, label).private,
        jump_host_key=jump_host_key_of(identity).private,
        image=want.image,
        disk_gib=want.disk_gib,
        bid_usd_h=want.max_price_usd_h if offer.spot else None,
        cuda=want.least_cuda,
    )


def _derived(identity: asyncssh.SSHKey, *purpose: str) -> HostKey:
    secret = identity.export_private_key("pkcs8-der")
    told = msgspec.json.encode(purpose)
    seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=told).derive(secret)
    private = _openssh_private_key(seed)
    key = asyncssh.import_private_key(private)
    return HostKey(private, key.export_public_key().decode().strip())


def _openssh_private_key(seed: bytes) -> str:
    """Ed25519 in OpenSSH's own format (its file PROTOCOL.key), not encrypted. Libraries write a
    random number where this writes a digest: both only show that the key was decrypted."""
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    check = hashlib.sha256(seed).digest()[:4]
    shown = _string(b"ssh-ed25519") + _string(public)
    hidden = 2 * check + shown + _string(seed + public) + _string(b"")
    hidden += bytes(range(1, 1 + -len(hidden) % 8))
    one_key = (1).to_bytes(4, "big")
    plain = _string(b"none") + _string(b"none") + _string(b"")
    blob = b"openssh-key-v1\0" + plain + one_key + _string(shown) + _string(hidden)
    lines = textwrap.wrap(base64.b64encode(blob).decode(), 70)
    kind = "OPENSSH PRIVATE KEY"
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


def _string(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content
