"""Storage: canaries survive moves, poison never reaches a grant of the other kind."""

import numpy as np
import pytest
import torch

from mempool import Geometry, Pool, Side, Step, kernels
from mempool.storage import Storage
from tests.interpreter import said_by
from tests.pool import arena_on_gpu
from tests.pool.interpret_kernels import compare

POISON = 0xFF  # NaN in fp32, bf16, fp16 and fp8 e4m3
NONE = np.empty(0, dtype=np.int64)
GEOMETRY = Geometry(total_bytes=3200, state_bytes=320, block_bytes=64, block_size=4)


def arena(geometry: Geometry = GEOMETRY) -> Storage:
    return Storage(torch.zeros(geometry.total_bytes, dtype=torch.uint8), geometry)


class World:
    """A pool with bytes: each live unit carries its own canary, everything else is poison."""

    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        self.pool, self.storage = Pool(geometry), arena(geometry)
        self.canaries: dict[tuple[Side, int], int] = {}
        self.storage.raw.fill_(POISON)
        self.stamp = 0

    def alloc(self, states: int, blocks: int):
        grant = self.pool.alloc(states, blocks)
        if grant is None:
            return None
        self.storage.apply(grant)
        self.check_stale(grant)
        for side, ids in ((Side.STATE, grant.states), (Side.BLOCK, grant.blocks)):
            indices = self.pool.table_of(side).index_of(ids)
            for one, index in zip(ids.tolist(), indices.tolist(), strict=True):
                self.stamp = (self.stamp + 1) % 251
                self.storage.rows(side)[index].fill_(self.stamp)
                self.canaries[side, one] = self.stamp
        self.check()
        return grant

    def check_stale(self, grant) -> None:
        for side, indices in ((Side.STATE, grant.stale_states), (Side.BLOCK, grant.stale_blocks)):
            assert not self.storage.rows(side)[torch.from_numpy(indices.copy())].any()

    def free(self, side: Side, ids) -> None:
        rows = self.storage.rows(side)
        for one in ids:
            rows[int(self.pool.table_of(side).index_of(one))].fill_(POISON)
            del self.canaries[side, one]
        pair = (ids, NONE) if side is Side.STATE else (NONE, ids)
        self.pool.free(*pair)
        self.check()

    def check(self) -> None:
        assert self.pool.violations() == []
        for (side, one), stamp in self.canaries.items():
            row = self.storage.rows(side)[int(self.pool.table_of(side).index_of(one))]
            assert bool((row == stamp).all()), f"{side} {one} lost its canary {stamp}"


def test_canaries_survive_moves_in_both_directions():
    world = World()
    states, blocks = world.alloc(4, 25).states, world.alloc(0, 0).blocks
    assert blocks.size == 0
    world.free(Side.BLOCK, list(range(1, 26, 2)))
    grant = world.alloc(2, 0)
    assert [move.side for move in grant.moves] == [Side.BLOCK]
    world.free(Side.STATE, states[[0, 2]].tolist())
    grant = world.alloc(0, 12)
    assert [move.side for move in grant.moves] == [Side.STATE]


def test_background_moves_keep_canaries():
    world = World()
    world.alloc(4, 20)
    world.free(Side.STATE, [1])
    world.free(Side.BLOCK, [2, 3, 5, 8])
    while moves := world.pool.compact(400):
        world.storage.move(moves)
        world.check()
    assert world.pool.report().states.holes == world.pool.report().blocks.holes == 0


def test_state_bytes_that_become_kv_are_zero_before_they_are_read():
    world = World()
    world.free(Side.STATE, world.alloc(9, 0).states.tolist())
    grant = world.pool.alloc(0, 30)
    assert grant is not None
    world.storage.apply(grant)
    # Those granted, and free ones of a state's bytes for the grants to come.
    assert sorted(grant.stale_blocks.tolist()) == list(range(15, 50))
    # One valid token of a four-token block: the unwritten tail must be finite in every dtype.
    rows = world.storage.rows(Side.BLOCK)[torch.from_numpy(grant.stale_blocks)]
    assert torch.isfinite(rows.view(torch.bfloat16).float()).all()
    assert torch.isfinite(rows.view(torch.float32)).all()


def test_kv_bytes_that_become_a_state_read_as_zero():
    world = World()
    world.free(Side.BLOCK, world.alloc(0, 45).blocks.tolist())
    grant = world.pool.alloc(9, 0)
    assert grant is not None
    assert grant.stale_states.tolist() == list(range(1, 10))
    world.storage.apply(grant)
    assert not world.storage.rows(Side.STATE)[1:10].any()


def test_zero_touches_nothing_else():
    storage = arena()
    storage.raw.fill_(POISON)
    storage.zero_states(np.array([3]))
    storage.zero_blocks(np.array([49, 40]))
    expected = torch.full_like(storage.raw, POISON)
    expected[3 * 320 : 4 * 320] = 0
    expected[40 * 64 : 41 * 64] = 0
    expected[49 * 64 : 50 * 64] = 0
    assert torch.equal(storage.raw, expected)


def test_copy_states_leaves_the_source():
    storage = arena()
    storage.rows(Side.STATE)[2].fill_(7)
    storage.copy_states(np.array([2]), np.array([5]))
    assert bool((storage.rows(Side.STATE)[[2, 5]] == 7).all())
    with pytest.raises(ValueError, match="1 sources for 2 targets"):
        storage.copy_states(np.array([2]), np.array([5, 6]))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (torch.zeros(3200, dtype=torch.int8), "uint8"),
        (torch.zeros((2, 1600), dtype=torch.uint8), "flat"),
        (torch.zeros(3199, dtype=torch.uint8), "3199 bytes"),
    ],
)
def test_a_wrong_arena_is_refused(raw, why):
    with pytest.raises(ValueError, match=why):
        Storage(raw, GEOMETRY)


class FakeKernel:
    """Stands for a Triton kernel: notes its launches."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid):
        return lambda *_args, **_options: self.log.append((self.name, grid[0]))


@pytest.fixture
def fake_device(monkeypatch):
    """A storage on a device whose values cannot be read back, and the log of its launches.

    Torch's meta device has no data: any wait for a value (`item`, `cpu`, `nonzero`) raises.
    """
    log: list[tuple[str, int]] = []
    for name in ("copy", "zero"):
        monkeypatch.setattr(kernels, f"_{name}_kernel", FakeKernel(name, log))
    monkeypatch.setattr(kernels, "upload", lambda ids, device: torch.from_numpy(ids).to(device))
    raw = torch.empty(GEOMETRY.total_bytes, dtype=torch.uint8, device="meta")
    return Storage(raw, GEOMETRY, kernels.TritonMover), log


def test_the_fake_device_cannot_be_waited_for(fake_device):
    storage, _ = fake_device
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        storage.raw[0].item()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        storage.raw.cpu()


def test_no_operation_waits_for_the_device(fake_device):
    pool, (storage, log) = Pool(GEOMETRY), fake_device
    grant = pool.alloc(4, 20)
    storage.apply(grant)
    assert log == []
    pool.free(grant.states[:1], grant.blocks[:6])
    pool.retire(grant.states[1:2], grant.blocks[6:7], Step(1))
    storage.copy_states(np.array([3]), np.array([1]))
    storage.move(pool.compact(10_000))
    pool.drain(Step(1))
    storage.apply(pool.alloc(0, 20))
    assert {name for name, _ in log} == {"copy", "zero"}


def test_moves_are_launched_before_zeroes(fake_device):
    pool, (storage, log) = Pool(GEOMETRY), fake_device
    grant = pool.alloc(9, 0)
    pool.free(grant.states[[0, 2, 4]], [])
    more = pool.alloc(0, 15)
    storage.apply(more)
    assert [len(move.sources) for move in more.moves] == [3]
    assert len(more.stale_blocks) == 15
    assert log == [("copy", 3), ("zero", 15)]


def test_an_unknown_device_needs_a_mover():
    with pytest.raises(ValueError, match="no mover for device 'meta'"):
        Storage(torch.empty(3200, dtype=torch.uint8, device="meta"), GEOMETRY)


def test_triton_mover_under_the_interpreter():
    said = said_by("tests.pool.interpret_kernels")
    assert " ".join(said).split() == ["32832", "ok", "1001", "ok", "beyond", "int32", "ok"]


@pytest.mark.gpu
@pytest.mark.parametrize("unit_bytes", [8 * kernels.CHUNK + 64, 1001, 27_648 * 64])
def test_triton_mover_on_a_gpu(unit_bytes):
    compare(unit_bytes, "cuda")


@pytest.mark.gpu
def test_nothing_waits_for_a_running_forward():
    assert arena_on_gpu.check().endswith("nothing waited")
