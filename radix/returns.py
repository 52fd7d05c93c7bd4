"""Whose next turn is about to ask to come in: learned from how soon those of others did.

An agent's next turn follows its last within a few admissions, a person's much later, that of a
finished conversation never.  A wait is counted from a turn's end to the *arrival* of the next, so
that neither a queue nor the loss of states makes it look longer than it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from radix.values import ENDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from radix.checkpoint import Checkpoint
    from radix.node import Node
    from radix.values import Match

Line = Literal["new", "quick", "slow"]

_OCTAVES = 7
SOON = (1 << _OCTAVES - 1) - 1  # ticks: whoever stays away longer is not expected
_FORGET = 1 / 256  # of what was seen, with every turn that ends
_PRIOR_OCTAVES = 4  # before anything is known, turns are taken to come back within 7 ticks
_PRIOR_TURNS = 2.0  # in each of these


def _prior() -> list[float]:
    return [_PRIOR_TURNS * (octave < _PRIOR_OCTAVES) for octave in range(_OCTAVES)]


@dataclass(slots=True)
class Pace:
    """Turns that ended, and how many of them came back, by octave of their wait.

    >>> Pace().window
    8
    >>> Pace(ended=16, came=[8.0, 2.0, 0, 0, 0, 0, 0]).window
    1
    >>> Pace(ended=16, came=[7.0, 0, 0, 0, 0, 0, 0]).window
    0
    """

    ended: float = _PRIOR_TURNS * _PRIOR_OCTAVES
    came: list[float] = field(default_factory=_prior)

    def end(self) -> None:
        """A turn ended."""
        keep = 1 - _FORGET
        self.ended = self.ended * keep + 1
        self.came = [came * keep for came in self.came]

    @property
    def window(self) -> int:
        """So many ticks after its end a turn is more likely than not to be continued soon."""
        window, coming, away = 0, sum(self.came), self.ended
        for octave, came in enumerate(self.came):
            if not coming or 2 * coming < away:
                break
            window = 1 << octave
            coming -= came
            away -= came
        return window


class Returns:
    """Turns that ended in the last `SOON` ticks, and which of them will be continued soon.

    Told of every end of a turn (`left`) and every admission (`came`), in amortised O(1).  Lines of
    turns that have just begun, came back soon the last time, or did not, are told apart.
    """

    def __init__(self) -> None:
        self.ended = 0  # turns
        self._paces: dict[Line, Pace] = {"new": Pace(), "quick": Pace(), "slow": Pace()}
        self._away: dict[int, tuple[int, Checkpoint, Line]] = {}  # by turn; who left last is last
        self._lines: dict[int, Line] = {}  # by turn that runs

    def came(self, turn: int, match: Match, arrived: int) -> None:
        """A request whose first pin began this `turn` was admitted; it arrived at that tick."""
        before = _continued(match)
        if before is None:
            return
        self._lines[turn] = "slow"
        known = self._away.pop(before.turn, None)
        if known is not None:
            left, _, line = known
            wait = max(0, arrived - left)
            if wait <= SOON:
                self._paces[line].came[wait.bit_length()] += 1
                self._lines[turn] = "quick"

    def left(self, turn: int, end: Checkpoint | None, now: int) -> None:
        """The `turn` is over; `end` is the deepest state of its path, if the tree has one."""
        line = self._lines.pop(turn, "new")
        self.ended += 1
        if end is not None and end.kind in (Kind.TURN_END, Kind.PROMPT_END):
            self._paces[line].end()
            self._away[turn] = now, end, line
        while self._away:
            first, (left, _, _) = next(iter(self._away.items()))
            if now - left <= SOON:
                break
            del self._away[first]

    def due(self, now: int) -> Iterator[Checkpoint]:
        """Ends that will probably be continued soon, who left last first. O(those)."""
        windows = {line: pace.window for line, pace in self._paces.items()}
        longest = max(windows.values())
        for left, end, line in reversed(self._away.values()):
            if now - left >= longest:
                return
            if now - left < windows[line] and not end.lost:
                yield end

    def forget(self) -> None:
        """The tree was flushed."""
        self._away.clear()
        self._lines.clear()


def _continued(match: Match) -> Checkpoint | None:
    """The deepest end that the prompt goes on from, whether its state is held or lost."""
    lost = [missed for missed in match.missed if missed.kind in ENDS]
    if lost:
        return lost[-1]
    nodes = () if match.node is None else match.node.lineage()
    held = (node.checkpoint for node in nodes)
    return next((one for one in held if one is not None and one.kind in ENDS), None)


def needed_by(
    ends: Iterable[Checkpoint], *, state_bytes: int, block_bytes: int, limit: int
) -> tuple[int, int]:
    """Evictable states and blocks that these ends need, as long as they weigh `limit` bytes.

    Of the same turn also the state from which a client resumes that drops the answer.  O(edges of
    the paths).
    """
    states = blocks = 0
    seen: set[int] = set()
    for end in ends:
        more_states = more_blocks = 0
        path: list[int] = []
        node: Node | None = end.node
        while node is not None and id(node) not in seen:
            path.append(id(node))
            one = node.checkpoint
            more_states += one is not None and one.turn == end.turn and one.evictable
            if node.blocks is not None and not node.guards:
                more_blocks += len(node.blocks)
            node = node.parent
        if (states + more_states) * state_bytes + (blocks + more_blocks) * block_bytes > limit:
            break
        states, blocks = states + more_states, blocks + more_blocks
        seen.update(path)
    return states, blocks
