"""Token ids on their way from SGLang into the tree."""

from array import array

import pytest

from radix.tokens import Key
from sgl_kimi_k3.keys import tokens_of


@pytest.mark.parametrize("count", [None, 0, 3, 5, 9])
@pytest.mark.parametrize("kind", [list, lambda ids: array("q", ids)])
def test_tokens_are_the_first_of_them_and_stay_so(kind, count) -> None:
    ids = kind([7, 8, 9, 10, 11])
    tokens = tokens_of(ids, count)
    ids[0] = 1
    ids.append(12)  # raises while somebody looks into an array
    assert tokens.tolist() == [7, 8, 9, 10, 11][:count]


def test_their_bytes_are_not_copied_again() -> None:
    tokens = tokens_of(array("q", range(5)))
    assert Key.of(tokens).raw is tokens.base
    for part in (tokens[:3], tokens[1:], tokens[::-1], tokens.copy()):
        assert Key.of(part).raw == part.tobytes()
