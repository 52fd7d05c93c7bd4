"""Operation sequences for the pool benchmark, made from a request trace.

A small serving loop replays the trace: up to `RUNNING` requests at once, prefill in chunks, decode
one block at a time; the KV and the last two turns' states of finished sessions stay cached, the
least recently used session is evicted until the next demand fits. Only counts and handles are
recorded, so any allocator can be driven by the result.
"""

import gzip
import json
import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mempool import Geometry, Pool

RUNNING = 16
CHUNK_TOKENS = 8192
STATES_A_REQUEST = 3  # one live, two that tracking alternates between
TOKEN_BYTES, STATE_BYTES = (
    32,
    65_024,
)  # Kimi K3 at TP8, bf16 KV, divided by 864: one state = 2,032 tokens
PAGE = 64


def scaled(tokens: int) -> Geometry:
    """An arena worth `tokens` tokens of KV with the ratio of Kimi K3 at TP8."""
    return Geometry(tokens * TOKEN_BYTES, STATE_BYTES, PAGE * TOKEN_BYTES, PAGE)


def find_trace(name: str) -> Path:
    """A trace by file name, from $KIMI_K3_TRACES (default traces/) or a shared/traces/ nearby."""
    places = [os.environ.get("KIMI_K3_TRACES", "traces"), "shared/traces", "../shared/traces"]
    for place in places:
        path = Path(place) / name
        if path.exists():
            return path
    raise FileNotFoundError(f"{name} is in none of {places}: set KIMI_K3_TRACES to its folder")


def read_trace(name: str, limit: int) -> Iterator[dict]:
    """The first `limit` rows, each with its full `hash_ids`."""
    previous: dict[int, list[int]] = {}
    with gzip.open(find_trace(name), "rt") as lines:
        for line, _ in zip(lines, range(limit), strict=False):
            row = json.loads(line)
            kept = row.pop("prefix_blocks", None)
            if kept is not None:
                row["hash_ids"] = previous.get(row["session"], [])[:kept] + row["hash_ids"]
                previous[row["session"]] = row["hash_ids"]
            yield row


@dataclass(frozen=True, slots=True)
class Op:
    """`alloc` takes units into a handle; `free` returns that many of a handle's oldest ones."""

    verb: str
    handle: int
    states: int
    blocks: int


@dataclass
class Session:
    """What a session keeps between its turns: handles with the units they still hold."""

    ids: list[int] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)  # [handle, states, blocks]
    running: bool = False


class Recorder:
    """Drives a `Pool` as an oracle of `fits` and writes down what happened."""

    def __init__(self, geometry: Geometry) -> None:
        self.pool, self.ops = Pool(geometry), []
        self.units: dict[int, tuple[list[int], list[int]]] = {}
        self.cached: OrderedDict[object, Session] = OrderedDict()

    def alloc(self, states: int, blocks: int) -> list[int] | None:
        """Take units, evicting cached ones until they fit; None when even that is not enough."""
        while not self.pool.fits(states, blocks):
            if not self.evict():
                return None
        grant = self.pool.alloc(states, blocks)
        handle = len(self.units)
        self.units[handle] = grant.states.tolist(), grant.blocks.tolist()
        self.ops.append(Op("alloc", handle, states, blocks))
        return [handle, states, blocks]

    def free(self, entry: list[int], states: int, blocks: int) -> None:
        handle = entry[0]
        held_states, held_blocks = self.units[handle]
        self.pool.free(held_states[:states], held_blocks[:blocks])
        del held_states[:states], held_blocks[:blocks]
        entry[1] -= states
        entry[2] -= blocks
        self.ops.append(Op("free", handle, states, blocks))

    def evict(self) -> bool:
        for key, session in self.cached.items():
            if session.running:
                continue
            entry = session.held.pop()
            self.free(entry, entry[1], entry[2])
            session.ids.clear()  # whatever is left is no longer matched, only freed
            if not session.held:
                del self.cached[key]
            return True
        return False


def record(name: str, limit: int, tokens: int) -> tuple[Geometry, list[Op]]:
    """The operations of the first `limit` requests of a trace in an arena of `tokens` tokens."""
    geometry = scaled(tokens)
    recorder = Recorder(geometry)
    running: deque[tuple[Session, list[list[int]], int]] = deque()
    for number, row in enumerate(read_trace(name, limit)):
        while len(running) >= RUNNING:
            _decode(recorder, running)
        key = row.get("session", f"request {number}")
        while recorder.cached.get(key, Session()).running:
            _decode(recorder, running)
        entry = _prefill(recorder, key, row)
        if entry is not None:
            running.append(entry)
    while running:
        _decode(recorder, running)
    assert recorder.pool.violations() == []
    return geometry, recorder.ops


def _prefill(recorder: Recorder, key: object, row: dict):
    session = recorder.cached.pop(key, None) or Session()
    same = 0
    for old, new in zip(session.ids, row["hash_ids"], strict=False):
        if old != new:
            break
        same += 1
    if not same:
        for entry in session.held:
            recorder.free(entry, entry[1], entry[2])
        session.held.clear()
    session.ids, session.running = row["hash_ids"], True
    recorder.cached[key] = session
    have = sum(entry[2] for entry in session.held) * PAGE
    need = max(row["input_length"] - min(same * row["block_size"], have), 1)
    mine: list[list[int]] = []
    states = STATES_A_REQUEST
    while need > 0:
        entry = recorder.alloc(states, -(-min(need, CHUNK_TOKENS) // PAGE))
        if entry is None:  # not even with an empty cache: the request is refused
            for own in mine:
                recorder.free(own, own[1], own[2])
            session.running = False
            if not session.held:
                del recorder.cached[key]
            return None
        mine.append(entry)
        need, states = need - CHUNK_TOKENS, 0
    return session, mine, -(-row["output_length"] // PAGE)


def _decode(recorder: Recorder, running: deque) -> None:
    """One block for the first of the running requests; a request without more to decode ends."""
    session, mine, more = running.popleft()
    if more:
        entry = recorder.alloc(0, 1)
        if entry is not None:
            mine.append(entry)
            running.append((session, mine, more - 1))
            return
    recorder.free(mine[0], 2, 0)  # the live state and one track; the other becomes the checkpoint
    for old in session.held[:-1]:  # superseded: only the last two turns keep theirs
        if old[1]:
            recorder.free(old, old[1], 0)
    session.held += mine
    session.running = False


def fill(name: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """(states, blocks, states to give back at once) of requests that are never evicted."""
    for row in read_trace(name, limit):
        tokens = row["input_length"] + row["output_length"]
        yield STATES_A_REQUEST, -(-tokens // PAGE), 2
