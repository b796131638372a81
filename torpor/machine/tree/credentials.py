"""Names of files that hold credentials, or what a person typed.

torpor stores what a user has written in a home by mistake without being asked for it. These files
it leaves where they are: nobody has said that keys may leave the machine, also not sealed. In a
workspace's own directories they are stored as all else: its user has named those.
"""

from __future__ import annotations

import re
from typing import Final

_FOLDERS: Final = (
    r"\.?secrets?|\.?credentials?|\.ssh|\.aws|\.azure|\.gnupg|\.kube|\.docker|\.oci"
    r"|\.password-store|\.huggingface|\.modal"
    r"|\.config/(gcloud|gh|rclone|doctl|hub|op|sops)"
)
_FILES: Final = (
    r"\.?_?netrc|\.git-credentials|\.pypirc|\.npmrc|\.yarnrc\.yml|\.pgpass|\.my\.cnf|\.s3cfg|\.boto"
    r"|\.dockercfg|\.vault-token|\.htpasswd|\.modal\.toml|\.condarc"
    r"|\.env(rc)?|\.env\.(?!(example|sample|template|dist)$)[^/]+|[^/]+\.env"
    r"|[^/]+\.(pem|key|p12|pfx|ppk|jks|keystore|kdbx|ovpn|asc|gpg|tfstate|tfvars)"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|kubeconfig|rclone\.conf|kaggle\.json"
    r"|\.?(credentials?|secrets?|tokens?|passwords?|passwd|api[-_]?keys?)"
    r"(\.(txt|json|ya?ml|toml|ini|cfg|csv))?"
    r"|[^/]*(client[-_]?secret|service[-_]?account|application_default_credentials)[^/]*\.json"
    r"|\.?[^/]*_history|\.lesshst|\.viminfo"
)
_CREDENTIAL: Final = re.compile(f"(.*/)?(({_FOLDERS})(/.*)?|({_FILES}))", re.IGNORECASE | re.DOTALL)


def is_credential(path: str) -> bool:
    """Whether a file of this path, below a home, may hold credentials, by its names alone."""
    return _CREDENTIAL.fullmatch(path) is not None
