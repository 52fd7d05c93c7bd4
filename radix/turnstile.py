"""Who of those that wait for memory is held back, so that others find the states they come for.

Where more conversations are active than memory holds, admitting whoever came first evicts, for
every stranger, the states of those whose next turn is under way; they come back as strangers, and
soon everybody computes everything.  So a stranger, who resumes little, is admitted into room that
costs nobody else his return; and when so many others have passed him, in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        need: tokens of memory that it takes beside what it resumes, its answer and state included.
        stranger: whether it resumes less than half of its prompt.
        held: whether it is held back now; `was_held`: or has been.
        overtaken: admissions of requests that came later.
    """

    need: int
    stranger: bool
    held: bool = False
    was_held: bool = False
    overtaken: int = 0


class Turnstile:
    """Holds strangers back, first come first served among them, and bounds what passes them.

    Of all that pass the first stranger held, at most `limit` are admitted before the first is let
    in: a request with n others ahead when it came is overtaken at most limit x (n + 1) times, as
    long as the requests it lets through are admitted in order.  Nobody is held where there is room,
    nor the first where nothing runs.

    >>> first, second = Waiting(need=10, stranger=True), Waiting(need=2, stranger=False)
    >>> gate = Turnstile(limit=1)
    >>> gate.hold_back([first, second], room=5, idle=False)
    >>> first.held, second.held
    (True, False)
    >>> gate.admitted([first, second], [second])
    >>> gate.hold_back([first], room=5, idle=False)
    >>> first.held, first.overtaken
    (False, 1)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held_requests = 0  # that were held back, each counted once
        self.let_in = 0  # strangers admitted because so many had passed
        self.most_overtaken = 0
        self._passed = 0  # admissions past the first stranger since one was admitted
        self._due = False

    def hold_back(self, waiting: Sequence[Waiting], *, room: int, idle: bool) -> None:
        """Mark who is held back. O(waiting).

        `waiting` stands in the order in which SGLang would admit; `room` are tokens that fit and
        cost nobody his return; `idle`: nothing runs, so that waiting gains nothing.
        """
        strangers = [one for one in waiting if one.stranger]
        if not strangers:
            self._passed = 0
        self._due = bool(strangers) and (idle or self._passed >= self.limit)
        room -= sum(one.need for one in waiting if not one.stranger)
        held = False
        for number, one in enumerate(strangers):
            room -= one.need
            held = held or (room < 0 and not (number == 0 and self._due))
            one.held = held
            self.held_requests += held and not one.was_held
            one.was_held |= held
        passing = self.limit if self._due else self.limit - self._passed
        behind = False
        for one in waiting:
            behind = behind or one.held
            if not one.stranger:
                passing -= behind
                one.held = passing < 0

    def admitted(self, waiting: Sequence[Waiting], admitted: Sequence[Waiting]) -> None:
        """These of `waiting`, as it was marked, were admitted. O(waiting)."""
        if not admitted:
            return
        gone = set(map(id, admitted))
        if any(one.stranger for one in admitted):
            self.let_in += self._due and self._passed >= self.limit
            self._passed = 0
        later = 0
        for one in reversed(waiting):
            if id(one) in gone:
                later += 1
                continue
            one.overtaken += later
            self.most_overtaken = max(self.most_overtaken, one.overtaken)
        first = next((i for i, one in enumerate(waiting) if one.held and one.stranger), None)
        if first is not None:
            self._passed += sum(id(one) in gone for one in waiting[first:])
