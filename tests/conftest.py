"""Fixtures that every room's tests may use; each is defined in its own module."""

import gc
import os
import signal
import sys
import tempfile
from typing import Final

from hypothesis import HealthCheck, settings

# Keep bytecode, whatever the shell says: else each process of a test compiles Prefect, 8 s of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts what is to run in the background deaf to Ctrl-C, and so is all that this starts: a
# test of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Flows find the installation of the user who runs them: tests must not find that of a developer.
_STATE: Final = tempfile.TemporaryDirectory(prefix="torpor-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE.name

# A busy host may hold up any example; hypothesis would call the test flaky.
settings.register_profile(
    "tests", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

_LONGEST_ID: Final = 100


def pytest_collection_finish() -> None:
    """What is imported by now stays: to look through it for garbage again and again would take a
    tenth of the tests' time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    _STATE.cleanup()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """pytest names a test by its parameters: without this, one by 16 MiB of a hostile message."""
    return argname if isinstance(val, bytes | str) and len(val) > _LONGEST_ID else None


pytest_plugins = [
    "tests.fixtures.servers",
    "tests.fixtures.shared",
    "tests.fixtures.stores",
    "tests.fixtures.memory_store",
    "tests.fixtures.rents",
    "tests.fixtures.metadata",
    "tests.fixtures.near_agent",
    "tests.fixtures.machines",
    "tests.fixtures.sshd",
    "tests.fixtures.agent_bundle",
    "tests.fixtures.fault_proxy",
    "tests.fixtures.world",
    "tests.fixtures.gpu",
    "tests.fixtures.helm",
    "tests.fixtures.roots",
    "tests.fixtures.containerfile",
    "tests.fixtures.supervised",
    "tests.fixtures.criu",
    "tests.fixtures.nvml",
    "tests.fixtures.lab",
    "tests.fixtures.short_agent",
    "tests.fixtures.postgres",
    "tests.fixtures.prefect_server",
    "tests.fixtures.own_installation",
    "tests.fixtures.newcomer",
    "tests.fixtures.deployed",
    "tests.markets.boot",
    "tests.markets.every",
    "tests.fixtures.driver",  # last: it imports some of the others
]
