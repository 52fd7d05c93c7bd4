"""Who is expected back: learned from waits between a turn's end and the next one's arrival."""

import numpy as np

from radix import Kind, PrefixCache, needed_by
from tests.cache.small import tiny

STATE, BLOCK = 8, 1


class Crowd:
    """Conversations in a cache with room for all; a turn adds two tokens."""

    def __init__(self) -> None:
        self.cache: PrefixCache
        self.cache, self.pool = tiny(100_000, STATE, BLOCK)
        self.turns: dict[int, int] = {}

    def turn(self, user: int, *, arrived: int | None = None) -> None:
        """The next one, from admission to its end, where its state is kept."""
        self.turns[user] = self.turns.get(user, 0) + 1
        cache, tokens = self.cache, 100_000 * user + np.arange(2 * self.turns[user])
        match = cache.match(tokens, None)
        pin = cache.pin(match)
        cache.returns.came(pin.turn, match, cache.held.tick if arrived is None else arrived)
        cache.touch(pin)
        grant = cache.acquire(1, len(tokens) - match.resume_len)
        assert grant is not None
        state = (len(tokens), int(grant.states[0]), Kind.TURN_END)
        cache.commit(pin, tokens, None, grant.blocks, [state], finished=True)

    def due(self) -> list[int]:
        """Users who are expected, who left last first."""
        return [
            int(end.node.tokens[0]) // 100_000
            for end in self.cache.returns.due(self.cache.held.tick)
        ]


def test_before_anything_is_known_the_last_few_are_expected() -> None:
    crowd = Crowd()
    for user in range(2):
        crowd.turn(user)
    assert crowd.due() == [1, 0]


def test_requests_that_nobody_continues_are_soon_expected_no_more() -> None:
    crowd = Crowd()
    for user in range(20):
        crowd.turn(user)
    assert crowd.due() == []


def test_agents_are_expected_as_long_as_they_usually_take() -> None:
    crowd = Crowd()
    for number in range(300):
        crowd.turn(number % 3)  # two others between a turn and its next: two ticks
    assert crowd.due() == [2, 1, 0]
    for user in (3, 4, 5, 6):
        crowd.turn(user)
    assert not {0, 1, 2} & set(crowd.due())  # they would have come by now


def test_a_queue_does_not_make_the_wait_longer() -> None:
    crowd = Crowd()
    for number in range(300):
        user = number % 30
        crowd.turn(
            user, arrived=crowd.cache.held.tick - 29
        )  # came at once, was admitted much later
    assert crowd.due()[0] == 29
    assert len(crowd.due()) <= 2


def test_people_are_not_expected_beside_agents_that_are() -> None:
    crowd = Crowd()
    for number in range(1200):
        person = number % 2
        crowd.turn(2 + number // 2 % 250 if person else 0)
    assert 0 in crowd.due()
    assert len(crowd.due()) < 20


def test_who_lost_his_state_comes_back_all_the_same() -> None:
    crowd = Crowd()
    for _ in range(100):
        crowd.turn(1)
        assert crowd.cache.evict(crowd.pool.fundable_states() + 1, 0)
        assert crowd.cache.states == 0
    crowd.turn(1)
    assert crowd.due() == [1]


def test_a_flush_forgets_who_is_away() -> None:
    crowd = Crowd()
    crowd.turn(1)
    crowd.cache.flush()
    assert crowd.due() == []


def test_what_they_need_is_counted_once_and_within_the_limit() -> None:
    crowd = Crowd()
    for user in (1, 2, 1):
        crowd.turn(user)
    ends = list(crowd.cache.returns.due(crowd.cache.held.tick))
    assert crowd.due() == [1, 2]

    def needed(limit: int) -> tuple[int, int]:
        return needed_by(ends * 2, state_bytes=STATE, block_bytes=BLOCK, limit=limit)

    assert needed(1000) == (2, 4 + 2)  # user 1 has four tokens and, of this turn, one state
    assert needed(2 * STATE + 5) == (1, 4)
    assert needed(STATE + 3) == (0, 0)
    pin = crowd.cache.pin(crowd.cache.match(100_000 + np.arange(9), None))
    assert needed(1000) == (1, 2)  # a running request keeps the rest
    crowd.cache.unpin(pin)
