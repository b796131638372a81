"""The agent's log: bounded on disk, without secrets of requests."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torpor.shared.values import KIB, MIB

LOG_FILE: Final = "agent.log"
MAX_LOG_BYTES: Final = 1 * MIB
KEPT_BYTES: Final = 256 * KIB  # what remains when a full log is cut
_HIDDEN: Final = "[hidden]"
_QUERY: Final = re.compile(r"(https?://[^\s\"'?]*)\?[^\s\"']+")
_SIGNED: Final = re.compile(r"(?i)(x-amz-(?:signature|credential|security-token)=)[^\s&\"']+")


class Log:
    """Appends lines to one file, which never grows past MAX_LOG_BYTES. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Append; a log that cannot be written never stops the agent."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        data = f"{stamp} {text.rstrip()}\n".encode("utf-8", "backslashreplace")[:KEPT_BYTES]
        with self._lock:
            try:
                self._append(data)
            except OSError:  # a full disk: the answer to the request itself reports it
                return

    def _append(self, data: bytes) -> None:
        # The daemon's standard error is the same file, opened to append: it follows a truncation.
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size + len(data) > MAX_LOG_BYTES:
                tail = os.pread(fd, KEPT_BYTES, max(0, size - KEPT_BYTES))
                os.ftruncate(fd, 0)
                os.write(fd, tail)
            os.write(fd, data)
        finally:
            os.close(fd)


def scrub(text: str, args: dict[str, Any] | None = None) -> str:
    """``text`` without URL queries, signatures, and in ``args`` the grants' URLs, keys and the
    values of environment variables."""
    for secret in sorted(set(_secrets(args or {}, depth=0)), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _SIGNED.sub(rf"\1{_HIDDEN}", _QUERY.sub(rf"\1?{_HIDDEN}", text))


def _secrets(value: object, depth: int, name: str = "") -> Iterator[str]:
    if name == "environment" and depth == 1 and isinstance(value, dict):
        yield from (text for text in value.values() if isinstance(text, str) and text)
        return
    # A workspace key is the text under `key` at the top level; deeper, `key` names an object.
    if isinstance(value, str):
        if value and (name == "url" or (name == "key" and depth == 1)):
            yield value
            if "?" in value:
                yield value.split("?", 1)[1]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, depth + 1, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _secrets(item, depth + 1, name)
