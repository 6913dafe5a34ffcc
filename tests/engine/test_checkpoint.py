"""What of a training state goes to Megatron's writer."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_stare.engine.checkpoint import _detach_from_buffers


def sharded(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def owns_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().size() == tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_of_a_buffer_gets_a_storage_of_its_own_over_the_same_memory(dtype):
    buffer = torch.arange(24).to(dtype)
    state = {"weight": sharded("weight", buffer[8:20].view(3, 4))}
    _detach_from_buffers(state)
    data = state["weight"].data
    assert owns_its_storage(data)
    assert data.dtype == dtype
    assert data.data_ptr() == buffer[8:].data_ptr()
    buffer += 1
    assert torch.equal(data, buffer[8:20].view(3, 4))


def test_the_parts_of_a_fused_matrix_get_storages_of_their_own():
    fused = torch.arange(12.0).view(4, 3)

    def halves(key, data, replica_id, _flattened_range):
        return {name: sharded(f"{key}.{name}", part) for name, part in zip("ab", data.chunk(2), strict=True)}

    state = {"fc1": ShardedTensorFactory("fc1", fused, halves, merge_fn=lambda parts: parts)}
    _detach_from_buffers(state)
    parts = [state["fc1"][name].data for name in "ab"]
    assert all(map(owns_its_storage, parts))
    assert parts[1].data_ptr() == fused[2:].data_ptr()
    assert torch.equal(torch.cat(parts), fused)


def test_what_does_not_lie_in_one_piece_stays_as_it_is():
    transposed = torch.arange(6.0).view(2, 3).t()
    state = {"weight": sharded("weight", transposed), "step": sharded("step", torch.tensor(3.0))}
    _detach_from_buffers(state)
    assert state["weight"].data is transposed
    assert float(state["step"].data) == 3
