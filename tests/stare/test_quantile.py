from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stare.stare import kth_largest, quantile

# Any non-negative float32, subnormal and infinite ones too, with ties likely.
any_value = st.one_of(
    st.floats(0, math.inf, width=32, allow_subnormal=True),
    st.sampled_from([0.0, 1e-45, 0.5, 1.0, 1.0000001, 2.0, 3.4e38, math.inf]),
)




def find(values: torch.Tensor, k: int):
    everything = torch.ones_like(values, dtype=torch.bool)
    return kth_largest(values, lambda part: [everything[part]], lambda count: torch.full_like(count, k))


@settings(max_examples=150, deadline=None)
@given(values=st.lists(any_value, min_size=1, max_size=40), data=st.data())
@example(values=[math.inf, math.inf, 0.0], data=None)
def test_agrees_with_sorting(values: list[float], data) -> None:
    k = data.draw(st.integers(1, len(values))) if data else 2
    tensor = torch.tensor(values)
    found = find(tensor, k)
    expected = tensor.sort(descending=True).values[k - 1]
    assert torch.equal(found.value, expected.view(1))
    assert found.count.tolist() == [len(values)]
    assert found.above.item() == (tensor > expected).sum()
    assert found.tied.item() == (tensor == expected).sum()
    assert found.above.item() < k <= found.above.item() + found.tied.item()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(any_value, max_size=30),
    seed=st.integers(0, 2**31),
    selections=st.integers(1, 4),
)
def test_selections_do_not_influence_each_other(values: list[float], seed: int, selections: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.tensor(values)
    masks = [torch.rand(len(values), generator=generator) < 0.6 for _ in range(selections)]
    found = kth_largest(tensor, lambda part: [m[part] for m in masks], lambda count: (count + 1) // 2)
    for i, mask in enumerate(masks):
        chosen = tensor[mask]
        k = (len(chosen) + 1) // 2
        assert found.count[i] == len(chosen)
        assert found.k[i] == k
        expected = chosen.topk(k).values[-1].item() if k else math.inf
        assert found.value[i].item() == expected
        assert found.tied[i] == ((chosen == expected).sum() if k else 0)


def test_more_values_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile, "_CHUNK", 1000)
    values = torch.rand(12_345, generator=torch.Generator().manual_seed(0)).mul(100).round()
    for k in (1, 999, 1000, 5000, 12_345):
        found = find(values, k)
        assert found.value.item() == values.topk(k).values[-1].item()
        assert found.tied.item() == (values == found.value).sum()


def test_all_equal_and_k_equal_to_n() -> None:
    found = find(torch.full((7,), 0.25), 7)
    assert (found.value.item(), found.above.item(), found.tied.item()) == (0.25, 0, 7)
    found = find(torch.tensor([3.0, 1.0, 2.0]), 3)
    assert (found.value.item(), found.above.item(), found.tied.item()) == (1.0, 2, 1)


@pytest.mark.parametrize("values", [torch.empty(0), torch.tensor([1.0, 2.0])])
def test_k_of_zero_has_nothing_above_it(values: torch.Tensor) -> None:
    found = find(values, 0)
    assert (found.value.item(), found.above.item(), found.tied.item()) == (math.inf, 0, 0)


def test_rounding_below_zero_counts_as_zero() -> None:
    found = find(torch.tensor([-1e-7, -0.0, 0.0, -1e-4, 1.0]), 2)
    assert (found.value.item(), found.above.item(), found.tied.item()) == (0.0, 1, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [(math.nan, "NaN at 1 tokens"), (-math.inf, "below 0 at 1 tokens"), (-0.5, "below 0 at 1 tokens")],
)
def test_what_cannot_be_ranked_is_refused_by_name(bad: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(torch.tensor([1.0, bad]), 1)


def test_values_outside_every_selection_may_be_anything() -> None:
    values = torch.tensor([1.0, math.nan, -5.0, 2.0])
    member = torch.tensor([True, False, False, True])
    found = kth_largest(values, lambda part: [member[part]], torch.ones_like)
    assert found.value.item() == 2.0


@pytest.mark.parametrize("k", [-1, 3])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="not between 0 and"):
        find(torch.tensor([1.0, 2.0]), k)


class Watch(TorchDispatchMode):
    """Sees every operation: the largest new tensor, and each wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.waits = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.waits += name in ("_local_scalar_dense", "nonzero", "masked_select", "bincount")
        self.waits += name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_temporary_memory_does_not_grow_with_the_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile, "_CHUNK", 4096)

    def largest_tensor(n: int) -> int:
        values = torch.rand(n)
        with Watch() as watch:
            kth_largest(values, lambda part: [values[part] > 0.5, values[part] < 0.5], lambda c: c // 10)
        return watch.largest

    bins = 2 * 2**16
    assert largest_tensor(2 * bins) == largest_tensor(8 * bins) == bins


def test_nothing_waits_for_the_device_but_the_final_check() -> None:
    values = torch.rand(1000)
    with Watch() as watch:
        kth_largest(values, lambda part: [values[part] > 0.5], lambda c: c // 10)
    # The packed flags are read by one tolist(), which is not an operation of its own.
    assert watch.waits == 0
