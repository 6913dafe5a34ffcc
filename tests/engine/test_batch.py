"""What a packed microbatch holds."""

from __future__ import annotations

import numpy as np
import torch

from megatron_stare.engine.batch import TrainSequence, pack, pack_update

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
