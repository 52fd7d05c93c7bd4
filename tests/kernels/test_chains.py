"""What the n-gram worker calls on a CPU in place of its kernels: all of it about a chain."""

import pytest
import torch

from sgl_kimi_k3.attention import chains

VOCABULARY = 5
NONE = -1


def links(window: int, *lengths: int) -> torch.Tensor:
    """Masks of chains: lower triangles, then nodes on their own."""
    masks = torch.eye(window, dtype=torch.bool).repeat(len(lengths), 1, 1)
    for mask, length in zip(masks, lengths, strict=True):
        mask[:length, :length] = torch.ones(length, length).tril().bool()
    return masks


def test_a_mask_says_who_follows_whom() -> None:
    positions, index = torch.empty(6, dtype=torch.int64), torch.empty(2, 3, dtype=torch.int64)
    child, sibling = torch.empty_like(index), torch.empty_like(index)
    mask, lengths = links(3, 3, 1).flatten(), torch.tensor([10, 20])
    chains.link(mask, lengths, positions, index, child, sibling, 2, 3)
    assert positions.tolist() == [10, 11, 12, 20, 21, 22]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert child.tolist() == [[1, 2, NONE], [NONE, NONE, NONE]]
    assert sibling.tolist() == [[NONE] * 3] * 2


def test_ids_are_written_and_read_where_a_window_stands() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    ids = torch.tensor([11, 12, 13, 21, 22])
    starts, stops = torch.tensor([1, 4]), torch.tensor([4, 6])
    chains.write_rows(torch.tensor([2, 0]), table, starts, stops, ids, 2)
    assert table.tolist() == [[0] * 4 + [21, 22, 0, 0], [0] * 8, [0, 11, 12, 13] + [0] * 4]
    found = chains.window_ids(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([2, 4]),
        end_offset=torch.tensor([4, 6]),
        batch_size=2,
        draft_token_num=2,
        device="cpu",
    )
    assert found.tolist() == [12, 13, 21, 22]
    assert found.dtype == torch.int64


class Verdict:
    """What the verifiers fill in, for one request with a window of 4."""

    def __init__(self) -> None:
        self.predicts = torch.zeros(4, dtype=torch.int32)
        self.accept_index = torch.full((1, 4), NONE, dtype=torch.int32)
        self.accept_token_num = torch.zeros(1, dtype=torch.int32)

    def said(self) -> list[int]:
        """Accepted drafts and the token behind them."""
        count = int(self.accept_token_num) + 1
        assert self.accept_index[0].tolist() == [*range(count), *[NONE] * (4 - count)]
        return self.predicts[:count].tolist()


@pytest.mark.parametrize(
    ("length", "model", "said"),
    [
        (4, [1, 2, 3, 4], [1, 2, 3, 4]),
        (4, [1, 2, 0, 4], [1, 2, 0]),
        (4, [0, 2, 3, 4], [0]),
        (3, [1, 2, 3, 4], [1, 2, 3]),  # the chain ends before a token that would have been right
        (1, [1, 2, 3, 4], [1]),
    ],
)
def test_drafts_are_accepted_while_they_are_right(length, model, said) -> None:
    child = torch.tensor([[n + 1 if n + 1 < length else NONE for n in range(4)]])
    verdict = Verdict()
    chains.accept_greedy(
        candidates=torch.tensor([[9, 1, 2, 3]]),
        retrieve_next_token=child,
        target_predict=torch.tensor([model]),
        retrieve_index=None,
        **vars(verdict),
    )
    assert verdict.said() == said


def test_sampled_tokens_have_the_models_distribution() -> None:
    """Whatever is drafted: the first two tokens' joint frequencies, over many coins."""
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(1, 4, VOCABULARY), -1)
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    rounds = 6000
    for coins in torch.rand(rounds, 5):
        verdict = Verdict()
        chains.accept_sampled(
            candidates=torch.tensor([[0, 3, 1, 2]]),
            retrive_next_token=torch.tensor([[1, 2, 3, NONE]]),
            uniform_samples=coins[None, :4],
            uniform_samples_for_final_sampling=coins[4:],
            target_probs=probs,
            draft_probs=None,
            **vars(verdict),
        )
        said = verdict.said()
        if said[0] == 3:  # only behind the draft does the window know the next token
            counts[said[0], said[1]] += 1
        else:
            counts[said[0], 0] += 1
    first, second = probs[0, 0], probs[0, 1]
    torch.testing.assert_close(counts.sum(1) / rounds, first, rtol=0, atol=0.02)
    torch.testing.assert_close(counts[3] / counts[3].sum(), second, rtol=0, atol=0.03)


def test_filters_keep_the_most_likely_tokens() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]])
    top = chains.keep_top_k(probs, torch.tensor([2, 1]))
    torch.testing.assert_close(top, torch.tensor([[0, 4 / 7, 0, 3 / 7], [1.0, 0, 0, 0]]))
    top = chains.keep_top_p(probs, torch.tensor([0.65, 0.6]))
    torch.testing.assert_close(top, torch.tensor([[0, 4 / 7, 0, 3 / 7], [1.0, 0, 0, 0]]))
