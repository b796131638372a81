"""Names of files and variables that hold credentials, or what a person typed. torpor stores a
user's files in a home without being asked, because they may have been written there by mistake.
Files with credentials it leaves where they are: nobody has said that keys may leave the machine,
not even sealed. In a workspace's own directories they are stored like everything else, because the
user has named these directories."""

from __future__ import annotations

import re
from typing import Final

_FOLDERS: Final = (
    r"\.?secrets?|\.?credentials?|\.ssh|\.aws|\.azure|\.gnupg|\.?kube|\.docker|\.oci"
    r"|\.password-store|\.huggingface|\.modal|\.?gcloud|\.mc|\.terraform\.d|\.dbt|\.torpor"
    r"|\.?runpod|\.config/(gh|rclone|doctl|hub|op|sops)"
)
_FILES: Final = (
    r"\.?_?netrc|\.git-credentials|\.pypirc|\.npmrc|\.yarnrc\.yml|\.pgpass|\.my\.cnf|\.s3cfg|\.boto"
    r"|\.dockercfg|\.vault-token|\.htpasswd|\.modal\.toml|\.condarc|\.terraformrc|\.Renviron"
    r"|\.?passwd-s3fs|\.env(rc)?|\.env[-.](?!(example|sample|template|dist)$)[^/]+|[^/]+\.env"
    r"|[^/]+\.(pem|key|der|p12|pfx|ppk|jks|keystore|kdbx|ovpn|asc|gpg|tfstate|tfvars)"
    r"|kubeconfig|rclone\.conf|kaggle\.json|(auth|sa|adc)\.json|(wandb|gh)/(settings|hosts\.yml)"
    r"|\.?(stored_)?(tokens?|passwd)(\.(txt|json|ya?ml|toml|ini|cfg|csv|pickle))?|secrets\.py"
    r"|(logins|signons)\.(json|sqlite)|key[34]\.db|cookies(\.(sqlite|txt))?|Login Data|Web Data"
    r"|wallet\.dat|mnemonic[^/]*|\.?[^/]*_history|\.(z|bash)?_?history|\.histfile|\.lesshst|\.viminfo"
)
_WORDS: Final = (
    r"secrets?|credentials?|passwords?|passphrase|seed[-_]?phrase"
    r"|(api|access|private|deploy|root|secret|ssh|aws|gcp|openai|anthropic|wandb|hf)[-_]?keys?"
    r"|(access|auth|api|bearer|bot|refresh|hf|hub|github|gitlab|slack|wandb)[-_]?tokens?"
    r"|id_(rsa|dsa|ecdsa|ed25519)|service[-_]?account|application_default"
)
_WORK: Final = (
    r"(pub|py|ipynb|md|rst|html|c|cc|cpp|h|rs|go|java|js|ts|jsonl|parquet|npy|bin|pt|safetensors)"
)
"""Endings of code and data files, whose names may contain a word such as "secret" without holding
one."""
_COPY: Final = r"(~|\.(bak|old|orig|save|swp|\d+))*"
_CREDENTIAL: Final = re.compile(
    f"(.*/)?(({_FOLDERS})(/.*)?|({_FILES}){_COPY}"
    rf"|(?![^/]*\.{_WORK}$)([^/]*[^a-z/])?({_WORDS})([^a-z/][^/]*)?)",
    re.IGNORECASE | re.DOTALL,
)
_VALUE: Final = re.compile(
    r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|npm_|pypi-|dop_v1_|rpa_)"
    r"[\w-]{16,}|\beyJ[\w-]{8,}\.eyJ|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/@:\s]+:[^/@\s]+@"
)
"""Texts that are secrets by their form: tokens with a known prefix, private keys, and passwords in
addresses."""


def is_credential(path: str) -> bool:
    """Whether a file of this path, below a home, may hold credentials, by its names alone."""
    return _CREDENTIAL.fullmatch(path) is not None


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable may hold a secret, by its name or its value."""
    named = is_credential(name) or name.upper().endswith("_TOKEN")
    return bool(value) and (named or _VALUE.search(value) is not None)
