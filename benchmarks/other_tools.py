"""restic and tar | lz4 | s5cmd on one folder and one bucket, as a user would run them.

Keys reach them in files in memory that have no name, never in arguments or the environment: they
go with the processes that hold them, also when those are killed.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from torpor.control.store.s3 import S3Settings
from torpor.shared.errors import InvalidInput, StoreError

LONGEST_S: Final = 3600.0
"""For one step of one tool; then it is ended."""
_LAST_WORDS: Final = 300  # characters of a failed tool's messages


class Cost(NamedTuple):
    """Wall seconds, and CPU seconds; of torpor the agent's and the control side's together."""

    wall_s: float
    cpu_s: float
    agent_cpu_s: float


class Tool(NamedTuple):
    """Another tool that stores a folder. Everything that it stores is below ``prefix``."""

    name: str
    prefix: str
    full: Callable[[], Cost]
    again: Callable[[], Cost]
    restore: Callable[[Path], Cost]


def restic(settings: S3Settings, below: str, folder: Path, cache: Path) -> Tool:
    """restic into a fresh repository below ``below``, with a cache in ``cache`` and another one for
    the restore, as on a new machine: it begins empty each time."""
    _found("restic")
    env = _environment(settings) | {"RESTIC_CACHE_DIR": str(cache / "kept")}
    keys = _keys(settings) | {"RESTIC_PASSWORD_FILE": secrets.token_hex(16)}
    endpoint = settings.endpoint_url or "https://s3.amazonaws.com"
    base = ["restic", "-r", f"s3:{endpoint}/{settings.bucket}/{below}/restic", "-q"]
    timed([[*base, "init"]], env, keys, folder)

    def backup() -> Cost:
        return timed([[*base, "backup", "."]], env, keys, folder)

    def restore(target: Path) -> Cost:
        fresh = env | {"RESTIC_CACHE_DIR": str(cache / "new")}
        shutil.rmtree(cache / "new", ignore_errors=True)
        return timed([[*base, "restore", "latest", "--target", str(target)]], fresh, keys, folder)

    return Tool("restic", f"{below}/restic/", backup, backup, restore)


def tarball(settings: S3Settings, below: str, folder: Path, _: Path) -> Tool:
    """tar, lz4 and s5cmd in one pipe, to one object below ``below``."""
    s5cmd = _found("s5cmd")
    _found("lz4")
    env, keys = _environment(settings), _keys(settings)
    base = [s5cmd]
    if settings.endpoint_url:
        base += ["--endpoint-url", settings.endpoint_url]
    url = f"s3://{settings.bucket}/{below}/tarball/workspace.tar.lz4"

    def upload() -> Cost:
        stages = [["tar", "-cf", "-", "."], ["lz4", "-q", "-1", "-"], [*base, "pipe", url]]
        return timed(stages, env, keys, folder)

    def restore(target: Path) -> Cost:
        target.mkdir()
        unpack = ["tar", "-xf", "-", "-C", str(target)]
        return timed([[*base, "cat", url], ["lz4", "-q", "-d", "-"], unpack], env, keys, folder)

    return Tool("tar+lz4+s5cmd", f"{below}/tarball/", upload, upload, restore)


PEERS: Final = {"restic": restic, "tar+lz4+s5cmd": tarball}


def _found(program: str) -> str:
    path = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if path is None:
        raise InvalidInput(f"{program} is not installed on this host: install it")
    return path


def _environment(settings: S3Settings) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return env | {"AWS_REGION": settings.region}


def _keys(settings: S3Settings) -> dict[str, str]:
    """What the file holds that an environment variable names."""
    lines = [
        "[default]",
        f"aws_access_key_id = {settings.access_key}",
        f"aws_secret_access_key = {settings.secret_key}",
    ]
    if settings.session_token:
        lines.append(f"aws_session_token = {settings.session_token}")
    return {"AWS_SHARED_CREDENTIALS_FILE": "\n".join(lines) + "\n"}


@contextmanager
def _in_memory(keys: Mapping[str, str]) -> Iterator[dict[str, int]]:
    with ExitStack() as stack:
        held: dict[str, int] = {}
        for name, text in keys.items():
            held[name] = os.memfd_create("torpor")
            stack.callback(os.close, held[name])
            os.write(held[name], text.encode())
        yield held


def timed(
    stages: Sequence[list[str]], env: Mapping[str, str], keys: Mapping[str, str], cwd: Path
) -> Cost:
    """Run a pipe of programs to its end. StoreError with their last words where one fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    source: Any = subprocess.DEVNULL
    with tempfile.TemporaryFile() as words, _in_memory(keys) as held:
        env = {**env, **{name: f"/proc/self/fd/{fd}" for name, fd in held.items()}}
        try:
            for number, argv in enumerate(stages):
                last = number == len(stages) - 1
                sink = subprocess.DEVNULL if last else subprocess.PIPE
                running.append(
                    subprocess.Popen(
                        argv,
                        env=env,
                        cwd=cwd,
                        stdin=source,
                        stdout=sink,
                        stderr=words,
                        pass_fds=tuple(held.values()),
                    )
                )
                if number:
                    source.close()
                source = running[-1].stdout
            codes = [process.wait(timeout=LONGEST_S) for process in running]
        except subprocess.TimeoutExpired:
            raise StoreError(f"{stages[0][0]} took longer than {LONGEST_S:.0f} s: ended") from None
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        wall_s = time.monotonic() - started
        if any(codes):
            words.seek(0)
            said = " ".join(words.read().decode(errors="replace").split())[-_LAST_WORDS:]
            names = " | ".join(Path(argv[0]).name for argv in stages)
            raise StoreError(f"{names} in {cwd} ended with {codes}: {said}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall_s, cpu_s, 0.0)
