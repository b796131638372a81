"""The order of a rental. Its host key is derived, so that no secret is stored, and is known before
there is a machine."""

from __future__ import annotations

import asyncssh
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from torpor.control.providers.offers import Offer
from torpor.control.providers.seam import Order
from torpor.shared.values import Label, Want


class HostKey(msgspec.Struct, frozen=True):
    """``private`` is installed on the machine; ``public`` is what its SSH server must show."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"HostKey({self.public})"


def host_key_of(identity: asyncssh.SSHKey, label: Label) -> HostKey:
    """The key of the rental with this label. Who knows it learns nothing of ``identity``, nor of
    another rental's key."""
    secret = identity.export_private_key("pkcs8-der")
    told = msgspec.json.encode(["torpor host key", label.owner, label.workspace, label.rental])
    seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=told).derive(secret)
    private = Ed25519PrivateKey.from_private_bytes(seed).private_bytes(
        Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
    )
    key = asyncssh.import_private_key(private)
    return HostKey(private.decode(), key.export_public_key().decode().strip())


def order_for(
    offer: Offer, label: Label, identity: asyncssh.SSHKey, want: Want | None = None
) -> Order:
    """What to ask the offer's provider for; ``identity`` will log in."""
    want = want or Want()
    return Order(
        offer=offer,
        label=label,
        public_key=identity.export_public_key().decode("ascii").strip(),
        host_key=host_key_of(identity, label).private,
        image=want.image,
        disk_gib=want.disk_gib,
        bid_usd_h=want.max_price_usd_h if offer.spot else None,
        cuda=want.cuda,
    )
