"""The start script: its limits, and what it never holds. That it works is shown by the contract,
whose machines boot from it."""

from __future__ import annotations

import base64
import secrets
import subprocess

import asyncssh
import msgspec
import pytest

from tests.fixtures.machines import new_key_pair
from tests.fixtures.market import H100
from torpor.control.providers.labels import label_among, label_in, label_name, label_tags
from torpor.control.providers.provider import Order
from torpor.control.providers.start_script import (
    MOST_CHARACTERS,
    check_image,
    start_command,
    start_script,
)
from torpor.control.rental.order import order_for
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Label, workspace_name


def _order(key: asyncssh.SSHKey | None = None) -> Order:
    key = key or asyncssh.import_private_key(new_key_pair().private)
    return order_for(H100, Label("me", workspace_name("work"), secrets.token_hex(8)), key)


def test_it_holds_the_host_key_and_the_public_key_and_is_shell() -> None:
    key = asyncssh.import_private_key(new_key_pair().private)
    order = _order(key)
    script = start_script(order)
    assert order.public_key in script
    assert order.host_key.strip() in script
    assert key.export_private_key().decode() not in script
    done = subprocess.run(["sh", "-n"], input=script.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_of_a_container_is_the_script_in_one_word() -> None:
    order = _order()
    program, flag, command = start_command(order)
    assert (program, flag) == ("/bin/sh", "-c")
    packed = command.split()[2]
    assert base64.b64decode(packed).decode() == start_script(order)
    assert len(command) <= MOST_CHARACTERS
    assert "'" not in command
    assert "\n" not in command


def test_a_key_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shorter SSH key"):
        start_command(msgspec.structs.replace(_order(), public_key=f"ssh-rsa {'A' * 2200}"))


@pytest.mark.parametrize(
    "change",
    [
        {"public_key": "ssh-ed25519 AAAA' >/root/x; echo '"},
        {"public_key": "ssh-ed25519 AAAA\nssh-ed25519 BBBB"},
        {"host_key": "-----BEGIN OPENSSH PRIVATE KEY-----\nKEY\nreboot\n"},
    ],
)
def test_nothing_but_keys_gets_into_it(change: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        start_script(msgspec.structs.replace(_order(), **change))


def test_images_that_cannot_work_are_refused_and_no_others() -> None:
    for image in ("nvidia/cuda:12.4.1-base-ubuntu22.04", "debian:12", "me/alpine-lookalike:1"):
        check_image(image)
    for image in ("alpine:3.20", "python:3.12-alpine3.20", "distroless/base", "ubuntu:focal"):
        with pytest.raises(InvalidInput):
            check_image(image)


def test_a_label_survives_names_and_tags() -> None:
    longest = workspace_name("w" * 63)
    label = Label("o" * 63, longest, "0" * 16)
    assert label_in(label_name(label)) == label
    assert len(label_name(label)) <= 191  # RunPod's limit
    assert label_among(label_tags(label)) == label
    assert all(len(value) <= 128 for value in label_tags(label).values())  # Lambda's limit


@pytest.mark.parametrize(
    "name", [None, "", "torpor", "torpor.a.b", "torpor.a.b.xyz", "x.torpor.a.b.0123456789abcdef"]
)
def test_other_names_are_not_ours(name: str | None) -> None:
    assert label_in(name) is None
    assert label_among({"torpor-owner": "a", "name": str(name)}) is None
