"""What fits into one rank's arena."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool import Geometry, unit_bytes
from sgl_kimi_k3.memory_plan import bundles
from sgl_kimi_k3.plan.model import ITEMSIZE, Layout, Model, Weights
from sgl_kimi_k3.serve import CPU_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sgl_kimi_k3.plan.traffic import Profile

VISION_CACHE_BYTES = 100 << 20  # SGLANG_VLM_CACHE_SIZE_MB, set aside where a model sees
STATE_SHARE = 0.9  # --mamba-full-memory-ratio; decides a few labels, not the size of our arena
MOST_FRACTION = 0.95  # what activations and CUDA graphs leave at best
ALIGN_BYTES = 4096  # SGLang floors a profiled budget to this
SMALLEST_STATES = 3  # SGLang's floor: a request's state and two more to work with


@dataclass(frozen=True, slots=True)
class Server:
    """What will be started, as far as memory goes.

    Attributes:
        model: from its config.
        layout: ranks.
        page_size: tokens per block of one rank.
        dtype, kv_dtype, ssm_dtype: of the model, of MLA rows, of the recurrent part of a state;
            `auto` is what `serve` makes of it.
        device: `cuda`, or `cpu` for the portable model.
    """

    model: Model
    layout: Layout
    page_size: int = 1
    dtype: str = "auto"
    kv_dtype: str = "auto"
    ssm_dtype: str = "auto"
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"--page-size {self.page_size}: must be at least 1 token")

    @property
    def serving_dtype(self) -> str:
        """SGLang serves a float32 checkpoint in float16, `serve` sets float32 on a CPU."""
        if self.dtype != "auto":
            return self.dtype
        if self.device == "cpu":
            return CPU_DEFAULTS["--dtype"]
        return "float16" if self.model.dtype == "float32" else self.model.dtype

    @property
    def recurrent_dtype(self) -> str:
        """SGLang's default is float32; the portable model keeps float64."""
        if self.ssm_dtype != "auto":
            return self.ssm_dtype
        return "float64" if self.device == "cpu" else "float32"

    def unit_bytes(self) -> tuple[int, int]:
        """Bytes of one state and of one token's rows on one rank."""
        model = self.model
        kv_dtype = self.serving_dtype if self.kv_dtype == "auto" else self.kv_dtype
        return unit_bytes(
            n_kda=model.n_kda,
            n_mla=model.n_mla,
            num_heads=model.heads,
            head_dim=model.head_dim,
            conv_kernel=model.conv_kernel,
            kv_lora_rank=model.kv_lora_rank,
            rope_dim=model.rope_dim,
            state_itemsize=ITEMSIZE[self.recurrent_dtype],
            conv_itemsize=ITEMSIZE[self.serving_dtype],
            kv_itemsize=ITEMSIZE[kv_dtype],
            tp=self.layout.attention_tp,
        )

    def geometry(self, total_bytes: int, fix: str) -> Geometry:
        """The arena of so many bytes.

        Raises:
            ValueError: it cannot hold one request; `fix` says what to raise.
        """
        state_bytes, token_bytes = self.unit_bytes()
        geometry = Geometry(
            total_bytes=total_bytes,
            state_bytes=state_bytes,
            block_bytes=token_bytes * self.page_size,
            block_size=self.page_size * self.layout.dcp,
        )
        geometry.require(states=SMALLEST_STATES, blocks=1, flag=fix)
        return geometry


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU's memory, in bytes.

    Attributes:
        total: what SGLang finds free before it loads anything.
        fraction: `--mem-fraction-static`, the share for weights and arena.
        weights: this rank's.
        weights_known: given by the user rather than worked out from the config.
    """

    total: int
    fraction: float
    weights: int
    weights_known: bool

    @classmethod
    def of(cls, total: int, fraction: float, weights: int | None, server: Server) -> GpuMemory:
        """With the weights given for one rank, or worked out from the config."""
        if not 0 < fraction < 1:
            raise ValueError(f"--mem-fraction-static {fraction}: must be between 0 and 1")
        known = weights is not None
        worked_out = weights if known else Weights.of(server.model).on_rank(server.layout)
        return cls(total, fraction, worked_out, known)

    def arena_bytes(self, server: Server) -> int:
        """The arena SGLang will give us: `KVCacheConfigurator`'s arithmetic.

        What `fraction` leaves beside the weights is split into states and KV, one state is set
        aside, the KV part is floored to 4,096 bytes; the arena is both parts together.

        Raises:
            ValueError: the weights leave no room; names what would.
        """
        state_bytes, _ = server.unit_bytes()
        reserved = VISION_CACHE_BYTES if server.model.sees else 0
        rest = self.total * self.fraction - self.weights - reserved
        states = int((rest * STATE_SHARE / (1 + STATE_SHARE) - state_bytes) // state_bytes)
        if states < 1:
            raise ValueError(self._too_small(reserved + 2 * state_bytes, server.layout))
        budget = int(rest - (states + 1) * state_bytes)
        return budget - budget % ALIGN_BYTES + states * state_bytes

    def _too_small(self, more: int, layout: Layout) -> str:
        needed = (self.weights + more) / self.total
        fixes = [f"more GPUs (--tp {2 * layout.tp})", "larger ones"]
        if needed < MOST_FRACTION:
            fixes.insert(0, f"--mem-fraction-static {needed + 0.01:.2f}")
        if not self.weights_known:
            fixes.append("--weight-bytes if the estimate is wrong")
        return (
            f"weights of {self.weights / 2**30:,.1f} GiB leave no room for the arena in "
            f"--mem-fraction-static {self.fraction} of {self.total / 2**30:,.1f} GiB; "
            f"{', or '.join(fixes)}"
        )


@dataclass(frozen=True, slots=True)
class Fits:
    """How much of one kind of traffic one arena holds; counts are of the whole server.

    Attributes:
        longest_request: tokens of the longest single request.
        requests: that run at once at a conversation's full length, nothing cached.
        context_requests: the same at the context length.
        conversations: cached at full length with their latest state only, the shared prefix once.
        conversations_all: cached with every state their turns leave.
        checkpoints: states that fit beside the KV of the conversations asked for.
    """

    longest_request: int
    requests: int
    context_requests: int
    conversations: int
    conversations_all: int
    checkpoints: int

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        layout: Layout,
        profile: Profile,
        *,
        interval: int,
        context: int,
        asked: int | None,
    ) -> Fits:
        """Counted on the arena, then times the attention replicas."""
        own = geometry.blocks_of(profile.own_len)
        shared_blocks = geometry.blocks_of(profile.shared)
        shared = {"shared_states": min(shared_blocks, 1), "shared_blocks": shared_blocks}
        every = 2 * profile.turns + on_grid(profile, interval)
        requests = bundles(geometry, states=1, blocks=geometry.blocks_of(profile.final_len))
        latest = bundles(geometry, states=1, blocks=own, **shared)
        held = shared_blocks + own * (latest if asked is None else -(-asked // layout.dp))
        return cls(
            longest_request=geometry.blocks_above(geometry.state_end(1)) * geometry.block_size,
            requests=requests * layout.dp,
            context_requests=bundles(geometry, states=1, blocks=geometry.blocks_of(context))
            * layout.dp,
            conversations=latest * layout.dp,
            conversations_all=bundles(geometry, states=every, blocks=own, **shared) * layout.dp,
            checkpoints=geometry.states_below(geometry.block_start(held)) * layout.dp,
        )


@dataclass(frozen=True, slots=True)
class IntervalCost:
    """What states every so many tokens cost one conversation.

    Attributes:
        interval: tokens; 0 is off.
        states: on the grid of one conversation, the shared prefix not counted.
        state_bytes: theirs on one rank.
        share: of the bytes of the conversation's KV and latest state.
        worst_recompute: tokens computed again, at most, by a request that parts from the
            conversation anywhere when only the grid and the shared prefix's state are left.
    """

    interval: int
    states: int
    state_bytes: int
    share: float
    worst_recompute: int

    @classmethod
    def of(cls, geometry: Geometry, profile: Profile, interval: int) -> IntervalCost:
        """For one conversation at its end."""
        states = on_grid(profile, interval)
        kept = geometry.blocks_of(profile.own_len) * geometry.block_bytes + geometry.state_bytes
        cost = states * geometry.state_bytes
        return cls(interval, states, cost, cost / kept, worst_recompute(profile, interval))


def on_grid(profile: Profile, interval: int) -> int:
    """States on the grid of one conversation, beyond the shared prefix."""
    if not interval:
        return 0
    return profile.final_len // interval - profile.shared // interval


def worst_recompute(profile: Profile, interval: int) -> int:
    """The widest gap between the shared prefix's end, the grid's depths and the end."""
    depths: Sequence[int] = [profile.shared, profile.final_len]
    if interval:
        first = profile.shared // interval + 1
        grid = range(first * interval, profile.final_len, interval)
        depths = [profile.shared, *grid, profile.final_len]
    return max(high - low for low, high in itertools.pairwise(depths))
