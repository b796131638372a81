"""The key of the embedded store's parts, without which no port of it answers but that of S3.

SeaweedFS is several servers that ask each other over HTTP and gRPC. Each shows a certificate and
asks for one. There is only one, and its key is in a file that only this user can read.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_SERVERS: Final = ("master", "volume", "filer", "s3", "admin", "worker")
_SETTINGS: Final = "security.toml"  # where SeaweedFS looks first: in its working directory


def lock(folder: Path) -> None:
    """Make a new key and the settings that demand it, for a server that starts in ``folder``."""
    pair = folder / "parts.pem"
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(pair, private + _certificate(key).public_bytes(Encoding.PEM))
    own, trusted = f'cert = "{pair}"\nkey = "{pair}"\n', f'ca = "{pair}"\n'
    sections = {"grpc": trusted, "grpc.client": own}
    sections |= {"https.client": f"enabled = true\n{own}{trusted}"}
    for server in _SERVERS:
        sections |= {f"grpc.{server}": own, f"https.{server}": own + trusted}
    text = "".join(f"[{name}]\n{lines}" for name, lines in sections.items())
    _write(folder / _SETTINGS, text.encode())


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A certificate that it signs itself. It is valid for ever, because a host's clock may be wrong
    when the store starts."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "torpor's embedded store")])
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    return (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        .sign(key, hashes.SHA256())
    )


def _write(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)  # an old file may have other permissions
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as opened:
        opened.write(content)
