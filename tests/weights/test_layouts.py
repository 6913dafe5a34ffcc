"""Layouts as pure functions: where each number goes, and that the way back is exact."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.weights.layouts import QKV, Column, GateUp, Replicated, Row, Vocab

LAYOUTS = {
    "replicated": Replicated((16,)),
    "column": Column((8, 12)),
    "column_bias": Column((8,)),
    "row": Row((12, 8)),
    "vocab": Vocab(13, 6),
    "qkv": QKV(num_heads=8, num_kv_heads=4, head_dim=3, tail=(10,)),
    "qkv_bias": QKV(num_heads=8, num_kv_heads=4, head_dim=3),
    "qkv_no_groups": QKV(num_heads=4, num_kv_heads=4, head_dim=2, tail=(8,)),
    "gate_up": GateUp(ffn_size=8, tail=(6,)),
}


def shards_of(layout, tensors, tp_size, dtype=torch.float32, padded_rows=16):
    shape = [layout.shard_shape(tp_size) or (padded_rows // tp_size, layout.hidden_size)] * tp_size
    shards = [torch.full(s, float("nan"), dtype=dtype) for s in shape]
    for rank, shard in enumerate(shards):
        layout.fill(shard, tensors, rank, tp_size)
    return shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_through_shards_is_bit_exact(name, tp_size, dtype):
    layout = LAYOUTS[name]
    tensors = [torch.randn(s).to(dtype) for s in layout.hf_shapes]
    shards = shards_of(layout, tensors, tp_size, dtype)
    assert not any(shard.isnan().any() for shard in shards)
    merged = layout.merge(shards)
    assert len(merged) == len(tensors)
    for tensor, back in zip(tensors, merged, strict=True):
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_qkv_rows_are_grouped_by_key_value_head():
    layout = QKV(num_heads=4, num_kv_heads=2, head_dim=1)
    query, key, value = torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20]), torch.tensor([100.0, 200])
    whole = shards_of(layout, [query, key, value], 1)[0]
    assert whole.tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    assert torch.cat(shards_of(layout, [query, key, value], 2)).tolist() == whole.tolist()


def test_a_rank_holds_its_gate_rows_and_then_its_up_rows():
    gate, up = torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20, 30, 40])
    first, second = shards_of(GateUp(ffn_size=4), [gate, up], 2)
    assert first.tolist() == [1, 2, 10, 20]
    assert second.tolist() == [3, 4, 30, 40]


@pytest.mark.parametrize("padded_rows", [16, 32, 64])
def test_vocabulary_padding_is_zero_even_when_whole_ranks_are_padding(padded_rows):
    layout, table = Vocab(13, 6), torch.randn(13, 6)
    shards = shards_of(layout, [table], 4, padded_rows=padded_rows)
    padding = torch.cat(shards)[13:]
    assert padding.shape[0] == padded_rows - 13
    assert padding.eq(0).all()
    assert torch.equal(layout.merge(shards)[0], table)


def test_filling_casts_to_the_parameter():
    shard = torch.empty(8, dtype=torch.bfloat16)
    source = torch.randn(8)
    Column((8,)).fill(shard, [source], 0, 1)
    assert torch.equal(shard, source.to(torch.bfloat16))


def test_only_the_rows_of_the_rank_are_read():
    class Recorder:
        def __init__(self, tensor):
            self.tensor, self.read = tensor, 0

        def __getitem__(self, index):
            part = self.tensor[index]
            self.read += part.numel()
            return part

    for name, layout in LAYOUTS.items():
        if name in ("replicated", "vocab"):
            continue
        sources = [Recorder(torch.randn(s)) for s in layout.hf_shapes]
        layout.fill(torch.empty(layout.shard_shape(4)), sources, 1, 4)
        assert [s.read for s in sources] == [s.tensor.numel() // 4 for s in sources], name
