"""Record served requests in the simulator's trace format (`python -m radix.sim FILE`).

One JSON line per finished request, in the order of arrival at the scheduler: `timestamp` (ms since
the first), `input_length`, `output_length`, `block_size`, `hash_ids` (one id per block; equal ids
mean an equal prefix up to and including that block).  Token ids themselves are not written.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from radix import TokenArray


@dataclass(slots=True)
class _Open:
    timestamp: int
    input_length: int
    hash_ids: list[int]


class TraceWriter:
    """Appends to one file; the clock is for the record alone, no decision reads it."""

    def __init__(self, path: str, block_size: int) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115  # open for the process's life
        self._block_size = block_size
        self._roots: dict[Hashable, int] = {}
        self._ids: dict[tuple[int, bytes], int] = {}
        self._open: dict[str, _Open] = {}
        self._start = time.monotonic()

    def request(self, rid: str, tokens: TokenArray, namespace: Hashable = None) -> None:
        """Note a request at its first scheduling; namespaces share no id."""
        parent, ids = self._roots.setdefault(namespace, -len(self._roots)), []
        for start in range(0, len(tokens), self._block_size):
            block = tokens[start : start + self._block_size].tobytes()
            parent = self._ids.setdefault((parent, block), len(self._ids) + 1)
            ids.append(parent)
        elapsed = int((time.monotonic() - self._start) * 1000)
        self._open[rid] = _Open(elapsed, len(tokens), ids)

    def finished(self, rid: str, output_length: int) -> None:
        """Write the request's line."""
        entry = self._open.pop(rid, None)
        if entry is None:
            return
        row = {
            "timestamp": entry.timestamp,
            "input_length": entry.input_length,
            "output_length": output_length,
            "block_size": self._block_size,
            "hash_ids": entry.hash_ids,
        }
        self._file.write(json.dumps(row) + "\n")
