"""Who is held back: only where there is no room, only strangers, and not for long."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from radix import Turnstile, Waiting

LIMIT = 3


@dataclass
class Arrival:
    """A request of the test: when it came, how many stood before it."""

    waiting: Waiting
    ahead: int


@dataclass
class Queue:
    """What a scheduler does: those let through are admitted in order, until one does not fit."""

    gate: Turnstile = field(default_factory=lambda: Turnstile(LIMIT))
    line: list[Arrival] = field(default_factory=list)

    def arrive(self, need: int, stranger: bool) -> None:
        self.line.append(Arrival(Waiting(need, stranger), len(self.line)))

    def step(self, *, room: int, admits: int, idle: bool) -> None:
        waiting = [one.waiting for one in self.line]
        self.gate.hold_back(waiting, room=room, idle=idle)
        admitted = [one for one in waiting if not one.held][:admits]
        self.gate.admitted(waiting, admitted)
        self.line = [one for one in self.line if one.waiting not in admitted]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 9), st.booleans()),
        st.tuples(st.just("step"), st.integers(-5, 20), st.integers(0, 5)),
        st.tuples(st.just("change"), st.integers(0, 20), st.booleans()),  # a state came or went
    ),
    max_size=60,
)


@given(STEPS)
def test_nobody_is_overtaken_more_often_than_promised(steps) -> None:
    queue = Queue()
    for what, first, second in steps:
        if what == "arrive":
            queue.arrive(first, second)
        elif what == "step":
            queue.step(room=first, admits=second, idle=False)
        elif queue.line:
            queue.line[first % len(queue.line)].waiting.stranger = second
        for one in queue.line:
            assert one.waiting.overtaken <= LIMIT * (one.ahead + 1)
            assert one.waiting.overtaken <= queue.gate.most_overtaken


@given(STEPS, st.integers(0, 60))
def test_everybody_is_served_by_a_server_without_spare_room(steps, others) -> None:
    queue = Queue()
    for what, first, second in steps:
        if what == "arrive":
            queue.arrive(first, second)
    served = 0
    while queue.line:
        if others:  # there is always one more that comes back
            others -= 1
            queue.arrive(1, stranger=False)
        before = len(queue.line)
        queue.step(room=-1, admits=1, idle=False)
        served += before - len(queue.line)
        if len(queue.line) == before:  # nobody was let through: what runs comes to its end
            queue.step(room=-1, admits=1, idle=True)
            assert len(queue.line) < before


@given(STEPS)
def test_with_room_the_order_is_the_schedulers_own(steps) -> None:
    queue = Queue()
    for what, first, second in steps:
        if what == "arrive":
            queue.arrive(first, second)
    waiting = [one.waiting for one in queue.line]
    queue.gate.hold_back(waiting, room=sum(one.need for one in waiting), idle=False)
    assert not any(one.held for one in waiting)


@given(STEPS)
def test_the_same_calls_get_the_same_answers(steps) -> None:
    """Every tensor-parallel rank asks its own."""
    ranks = Queue(), Queue()
    for what, first, second in steps:
        for queue in ranks:
            if what == "arrive":
                queue.arrive(first, second)
            elif what == "step":
                queue.step(room=first, admits=second, idle=first % 2 == 0)
        assert [one.waiting.held for one in ranks[0].line] == [
            one.waiting.held for one in ranks[1].line
        ]


def held(gate: Turnstile, waiting: list[Waiting], *, room: int, idle: bool = False) -> str:
    gate.hold_back(waiting, room=room, idle=idle)
    return "".join("-+"[one.held] for one in waiting)


def test_strangers_keep_their_order() -> None:
    waiting = [Waiting(4, stranger=True), Waiting(9, stranger=True), Waiting(1, stranger=True)]
    assert held(Turnstile(LIMIT), waiting, room=5) == "-++"  # the small one does not pass the large


def test_who_resumes_is_not_held_and_counts_first() -> None:
    waiting = [Waiting(4, stranger=True), Waiting(2, stranger=False)]
    assert held(Turnstile(LIMIT), waiting, room=5) == "+-"
    assert held(Turnstile(LIMIT), waiting, room=6) == "--"


def test_the_first_is_let_in_where_nothing_runs() -> None:
    waiting = [Waiting(4, stranger=True), Waiting(4, stranger=True)]
    assert held(Turnstile(LIMIT), waiting, room=-9, idle=True) == "-+"


def test_so_many_pass_and_no_more() -> None:
    gate = Turnstile(LIMIT)
    waiting = [Waiting(9, stranger=True), *(Waiting(1, stranger=False) for _ in range(5))]
    assert held(gate, waiting, room=0) == "+---++"
    gate.admitted(waiting, waiting[1:4])
    waiting = [waiting[0], *waiting[4:]]
    assert held(gate, waiting, room=0) == "---"
    assert (gate.held_requests, gate.let_in, gate.most_overtaken) == (1, 0, LIMIT)
    gate.admitted(waiting, waiting)
    assert (gate.let_in, gate.most_overtaken) == (1, LIMIT)
