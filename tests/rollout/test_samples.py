"""Samples and weight updates through a real SGLang server and router."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_stare.errors import Preempted, UserError
from megatron_stare.rollout import (
    Endpoints,
    PublishError,
    RolloutClient,
    RolloutError,
    StaleServersError,
    make_publisher,
)
from megatron_stare.tasks.sample import Group, Prompt

VOCABULARY = 16
PROMPTS = [Prompt(index, [1 + index, 5, 11], "", None) for index in range(4)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, make_tiny_model, tmp_path_factory) -> list[Qwen3ForCausalLM]:
    """Four models of one shape; the first is the one that the fleet started with."""
    folder = tmp_path_factory.mktemp("others")
    paths = [tiny_model_dir, *(make_tiny_model(folder / str(seed), seed) for seed in (1, 2, 3))]
    return [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths]


@pytest.fixture
def client(sglang_fleet: SimpleNamespace) -> Iterator[RolloutClient]:
    with RolloutClient(sglang_fleet.endpoints, sglang_fleet.rollout, VOCABULARY) as client:
        yield client


def publish(fleet: SimpleNamespace, model: Qwen3ForCausalLM, version: int, tmp_path: Path, sync: str) -> None:
    rollout = fleet.rollout.model_copy(update={"sync": sync})
    publisher = make_publisher(rollout, fleet.endpoints, "gloo", tmp_path)
    try:
        publisher.publish(model.state_dict().items(), version)
    finally:
        publisher.close()


@torch.no_grad()
def worst_difference(groups: list[Group], model: Qwen3ForCausalLM, temperature: float = 1.0) -> float:
    """Largest difference between the sampler's log-probs and transformers'."""
    worst = 0.0
    for group in groups:
        for response in group.responses:
            ids = torch.tensor([group.prompt.token_ids + response.token_ids])
            log_probs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
            start = len(group.prompt.token_ids)
            expected = log_probs[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]]
            worst = max(worst, (expected - torch.tensor(response.log_probs)).abs().max().item())
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("prompt_tokens", [3, 110], ids=["copies", "shared-prompt"])
def test_log_probs_are_transformers_at_the_sampling_temperature(
    sglang_fleet, client, models, tmp_path, monkeypatch, temperature, prompt_tokens
):
    monkeypatch.setattr("megatron_stare.rollout.request.SHARED_PROMPT_TOKENS", 100)
    publish(sglang_fleet, models[0], 10, tmp_path, "disk")
    prompts = [Prompt(i, [(3 * i + j) % 10 for j in range(prompt_tokens)], "", None) for i in range(3)]
    groups = client.generate(prompts, n=8, weight_version=10, temperature=temperature)
    assert [group.prompt for group in groups] == prompts
    assert all(len(group.responses) == 8 for group in groups)
    assert worst_difference(groups, models[0], temperature) < 1e-4
    assert len({tuple(response.token_ids) for response in groups[0].responses}) > 4


def test_responses_end_at_the_end_token_or_at_the_limit(client, sglang_fleet):
    responses = [r for group in client.generate(PROMPTS, n=16) for r in group.responses]
    limit = sglang_fleet.rollout.max_response_tokens
    for response in responses:
        assert len(response.token_ids) == len(response.log_probs) <= limit
        assert (response.finish_reason == "stop") == (response.token_ids[-1] == 13)
        assert 13 not in response.token_ids[:-1]
    assert {response.finish_reason for response in responses} == {"stop", "length"}


@pytest.mark.parametrize("sync", ["disk", "distributed"])
def test_after_a_publish_the_new_weights_answer(sglang_fleet, client, models, tmp_path, sync):
    for number, version in ((1, 21), (2, 22), (3, 23)):
        publish(sglang_fleet, models[number], version, tmp_path, sync)
        groups = client.generate(PROMPTS, n=4, weight_version=version)
        assert {response.weight_version for group in groups for response in group.responses} == {version}
        assert worst_difference(groups, models[number]) < 1e-4
        assert worst_difference(groups, models[number - 1]) > 0.1


def test_one_publisher_publishes_many_times_and_mixed_dtypes(sglang_fleet, client, models, tmp_path):
    publisher = make_publisher(sglang_fleet.rollout, sglang_fleet.endpoints, "gloo", tmp_path)
    odd = models[2].state_dict()
    odd["model.norm.weight"] = odd["model.norm.weight"].bfloat16()
    try:
        publisher.publish(models[1].state_dict().items(), 31)
        publisher.publish(odd.items(), 32)
    finally:
        publisher.close()
    groups = client.generate(PROMPTS, n=2, weight_version=32)
    assert worst_difference(groups, models[2]) < 1e-4


def test_a_failed_distributed_update_is_an_error_soon_and_the_next_one_works(
    sglang_fleet, client, models, tmp_path
):
    publisher = make_publisher(sglang_fleet.rollout, sglang_fleet.endpoints, "gloo", tmp_path)
    seen = []

    def broken():
        for name, tensor in models[1].state_dict().items():
            seen.append(name)
            yield name, (torch.zeros(3, 5) if name == "model.embed_tokens.weight" else tensor)

    try:
        publisher.publish(models[1].state_dict().items(), 40)
        # The server forgets the group, so that it rejects the update without joining the broadcast.
        url = sglang_fleet.endpoints.servers[0]
        body = {"group_name": publisher._name}
        sglang_fleet.endpoints.require(url, "/destroy_weights_update_group", body, timeout=10)
        for weights in (models[1].state_dict().items(), broken()):
            start = time.monotonic()
            with pytest.raises(PublishError):
                publisher.publish(weights, 41)
            assert time.monotonic() - start < 20
            with pytest.raises(StaleServersError):
                client.generate(PROMPTS[:1], n=1, weight_version=40)
        assert seen == list(models[1].state_dict())  # the trainer's other ranks wait for each of them
        publisher.publish(models[3].state_dict().items(), 42)
    finally:
        publisher.close()
    groups = client.generate(PROMPTS, n=2, weight_version=42)
    assert worst_difference(groups, models[3]) < 1e-4


class Absent(http.server.BaseHTTPRequestHandler):
    """Says yes to everything and never joins an update, as a server whose worker hangs."""

    def answer(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"weight_version": "0"}')

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_never_joins_an_update_does_not_keep_the_others(
    sglang_fleet, client, models, tmp_path, monkeypatch
):
    monkeypatch.setattr("megatron_stare.rollout.meeting.MEETING_SECONDS", 2.0)
    real = sglang_fleet.endpoints
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Absent) as absent:
        threading.Thread(target=absent.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{absent.server_port}"
        both = Endpoints([*real.servers, url], api_key=real.api_key)
        publisher = make_publisher(sglang_fleet.rollout, both, "gloo", tmp_path)
        start = time.monotonic()
        with pytest.raises(PublishError, match="not all servers joined"):
            publisher.publish(models[1].state_dict().items(), 45)
        absent.shutdown()
    assert publisher.publish(models[1].state_dict().items(), 45) == [url]
    publisher.close()
    assert time.monotonic() - start < 20
    assert worst_difference(client.generate(PROMPTS, n=2, weight_version=45), models[1]) < 1e-4


def test_servers_with_other_weights_than_asked_for_end_the_call_soon(sglang_fleet, client, models, tmp_path):
    publish(sglang_fleet, models[0], 50, tmp_path, "disk")
    start = time.monotonic()
    with pytest.raises(StaleServersError, match="serves weights 51 .*serves weights 50.*publish") as caught:
        client.generate(PROMPTS, n=2, weight_version=51)
    assert caught.value.groups == [None] * 4
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_an_id_outside_the_vocabulary_is_not_sent(client, token):
    with pytest.raises(UserError, match=f"prompt 7 has token id {token}, outside the vocabulary of 16"):
        client.generate([Prompt(7, [1, token], "", None)], n=2)
    assert len(client.generate(PROMPTS, n=1)) == len(PROMPTS)


def test_a_prompt_that_leaves_no_room_is_not_sent(client):
    with pytest.raises(UserError, match="has 113 tokens.*leaves room for 112"):
        client.generate([Prompt(0, [1] * 113, "", None)], n=1)


def test_should_stop_aborts_what_is_in_flight(sglang_fleet):
    update = {"max_response_tokens": 120, "max_running_requests": 512}
    rollout = sglang_fleet.rollout.model_copy(update=update)
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    prompts = [Prompt(i, [1, 2], "", None) for i in range(512)]
    with RolloutClient(sglang_fleet.endpoints, rollout, VOCABULARY) as client:
        start = time.monotonic()
        with pytest.raises(Preempted):
            client.generate(prompts, n=16, should_stop=stop.is_set)
        assert time.monotonic() - start < 5
        start = time.monotonic()
        client.generate(PROMPTS[:1], n=1)  # not after 8192 others
        assert time.monotonic() - start < 10


def test_further_stop_tokens_reach_the_servers(sglang_fleet):
    digits = list(range(10))
    with RolloutClient(
        sglang_fleet.endpoints, sglang_fleet.rollout, VOCABULARY, stop_token_ids=digits
    ) as client:
        responses = [r for group in client.generate(PROMPTS, n=16) for r in group.responses]
    assert all(token not in digits for r in responses for token in r.token_ids[:-1])
    assert any(r.token_ids[-1] in digits for r in responses)


def test_seeds_are_understood_by_servers_that_ignore_them(client):
    groups = client.generate(PROMPTS, n=4, seed=3)
    assert [len(group.responses) for group in groups] == [4] * len(PROMPTS)


def test_progress_counts_groups(client):
    seen: list[tuple[int, int]] = []
    client.generate(PROMPTS, n=2, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_without_the_key_nothing_is_answered(sglang_fleet):
    for url in (*sglang_fleet.endpoints.servers, sglang_fleet.endpoints.router):
        stranger = Endpoints([url], api_key="wrong")
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        assert stranger.call(url, "/generate", body, timeout=10)[0] == 401


def test_the_key_is_in_no_log_and_on_no_command_line(sglang_fleet):
    key = sglang_fleet.endpoints.api_key
    logs = list(sglang_fleet.run_dir.rglob("*.log"))
    assert {log.name for log in logs} == {"server-0.log", "router.log"}
    assert all(key not in log.read_text() for log in logs)
    for pid in sglang_fleet.fleet.pids.values():
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert key not in repr(sglang_fleet.endpoints)


def test_servers_that_stay_away_are_a_clear_error(sglang_fleet):
    gone = Endpoints(["http://127.0.0.1:9"], api_key="x")
    rollout = sglang_fleet.rollout.model_copy(update={"outage_timeout": 1.0})
    start = time.monotonic()
    with (
        RolloutClient(gone, rollout, VOCABULARY) as client,
        pytest.raises(RolloutError, match="no server answered for rollout.outage_timeout=1 s .*127.0.0.1:9"),
    ):
        client.generate(PROMPTS, n=1)
    assert 1 <= time.monotonic() - start < 5


def test_a_refused_request_ends_the_call_at_once(sglang_fleet, client):
    start = time.monotonic()
    with pytest.raises(RolloutError, match="/generate: 400 "):
        client.generate(PROMPTS, n=1, temperature=-1.0)
    assert time.monotonic() - start < 5


def test_lost_requests_are_sent_to_another_server(sglang_fleet):
    alive = sglang_fleet.endpoints
    dead = "http://127.0.0.1:9"
    half = Endpoints([*alive.servers, dead], router=dead, api_key=alive.api_key)
    with RolloutClient(half, sglang_fleet.rollout, VOCABULARY) as client:
        assert len(client.generate(PROMPTS * 2, n=1)) == 8
