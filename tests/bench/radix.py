"""The tree beside SGLang 0.5.23's own: `python -m tests.bench.radix [--json F]`.

Both get the same prompts as SGLang's scheduler hands them over, `array('q')` of token ids, and a
row of KV ids as each keeps it (SGLang int32 on the device, ours int64 on the host), at pages of
one token, in one process with one thread, interleaved, timed in CPU seconds of the process. Every
figure is the median of its repeats. Trees are compared first: ids that a tree frees return to their
pool after the clock has stopped, SGLang's to nowhere.

    cycle  a new prompt of so many tokens: match (a miss behind the shared prefix), commit with a
           state at its end, evict as many tokens of others
    match  the same prompt again with one more token: all is known, as one edge
    turn   a conversation of so many tokens in turns of 1,024, each with its state, goes on by one
           turn: match and commit
    pool   what taking a prompt's ids and giving back as many took beside a cycle: ours then, in the
           pieces the tree freed; SGLang's unified pool and its allocator of a static split (CPU
           tensors) in one call each, from a pool of as many ids, half of them taken. `ratio` is
           that of a cycle with ours on top to SGLang's with the unified one
    admit  what our adapter computes on the host per request: key conversion (twice), look-up,
           message boundaries, stops

A match is what admission does: key conversion, look-up, pin (SGLang: look-up, lock). A commit
takes the key and the row as SGLang's scheduler holds them. The tree holds 10,000 leaves of 1,024
tokens, each with a state, behind a shared prefix of 256. `ratio` is ours over SGLang's.
"""

import argparse
import gc
import json
import statistics
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
import torch

from mempool import Geometry, Pool
from radix import CacheConfig, Costs, Kind, PrefixCache
from sgl_kimi_k3.boundaries import BoundaryRule
from sgl_kimi_k3.keys import tokens_of
from tests.bench.machine import commit, machine
from tests.bench.radix_peer import Allocator, Peer

ENVIRONMENT = {
    "machine": machine(), "commit": commit(), "command": "python -m tests.bench.radix"
}  # fmt: skip
SIZES = (1_024, 16_384, 131_072, 1_048_576)
NODES, LEAF, SHARED, TURN = 10_000, 1_024, 256, 1_024
TURN_REPEATS, OTHERS = 9, 140
TOKEN_BYTES = 64  # a state counts as one token, so that both trees evict by tokens alone


class Shelf:
    """A `Pool` that is given back what was freed only by `settle`."""

    def __init__(self, geometry: Geometry) -> None:
        self.pool = Pool(geometry)
        self.freed: list[tuple[np.ndarray, np.ndarray]] = []
        self.states = self.blocks = 0  # freed

    def fits(self, states: int, blocks: int) -> bool:
        return self.fits_after(states, blocks, freed_states=0, freed_blocks=0)

    def fits_after(self, states: int, blocks: int, *, freed_states: int, freed_blocks: int) -> bool:
        return self.pool.fits_after(
            states,
            blocks,
            freed_states=freed_states + self.states,
            freed_blocks=freed_blocks + self.blocks,
        )

    def alloc(self, states: int, blocks: int):
        assert not self.freed
        return self.pool.alloc(states, blocks)

    def free(self, states: np.ndarray, blocks: np.ndarray) -> None:
        self.freed.append((states, blocks))
        self.states += len(states)
        self.blocks += len(blocks)

    def settle(self) -> None:
        for states, blocks in self.freed:
            self.pool.free(states, blocks)
        self.freed, self.states, self.blocks = [], 0, 0


class Ours:
    """`PrefixCache` over `Pool` under the peer's verbs."""

    def __init__(self, sizes: Sequence[int], nodes: int) -> None:
        tokens = nodes * (LEAF + 1) + sum(2 * n * repeats(n) for n in sizes)  # and to spare
        self.shelf = Shelf(
            Geometry(
                total_bytes=tokens * TOKEN_BYTES,
                state_bytes=TOKEN_BYTES,
                block_bytes=TOKEN_BYTES,
                block_size=1,
            )
        )
        self.pool = self.shelf.pool
        everything = self.pool.alloc(0, self.pool.geometry.max_blocks)
        self.pool.free(everything.states, everything.blocks)  # the first touch of pages is slow
        config = CacheConfig(
            block_size=1, grid=64, costs=Costs(state_bytes=TOKEN_BYTES, token_bytes=TOKEN_BYTES)
        )
        self.cache = PrefixCache(self.shelf, config)

    def row(self, hit: int, tokens: int) -> np.ndarray:
        """The ids of a request's row, from the pool beyond what it resumed from."""
        grant = self.pool.alloc(0, tokens - hit)
        assert grant is not None
        return np.concatenate((np.zeros(hit, dtype=np.int64), grant.blocks))

    def match(self, tokens: array):
        """As admission does: look up, pin, mark what is consumed."""
        pin = self.cache.pin(self.cache.match(tokens_of(tokens), None))
        self.cache.touch(pin)
        return pin.depth, pin

    def commit(self, held, tokens: array, row: np.ndarray, depths: list[int]) -> None:
        """As a request's end does, with states at `depths`."""
        start, pin = held
        slots = self.pool.alloc(len(depths), 0).states
        kinds = (Kind.JUNCTION if depth == SHARED else Kind.TURN_END for depth in depths)
        offers = list(zip(depths, slots.tolist(), kinds, strict=True))
        key = tokens_of(tokens, depths[-1])
        mine = row[start : depths[-1]]
        self.cache.commit(pin, key, None, mine, offers, finished=True)

    def evict(self, tokens: int) -> None:
        """Make room for so many tokens."""
        assert self.cache.evict(0, self.pool.fundable_blocks() + tokens)

    def let_go(self, pin) -> None:
        """A request that goes no further."""
        self.cache.unpin(pin)

    def settle(self) -> None:
        """Give ids back to the pool."""
        self.shelf.settle()

    def states(self) -> int:
        """States held."""
        return self.cache.states


class Messages:
    """Stands in for a tokenizer: every header is a user's."""

    unk_token_id = None
    ids = {"<|open|>": 1, "<|sep|>": 2, "<|end_of_msg|>": 3}  # noqa: RUF012

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.ids[token]

    def decode(self, ids: list[int]) -> str:
        return f'message role="user" {len(ids)}'


class Prompts:
    """Random prompts that share their first tokens, alike for both sides."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.shared = self.draw(SHARED)

    def draw(self, tokens: int) -> np.ndarray:
        return self.rng.integers(0, 150_000, tokens, dtype=np.int64)

    def new(self, tokens: int) -> array:
        return array("q", np.concatenate((self.shared, self.draw(tokens - SHARED))).tobytes())

    def grown(self, prompt: array, tokens: int) -> array:
        return prompt + array("q", self.draw(tokens).tobytes())


class Times(NamedTuple):
    """Seconds of one request's parts, and what it hit."""

    match: float
    take: float  # its row of ids from the pool
    commit: float
    hit: int


def run(side, prompt: array, depths: list[int]) -> Times:
    """One request, with states left at `depths`."""
    (hit, held), matching = timed(side.match, prompt)
    row, taking = timed(side.row, hit, len(prompt))
    _, committing = timed(side.commit, (hit, held), prompt, row, depths)
    return Times(matching, taking, committing, hit)


def timed(call, *args):
    start = process_time()
    result = call(*args)
    return result, process_time() - start


class Samples:
    """Seconds by part, for ours and for SGLang's."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[list[float], list[float]]] = {}

    def add(self, part: str, side: int, seconds: float) -> None:
        self.seconds.setdefault(part, ([], []))[side].append(seconds)

    def row(self, tokens: int, *parts: str) -> dict:
        """Medians in microseconds; `ratio` is ours over SGLang's."""
        both = [
            {part: round(1e6 * statistics.median(self.seconds[part][side]), 1) for part in parts}
            for side in (0, 1)
        ]
        ours, peer = (round(sum(one.values()), 1) for one in both)
        row = {"tokens": tokens, "ours_us": ours, "sglang_us": peer, "ratio": round(ours / peer, 3)}
        return row | ({"ours": both[0], "sglang": both[1]} if len(parts) > 1 else {})


def cycles(sides, prompts: Prompts, tokens: int) -> Samples:
    """New prompts of so many tokens come, are looked up again, and others make room for them."""
    samples = Samples()
    for _ in range(repeats(tokens)):
        prompt = prompts.new(tokens)
        again = prompts.grown(prompt, 1)
        for index, side in enumerate(sides):
            spent = run(side, prompt, [tokens])
            assert spent.hit <= SHARED, spent.hit
            side.settle()
            (hit, held), known = timed(side.match, again)
            assert hit == tokens, (hit, tokens)
            side.let_go(held)
            _, evicting = timed(side.evict, tokens)
            _, settling = timed(side.settle)
            parts = {"match": spent.match, "commit": spent.commit, "evict": evicting}
            parts |= {"known": known, "pool": spent.take + settling}
            for part, seconds in parts.items():
                samples.add(part, index, seconds)
    return samples


def turns(sides, prompts: Prompts, tokens: int) -> Samples:
    """A conversation of so many tokens goes on, turn by turn."""
    samples = Samples()
    prompt = prompts.new(tokens)
    for side in sides:
        run(side, prompt, list(range(TURN, tokens + 1, TURN)))
        side.settle()
        for _ in range(OTHERS):  # turns do not all come at one instant
            side.let_go(side.match(prompts.new(2 * SHARED))[1])
    for _ in range(TURN_REPEATS):
        prompt = prompts.grown(prompt, TURN)
        for index, side in enumerate(sides):
            spent = run(side, prompt, [len(prompt)])
            assert spent.hit == len(prompt) - TURN, (spent.hit, len(prompt))
            side.settle()
            samples.add("match", index, spent.match)
            samples.add("commit", index, spent.commit)
    return samples


def admission(ours: Ours, prompts: Prompts, tokens: int) -> dict:
    """What a known prompt of so many tokens, a message every 512, costs before it is scheduled."""
    prompt = prompts.new(tokens)
    prompt[511::512] = array("q", [Messages.ids["<|end_of_msg|>"]]) * (tokens // 512)
    prompt[512::512] = array("q", [Messages.ids["<|open|>"]]) * len(prompt[512::512])
    run(ours, prompt, [tokens])
    ours.settle()
    rule = BoundaryRule.of(Messages())
    again = prompts.grown(prompt, 1)
    spent: dict[str, list[float]] = {}
    for _ in range(repeats(tokens)):
        key, spent_key = timed(tokens_of, again)
        match, spent_match = timed(ours.cache.match, key, None)
        boundaries, spent_boundaries = timed(rule.boundaries, key)
        _, spent_stops = timed(
            lambda match=match, boundaries=boundaries: ours.cache.stops(
                match, start=0, prompt_len=tokens, boundaries=boundaries
            )
        )
        for part, seconds in (
            ("keys", 2 * spent_key),
            ("match", spent_match),
            ("boundaries", spent_boundaries),
            ("stops", spent_stops),
        ):
            spent.setdefault(part, []).append(seconds)
    ours.evict(tokens)
    ours.settle()
    parts = {part: round(1e6 * statistics.median(times), 1) for part, times in spent.items()}
    return {"tokens": tokens, "ours_us": round(sum(parts.values()), 1), "ours": parts}


def pools(cycle: list[dict], spent: dict[int, float], ids: int) -> list[dict]:
    """Cycles with the pool on top; `spent` is what ours took, by prompt length."""
    unified, static = Allocator.unified(ids), Allocator.static(ids)
    rows = []
    for row in cycle:
        tokens = row["tokens"]
        theirs = [one.seconds(tokens, repeats(tokens)) for one in (unified, static)]
        ours_us, unified_us, static_us = (round(1e6 * s, 1) for s in (spent[tokens], *theirs))
        ratio = (row["ours_us"] + ours_us) / (row["sglang_us"] + unified_us)
        rows.append(
            {"tokens": tokens, "ours_us": ours_us, "unified_us": unified_us}
            | {"static_us": static_us, "ratio": round(ratio, 3)}
        )
    return rows


def refill(sides, prompts: Prompts, nodes: int) -> None:
    """Leaves up to the number the figures are for."""
    for side in sides:
        while side.states() < nodes:
            run(side, prompts.new(SHARED + LEAF), [SHARED + LEAF])
            side.settle()


def repeats(tokens: int) -> int:
    """More of what is short."""
    return max(5, 41 // max(1, tokens // 8_192 + 1))


def measure(sizes: Sequence[int] = SIZES, nodes: int = NODES) -> dict:
    """Every figure."""
    torch.set_num_threads(1)
    prompts = Prompts()
    sides = Ours(sizes, nodes), Peer()
    figures: dict[str, list] = {"cycle": [], "match": [], "turn": [], "pool": [], "admit": []}
    spent: dict[int, float] = {}
    with torch.inference_mode():
        for side in sides:
            run(side, prompts.new(2 * SHARED), [SHARED, 2 * SHARED])
            side.settle()
        refill(sides, prompts, nodes)
        for tokens in sizes:
            samples = cycles(sides, prompts, tokens)
            figures["cycle"].append(samples.row(tokens, "match", "commit", "evict"))
            spent[tokens] = statistics.median(samples.seconds["pool"][0])
            figures["match"].append(samples.row(tokens, "known"))
            refill(sides, prompts, nodes)
        for tokens in sizes:
            figures["admit"].append(admission(sides[0], prompts, tokens))
        for tokens in sizes:
            figures["turn"].append(turns(sides, prompts, tokens).row(tokens, "match", "commit"))
        figures["pool"] = pools(figures["cycle"], spent, sides[0].pool.geometry.max_blocks)
    assert sides[0].cache.violations() == []
    return figures | {"sglang_core": sides[1].core, "nodes": nodes, **ENVIRONMENT}


def show(figures: dict) -> None:
    """A line per figure."""
    for name in ("match", "turn", "cycle"):
        for row in figures[name]:
            parts = {
                part: f"{row['ours'][part]:.0f}/{row['sglang'][part]:.0f}"
                for part in row.get("ours", {})
            }
            print(
                f"{name:6}{row['tokens']:>10,} tokens  ours {row['ours_us']:>10,.0f} us  "
                f"SGLang {row['sglang_us']:>10,.0f} us  ratio {row['ratio']:.2f}  {parts or ''}"
            )
    for row in figures["pool"]:
        print(
            f"pool  {row['tokens']:>10,} tokens  ours {row['ours_us']:>10,.0f} us  SGLang "
            f"{row['unified_us']:>10,.0f} us (static {row['static_us']:,.0f})  with it a cycle's "
            f"ratio {row['ratio']:.2f}"
        )
    for row in figures["admit"]:
        print(f"admit {row['tokens']:>10,} tokens  ours {row['ours_us']:>10,.0f} us  {row['ours']}")
    for name in ("sglang_core", "machine", "commit", "command"):
        print(f"{name}: {figures[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    path = parser.parse_args().json
    gc.collect()
    gc.freeze()  # or collections walk the million objects that importing SGLang leaves
    figures = measure()
    show(figures)
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
