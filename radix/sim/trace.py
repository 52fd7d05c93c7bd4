"""Traces: requests as block ids, read from gzipped or plain JSON lines.

Token t of a prompt is `ids[t // block_size] * block_size + t % block_size`, so equal ids give equal
tokens. A trace does not say what stands in a prompt's partial last block and in the answer; both
are taken from the prompt that continues it, or else are tokens nobody else has.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from radix import IdArray, TokenArray

_GZIP = b"\x1f\x8b"
_LENGTHS = ("timestamp", "input_length", "output_length", "block_size")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace. Lengths and depths are tokens.

    Attributes:
        number: its place in the order of arrival, from 0.
        arrival_us: time of arrival.
        session: requests of one session follow each other; None where unknown.
        prompt_len: at least 1.
        output_len: tokens of the answer.
        boundaries: depths at which a message of the prompt ends, where known.
        ids: int64, the blocks of prompt and answer.
        block_size: tokens per id.
    """

    number: int
    arrival_us: int
    session: object
    prompt_len: int
    output_len: int
    boundaries: tuple[int, ...]
    ids: IdArray
    block_size: int

    @property
    def computed_len(self) -> int:
        """Tokens that have KV at the end: the last token of the answer is never fed back."""
        return self.prompt_len + max(self.output_len - 1, 0)

    @property
    def whole(self) -> int:
        """Blocks that the prompt fills."""
        return self.prompt_len // self.block_size

    def tokens(self) -> TokenArray:
        """Prompt and answer, int64; made anew by every call."""
        offsets = np.arange(self.block_size, dtype=np.int64)
        tokens = (self.ids[:, None] * self.block_size + offsets).reshape(-1)
        return tokens[: self.prompt_len + self.output_len]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """All requests, in order of arrival; block ids are below `id_limit`."""

    name: str
    requests: tuple[Request, ...]
    id_limit: int

    @property
    def block_size(self) -> int:
        """Tokens per id."""
        return self.requests[0].block_size

    def coarse(self) -> Trace:
        """The same with one token per block: lengths in blocks, rounded up."""
        size = self.block_size
        rows = []
        for one in self.requests:
            prompt = -(-one.prompt_len // size)
            rows.append(
                replace(
                    one,
                    prompt_len=prompt,
                    output_len=len(one.ids) - prompt,
                    boundaries=tuple(depth // size for depth in one.boundaries),
                    block_size=1,
                )
            )
        return Trace(self.name, tuple(rows), self.id_limit)


def read(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: the file cannot be read, or a line is not a request; names file and line.
    """
    rows: list[Request] = []
    previous: dict[object, IdArray] = {}
    for number, text in enumerate(_lines(path), 1):
        try:
            rows.append(_row(json.loads(text), previous))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} line {number} is no request of a trace: {reason}") from None
    if not rows:
        raise ValueError(f"{path} holds no request")
    sizes = Counter(row.block_size for row in rows)
    if len(sizes) > 1:
        raise ValueError(f"{path} mixes block sizes {sorted(sizes)}: record it with one grid")
    rows.sort(key=lambda row: row.arrival_us)
    return _link(path.name, rows)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
        with gzip.open(path, "rt") if packed else path.open("rt") as lines:
            yield from (line for line in lines if line.strip())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trace {path}: {error}") from None


def _row(fields: dict[str, Any], previous: dict[object, IdArray]) -> Request:
    """A line on its own: not yet numbered, its ids those of the prompt."""
    timestamp, prompt_len, output_len, block_size = (int(fields[name]) for name in _LENGTHS)
    if min(prompt_len, block_size) < 1 or min(timestamp, output_len) < 0:
        raise ValueError(f"input {prompt_len}, output {output_len}, block size {block_size}")
    session = fields.get("session")
    ids = np.array(fields["hash_ids"], dtype=np.int64)
    kept = fields.get("prefix_blocks")
    if kept is not None:
        ids = np.concatenate((previous.get(session, ids)[:kept], ids))
        previous[session] = ids
    whole, partial = divmod(prompt_len, block_size)
    if len(ids) not in {whole, whole + bool(partial)}:  # a partial block's id may be left out
        raise ValueError(
            f"{prompt_len} tokens fill {whole} blocks of {block_size}, got {len(ids)} ids"
        )
    if ids.min(initial=0) < 0:
        raise ValueError(f"block id {ids.min()} is negative")
    boundaries = tuple(int(depth) for depth in fields.get("boundaries", ()))
    arrival_us = timestamp * 1000
    return Request(0, arrival_us, session, prompt_len, output_len, boundaries, ids, block_size)


def _link(name: str, rows: list[Request]) -> Trace:
    """Complete every row's ids to cover its answer, last row first."""
    fresh = 1 + max(int(row.ids.max(initial=0)) for row in rows)
    through: npt.NDArray[np.int64] = np.full(fresh, -1, dtype=np.int64)  # row that passes a block
    following: dict[object, int] = {}
    requests: list[Request] = []
    done: dict[int, IdArray] = {}
    for number in range(len(rows) - 1, -1, -1):
        row = rows[number]
        blocks = -(-(row.prompt_len + row.output_len) // row.block_size)
        if row.session is not None:
            heir = following.get(row.session, -1)
            following[row.session] = number
        else:
            heir = int(through[row.ids[row.whole - 1]]) if row.whole else -1
            through[row.ids[: row.whole]] = number
        known = row.ids[: row.whole]
        if heir >= 0 and np.array_equal(rows[heir].ids[: row.whole], known):
            known = done[heir][: min(blocks, -(-rows[heir].prompt_len // row.block_size))]
        missing = blocks - len(known)
        done[number] = np.concatenate((known, np.arange(fresh, fresh + missing, dtype=np.int64)))
        fresh += missing
        requests.append(replace(row, number=number, ids=done[number]))
    return Trace(name, tuple(reversed(requests)), fresh)
