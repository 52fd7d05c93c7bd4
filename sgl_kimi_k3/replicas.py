"""Which replica serves a request, where one server runs several (`--dp-size`, DP attention).

Each has a cache of its own, so a conversation must stay where its prefix is.  SGLang deals requests
out in turn.  This runs in its controller process, which sees prompts and replicas' loads but no
tree: it remembers which blocks of tokens were sent where.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.data_parallel_controller import LoadBalanceMethod
from sglang.srt.runtime_context import get_memory

from sgl_kimi_k3.config import BACKEND
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from radix import TokenArray

BLOCK_TOKENS = 256
MAX_BLOCKS = 1 << 16  # 16 M tokens
# A replica with so many requests more than the least loaded one gets none for its prefixes.
CROWDED_REQUESTS = 8
CROWDED_SHARE = 0.25


class Replicas:
    """Remembers where prefixes were sent, and chooses.

    >>> import numpy as np
    >>> known, prompt = Replicas(), np.arange(600)
    >>> known.choose(prompt, None, {0: 1, 1: 0}), known.choose(prompt, None, {0: 0, 1: 3})
    (1, 1)
    >>> known.choose(prompt[:255], None, {0: 0, 1: 3}) is None
    True
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # By digest of a prefix of whole blocks: the ranks it was sent to; last used is last.
        self._sent: OrderedDict[bytes, set[int]] = OrderedDict()
        self._turn = 0

    def choose(
        self, tokens: TokenArray, namespace: Hashable, requests: Mapping[int, int]
    ) -> int | None:
        """The rank for a prompt: the one that was sent most of it, of those not crowded.

        Of equals the one with the fewest requests, then in turn.

        Args:
            tokens: int64 [n], the prompt.
            namespace: whose prefixes it shares.
            requests: by rank that takes requests, how many it has.

        Returns:
            None for a prompt of less than a block.
        """
        prefixes = self._prefixes(tokens, namespace)
        if not prefixes or not requests:
            return None
        least = min(requests.values())
        limit = max(CROWDED_REQUESTS, int(CROWDED_SHARE * least))
        free = [rank for rank, count in requests.items() if count - least < limit]
        known = {rank: self._known(prefixes, rank) for rank in free}
        self._turn += 1
        count = len(free)
        turns = {rank: (at - self._turn) % count for at, rank in enumerate(free)}
        chosen = min(free, key=lambda rank: (-known[rank], requests[rank], turns[rank]))
        self._note(prefixes, chosen)
        return chosen

    def send(self, tokens: TokenArray, namespace: Hashable, rank: int) -> None:
        """Somebody else chose."""
        self._note(self._prefixes(tokens, namespace), rank)

    def _note(self, prefixes: Sequence[bytes], rank: int) -> None:
        """Remember that these were sent there, and forget what was not sent for longest."""
        for prefix in prefixes:
            self._sent.setdefault(prefix, set()).add(rank)
            self._sent.move_to_end(prefix)
        while len(self._sent) > self._max_blocks:
            self._sent.popitem(last=False)

    def _known(self, prefixes: Sequence[bytes], rank: int) -> int:
        """How many blocks of the prompt that rank was sent."""
        for at, prefix in enumerate(prefixes):
            if rank not in self._sent.get(prefix, ()):
                return at
        return len(prefixes)

    @staticmethod
    def _prefixes(tokens: TokenArray, namespace: Hashable) -> list[bytes]:
        """A digest for each prefix of whole blocks, each made of the one before."""
        digest = repr(namespace).encode()
        found = []
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            block = tokens[end - BLOCK_TOKENS : end].tobytes()
            digest = blake2b(digest + block, digest_size=16).digest()
            found.append(digest)
        return found


def route(original: Callable[..., bool], controller: Any, req: Any) -> bool:
    """AROUND `DataParallelController.maybe_external_dp_rank_routing`: prefixes stay together.

    A request that names its rank goes there.  Where `--load-balance-method` was set, or the prompt
    is short, SGLang's own choice stands.
    """
    if (
        get_memory().radix_cache_backend != BACKEND
        or controller.load_balance_method is not LoadBalanceMethod.ROUND_ROBIN
        or getattr(req, "input_ids", None) is None
    ):
        return original(controller, req)
    known: Replicas = controller.__dict__.setdefault("kimi_k3_replicas", Replicas())
    tokens, namespace = tokens_of(req.input_ids), namespace_of(req)
    if req.routed_dp_rank is not None:
        known.send(tokens, namespace, req.routed_dp_rank)
        return original(controller, req)
    controller.refresh_load_budget()
    loads = controller.dp_budget.total_requests
    active = {rank: loads[rank] for rank in controller._active_workers}  # noqa: SLF001  # no accessor
    rank = known.choose(tokens, namespace, active)
    if rank is not None:
        loads[rank] += 1  # until the next report, as SGLang's own methods do
        req.routed_dp_rank = rank
    return original(controller, req)
