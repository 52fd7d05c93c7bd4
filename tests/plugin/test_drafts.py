"""Draft windows through SGLang's own allocation and release, on our pool and tree (cases E1, E2).

Every step verifies a window per request: KV rows of rejected drafts hold other tokens, and the
state goes on by the accepted ones.  The world compares what each step reads.
"""

from __future__ import annotations

import random
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_reserve_per_decode,
    page_aligned_decode_alloc_lens,
)

from sgl_kimi_k3 import drafts
from sgl_kimi_k3.attention import chains
from tests.plugin.test_life import prompt
from tests.plugin.world import World

REJECTED = 127.0  # in a KV row: no token's value


def reserve() -> int:
    return drafts.reserve(get_alloc_reserve_per_decode)


class DraftWorld(World):
    """A world whose decode steps verify windows and accept `accepts(request)` of their steps."""

    def __init__(self, *, window: int = 4, seed: int = 0, **sizes: int) -> None:
        super().__init__(window=window, **sizes)
        self.window = window
        self._random = random.Random(seed)
        self.overshoots = False  # accept past the request's end, as if no chain were cut there

    def accepts(self, req: Req) -> int:
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        most = self.window if self.overshoots else min(self.window, left)
        return self._random.randint(1, most)

    def _next_tokens(self) -> int:
        batch = SimpleNamespace(
            reqs=self.running,
            token_to_kv_pool_allocator=self.allocator,
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
        )
        batch._new_tokens_required_next_decode_spec_v2 = lambda *args: (
            ScheduleBatch._new_tokens_required_next_decode_spec_v2(batch, *args)
        )
        with mock.patch("sglang.srt.managers.schedule_batch.get_alloc_reserve_per_decode", reserve):
            return ScheduleBatch.new_tokens_required_next_decode(batch)

    def _extend_rows(self, reqs: list[Req]) -> int:
        """As `eagle_prepare_for_decode` takes memory, then one window of each; 0 tokens of all."""
        now, then, needed = page_aligned_decode_alloc_lens(
            reqs, reserve=reserve(), page_size=self.page_size
        )
        batch = self._batch(reqs, [req.kv.kv_committed_len for req in reqs])
        batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lengths = {
            f"{name}_kv_lens{where}": torch.tensor(values, dtype=torch.int32)
            for name, values in (("cur", now), ("nxt", then))
            for where in ("", "_cpu")
        }
        with mock.patch.object(allocation, "assign_req_to_token_pool_func", chains.write_rows):
            drafts.allocate(
                allocation.alloc_for_spec_decode,
                self.tree,
                self.rows,
                reqs=reqs,
                req_pool_indices=batch.req_pool_indices_cpu,
                num_needed_tokens=needed,
                batch=batch,
                **lengths,
            )
        return 0

    def _decode(self):
        launched = super()._decode()
        if launched is None:
            return None
        results = []
        for req in list(self.running):
            start, count = req.kv.kv_committed_len, self.accepts(req)
            assert start + self.window <= req.kv.kv_allocated_len
            sampled = [(req, self._sample(req)) for _ in range(count)]
            self.verify(req, start, count)
            req.kv.kv_committed_len += count
            if len(req.output_ids) + count >= req.sampling_params.max_new_tokens:
                req.finished_len = req.sampling_params.max_new_tokens
            results += sampled
        return results, False

    def verify(self, req: Req, start: int, count: int) -> None:
        """Rows of a whole window, of which `count` are right; a state after those."""
        self._forward(req, start, start + count)
        rows = self.rows.req_to_token[req.kv.req_pool_idx, start + count : start + self.window]
        written = self.allocator.translate_write_loc(rows.to(torch.int64))
        assert (written > 0).all(), (req.rid, rows)
        self.kv[written] = REJECTED


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("window", [2, 5, 8])
def test_second_turn_resumes_where_the_first_ended(page_size: int, window: int) -> None:
    """As without drafts: all but the last token, which was never fed."""
    world = DraftWorld(tokens=1280, page_size=page_size, window=window)
    first = world.serve(prompt(1, 20), new=11)
    history = list(first.origin_input_ids) + list(first.output_ids)
    assert len(history) == 31
    second = world.request(history + prompt(2, 10))
    world.step()
    assert second.num_matched_prefix_tokens == len(history) - 1
    world.run(second)
    assert len(second.output_ids) == 4


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_rejected_tail_is_the_requests_and_is_freed(page_size: int) -> None:
    """Only what is committed is published; rows behind it come back at the end."""
    world = DraftWorld(tokens=640, page_size=page_size, window=8)
    world.accepts = lambda _: 1
    req = world.request(prompt(1, 20), new=12)
    world.step()
    tails = []
    while not req.finished():
        tails.append(req.kv.kv_allocated_len - req.kv.kv_committed_len)
        assert world.rows._held[req.kv.req_pool_idx] == -(-req.kv.kv_allocated_len // page_size)
        world.step()
    assert max(tails) >= 7, tails
    kept = -(-(20 + 11) // page_size)  # the last sampled token was never fed
    assert world.arena.pool.live_blocks == kept


def test_an_end_inside_an_accepted_window_leaves_no_state_behind_it() -> None:
    """The live state holds tokens that the client never saw: it is freed, what precedes it kept."""
    world = DraftWorld(tokens=640, window=8)
    world.overshoots = True
    ended = 0
    for seed in range(6):
        first = world.serve(prompt(seed, 20), new=6)
        history = list(first.origin_input_ids) + list(first.output_ids)
        second = world.request(history + prompt(90, 5))
        world.step()
        assert second.num_matched_prefix_tokens in (20, 25, 26)  # 26: it ended with the window
        ended += second.num_matched_prefix_tokens == 20
        world.run(second)
    assert ended


@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_leaves_the_state_after_the_accepted_tokens(page_size: int) -> None:
    world = DraftWorld(tokens=640, page_size=page_size, window=5)
    req = world.request(prompt(1, 22), new=30)
    for _ in range(4):
        world.step()
    known = req.kv.kv_committed_len
    assert 22 < known < 22 + len(req.output_ids) + 1
    world.retract(req)
    world.check()
    world.step()
    assert req.num_matched_prefix_tokens == known
    world.run(req)
    assert len(req.output_ids) == 30


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [1, 8])
def test_more_conversations_than_fit(seed: int, page_size: int) -> None:
    """Eviction, retraction and aborts among windows: books hold and every answer is whole."""
    world = DraftWorld(
        tokens=400, states=8, rows=6, page_size=page_size, window=5, seed=seed, opportunistic=16
    )
    draw = random.Random(seed)
    talks = [prompt(10 * seed + n, draw.randint(5, 60)) for n in range(8)]
    for _ in range(3):
        pending = {n: world.request(talk, new=draw.randint(1, 40)) for n, talk in enumerate(talks)}
        aborted = draw.sample(sorted(pending), 2)
        for _ in range(draw.randint(2, 12)):
            world.step()
            if world.running and draw.random() < 0.2:
                world.retract(draw.choice(world.running))
        for n in aborted:
            if not pending[n].finished():
                world.abort(pending[n])
            world.check()
        world.run(*pending.values())
        for n, req in pending.items():
            talks[n] = [*talks[n], *req.output_ids, *prompt(draw.randint(0, 99), 3)]
            if n not in aborted:
                assert len(req.output_ids) == req.sampling_params.max_new_tokens
    assert world.tree.observer.retracted > 0


# -- the chain --


def tree(*parents: int) -> np.ndarray:
    """A mask of nodes by their parents; -1 for none."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def cut(tokens: list[int], mask: np.ndarray, longest: int = 99, last: tuple[int, ...] = ()):
    from sgl_kimi_k3.chain import chain

    drafts_, links = chain(np.array(tokens), mask, longest=longest, last=last)
    length = int(links[:, 0].sum())
    assert (
        links.tolist() == tree(*[n - 1 if n < length else -1 for n in range(len(tokens))]).tolist()
    )
    return drafts_[:length].tolist()


def test_a_chain_stays_as_it_is() -> None:
    assert cut([7, 1, 2, 3], tree(-1, 0, 1, 2)) == [7, 1, 2, 3]


def test_of_a_tree_the_first_children() -> None:
    assert cut([7, 1, 5, 2, 6], tree(-1, 0, 0, 1, 2)) == [7, 1, 2]


def test_without_drafts_it_is_the_last_token() -> None:
    assert cut([7, 0, 0], tree(-1, -1, -1)) == [7]


def test_it_ends_no_later_than_the_answer() -> None:
    """At the last token asked for, or behind one that ends the answer; the first is no draft."""
    whole = tree(-1, 0, 1, 2)
    assert cut([7, 1, 2, 3], whole, longest=3) == [7, 1, 2]
    assert cut([7, 1, 2, 3], whole, longest=1) == [7]
    assert cut([7, 1, 2, 3], whole, last=(1,)) == [7, 1]
    assert cut([7, 1, 2, 3], whole, last=(7, 2)) == [7, 1, 2]


def test_the_environments_ninja_will_do_but_not_no_compiler(monkeypatch, tmp_path):
    """As where `.venv/bin` is not on the PATH; the scripts of an environment are."""
    system, scripts = tmp_path / "bin", tmp_path / "scripts"
    for path in (system / "c++", scripts / "ninja"):
        path.parent.mkdir()
        path.touch(0o755)
    monkeypatch.setattr(drafts, "get_path", lambda _: str(scripts))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(system))
    drafts._find_compiler()
    assert shutil.which("ninja") == str(scripts / "ninja")
    system.joinpath("c++").unlink()
    with pytest.raises(ValueError, match=r"c\+\+ is missing: apt install g\+\+"):
        drafts._find_compiler()
