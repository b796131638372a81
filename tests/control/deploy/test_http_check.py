"""The proof that a server works is read strictly."""

from __future__ import annotations

import socket
import traceback

import pytest

from torpor.control.deploy.http_check import HttpAnswer, ask, check
from torpor.control.deploy.stack import Proof
from torpor.control.variables import Secrets
from torpor.shared.errors import DeployFailed, InvalidInput


def _proof(answer: str) -> Proof:
    return Proof("POST", "/v1/completions", {}, answer)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("choices.0.text", '{"choices": [{"text": "a word"}]}'),
        ("usage.completion_tokens", '{"usage": {"completion_tokens": 1}}'),
        ("data.0.embedding", '{"data": [{"embedding": [0.0]}]}'),
        ("0", '["first"]'),
    ],
)
def test_an_answer_that_holds_something_proves_it(where: str, text: str) -> None:
    check(_proof(where), HttpAnswer(200, text), Secrets())


@pytest.mark.parametrize(
    "text",
    [
        "", "no JSON", "{}", "[]", "null", '{"choices": []}', '{"choices": [{}]}',
        '{"choices": [{"text": ""}]}', '{"choices": [{"text": null}]}', '{"choices": {"0": {}}}',
        '{"choices": [{"text": []}]}', '{"choices": [{"text": 0}]}', '{"choices": "text"}',
    ],
)  # fmt: skip
def test_an_answer_that_holds_nothing_proves_nothing(text: str) -> None:
    with pytest.raises(DeployFailed, match=r"holds nothing at choices\.0\.text"):
        check(_proof("choices.0.text"), HttpAnswer(200, text), Secrets())


def test_an_error_and_silence_prove_nothing() -> None:
    with pytest.raises(DeployFailed, match="with status 500: out of memory"):
        check(_proof("x"), HttpAnswer(500, "out of memory"), Secrets())
    with pytest.raises(DeployFailed, match="did not answer POST /v1/completions"):
        check(_proof("x"), None, Secrets())
    assert ask(9, "GET", "/", None, 1.0) is None


@pytest.mark.rule(9)
@pytest.mark.parametrize("token", ["s3cret-token\n", "s3cret-token\u20ac"])
def test_a_token_that_cannot_be_sent_is_in_no_error(token: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InvalidInput, match="cannot be sent") as refused:
            ask(port, "GET", "/", None, 1.0, token)
    assert "s3cret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_is_shown_without_secrets_and_without_half_of_one(status: int) -> None:
    secrets = Secrets({"KEY": "s3cret-0123456789"})
    text = "x" * 290 + "s3cret-0123456789"
    with pytest.raises(DeployFailed, match="xxx") as failed:
        check(_proof("x"), HttpAnswer(status, text), secrets)
    assert "s3cret" not in str(failed.value)
