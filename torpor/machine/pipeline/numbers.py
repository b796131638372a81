"""The kinds of numbers in a big file, determined once a file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torpor.machine.tree.names import Unread
from torpor.machine.tree.plan import ChunkRange
from torpor.machine.tree.read import opened
from torpor.shared.codecs.elements import guess, layout_of
from torpor.shared.codecs.layout import Layout, Run


class Numbers:
    """Layouts of one pass's files: from their headers, otherwise from a sample. Thread-safe: two
    threads that ask at once get the same."""

    def __init__(self, roots: Sequence[bytes], unread: Sequence[Unread]) -> None:
        self._roots = roots
        self._unread = unread
        self._layouts: dict[int, Layout | None] = {}

    def runs(self, piece: ChunkRange, data: bytes) -> Sequence[Run]:
        """The runs of ``data``, which was read for ``piece``; none if it is not numbers."""
        if piece.file not in self._layouts:
            self._layouts[piece.file] = self._find(piece, data)
        layout = self._layouts[piece.file]
        return () if layout is None else layout.chunk(piece.offset, len(data))

    def _find(self, piece: ChunkRange, data: bytes) -> Layout | None:
        file = self._unread[piece.file]
        size = file.signature.size
        try:
            with opened(os.path.join(self._roots[file.entry.root], file.entry.path)) as fd:
                layout = layout_of(fd, size)
        except OSError:
            return None  # gone or replaced: the read that follows raises
        if layout is not None:
            return layout
        middle = len(data) // 2 & ~7
        element = guess(memoryview(data)[middle:])
        return None if element is None else Layout([Run(size, element)])
