"""Small sequences of requests for the policies: one runs to its end before the next begins."""

import numpy as np

from radix.sim.model import Model
from radix.sim.server import CHUNK_TOKENS, Setup
from radix.sim.trace import Request, Trace

ID_LIMIT = 1 << 20


class Prompts:
    """Requests whose tokens are their ids: equal prefixes have equal ids, all others differ."""

    def __init__(self) -> None:
        self.fresh = 1
        self.number = 0

    def new(self, tokens: int) -> np.ndarray:
        self.fresh += tokens
        return np.arange(self.fresh - tokens, self.fresh, dtype=np.int64)

    def request(self, *parts: np.ndarray, output: int = 1) -> Request:
        """A prompt of these parts; its answer is new."""
        prompt = np.concatenate(parts)
        return self.of(np.concatenate((prompt, self.new(output))), len(prompt))

    def of(self, tokens: np.ndarray, prompt_len: int) -> Request:
        """Prompt and answer given."""
        self.number += 1
        return Request(self.number, 0, None, prompt_len, len(tokens) - prompt_len, (), tokens, 1)


def setup(capacity_tokens: int, *, state_tokens: int, longest: int = 1000) -> Setup:
    """Memory in tokens of KV, the sink of one state included; one byte a token."""
    requests = (Prompts().request(np.arange(longest)),)
    model = Model("small", state_tokens, 1, token_flops=1.0, pair_flops=0.0)
    return Setup(model, capacity_tokens, Trace("small", requests, ID_LIMIT))


def serve(server, *requests: Request) -> list[int | None]:
    """What each resumed."""
    resumed = []
    for request in requests:
        depth = server.begin(request)
        resumed.append(depth)
        while depth is not None and depth < request.prompt_len:
            depth = min(depth + CHUNK_TOKENS, request.prompt_len)
            assert server.extend(request, depth)
        if depth is not None:
            if request.computed_len > depth:
                assert server.extend(request, request.computed_len)
            server.finish(request)
    return resumed
