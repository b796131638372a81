"""Which certificate authorities the control side trusts beside the public ones."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final

import certifi

from torpor.shared.errors import InvalidInput
from torpor.shared.values import KIB

_MOST_BYTES: Final = 256 * KIB
"""Most bytes of the certificates: some 120 of them. They go with each request that begins a run on
a machine."""
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


def private_authority(bundle: str) -> str:
    """The certificates of the file ``bundle`` that certifi lacks, as PEM. A machine trusts the
    public ones anyway, so that a bundle of a whole system shrinks to what somebody added to it.
    InvalidInput for a file without certificates."""
    what = f"the certificate authorities of the object store, {bundle},"
    again = (
        "check AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, ca_bundle in ~/.aws/config, and verify_cert_path "
        "in the client parameters of the store's credentials block"
    )
    try:
        theirs = _certificates(Path(bundle).read_text("latin-1"))
        public = set(_certificates(certifi.contents()))
        private = "".join(
            ssl.DER_cert_to_PEM_cert(one) for one in dict.fromkeys(theirs) if one not in public
        )
        if private:
            ssl.create_default_context(cadata=private)
    except OSError as error:  # also ssl.SSLError
        raise InvalidInput(f"{what} cannot be read: {error.strerror or error}; {again}") from None
    except ValueError as error:
        raise InvalidInput(f"{what} are no certificates in PEM: {error}; {again}") from None
    if not theirs:
        raise InvalidInput(f"{what} hold no certificate in PEM; {again}")
    if len(private) > _MOST_BYTES:
        raise InvalidInput(
            f"{what} hold {len(private)} bytes of certificates that are not public, more than "
            f"{_MOST_BYTES}: name a file with the authority of the store alone"
        )
    return private


def _certificates(pem: str) -> list[bytes]:
    return [ssl.PEM_cert_to_DER_cert(one) for one in _CERTIFICATE.findall(pem)]
