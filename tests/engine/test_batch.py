"""What a packed microbatch holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_stare.engine.batch import Microbatch, TrainSequence, pack, pack_update, packed_length
from megatron_stare.engine.context import Context

CPU = torch.device("cpu")


def sequence(prompt: list[int], response: list[int], advantage: float = 1.0) -> TrainSequence:
    mask = np.array([False] * len(prompt) + [True] * len(response))
    log_probs = -np.arange(1, len(response) + 1, dtype=np.float32)
    return TrainSequence(np.array([*prompt, *response]), mask, advantage, log_probs)


def test_packing_predicts_each_response_token_from_the_one_before():
    mb = pack([sequence([1, 2], [3, 4], 0.5), sequence([5], [6, 7, 8], -1.0)], 10, CPU)
    assert mb.tokens[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert mb.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert mb.labels[0][mb.loss_mask[0]].tolist() == [3, 4, 6, 7, 8]
    assert mb.tokens[0][mb.loss_mask[0]].tolist() == [2, 3, 5, 6, 7]
    assert mb.advantages.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0]
    assert mb.sampler_log_probs.tolist() == [-1.0, -2.0, -1.0, -2.0, -3.0]
    assert mb.sequence_of.tolist() == [0, 0, 1, 1, 1]
    assert mb.packed.cu_seqlens_q.tolist() == [0, 4, 8, 10]


def test_an_empty_response_counts_nothing():
    mb = pack([sequence([1, 2, 3], []), sequence([4], [5])], 5, CPU)
    assert mb.response_tokens == 1
    assert not mb.loss_mask[0, :3].any()


def test_an_empty_microbatch_is_padding_only():
    (mb,) = pack_update([[]], common_length=None, multiple=4, device=CPU)
    assert (mb.length, mb.response_tokens) == (4, 0)


def test_common_length_makes_all_microbatches_alike():
    a, b = [sequence([1, 2, 3], [4, 5])], [sequence([1], [2])]
    packed = pack_update([a, b], common_length=5, multiple=4, device=CPU)
    assert [mb.length for mb in packed] == [8, 8]


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_share_every_token_once(size):
    sequences = [
        sequence([1, 2], [3, 4, 5], 0.5),
        sequence([6], list(range(7, 19)), -1.0),
        sequence([20, 21, 22], [], 2.0),
    ]
    for number, each in enumerate(sequences):
        each.number = number
    whole = pack(sequences, packed_length(sequences), CPU)
    length = packed_length(sequences, Context(size=size)) + 2 * size
    ranks = [pack(sequences, length, CPU, Context(rank, size)) for rank in range(size)]
    assert {mb.length for mb in ranks} == {length // size}
    assert by_token(*ranks) == by_token(whole)
    assert sum((~mb.padding).sum() for mb in ranks) == whole.length
    assert all(mb.sequence_tokens.tolist() == [3, 12, 0] for mb in ranks)
    rows = torch.cat([mb.own.index for mb in ranks])
    assert sorted(rows.tolist()) == list(range(15))


def by_token(*microbatches: Microbatch) -> dict[int, tuple]:
    """What belongs to each response token, by its number in the step."""
    found = {}
    for mb in microbatches:
        mask = mb.loss_mask[0]
        columns = (
            mb.tokens[0][mask],
            mb.positions[0][mask],
            mb.labels[0][mask],
            mb.advantages,
            mb.sampler_log_probs,
            mb.sequence_of,
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found |= dict(zip(mb.token_numbers.tolist(), rows, strict=True))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_context_parallel_ranks_have_the_same_causal_work(size):
    lengths = [Context(size=size).padded(length) for length in (1, 7, 30, 101)]
    work = []
    for rank in range(size):
        rows = Context(rank, size).own_rows(lengths)
        starts = np.cumsum([0, *lengths[:-1]])
        positions = rows - starts[np.searchsorted(starts, rows, side="right") - 1]
        work.append(int((positions + 1).sum()))
    assert len(set(work)) == 1
    assert work[0] * size == sum(length * (length + 1) // 2 for length in lengths)
