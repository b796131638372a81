"""Which names may be those of credentials."""

from __future__ import annotations

import pytest

from torpor.machine.tree.credentials import is_credential, is_secret_variable

pytestmark = pytest.mark.rule(22)


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        "proj/.env.production",
        "proj/prod.env",
        "proj/.ssh/config",
        "proj/.aws/credentials",
        "proj/.config/gcloud/access_tokens.db",
        "proj/.docker/config.json",
        "proj/.huggingface/token",
        "hf/token",
        ".netrc",
        "_netrc",
        ".git-credentials",
        ".pypirc",
        "keys/ID_RSA",
        "id_ed25519",
        "server.pem",
        "a\n.key",
        "client_secret_123.json",
        "my-service-account.json",
        "credentials.json",
        "secrets.toml",
        "secrets/openai",
        "API_KEY.txt",
        "terraform.tfstate",
        ".bash_history",
        "kaggle.json",
        "proj/.runpod/config.toml",
        ".vast_api_key",
        "huggingface/stored_tokens",
        "wandb/settings",
        "gcloud/credentials.db",
        "kube/config",
        ".passwd-s3fs",
        ".terraform.d/credentials.tfrc.json",
        ".dbt/profiles.yml",
        ".Renviron",
        "hf_token.txt",
        "github_token",
        "openai_key.txt",
        "deploy_key",
        "private.der",
        "auth.json",
        "rootkey.csv",
        "aws_keys.csv",
        "me_accessKeys.csv",
        "gcp-key.json",
        "id_rsa.bak",
        "id_rsa_work",
        "server.pem.bak",
        ".env~",
        ".env-prod",
        "secrets.env.bak",
        "secrets.py",
        "profile/logins.json",
        "profile/key4.db",
        "profile/Login Data",
        "Cookies",
        ".zhistory",
        "wallet.dat",
        "proj/.torpor/x",
    ],
)
def test_a_name_of_credentials_is_known_wherever_it_lies(path: str) -> None:
    assert is_credential(path)
    assert is_credential(f"deep/er/{path}")


@pytest.mark.parametrize(
    "path",
    [
        "train.py",
        "proj/.env.example",
        "proj/.envoy.yaml",
        "environment.yml",
        "id_rsa.pub",
        "tokenizer.json",
        "tokens/train.bin",
        "proj/token.py",
        "secretary.txt",
        "keyboard.py",
        "proj/.git/config",
        "proj/awsome.txt",
        "history.md",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokens.npy",
        "data/api_keys.parquet",
        "secret_santa.py",
        "monkey.csv",
        "keyframes.json",
        "config.json",
        "passage.txt",
    ],
)
def test_work_is_no_credential(path: str) -> None:
    assert not is_credential(path)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("MY_TOKEN", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("MY_TOKEN", "", False),
        ("MAX_TOKENS", "5", False),
        ("A", "hf_0123456789abcdefghij", True),
        ("WHERE", "postgres://ada:hunter2@db/x", True),
        ("WHERE", "https://host/a:b@c", False),
    ],
)
def test_a_variable_may_be_a_secret_by_its_name_or_its_value(
    name: str, value: str, secret: bool
) -> None:
    assert is_secret_variable(name, value) == secret
