"""Which Prefect server blocks and flows use, where nobody has named one."""

from __future__ import annotations

import os
from typing import Final

import prefect.context
from prefect.settings import Settings, get_current_settings

from torpor.control.own_server import own_server

API_URL: Final = "PREFECT_API_URL"
LOGIN: Final = "PREFECT_API_AUTH_STRING"


def connect() -> None:
    """Use the server of this user's installation, unless the environment or Prefect's profile names
    one. Without an installation, Prefect decides."""
    if API_URL in os.environ or get_current_settings().api.url is not None:
        return
    found = own_server()
    if found is not None:
        os.environ[API_URL], os.environ[LOGIN] = found
        prefect.context.refresh_global_settings_context()


def prefect_settings() -> Settings:
    """Prefect's settings, after the choice of the server."""
    return get_current_settings()


def server_in_use() -> str:
    """The server that is asked, for messages."""
    return get_current_settings().api.url or (
        "a temporary server, because neither PREFECT_API_URL nor an installation names one"
    )
