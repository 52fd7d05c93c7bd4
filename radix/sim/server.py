"""What a policy is to the simulator: a server that holds memory for running requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from radix.sim.model import Model
    from radix.sim.trace import Request, Trace

CHUNK_TOKENS = 8192  # the longest prefill step, SGLang's default for large models


@dataclass(frozen=True, slots=True)
class Setup:
    """What a policy is built for.

    Attributes:
        model: bytes and FLOPs.
        capacity_bytes: memory for states and KV, of running requests and cached ones alike, with
            whatever the policy's pool reserves.
        trace: what will come. Only a policy that says so in its name (`clairvoyant`) may look
            ahead; others may read sizes, such as the longest prompt.
        block_size: tokens per KV block, where the policy has a choice.
        interval, grid, opportunistic, dense, probation, ghost_tokens: the options of `ours`, as in
            its README.
    """

    model: Model
    capacity_bytes: int
    trace: Trace
    block_size: int = 1
    interval: int = 32_768
    grid: int = 64
    opportunistic: int = 4096
    dense: int = 0
    probation: int = 16
    ghost_tokens: int = 16_777_216


class Server(Protocol):
    """One policy over one memory.

    For each request the engine calls `begin` until it admits, `extend` once per prefill chunk and
    once for the whole answer, then `finish`. Calls of running requests interleave. `Request`
    objects are equal only to themselves.
    """

    def begin(self, request: Request) -> int | None:
        """Admit: find the longest prefix to resume from, take what the request needs to run.

        Returns the tokens that need no computing, at most prompt_len - 1; None if there is no room
        now, with nothing changed that could be seen later. The engine then asks again after another
        request has finished, and gives the request up if none is running.
        """
        ...

    def extend(self, request: Request, up_to: int) -> bool:
        """Tokens up to depth `up_to` have been computed now; their KV and states may be kept.

        `up_to` grows by at most `CHUNK_TOKENS` inside the prompt, ends exactly at `prompt_len`, and
        then jumps to `computed_len`, if the answer has that many. False: there was no memory, which
        cuts the request short; `finish` follows at once.
        """
        ...

    def finish(self, request: Request) -> None:
        """The answer is complete (or cut short): keep what is worth it, give back the rest."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Totals that explain the result, by name."""
        ...
