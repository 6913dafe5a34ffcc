"""Microbatches in flight, workload, KV cache, sizes."""

from __future__ import annotations

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.plan.architecture import find_architecture
from megatron_stare.plan.hardware import Hardware, parse_bytes
from megatron_stare.plan.memory import export_bytes, passes_in_flight
from megatron_stare.plan.plan import trainer_world
from megatron_stare.plan.serving import serving
from megatron_stare.plan.workload import workload


def make_config(**changes) -> Config:
    values: dict = {"model": {"path": "models/Qwen2.5-7B"}, "task": {"source": "unused.jsonl"}}
    for key, value in changes.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


def in_flight_by_schedule(order: list[tuple[str, int]]) -> int:
    alive = most = 0
    for kind, _ in order:
        alive += 1 if kind == "forward" else -1
        most = max(most, alive)
    return most


def one_forward_one_backward(stage: int, pp: int, microbatches: int) -> list[tuple[str, int]]:
    """Megatron's order on a stage: as many forward passes as stages follow, then one of each in turn."""
    warmup = min(pp - stage - 1, microbatches)
    order = [("forward", i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        order += [("forward", warmup + i), ("backward", i)]
    return order + [("backward", i) for i in range(microbatches - warmup, microbatches)]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", range(4))
def test_in_flight_is_what_the_schedule_holds(stage, microbatches):
    order = one_forward_one_backward(stage, 4, microbatches)
    assert passes_in_flight(stage, 4, 1, microbatches) == in_flight_by_schedule(order)


def test_interleaving_holds_more_but_never_more_than_there_are():
    # Megatron's num_warmup_microbatches: (pp - stage - 1) * 2 + (vpp - 1) * pp, and the one in work.
    assert [passes_in_flight(stage, 4, 2, 16) for stage in range(4)] == [11, 9, 7, 5]
    assert passes_in_flight(0, 4, 2, 4) == 8


def test_workload_fills_microbatches_and_keeps_the_pipelines_multiple():
    config = make_config(**{
        "batch.max_tokens_per_microbatch": 8192, "rollout.max_response_tokens": 3072,
        "parallel.pp": 4, "parallel.vpp": 2, "parallel.world_size": 8,
    })  # fmt: skip
    work = workload(config, 8, mean_prompt=100, mean_response=1900)
    assert (work.replicas, work.responses, work.tokens) == (2, 512, 512 * 2000)
    needed = 512 * 2000 / 2 / (8192 * 0.95)
    assert work.microbatches % 4 == 0 and needed <= work.microbatches < needed + 4
    assert work.lengths == [4096, 4096] and sum(work.lengths) == 8192
    assert work.mean_microbatch_tokens * work.microbatches == pytest.approx(512 * 1000)


def test_rest_of_a_microbatch_is_a_shorter_sequence():
    config = make_config(**{"batch.max_tokens_per_microbatch": 9000, "rollout.max_response_tokens": 3072})
    assert workload(config, 1).lengths == [4096, 4096, 808]


def test_kv_cache_of_a_published_model():
    model = find_architecture("Qwen2.5-7B")
    config = make_config(**{"rollout.memory_fraction": 0.8})
    served = serving(config, model, Hardware(), workload(config, 1))
    assert served.kv_bytes_a_token == 56 * 1024  # 2 * 28 layers * 4 heads * 128 * 2 bytes
    assert served.weights_a_gpu == served.sync_bytes == 2 * 7_615_616_512
    assert served.kv_tokens == (64 * 10**9 - served.weights_a_gpu) // (56 * 1024)
    wide = make_config(**{"rollout.memory_fraction": 0.8, "rollout.tp": 8})
    assert serving(wide, model, Hardware(), workload(wide, 1)).kv_bytes_a_token == 2 * 56 * 1024


def test_servers_too_small_for_the_weights_hold_nothing():
    model, config = find_architecture("Qwen2.5-32B"), make_config()
    served = serving(config, model, Hardware(memory=60 * 10**9), workload(config, 1))
    assert served.kv_tokens == served.concurrent == 0


def test_export_takes_the_largest_parameter_twice_and_a_bucket():
    hf = find_architecture("Qwen2.5-7B").hf
    size = export_bytes(make_config(**{"rollout.bucket_mb": 100}), hf)
    assert size == 2 * (152_064 * 3584 * 2) + (64 << 20) + 100 * 2**20


def test_gpus_count_trainer_and_own_servers():
    config = make_config(**{"rollout.servers": 2, "rollout.tp": 2, "parallel.world_size": 4})
    assert trainer_world(config, None)[1] == 4
    assert trainer_world(config, 16)[1] == 12
    elsewhere = make_config(**{"rollout.endpoints": ["http://10.0.0.1:1"], "parallel.tp": 2})
    assert trainer_world(elsewhere, None)[1] == 2
    assert trainer_world(elsewhere, 16)[1] == 16
    with pytest.raises(UserError, match="--gpus=4"):
        trainer_world(config, 4)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("79.5GiB", int(79.5 * 2**30)), ("512mb", 512 * 10**6), ("80", 80 * 10**9)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "eighty", "0GB", "-1GB", "80 TB"])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes(text)
