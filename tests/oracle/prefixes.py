"""What a cache could know at best: every published prefix, compared one token at a time."""

from __future__ import annotations


class Prefixes:
    """Remembers everything for ever; shares no code with `radix`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.seen: list[tuple[object, tuple[int, ...]]] = []
        self.states: set[tuple[object, tuple[int, ...]]] = set()

    def see(self, namespace, tokens) -> None:
        """These tokens were committed, whether or not their bytes were kept."""
        whole = len(tokens) - len(tokens) % self.block_size
        self.seen.append((namespace, tuple(int(t) for t in tokens[:whole])))

    def publish(self, namespace, tokens) -> None:
        """A state that stands after `tokens` was taken by the cache."""
        self.states.add((namespace, tuple(int(t) for t in tokens)))

    def matched_len(self, namespace, tokens) -> int:
        """Longest prefix, in whole blocks, of anything seen, or at which a state ever stood."""
        states = self._depths(namespace, tokens, len(tokens) + 1)
        return max(self.whole_len(namespace, tokens), *states, 0)

    def whole_len(self, namespace, tokens) -> int:
        """Longest prefix, in whole blocks, of anything seen."""
        best = 0
        for owner, known in self.seen:
            if owner != namespace:
                continue
            shared = 0
            while shared < min(len(known), len(tokens)) and known[shared] == tokens[shared]:
                shared += 1
            best = max(best, shared - shared % self.block_size)
        return best

    def resume_len(self, namespace, tokens) -> int:
        """Deepest published state that does not contain the last token."""
        return max(self._depths(namespace, tokens, len(tokens)), default=0)

    def _depths(self, namespace, tokens, stop) -> list[int]:
        return [d for d in range(stop) if (namespace, tuple(tokens[:d])) in self.states]
