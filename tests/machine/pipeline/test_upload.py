"""A run's packs tell its Effort what each step takes, and the step encodes the next chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from torpor.machine.agent.content import sources
from torpor.machine.pipeline.buffers import PackBuffers
from torpor.machine.pipeline.chunks import ChunkTable
from torpor.machine.pipeline.contents import Contents
from torpor.machine.pipeline.journal import Journal
from torpor.machine.pipeline.numbers import Numbers
from torpor.machine.pipeline.upload import Share, Source, store_share
from torpor.machine.tree.names import Names
from torpor.machine.tree.plan import cut
from torpor.machine.tree.walk import walk
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import BALANCED, FASTEST, Effort, Step
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.format.keys import Seal
from torpor.shared.format.names import pack_key
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import MIB, Grant, WorkspaceName

TEXT_BYTES = 80 * MIB
PACK_BYTES = CHUNK_BYTES + MIB  # so that a little text makes many packs


class TakesAtOnce:
    """A store over a line that is never the limit."""

    def put(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    with (folder / "library.txt").open("wb") as file:
        for _, content in sources(1):
            file.write(content)
            if file.tell() > TEXT_BYTES:
                return folder
    raise AssertionError("this Python has no library")


def encodings(folder: Path, steps: Sequence[Step], journal: Path) -> Counter[str]:
    """How many chunks got each encoding."""
    roots = [bytes(folder)]
    seen = walk(roots, Names(1), None, lambda: None)
    jobs = cut(seen.unread, roots)
    source = Source(
        roots, seen.unread, Seal(None), ChunkTable(), Contents(seen, jobs),
        Numbers(roots, seen.unread), Journal(journal), PackBuffers(PACK_BYTES),
        Encoder(Effort(steps)),
    )  # fmt: skip
    keys = (pack_key(WorkspaceName("ws"), bytes([number] * 16)) for number in range(256))
    grants = [Grant(key, "PUT", "http://store/", 1 << 40) for key in islice(keys, 100)]
    store_share(
        Share(jobs),
        source,
        cast(Transfer, TakesAtOnce()),
        grants,
        progress=lambda: None,
        check=lambda: None,
    )
    places = [chunk.place for record in source.journal.read() for chunk in record.located]
    return Counter(ENCODINGS[place.encoding].name for place in places)


def test_where_sending_takes_no_time_a_run_for_speed_stores_raw(text: Path, tmp_path: Path) -> None:
    made = encodings(text, FASTEST, tmp_path / "journal")
    assert set(made) == {"lz4", "raw"}
    assert made["raw"] > 5


def test_a_usual_run_stores_no_text_raw(text: Path, tmp_path: Path) -> None:
    assert set(encodings(text, BALANCED, tmp_path / "journal")) == {"zstd"}
