"""What is said of a whole machine, whose root is its own; measured small."""

from __future__ import annotations

import re

from tests.benchmarks.what_is_lost import measure
from tests.fixtures.stores import Server
from tests.markets.every import Markets

USED = [
    r"\S+ MB in \d+ files, newest .* outside of the workspace, in:",
    r"/mnt/nvme/checkpoints: 3\.0 MB in 1 file, newest .*",
    r"/opt/conda/envs/train: 2\.0 MB in 3 files, newest .*",
    r"/data/raw: .* in 600 files, newest .*",
    r"settings of the system that were added or changed: /etc/bash\.bashrc, "
    r"/etc/systemd/system/train\.service",
    r"packages that were added, and that a wake does not install: lostandfound 1\.0 \(pip\), "
    r"numpy 2\.1 \(pip in /opt/conda/envs/train/lib/python3\.12/site-packages, in no record\)",
]


def test_a_used_machine_is_told_in_lines_and_an_untouched_one_in_none(
    seaweed: Server, markets: Markets
) -> None:
    result = measure(markets, seaweed.store(), outside=600, times=1)
    assert result["untouched"]["report"] == []
    said = result["used"]["report"]
    assert len(said) == len(USED), said
    for line, expected in zip(said, USED, strict=True):
        assert re.fullmatch(expected, line), line
