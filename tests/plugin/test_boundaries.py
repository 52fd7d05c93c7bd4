"""Message ends in K3's chat format."""

import numpy as np
import pytest

from sgl_kimi_k3.boundaries import BoundaryRule

OPEN, SEP, END = 1, 2, 3
WORDS = {10: "message", 11: ' role="system"', 12: ' role="user"', 13: ' type="tool-declare"'}


class Words:
    unk_token_id = 0

    def __init__(self, known: dict[str, int]) -> None:
        self.known = known

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.known.get(token, 0)

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[i] for i in ids)


CONTROL = {"<|open|>": OPEN, "<|sep|>": SEP, "<|end_of_msg|>": END}
TOOLS = [OPEN, 10, 11, 13, SEP, 50, 51, END]
SYSTEM = [OPEN, 10, 11, SEP, 60, 61, 62, END]
USER = [OPEN, 10, 12, SEP, 70, END]
REPLY = [OPEN, 10, SEP]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER, REPLY], (8,)),
        ([TOOLS, SYSTEM, USER, REPLY], (16,)),
        ([TOOLS, SYSTEM, USER, USER, REPLY], (16,)),
        # A one-shot option after the last input message is gone from the next prompt.
        ([SYSTEM, USER, SYSTEM, REPLY], (8, 14)),
        ([USER, REPLY], ()),
        ([USER, SYSTEM, REPLY], (6,)),
        ([SYSTEM], (8,)),
        ([[70, 71, 72]], ()),
    ],
)
def test_boundaries(messages: list[list[int]], expected: tuple[int, ...]) -> None:
    rule = BoundaryRule.of(Words(CONTROL))
    assert rule is not None
    assert rule.boundaries(np.concatenate(messages)) == expected


def test_no_rule_without_the_control_tokens() -> None:
    assert BoundaryRule.of(None) is None
    assert BoundaryRule.of(Words({"<|open|>": OPEN})) is None
