"""With seeds a response follows from seed, prompt and weights, to the bit, whatever else a server does."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_stare.rollout import RolloutClient
from megatron_stare.rollout.batch_invariant import BLOCK_ROWS, addmm, mm
from megatron_stare.tasks.sample import Prompt

pytestmark = pytest.mark.timeout(300)
VOCABULARY = 16
# Some share a beginning, and lengths differ.
PROMPTS = [Prompt(i, [1, 5] + [(7 * i + j) % 10 for j in range(i % 23)], "", None) for i in range(40)]


def written(groups):
    return {group.prompt.index: [(r.token_ids, r.log_probs) for r in group.responses] for group in groups}


def test_a_seed_gives_the_same_responses_to_the_bit_alone_and_in_any_company(stand):
    rollout = stand.rollout.model_copy(update={"seeded": True})
    with RolloutClient(stand.fleet.endpoints, rollout, VOCABULARY) as client:
        version = stand.version
        together = written(client.generate(PROMPTS, 4, weight_version=version, seed=3))
        shuffled = random.Random(0).sample(PROMPTS, len(PROMPTS))
        assert written(client.generate(shuffled, 4, weight_version=version, seed=3)) == together
        for prompt in (PROMPTS[0], PROMPTS[22], PROMPTS[39]):
            alone = written(client.generate([prompt], 4, weight_version=version, seed=3))
            assert alone[prompt.index] == together[prompt.index]
        half = PROMPTS[::2]
        again = written(client.generate(half, 4, weight_version=version, seed=3))
        assert again == {prompt.index: together[prompt.index] for prompt in half}
        other = written(client.generate(PROMPTS, 4, weight_version=version, seed=4))
        assert all(other[index] != together[index] for index in other)
        responses = [tuple(ids) for group in together.values() for ids, _ in group]
        assert len(set(responses)) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(64, 128), (576, 192), (100, 30)])
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype, inner, columns):
    torch.manual_seed(0)
    rows = torch.randn(3 * BLOCK_ROWS + 5, inner).to(dtype)
    weight = torch.randn(columns, inner).to(dtype).t()
    bias = torch.randn(columns).to(dtype)
    product = mm(rows, weight)
    torch.testing.assert_close(product, rows @ weight)
    torch.testing.assert_close(addmm(bias, rows, weight), torch.addmm(bias, rows, weight))
    for start, count in ((0, 1), (1, 1), (40, 1), (3, 2), (17, 33), (60, 41)):
        part = slice(start, start + count)
        assert torch.equal(mm(rows[part].clone(), weight), product[part])
    assert mm(rows[:0], weight).shape == (0, columns)
