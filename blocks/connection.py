"""Which Prefect server blocks and flows use: torpor/control/own_server.py decides."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import prefect.context
from prefect.settings import Settings, get_current_settings

from torpor.control.own_server import (
    API_URL,
    LOGIN_VARIABLE,
    Candidate,
    announce,
    choose_server,
    is_this_host,
    set_apart,
    without_proxy,
)
from torpor.shared.errors import InvalidInput


def connect() -> None:
    """Use the server that is meant, and say which where another could have been. Where nothing
    names one, Prefect decides."""
    choice = choose_server(set_in=get_current_settings().api.url or "")
    if choice is None:
        return
    announce(choice)
    taken = choice.taken
    _keep_from_proxies(taken)
    if taken.source not in ("installation", "connection"):
        return  # Prefect's settings have it, with its login
    if taken.source == "connection":
        set_apart()
    elif os.environ.get(API_URL) == taken.api_url and LOGIN_VARIABLE in os.environ:
        return
    os.environ[API_URL] = taken.api_url
    os.environ[LOGIN_VARIABLE] = taken.login  # empty for a server elsewhere that asks for none
    prefect.context.refresh_global_settings_context()
    if taken.source == "connection":  # a prefect.toml adds to the variable, which is empty
        get_current_settings().client.custom_headers.clear()


def _keep_from_proxies(taken: Candidate) -> None:
    """No proxy gets what is sent without encryption: a login, and what blocks hold."""
    parts = urlsplit(taken.api_url)
    host = parts.hostname or ""
    if is_this_host(host) or (taken.source == "connection" and parts.scheme == "http"):
        os.environ.update(without_proxy(host))


def prefect_settings() -> Settings:
    """Prefect's settings, after the choice of the server."""
    return get_current_settings()


def see_that_it_is_of_this_host(what: str) -> None:
    """InvalidInput where `torpor connect` chose a server: ``what`` its block names is on the host
    of that server, and this host has another one under the same address or path, or none."""
    choice = choose_server(set_in=get_current_settings().api.url or "")
    if choice is not None and choice.taken.source == "connection":
        raise InvalidInput(
            f"{what} is on the host of the server {choice.taken.api_url}, which `torpor connect` "
            "chose, and this command runs on another host: add --detach, where the command has it, "
            "so that the worker there does it; or run it on that host; or give the workspace a "
            "bucket and a market, which both hosts reach (`torpor init`, `torpor edit`)"
        )


def server_in_use() -> str:
    """The server that is asked, for messages."""
    return get_current_settings().api.url or (
        "a temporary server, because neither PREFECT_API_URL nor an installation names one"
    )
