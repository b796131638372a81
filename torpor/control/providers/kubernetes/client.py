"""One cluster's API server, through the official client: it knows kubeconfigs and their logins.

The requests go through ``MarketClient``, which has the retries and knows what a lost answer means.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from torpor.control.providers.market_client import (
    NO_SECRETS,
    TIMEOUT,
    MarketClient,
    Refusal,
)
from torpor.control.variables import Secrets
from torpor.shared.errors import InvalidInput, ProviderDenied, ProviderError

_RIGHTS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
# host names of CoreWeave's API servers
_COREWEAVE: Final = re.compile(r"(?:^|\.)coreweave\.(?:com|cloud|app)$")
_NO_EXTRA: Final = (
    "the Kubernetes provider needs the official Python client, which is not installed: run "
    "`pip install '.[kubernetes]'` in torpor's folder, with the Python of the flows"
)

_Shape = TypeVar("_Shape")


class Right(msgspec.Struct, frozen=True):
    """A permission that renting needs. ``namespaced`` is false for what belongs to the whole
    cluster."""

    verb: str
    resource: str
    group: str = ""
    namespaced: bool = True


class _ReviewStatus(msgspec.Struct):
    allowed: bool


class _Review(msgspec.Struct):
    status: _ReviewStatus


class Fault(msgspec.Struct):
    """A refusal in the API server's words."""

    reason: str = ""
    message: str = ""


class KubernetesClient:
    """Asks the API server that ``kubeconfig`` names, for one namespace. Thread-safe."""

    def __init__(
        self,
        kubeconfig: str,
        namespace: str,
        identity: str = "",
        *,
        context: str = "",
        secrets: Secrets = NO_SECRETS,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        transport = _Transport(kubeconfig, context)
        self.namespace, self.url = namespace, transport.url
        self.market = MarketClient(
            "kubernetes",
            transport.url,
            "",
            identity=f"kubernetes://{_place(transport.url)}/{namespace}{identity}",
            transport=transport,
            secrets=secrets,
            timeout=timeout,
            sleep=sleep,
        )
        self.identity = self.market.identity

    def path(self, resource: str, name: str = "", api: str = "v1") -> str:
        """The path of a resource of the namespace; ``api``: its group and version."""
        root = f"/api/{api}" if api == "v1" else f"/apis/{api}"
        return f"{root}/namespaces/{self.namespace}/{resource}{f'/{name}' if name else ''}"

    def refused(self, refusal: Refusal, doing: str) -> ProviderError:
        """The error for an unexpected refusal."""
        if refusal.status in (401, 403):
            return ProviderDenied(
                f"{self.identity} refused to {doing}: {fault_of(refusal).message}. Check the "
                "kubeconfig and the rights of its user (docs/guide/markets/kubernetes.md)"
            )
        return self.market.unexpected(refusal, doing)

    def read(self, shape: type[_Shape], path: str, selector: str = "") -> _Shape:
        """GET. Any refusal is an error."""
        params = {"labelSelector": selector} if selector else {}
        answer = self.market.ask("GET", path, shape, params=params)
        if isinstance(answer, Refusal):
            raise self.refused(answer, f"list {path}")
        return answer

    def may(self, right: Right) -> bool:
        """Whether the kubeconfig's user has this right."""
        asked = {"verb": right.verb, "resource": right.resource, "group": right.group}
        if right.namespaced:
            asked["namespace"] = self.namespace
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = self.market.ask("POST", _RIGHTS, _Review, body=body)
        if isinstance(answer, Refusal):
            raise self.refused(answer, "say what its user may do")
        return answer.status.allowed


def _place(url: str) -> str:
    """The cluster that answers there, without a login. One host may stand before many clusters, by
    the path; two slashes end a path, since a namespace could be a part of one."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    path = parts.path.rstrip("/")
    return f"{host}{path}/" if path else host


def is_coreweave(url: str) -> bool:
    return _COREWEAVE.search(urlsplit(url).hostname or "") is not None


def fault_of(refusal: Refusal) -> Fault:
    """The API server's own words, or the text of whatever answered instead of it."""
    if isinstance(refusal.body, dict) and refusal.body.get("kind") == "Status":
        return Fault(str(refusal.body.get("reason")), str(refusal.body.get("message")))
    return Fault("", str(refusal))


class _Transport(httpx.BaseTransport):
    """Sends with the official client's connection, certificates and login."""

    def __init__(self, kubeconfig: str, context: str) -> None:
        try:
            import kubernetes  # an optional extra of torpor
            import urllib3
        except ImportError as missing:
            raise InvalidInput(_NO_EXTRA) from missing
        # The client's own error is that of TLS, which may also fail after the request was sent.
        self._errors = (urllib3.exceptions.HTTPError, kubernetes.client.ApiException)
        self._unsent: tuple[type[Exception], ...] = (
            urllib3.exceptions.NewConnectionError,
            urllib3.exceptions.ConnectTimeoutError,
            urllib3.exceptions.ProxyError,
            urllib3.exceptions.ClosedPoolError,  # another thread cleared the pool meanwhile
        )
        self._login_errors = (kubernetes.config.ConfigException, OSError, KeyError, ValueError)
        configuration = kubernetes.client.Configuration()
        configuration.retries = False  # ``MarketClient`` repeats what may be repeated
        try:
            load: Any = kubernetes.config.load_kube_config_from_dict
            load(
                _parsed(kubeconfig),
                context=context or None,
                client_configuration=configuration,
                persist_config=False,
            )
        except self._login_errors as cause:
            raise InvalidInput(
                f"the kubeconfig gives no login: {_without_secrets(cause)}"
            ) from None
        self.url = str(configuration.host)
        if not re.fullmatch(r"https?://[^/\s]+(?:/\S*)?", self.url):
            raise InvalidInput("the kubeconfig names no API server: `server` is no http(s) URL")
        self._client: Any = kubernetes.client.ApiClient(configuration)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions["timeout"]
        headers = {"Accept": "application/json"}
        if request.content:
            # A strategic merge adds to an object's owners; another one would replace them.
            patch = request.method == "PATCH"
            kind = "application/strategic-merge-patch+json" if patch else "application/json"
            headers["Content-Type"] = kind
        try:
            self._client.update_params_for_auth(
                headers, [], ["BearerToken"], str(request.url), request.method, None
            )
        except self._login_errors as cause:  # the kubeconfig runs a program for the login
            told = _without_secrets(cause)
            raise ProviderDenied(f"the kubeconfig gives no login now: {told}") from None
        try:
            answer = self._client.rest_client.request(
                request.method,
                str(request.url),
                headers=headers,
                body=msgspec.json.decode(request.content) if request.content else None,
                _request_timeout=(limits["connect"], limits["read"]),
            )
            content = answer.read()
        except self._errors as cause:
            self._raise(cause, request)
        finally:  # nobody closes a provider, and a connection that was kept may be closed by now
            self._client.rest_client.pool_manager.clear()
        kept = {name: text for name, text in answer.headers.items() if name == "Retry-After"}
        return httpx.Response(answer.status, headers=kept, content=content)

    def _raise(self, cause: Exception, request: httpx.Request) -> NoReturn:
        """Raise ``cause`` as httpx does: whether the request may have been carried out."""
        error = httpx.ConnectError if isinstance(cause, self._unsent) else httpx.ReadError
        raise error(f"{type(cause).__name__}: {cause}", request=request) from cause


def _without_secrets(cause: Exception) -> str:
    """The cause's text: names of missing keys, but no value, and nothing that a program printed."""
    words = str(cause)
    return words if words.startswith("Invalid kube-config") else type(cause).__name__


def _parsed(kubeconfig: str) -> dict[str, Any]:
    import yaml  # installed with the extra

    try:
        parsed = yaml.safe_load(kubeconfig)
    except yaml.YAMLError:
        # Without the cause, which quotes the faulty line: it may hold a token.
        raise InvalidInput("the kubeconfig is no YAML") from None
    if not isinstance(parsed, dict) or "clusters" not in parsed:
        raise InvalidInput("the kubeconfig is not one: it has no `clusters`")
    return parsed
