"""A job as its nodes see it: who does what, on which ports, and what is wrong with the variables."""

from __future__ import annotations

import socket

import pytest

from megatron_stare.config import Config
from megatron_stare.errors import UserError
from megatron_stare.rollout.ports import _RANGE as SINGLE_NODE_PORTS
from megatron_stare.run.job import (
    API_KEY_VARIABLE,
    HOSTS_VARIABLE,
    JOB_VARIABLE,
    NODE_VARIABLE,
    PORT_VARIABLE,
    PORTS_PER_JOB,
    RANKS_VARIABLE,
    TRAINER_NODES_VARIABLE,
    Job,
    base_port,
)
from megatron_stare.run.layout import ranks_per_node, spread

EPHEMERAL = range(32_768, 61_000)


def config(objective: str = "rl", world_size: int | None = None, **rollout) -> Config:
    return Config.model_validate(
        {
            "objective": objective,
            "model": {"path": "nowhere"},
            "task": {"source": "rows.jsonl"},
            "parallel": {"world_size": world_size},
            "rollout": rollout,
        }
    )


def variables(node: int, hosts: str = "127.0.0.1,127.0.0.1,127.0.0.1", **changes: str) -> dict[str, str]:
    return {
        JOB_VARIABLE: "1234.0",
        HOSTS_VARIABLE: hosts,
        NODE_VARIABLE: str(node),
        TRAINER_NODES_VARIABLE: "2",
        RANKS_VARIABLE: "4",
        API_KEY_VARIABLE: "secret",
    } | changes


def test_without_a_launcher_all_is_on_this_node():
    job = Job.from_environment(config(world_size=2), {"SLURM_JOB_ID": "7", API_KEY_VARIABLE: "theirs"})
    assert (job.hosts, job.node, job.world_size, job.head, job.trains) == (("127.0.0.1",), 0, 2, True, True)
    assert job.rendezvous == "127.0.0.1:0"
    assert job.fleet is None
    assert Job.single(config(world_size=2)).id != job.id


def test_nodes_of_a_job_agree_on_everything_but_their_own_part():
    jobs = [Job.from_environment(config(servers=5), variables(node)) for node in range(3)]
    assert {(job.id, job.hosts, job.world_size, job.rendezvous) for job in jobs} == {
        ("1234.0", ("127.0.0.1",) * 3, 8, jobs[0].rendezvous)
    }
    assert [job.head for job in jobs] == [True, False, False]
    assert [job.trains for job in jobs] == [True, True, False]
    fleets = [job.fleet for job in jobs]
    assert {(f.urls, f.router, f.api_key) for f in fleets} == {(fleets[0].urls, fleets[0].router, "secret")}
    assert [f.starts_router for f in fleets] == [True, False, False]
    assert [list(f.mine) for f in fleets] == [[], [], [0, 1, 2, 3, 4]]
    assert "secret" not in repr(jobs[0])


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_no_two_ports_of_a_job_on_one_host_are_equal(nodes):
    hosts = ",".join(["127.0.0.1"] * nodes)
    job = Job.from_environment(
        config(servers=30), variables(0, hosts, **{TRAINER_NODES_VARIABLE: str(nodes)})
    )
    ports = [job.rendezvous, job.fleet.router, *job.fleet.urls]
    numbers = {int(text.rpartition(":")[2]) for text in ports}
    assert len(numbers) == 32
    assert numbers <= set(range(base_port("1234.0"), base_port("1234.0") + PORTS_PER_JOB))


def test_jobs_that_schedulers_count_get_other_ports_than_runs_and_connections():
    blocks = [base_port(str(number)) for number in range(5000, 5200)]
    assert len(set(blocks)) == 200
    used = {port for base in blocks for port in range(base, base + PORTS_PER_JOB)}
    assert not used & set(SINGLE_NODE_PORTS)
    assert not used & set(EPHEMERAL)
    assert base_port("5000.3") == base_port("5000")
    assert base_port("qwen-1a2b3c") in range(10_000, 20_000)


def test_servers_on_different_hosts_use_the_same_ports():
    # Names of loopback, which Linux all takes for this machine.
    hosts = "127.0.0.1,127.0.0.2,127.0.0.3"
    job = Job.from_environment(config(servers=2), variables(1, hosts, **{TRAINER_NODES_VARIABLE: "1"}))
    first, second = (url.rpartition(":") for url in job.fleet.urls)
    assert (first[0], second[0]) == ("http://127.0.0.2", "http://127.0.0.3")
    assert first[2] == second[2]
    assert not job.trains


def test_supervised_jobs_and_running_servers_need_no_fleet_and_no_key():
    environment = variables(0)
    del environment[API_KEY_VARIABLE]
    assert Job.from_environment(config("sft"), environment).fleet is None
    assert Job.from_environment(config(endpoints=["http://x:1"]), environment).fleet is None
    with pytest.raises(UserError, match=API_KEY_VARIABLE):
        Job.from_environment(config(), environment)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({NODE_VARIABLE: "3"}, "MEGATRON_STARE_NODE=3: must be from 0 to 2"),
        ({NODE_VARIABLE: "first"}, "MEGATRON_STARE_NODE=first"),
        ({NODE_VARIABLE: ""}, "MEGATRON_STARE_NODE is not set"),
        ({TRAINER_NODES_VARIABLE: "4"}, "MEGATRON_STARE_TRAINER_NODES=4: must be from 1 to 3"),
        ({RANKS_VARIABLE: "0"}, "MEGATRON_STARE_RANKS_PER_NODE=0"),
        ({JOB_VARIABLE: " "}, "MEGATRON_STARE_JOB is not set"),
        ({PORT_VARIABLE: "65530"}, "MEGATRON_STARE_PORT=65530"),
        ({HOSTS_VARIABLE: "none.invalid", TRAINER_NODES_VARIABLE: "1"}, "none.invalid cannot be resolved"),
    ],
)  # fmt: skip
def test_wrong_variables_are_named(changes, named):
    with pytest.raises(UserError, match=named):
        Job.from_environment(config(), variables(0, **changes))


def test_a_port_in_use_is_found_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # The rendezvous is the first of the job's ports, and the first node's alone.
        at = {PORT_VARIABLE: str(port)}
        head, other = (Job.from_environment(config("sft"), variables(node, **at)) for node in (0, 1))
        other.require_ports()
        with pytest.raises(UserError, match=f"MEGATRON_STARE_PORT: port {port} on 127.0.0.1 is in use"):
            head.require_ports()
    head.require_ports()


def test_the_interface_of_the_jobs_network_is_told_to_gloo_and_nccl():
    environment = Job.from_environment(config("sft"), variables(0)).environment({})
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    chosen = {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "8"}
    kept = Job.from_environment(config("sft"), variables(0)).environment(chosen)
    assert kept.items() >= chosen.items()
    assert "GLOO_SOCKET_IFNAME" not in Job.single(config("sft", 1)).environment({})


@pytest.mark.parametrize(
    ("servers", "nodes", "trainers", "expected"),
    [
        (4, 2, 2, [[0, 1], [2, 3]]),
        (5, 4, 2, [[], [], [0, 1, 2], [3, 4]]),
        (1, 2, 2, [[0], []]),
        (3, 1, 1, [[0, 1, 2]]),
        (2, 4, 1, [[], [0], [1], []]),
    ],
)
def test_servers_are_spread_evenly_over_nodes_that_do_not_train(servers, nodes, trainers, expected):
    assert [list(share) for share in spread(servers, nodes, trainers)] == expected


def test_ranks_are_the_gpus_that_servers_leave_or_a_share_of_the_world_size():
    assert ranks_per_node(config(servers=4, tp=2), nodes=2, trainer_nodes=2, gpus=8) == 4
    assert ranks_per_node(config(servers=4), nodes=4, trainer_nodes=2, gpus=8) == 8
    assert ranks_per_node(config(world_size=8, servers=8), nodes=2, trainer_nodes=1, gpus=8) == 8
    assert ranks_per_node(config("sft", world_size=6), nodes=3, trainer_nodes=3, gpus=0) == 2
    assert ranks_per_node(config("sft"), nodes=3, trainer_nodes=3, gpus=0) == 1
    # Told to share GPUs, both may take all of them.
    assert ranks_per_node(config(world_size=16, servers=16), nodes=2, trainer_nodes=2, gpus=8) == 8


@pytest.mark.parametrize(
    ("settings", "nodes", "trainers", "gpus", "named"),
    [
        ({"world_size": 3}, 2, 2, 0, "parallel.world_size=3"),
        ({"world_size": 32}, 2, 2, 8, "16 ranks on each"),
        ({"servers": 8}, 1, 1, 8, "leave no GPU of 8"),
        ({"servers": 3}, 2, 2, 8, "rollout.servers=3: is not a multiple"),
        ({"servers": 1}, 4, 2, 8, "fewer than the 2 nodes that serve"),
        ({"servers": 3, "tp": 8}, 4, 2, 8, "need 16 GPUs on a node"),
    ],
)
def test_what_does_not_fit_on_the_nodes_is_refused(settings, nodes, trainers, gpus, named):
    with pytest.raises(UserError, match=named):
        ranks_per_node(config(**settings), nodes, trainers, gpus)
