"""The Prefect server that a command talks to: found, asked once, and named where it is missing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from deployments.installation import Installation, cache_folder
from deployments.terminal import Waiting
from torpor.control.own_server import choose_server, is_this_host, set_apart
from torpor.shared.errors import InvalidInput, TorporError
from torpor_cli.output import quiet

if TYPE_CHECKING:
    import ssl

    import httpx

CERTIFICATES: Final = "PREFECT_API_SSL_CERT_FILE"
UNAUTHORIZED: Final = (401, 403)
_ANSWERS_S: Final = 5.0
_UNKNOWN: Final = (
    "no Prefect server is known here: run `torpor up`, or `torpor connect https://...` to use one "
    "elsewhere"
)


@contextmanager
def connected() -> Iterator[str]:
    """Use the server that is meant (torpor/control/own_server.py); yields the address of its UI.
    TorporError where none is known or none answers."""
    elsewhere = _choose_folders()
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("DO_NOT_TRACK", "1")  # otherwise Prefect sends usage data, and says so
    looks = gc.isenabled()
    gc.disable()  # everything that is imported stays, and searching it for garbage takes 0.2 s
    with Waiting("loading Prefect"):
        try:
            from blocks.connection import prefect_settings  # importing Prefect takes a second
        finally:
            if looks:
                gc.enable()
        gc.freeze()

        api = prefect_settings().api
        if api.url is None:
            raise InvalidInput(_UNKNOWN)
        login = api.auth_string.get_secret_value() if api.auth_string else ""
        key = api.key.get_secret_value() if api.key else ""
        _check(api.url, login, key, elsewhere=elsewhere, trusted=api.ssl_cert_file)
        from prefect.context import SyncClientContext

    # Log lines of Prefect's are no message of a command.
    with quiet(as_json=True), ExitStack() as until_the_end:
        # one client for all requests of the command: each client reads the CA roots, for 25 ms
        try:
            until_the_end.enter_context(SyncClientContext.get_or_create())
        except RuntimeError as error:
            raise TorporError(f"the Prefect server at {api.url} cannot be used: {error}") from None
        yield api.url.removesuffix("/").removesuffix("/api")


def _choose_folders() -> bool:
    """Before Prefect is imported, which makes a folder in the home: keep its files and the agent's
    wheels with those of the installation, where its server is meant. Returns whether that of
    `torpor connect` is."""
    choice = choose_server()
    if choice is None:
        raise InvalidInput(_UNKNOWN)
    if choice.taken.source == "installation":
        installation = Installation.here()
        os.environ.setdefault("PREFECT_HOME", str(installation.prefect_home))
        os.environ.setdefault("XDG_CACHE_HOME", str(cache_folder(installation.folder / "cache")))
    elif choice.taken.source == "connection":
        set_apart()
    return choice.taken.source == "connection"


def _authorities(file: str | None) -> ssl.SSLContext | bool:
    """The certificate authorities by which httpx verifies a server: those in that file, as in
    Prefect's client, or else the usual ones. InvalidInput where the file cannot be used."""
    if not file:
        return True
    import ssl  # not needed for a server without TLS

    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # SSLError is an OSError
        raise InvalidInput(
            f"{file}, which {CERTIFICATES} or SSL_CERT_FILE names, has no certificates of "
            f"authorities that can be read: {error}"
        ) from None


def ask(
    api_url: str,
    path: str,
    login: str,
    next_step: str,
    *,
    key: str = "",
    trusted: str | None = None,
) -> httpx.Response:
    """The server's answer to a GET. TorporError, with ``next_step``, where nobody answers."""
    import httpx  # importing it takes a quarter of the time of `torpor --help`

    user, _, password = login.partition(":")
    try:
        parts = urlsplit(api_url)
        encrypted = parts.scheme == "https"
        return httpx.get(
            f"{api_url}/{path}",
            auth=(user, password) if login else None,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_ANSWERS_S,
            trust_env=not is_this_host(parts.hostname or ""),  # no proxy gets a login of this host
            # reading the CA roots takes 25 ms
            verify=_authorities(trusted) if encrypted else False,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidInput(f"the address {api_url} cannot be read: {error}") from None
    except httpx.HTTPError as error:
        said = _unanswered(api_url, error, next_step)
        raise TorporError(f"the Prefect server at {said}") from None


def _unanswered(api_url: str, error: Exception, next_step: str) -> str:
    """The error about a server that cannot be asked, and what to do."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return f"{api_url} does not answer ({error}): {next_step}"
    return (
        f"{api_url} shows a certificate that this host does not trust ({error}). Where it is of an "
        "authority of your own, as with Caddy's TORPOR_TLS=internal, copy that authority's "
        f"certificate to this host, and set {CERTIFICATES} to the file; SSL_CERT_FILE does it too, "
        "for markets and stores as well (docs/guide/where-it-runs.md). Otherwise somebody else may "
        "answer in its place"
    )


def _check(
    api_url: str, login: str, key: str, *, elsewhere: bool, trusted: str | None = None
) -> None:
    parts = urlsplit(api_url)
    ours = parts.scheme == "http" and is_this_host(parts.hostname or "")
    next_step = "run `torpor up`" if ours else "check PREFECT_API_URL, and that the server runs"
    of_login = "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud"
    if elsewhere:
        next_step = (
            "`torpor connect` chose it: see that it runs and that this host reaches it; `torpor "
            "disconnect` goes back to this host's own"
        )
        address = api_url.removesuffix("/api")
        of_login = f"`torpor connect {address}` asks for the one that it takes now"
    answer = ask(
        api_url,
        "admin/version",
        login,
        next_step,
        key=key,
        trusted=trusted,
    )
    # an answer of Caddy, for example, while the server behind it is down
    if answer.is_server_error:
        raise TorporError(
            f"the Prefect server at {api_url} answers with {answer.status_code}: {next_step}"
        )
    # Prefect's client would follow it, and send there what blocks hold
    if elsewhere and answer.is_redirect:
        raise TorporError(
            f"the Prefect server at {api_url}, which `torpor connect` chose, leads to "
            f"{answer.headers.get('location', 'another address')}: connect to that server by its "
            "own address"
        )
    if answer.status_code in UNAUTHORIZED:
        raise TorporError(
            f"the Prefect server at {api_url} refuses the login ({answer.status_code}): {of_login}"
        )
