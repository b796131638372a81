from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from torpor.control.providers.local.lock import held, sweep
from torpor.shared.errors import ProviderError


def test_one_holder_at_a_time_and_no_file_left(tmp_path: Path) -> None:
    lock = tmp_path / ".m-0123456789ab.lock"
    with held(lock, timeout_s=0):
        with pytest.raises(ProviderError, match="another process"), held(lock, timeout_s=0):
            pytest.fail("held twice")
        with pytest.raises(ProviderError), held(lock, timeout_s=0.05):
            pytest.fail("held twice")
    assert list(tmp_path.iterdir()) == []
    with held(lock, timeout_s=0):
        pass


def test_it_dies_with_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / ".m-0123456789ab.lock"
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with held(lock, timeout_s=0):
            os.write(told, b"x")
            signal.pause()
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(ProviderError), held(lock, timeout_s=0):
        pytest.fail("held twice")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with held(lock, timeout_s=0):
        pass
    os.close(ready)
    os.close(told)


def test_a_lock_whose_file_cannot_be_removed_is_given_up_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".m-0123456789ab.lock"

    def refused(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as now:
        now.setattr(os, "unlink", refused)
        with pytest.raises(OSError, match="lock"), held(lock, timeout_s=0):
            pass
    with held(lock, timeout_s=0):
        pass


def test_sweep_clears_debris_but_not_of_a_live_holder(tmp_path: Path) -> None:
    for name in (".m-0123456789ab.new", ".m-ba9876543210.new"):
        (tmp_path / name / "home").mkdir(parents=True)
    (tmp_path / ".m-fedcba987654.lock").write_text("")
    (tmp_path / ".m-not-ours.new").mkdir()
    with held(tmp_path / ".m-ba9876543210.lock", timeout_s=0):
        sweep(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".m-ba9876543210.lock",
            ".m-ba9876543210.new",
            ".m-not-ours.new",
        ]
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".m-not-ours.new"]
