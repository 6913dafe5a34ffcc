"""Answers that training could not use are refused where they arrive."""

from __future__ import annotations

import copy

import pytest

from megatron_stare.rollout.answer import UNKNOWN_VERSION, WeightVersionError, responses_from
from megatron_stare.rollout.endpoints import Endpoints, RolloutError

ANSWER = {
    "output_ids": [3, 1],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "completion_tokens": 2,
        "weight_version": "4",
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
        "output_token_logprobs": [[-0.5, 3, None], [-1.5, 1, None]],
    },
}


def changed(**meta):
    answer = copy.deepcopy(ANSWER)
    answer["meta_info"] |= meta
    return answer


def read(answer, n=1, version=4):
    return responses_from(answer, n, prompt_index=9, vocab_size=16, weight_version=version)


def test_ids_and_log_probs_come_from_the_same_triples():
    (response,) = read(ANSWER)
    assert (response.token_ids, response.log_probs) == ([3, 1], [-0.5, -1.5])
    assert (response.finish_reason, response.weight_version, response.text) == ("stop", 4, "")


def test_a_list_keeps_its_order():
    other = changed(output_token_logprobs=[[-0.1, 7, None], [-0.2, 8, None]])
    assert [response.token_ids for response in read([ANSWER, other], n=2)] == [[3, 1], [7, 8]]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": None}, "0 log-probs for 2 tokens"),
        ({"output_token_logprobs": [[-0.5, 3, None]]}, "1 log-probs for 2 tokens"),
        ({"output_token_logprobs": [[-0.5, 3, None], [None, 1, None]]}, "log-prob None for token 1"),
        ({"output_token_logprobs": [[float("nan"), 3, None], [-1.0, 1, None]]}, "log-prob nan for token 3"),
        ({"output_token_logprobs": [[-0.5, 16, None], [-1.0, 1, None]]}, "token 16 is outside"),
        ({"finish_reason": {"type": "abort", "message": "out of memory"}}, "aborted a response .out of mem"),
    ],
)
def test_what_is_missing_is_named(meta, message):
    with pytest.raises(RolloutError, match=f"prompt 9: .*{message}"):
        read(changed(**meta))


def test_too_few_responses_are_an_error():
    with pytest.raises(RolloutError, match="1 responses came back instead of 2"):
        read([ANSWER], n=2)


def test_a_version_that_changed_within_a_response_is_found():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    with pytest.raises(WeightVersionError, match="by weights 3 then 4, not by version 4.*publish"):
        read(changed(weight_versions=spans))


def test_any_version_is_taken_where_none_is_asked_for():
    (response,) = read(changed(weight_version="default", weight_versions=[]), version=None)
    assert response.weight_version == UNKNOWN_VERSION
    with pytest.raises(WeightVersionError, match="by weights default, not by version 4"):
        read(changed(weight_version="default", weight_versions=[]))


def test_endpoints_travel_by_environment():
    endpoints = Endpoints(["http://a:1", "http://b:2"], "http://r:3", "secret")
    assert Endpoints.from_env(endpoints.to_env()) == endpoints
    elsewhere = Endpoints(["http://a:1"], None, "secret", rendezvous="10.0.0.7")
    assert Endpoints.from_env(elsewhere.to_env()) == elsewhere
    direct = Endpoints(["http://a:1"])
    assert Endpoints.from_env(direct.to_env()) == direct
    assert direct.sampling == ["http://a:1"]
    with pytest.raises(RolloutError, match="told of no SGLang server"):
        Endpoints.from_env({})
