"""A long scripted life of a small cache; prints the log of its victims. Run by test_cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from radix import ExpectedLoss
from tests.oracle.world import World


class Logged(ExpectedLoss):
    """The policy of the server, with a log of (kind, depth) in the order of eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []

    def victim(self, now):
        chosen = super().victim(now)
        if chosen is not None:
            self.log.append((chosen.kind.value, chosen.node.end))
        return chosen


def run(seed: int, requests: int) -> list[tuple[str, int]]:
    """Victims of `requests` pseudo-random requests of three tenants in a tight pool."""

    def draw(below: int) -> int:
        nonlocal seed
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        return (seed >> 33) % below

    policy = Logged()
    world = World(opportunistic=4, interval=8, states=6, blocks=30, policy=policy)
    for _ in range(requests):
        prompt = [draw(2) for _ in range(2 + draw(16))]
        output = [draw(2) for _ in range(draw(5))]
        world.serve(prompt, f"tenant {draw(3)}", output, turn_end=draw(2) == 0)
    return policy.log


if __name__ == "__main__":
    for kind, depth in run(seed=int(sys.argv[1]), requests=200):
        print(kind, depth)
