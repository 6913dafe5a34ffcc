"""A job: the nodes that one run is on, and everything that they must agree on.

The one place that knows the names of a job's environment variables, its ports, its API key and the settings
of NCCL, gloo and threads. Launchers fill in the variables; nothing else is passed from node to node, because
the run directory, which all nodes share, tells the rest.
"""

from __future__ import annotations

import os
import secrets
import socket
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.rollout.child import API_KEY_VARIABLE as API_KEY_VARIABLE
from megatron_stare.rollout.fleet_plan import FleetPlan
from megatron_stare.rollout.ports import require_free
from megatron_stare.run.layout import spread, starts_servers
from megatron_stare.run.ranks import trainer_ranks

JOB_VARIABLE = "MEGATRON_STARE_JOB"  # the same on all nodes, another at each start of the job: 1234.0
HOSTS_VARIABLE = "MEGATRON_STARE_HOSTS"  # all nodes, trainers first: n1,n2,n3
NODE_VARIABLE = "MEGATRON_STARE_NODE"  # this one's place in that list, from 0
TRAINER_NODES_VARIABLE = "MEGATRON_STARE_TRAINER_NODES"  # so many of them train; default: all
RANKS_VARIABLE = "MEGATRON_STARE_RANKS_PER_NODE"  # trainer ranks on each of those
PORT_VARIABLE = "MEGATRON_STARE_PORT"  # the job's first port; default: from the job's name

# Below the ranges of outgoing connections and of runs on one node (rollout/ports.py).
_PORTS = range(10_000, 20_000)
# A job's ports: the rendezvous, the router, and up to 38 servers on one host.
PORTS_PER_JOB = 40
_ROUTER, _SERVERS = 1, 2


@dataclass(frozen=True)
class Job:
    """One start of a run on one or more nodes, as one of the nodes sees it.

    Attributes:
        id: equal on all nodes, and different each time that the job is started.
        hosts: name or address of every node, those with trainer ranks first.
        node: which of them this is.
        trainer_nodes: the first so many run trainer ranks.
        ranks_per_node: trainer ranks on each of these.
        rendezvous: "host:port" where trainer ranks meet.
        address: this node's address, as other nodes of the job reach it.
        fleet: who serves where; None where no servers are started, or where all is on this node.
    """

    id: str
    hosts: tuple[str, ...]
    node: int
    trainer_nodes: int
    ranks_per_node: int
    rendezvous: str
    address: str = "127.0.0.1"
    fleet: FleetPlan | None = None

    @property
    def head(self) -> bool:
        """Whether this node runs the router, and writes the run's config."""
        return self.node == 0

    @property
    def trains(self) -> bool:
        """Whether this node has trainer ranks."""
        return self.node < self.trainer_nodes

    @property
    def world_size(self) -> int:
        """Trainer ranks of all nodes."""
        return self.trainer_nodes * self.ranks_per_node

    @classmethod
    def single(cls, config: Config) -> Job:
        """All on this node, on ports that are free. Raises UserError as `trainer_ranks` does."""
        ranks = trainer_ranks(config)
        return cls(uuid.uuid4().hex[:12], ("127.0.0.1",), 0, 1, ranks, "127.0.0.1:0")

    @classmethod
    def from_environment(cls, config: Config, environment: Mapping[str, str] | None = None) -> Job:
        """The job that a launcher described; `single` where none did.

        Raises UserError naming a variable that is missing or wrong.
        """
        environment = os.environ if environment is None else environment
        if HOSTS_VARIABLE not in environment:
            return cls.single(config)
        hosts = tuple(filter(None, environment[HOSTS_VARIABLE].replace(",", " ").split()))
        node = _number(environment, NODE_VARIABLE, range(len(hosts)))
        trainer_nodes = _number(environment, TRAINER_NODES_VARIABLE, range(1, len(hosts) + 1), len(hosts))
        ranks = _number(environment, RANKS_VARIABLE, range(1, 1025))
        name = _text(environment, JOB_VARIABLE)
        base = _number(environment, PORT_VARIABLE, range(1024, 65_536 - PORTS_PER_JOB), base_port(name))
        return cls(
            name,
            hosts,
            node,
            trainer_nodes,
            ranks,
            f"{_bracketed(hosts[0])}:{base}",
            address=_own_address(hosts, node),
            fleet=_fleet(config, environment, hosts, node, trainer_nodes, base),
        )

    def torchrun_arguments(self) -> list[str]:
        """torchrun's arguments that tell where the trainer ranks are. For a node that trains."""
        arguments = ["--nproc-per-node", str(self.ranks_per_node), "--nnodes", str(self.trainer_nodes)]
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.rendezvous, "--rdzv-id", self.id]
        if len(self.hosts) > 1:
            # Said, not guessed from host names, which need not resolve, or to an address of loopback.
            arguments += ["--local-addr", self.address, "--rdzv-conf", f"is_host={str(self.head).lower()}"]
        return arguments

    def environment(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """What trainer ranks need in their environment; a variable that is set already keeps its value."""
        environment = os.environ if environment is None else environment
        wanted = {
            # Ranks share the node's cores. (Without it torchrun sets 1 as well, but says so at length.)
            "OMP_NUM_THREADS": "1",
            # Tokenizers warn after a fork otherwise.
            "TOKENIZERS_PARALLELISM": "false",
            # Megatron overlaps communication with computing by the order in which kernels are queued.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NCCL_DEBUG": "WARN",
            # Restarted ranks otherwise meet the dead ones' keys in the agent's store, and gloo fails.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if interface := self._interface():
            # Both else take the first interface, or what the host's name resolves to.
            wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return {name: environment.get(name, value) for name, value in wanted.items()}

    def require_ports(self) -> None:
        """Raise UserError when a port that this node is to open is in use."""
        if len(self.hosts) == 1 and self.fleet is None:
            return
        ports = [int(self.rendezvous.rpartition(":")[2])] if self.head else []
        if self.fleet:
            ports += [_port(self.fleet.urls[index]) for index in self.fleet.mine]
            ports += [_port(self.fleet.router)] if self.fleet.router and self.fleet.starts_router else []
        for port in ports:
            try:
                require_free(self.address, port, PORT_VARIABLE)
            except UserError:
                raise UserError(
                    f"{PORT_VARIABLE}: port {port} on {self.address} is in use, or may not be used; set it "
                    f"to the first of {PORTS_PER_JOB} free ports, the same on all nodes"
                ) from None

    def _interface(self) -> str | None:
        """The network interface that this node's address belongs to; None on one node alone."""
        if len(self.hosts) == 1:
            return None
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == self.address for entry in addresses):
                return name
        return None


def base_port(job: str) -> int:
    """The first port of a job, from its name without what follows a dot (the count of its starts).

    Schedulers count their jobs, so that those which run at the same time get different ports.
    """
    name = job.partition(".")[0]
    number = int(name) if name.isdecimal() else zlib.crc32(name.encode())
    return _PORTS.start + PORTS_PER_JOB * (number % (len(_PORTS) // PORTS_PER_JOB))


def _fleet(
    config: Config, environment: Mapping[str, str], hosts: tuple[str, ...], node: int, trainer_nodes: int,
    base: int,
) -> FleetPlan | None:  # fmt: skip
    if not starts_servers(config):
        return None
    shares = spread(config.rollout.servers, len(hosts), trainer_nodes)
    urls: list[str] = []
    used: dict[str, int] = {}
    for host, share in zip(hosts, shares, strict=True):
        # Nodes that are emulated on one host share its ports.
        first = base + _SERVERS + used.get(host, 0)
        urls += [f"http://{_bracketed(host)}:{port}" for port in range(first, first + len(share))]
        used[host] = used.get(host, 0) + len(share)
    router = config.rollout.port or base + _ROUTER
    key = environment.get(API_KEY_VARIABLE) or (secrets.token_hex(32) if len(hosts) == 1 else "")
    if not key:
        raise UserError(f"{API_KEY_VARIABLE} is not set: all nodes of a job need the same secret")
    return FleetPlan(
        urls=tuple(urls),
        mine=shares[node],
        router=f"http://{_bracketed(hosts[0])}:{router}" if config.rollout.router else None,
        starts_router=node == 0,
        api_key=key,
        bind=_own_address(hosts, node),
    )


def _own_address(hosts: tuple[str, ...], node: int) -> str:
    """The address of this node on the network that the job's nodes share.

    Not what its own name resolves to: that is an address of loopback on many systems.
    """
    for peer in hosts:
        if peer == hosts[node]:
            continue
        with socket.socket(_family(peer), socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing; the kernel chooses the way, and so the address
            return probe.getsockname()[0]
    try:
        return socket.getaddrinfo(hosts[node], None)[0][4][0]
    except OSError as error:
        raise UserError(f"{HOSTS_VARIABLE}: {hosts[node]} cannot be resolved ({error})") from None


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None)[0][0]
    except OSError as error:
        raise UserError(f"{HOSTS_VARIABLE}: {host} cannot be resolved ({error})") from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _text(environment: Mapping[str, str], name: str) -> str:
    if not (value := environment.get(name, "").strip()):
        raise UserError(f"{name} is not set, and {HOSTS_VARIABLE} is: a job needs both")
    return value


def _number(environment: Mapping[str, str], name: str, allowed: range, default: int | None = None) -> int:
    if name not in environment and default is not None:
        return default
    text = _text(environment, name)
    if not text.isdecimal() or int(text) not in allowed:
        raise UserError(f"{name}={text}: must be from {allowed.start} to {allowed.stop - 1}")
    return int(text)
