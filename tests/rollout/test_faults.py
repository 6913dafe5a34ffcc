"""Servers and the router are killed and stopped under a client, a publisher and a fleet that go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatron_stare.errors import UserError
from megatron_stare.rollout import (
    FleetPlan,
    Publisher,
    PublishError,
    RolloutClient,
    RolloutError,
    ServerFleet,
    StaleServersError,
    make_publisher,
)
from megatron_stare.tasks.sample import Prompt

pytestmark = pytest.mark.timeout(300)
VOCABULARY = 16
PROMPTS = [Prompt(index, [1 + index % 8, 5, 11], "", None) for index in range(64)]


def whole(groups: list[Any], version: int, n: int = 4) -> bool:
    """Whether each prompt has its n responses, all of them by these weights."""
    return [group.prompt for group in groups] == PROMPTS and all(
        len(group.responses) == n and {r.weight_version for r in group.responses} == {version}
        for group in groups
    )


def test_a_server_that_dies_while_it_samples_loses_nothing_and_comes_back(stand):
    dead = stand.fleet.endpoints.servers[1]
    key_before = stand.fleet.endpoints
    groups = stand.watched(
        stand.client.generate, PROMPTS, 4,
        weight_version=stand.version, on_progress=stand.killing("server-1", at=3),
    )  # fmt: skip
    assert whole(groups, stand.version)
    ((name, message),) = stand.problems
    assert name == "server-1"
    assert "was ended by SIGKILL; starting it again (" in message
    assert message in (stand.logs / "server-1.log").read_text()

    stand.watch(stand.all_up)
    assert stand.fleet.endpoints == key_before
    assert stand.publisher.outdated(stand.version) == [dead]
    # Up, but with the weights it was started with: the other one gets all samples.
    assert whole(stand.client.generate(PROMPTS, 4, weight_version=stand.version), stand.version)
    assert stand.publish() == []
    assert stand.publisher.outdated(stand.version) == []
    assert whole(stand.client.generate(PROMPTS, 4, weight_version=stand.version), stand.version)
    _, info = stand.fleet.endpoints.call(dead, "/model_info", timeout=5)
    assert info["weight_version"] == str(stand.version)


def test_deaths_in_a_publish_and_of_all_servers_end_in_new_weights_and_samples(stand):
    first, second = stand.fleet.endpoints.servers
    seen = []

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stand.weights.items():
            if len(seen) == 12:
                stand.kill("server-0")
            seen.append(name)
            yield name, tensor

    start = time.monotonic()
    with pytest.raises(PublishError):
        stand.publisher.publish(dying(), stand.version + 1)
    assert seen == list(stand.weights)  # the trainer's other ranks wait for each of them
    assert stand.publish() == [first]
    assert time.monotonic() - start < 15
    assert whole(stand.client.generate(PROMPTS, 4, weight_version=stand.version), stand.version)

    with pytest.raises(StaleServersError, match="publish the weights again") as caught:
        stand.watched(
            stand.client.generate, PROMPTS, 4,
            weight_version=stand.version, on_progress=stand.killing("server-1", at=5),
        )  # fmt: skip
    done = [group for group in caught.value.groups if group is not None]
    assert len(done) >= 5
    missing = [index for index, group in enumerate(caught.value.groups) if group is None]
    stand.watched(stand.publisher.publish, stand.weights.items(), stand.version)
    again = stand.watched(
        stand.client.generate, [PROMPTS[index] for index in missing], 4, weight_version=stand.version
    )
    groups = list(caught.value.groups)
    for index, group in zip(missing, again, strict=True):
        groups[index] = group
    assert whole(groups, stand.version)


def test_without_the_router_samples_go_to_the_servers_until_it_is_back(stand):
    pid = stand.fleet.pids["router"]
    groups = stand.watched(
        stand.client.generate, PROMPTS, 4,
        weight_version=stand.version, on_progress=stand.killing("router", at=3),
    )  # fmt: skip
    assert whole(groups, stand.version)
    stand.watch(stand.all_up)
    assert stand.fleet.pids["router"] != pid
    assert [name for name, _ in stand.problems] == ["router"]
    assert whole(stand.client.generate(PROMPTS, 4, weight_version=stand.version), stand.version)


def test_servers_that_hang_or_lose_their_worker_are_done_without_and_then_restarted(stand):
    hung = stand.fleet.endpoints.servers[0]
    # Nobody watches the fleet yet: as with a machine that is lost, only the client's own check helps.
    rollout = stand.rollout.model_copy(update={"health_timeout": 1.0})
    pid = stand.fleet.pids["server-0"]

    def stop(done: int, _total: int) -> None:
        if done == 3:
            stand.kill("server-0", signal.SIGSTOP)

    with RolloutClient(stand.fleet.endpoints, rollout, VOCABULARY) as client:
        start = time.monotonic()
        groups = client.generate(PROMPTS, 4, weight_version=stand.version, on_progress=stop)
        assert whole(groups, stand.version)
        assert time.monotonic() - start < 30
    start = time.monotonic()
    assert stand.publish() == [hung]
    assert time.monotonic() - start < 10

    before = dict(stand.fleet.pids)
    worker = next(p for p in psutil.Process(before["server-1"]).children() if p.name() == "sglang::scheduler")
    worker.kill()
    stand.watch(
        lambda: all(stand.fleet.pids[name] != before[name] for name in ("server-0", "server-1")), 40.0
    )
    assert not psutil.pid_exists(pid)
    assert "was not healthy for rollout.health_timeout=6 s" in dict(stand.problems)["server-0"]
    assert sorted(name for name, _ in stand.problems) == ["server-0", "server-1"]


@pytest.fixture
def plan_around(sglang_fleet: SimpleNamespace) -> Callable[..., FleetPlan]:
    """A plan of a head node with a router of its own; the session's server is another node's."""
    from megatron_stare.rollout.ports import PortLease

    lease = PortLease()
    port = lease.take("127.0.0.1")
    lease.release()

    def plan(**changes: Any) -> FleetPlan:
        values = {
            "urls": tuple(sglang_fleet.endpoints.servers),
            "mine": range(0),
            "router": f"http://127.0.0.1:{port}",
            "starts_router": True,
            "api_key": sglang_fleet.endpoints.api_key,
            "bind": "127.0.0.1",
        }
        return FleetPlan(**(values | changes))

    return plan


def test_a_planned_head_node_waits_for_other_nodes_servers_and_gives_up_after_restarts(
    sglang_fleet, plan_around, tmp_path
):
    problems: list[str] = []
    rollout = sglang_fleet.rollout.model_copy(update={"server_restarts": 1, "host": "192.0.2.1"})
    plan = plan_around()
    fleet = ServerFleet(
        rollout, "unused", "float32", tmp_path, 0,
        plan=plan, on_problem=lambda name, message: problems.append(message),
    )  # fmt: skip
    try:
        endpoints = fleet.start()
        assert (endpoints.servers, endpoints.router) == (list(plan.urls), plan.router)
        assert (endpoints.api_key, endpoints.rendezvous) == (plan.api_key, plan.bind)
        assert list(fleet.pids) == ["router"]
        with RolloutClient(endpoints, rollout, VOCABULARY) as client:
            assert len(client.generate(PROMPTS, 2)) == len(PROMPTS)
        os.kill(fleet.pids["router"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not (problems and fleet._members[0].is_up):
            assert time.monotonic() < deadline
            fleet.watch()
            time.sleep(0.05)
        os.kill(fleet.pids["router"], signal.SIGKILL)
        message = (
            r"router was ended by SIGKILL, after rollout.server_restarts=1 restarts; .*router.log:\n  \|"
        )
        with pytest.raises(RolloutError, match=message):
            while time.monotonic() < deadline:
                fleet.watch()
                time.sleep(0.05)
        assert problems == ["was ended by SIGKILL; starting it again (1 of at most 1 times)"]
    finally:
        fleet.stop()


def test_other_nodes_start_only_what_is_theirs(sglang_fleet, plan_around, tmp_path):
    plan = plan_around(starts_router=False)
    fleet = ServerFleet(sglang_fleet.rollout, "unused", "float32", tmp_path, 0, plan=plan)
    assert fleet.start().router == plan.router
    assert fleet.pids == {}
    fleet.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mine": range(1)}, r"http://127.0.0.1:\d+ of the launch plan: port \d+ on 127.0.0.1 is in use"),
        ({"bind": "192.0.2.1"}, r"launch plan: port \d+ on 192.0.2.1 cannot be used"),
        ({"urls": ("http://127.0.0.1:1", "http://127.0.0.1:2")}, "servers=1, but the launch plan names 2"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_starts(
    sglang_fleet, plan_around, tiny_model_dir, tmp_path, changes, message
):
    fleet = ServerFleet(
        sglang_fleet.rollout, str(tiny_model_dir), "float32", tmp_path / "run", 0, plan=plan_around(**changes)
    )
    with pytest.raises(UserError, match=message):
        fleet.start()
    assert not (tmp_path / "run").exists()


def test_a_publish_without_any_server_gives_up_after_the_outage(sglang_fleet, tmp_path):
    rollout = sglang_fleet.rollout.model_copy(update={"outage_timeout": 1.0})
    gone = type(sglang_fleet.endpoints)(["http://127.0.0.1:9"])
    publisher: Publisher = make_publisher(rollout, gone, "gloo", tmp_path)
    weights = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    with pytest.raises(PublishError, match="no server answered for rollout.outage_timeout=1 s"):
        publisher.publish(weights, 1)
    assert list(weights) == []
    assert publisher.outdated(1) == []
    publisher.close()
