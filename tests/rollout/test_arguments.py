"""Command lines of servers and router, as pure functions."""

from __future__ import annotations

import pytest

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import UserError
from megatron_stare.rollout.answer import UNKNOWN_VERSION, as_version
from megatron_stare.rollout.arguments import router_arguments, server_arguments, server_environment


def parsed(arguments: list[str]) -> dict[str, str | bool | list[str]]:
    result: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            name = word
            assert name not in result
            result[name] = []
        else:
            result[name].append(word)
    return {name: values[0] if len(values) == 1 else values or True for name, values in result.items()}


def server(device: str = "cpu", index: int = 0, **fields):
    rollout = RolloutSection(**fields)
    return parsed(
        server_arguments(rollout, "/m", "float32", device=device, index=index, port=1234, seed=7, first_gpu=2)
    )


def test_a_cpu_server_needs_no_kernels_and_leaves_the_cores_to_the_trainer():
    line = server(max_running_requests=8, context_length=128, max_response_tokens=16)
    assert line["--attention-backend"] == "torch_native"
    assert line["--sampling-backend"] == "pytorch"
    assert line["--max-total-tokens"] == str(8 * 128)
    assert line["--sleep-on-idle"] is True
    assert line["--host"] == "127.0.0.1"
    assert line["--dtype"] == "float32"
    assert "--base-gpu-id" not in line
    assert server_environment(RolloutSection(threads=3), "cpu")["OMP_NUM_THREADS"] == "3"


def test_gpu_servers_get_gpus_one_after_the_other():
    lines = [server("cuda", index, tp=2, servers=2, memory_fraction=0.5) for index in range(2)]
    assert [line["--base-gpu-id"] for line in lines] == ["2", "4"]
    assert {line["--tp-size"] for line in lines} == {"2"}
    assert {line["--mem-fraction-static"] for line in lines} == {"0.5"}
    assert "--attention-backend" not in lines[0]
    assert "OMP_NUM_THREADS" not in server_environment(RolloutSection(), "cuda")


def test_servers_sample_different_noise_from_one_seed():
    assert server(index=0)["--random-seed"] != server(index=1)["--random-seed"]
    assert server(index=1) == server(index=1)


def test_the_cache_holds_one_whole_context_at_least():
    line = server(context_length=200_000)
    assert line["--max-total-tokens"] == "200000"


def test_further_arguments_replace_add_and_remove():
    further = {"disable_radix_cache": True, "log-level-http": "info", "sleep_on_idle": False, "x": [1, 2]}
    line = server(server_args=further)
    assert line["--disable-radix-cache"] is True
    assert line["--log-level-http"] == "info"
    assert "--sleep-on-idle" not in line
    assert line["--x"] == ["1", "2"]


@pytest.mark.parametrize("name", ["port", "model_path", "api-key", "--host"])
def test_arguments_the_run_depends_on_are_refused(name):
    with pytest.raises(UserError, match="is not allowed: the run sets it itself"):
        server(server_args={name: "x"})


def test_the_router_binds_to_the_servers_host_only():
    line = parsed(router_arguments(RolloutSection(), ["http://a", "http://b"], port=1, metrics_port=2))
    assert line["--worker-urls"] == ["http://a", "http://b"]
    assert line["--host"] == line["--prometheus-host"] == "127.0.0.1"
    assert line["--prometheus-port"] == "2"


def test_a_restarted_server_passes_for_no_published_version():
    assert as_version(server()["--weight-version"]) == UNKNOWN_VERSION


def test_seeded_servers_cut_no_prompt_and_give_no_response_up():
    line = server(seeded=True)
    assert line["--enable-deterministic-inference"] is line["--disable-radix-cache"] is True
    assert line["--chunked-prefill-size"] == "-1"
    environment = server_environment(RolloutSection(seeded=True, max_response_tokens=9), "cpu")
    assert environment["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] == "9"
    assert "--enable-deterministic-inference" not in server()
