"""A fleet: N SGLang servers and a router, started together, kept running, and ended together."""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import UserError
from megatron_stare.rollout.arguments import router_arguments, server_arguments, server_environment
from megatron_stare.rollout.child import API_KEY_VARIABLE
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.fleet_plan import FleetPlan
from megatron_stare.rollout.member import Limits, Member, OnProblem, Program
from megatron_stare.rollout.ports import PortLease, require_free
from megatron_stare.rollout.process import end
from megatron_stare.rollout.threads import in_thread

_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 5.0
_WARM_UP_SECONDS = 600.0  # the first forward pass may compile kernels
Progress = Callable[[str], None]


class ServerFleet:
    """The SGLang servers of a run, and their router.

    With `rollout.endpoints` set nothing is started: those servers are asked whether they are there, and
    their key, if they have one, is read from MEGATRON_STARE_API_KEY. Otherwise a key is made for each
    run; it goes to the processes by environment only, and is masked in their logs.

    The processes live in sessions of their own, log to RUN/logs, and are killed by the kernel when the
    thread that started them ends: call start() and watch() from the main thread.

    Args:
        plan: for a fleet over several nodes: addresses, key, and which servers are this process's. Without
            it all servers are, on free ports of `rollout.host`.
        on_problem: told (name, what happened) of every restart, from within watch().
    """

    def __init__(
        self,
        rollout: RolloutSection,
        model_path: str,
        dtype: str,
        run_dir: str | Path,
        seed: int,
        *,
        plan: FleetPlan | None = None,
        on_problem: OnProblem = lambda name, message: None,
    ) -> None:
        self._rollout = rollout.model_copy(update={"host": plan.bind}) if plan else rollout
        self._model_path = model_path
        self._dtype = dtype
        self._logs = Path(run_dir) / "logs"
        self._seed = seed
        self._plan = plan
        self._on_problem = on_problem
        self._mine = plan.mine if plan else range(rollout.servers)
        self._is_head = plan.starts_router if plan else True
        self._members: list[Member] = []
        self._lease = PortLease()
        self._endpoints: Endpoints | None = None

    @property
    def endpoints(self) -> Endpoints:
        """Where the servers are. Raises RolloutError before start()."""
        if self._endpoints is None:
            raise RolloutError("the servers have not been started")
        return self._endpoints

    def start(self, on_progress: Progress | None = None) -> Endpoints:
        """Start everything and wait until all of it answers; on the head node also the other nodes' servers.

        Args:
            on_progress: called with a short line whenever something became ready.

        Raises:
            UserError: before anything starts: model missing, a port busy, an argument not allowed.
            RolloutError: a process ended or was not ready within `rollout.start_timeout`; quotes its log.
        """
        say = on_progress or (lambda line: None)
        if self._rollout.endpoints:
            self._endpoints = self._probe_external(say)
            return self._endpoints
        if self._members:
            raise RolloutError("the servers are already started")
        device, first_gpu = self._check()
        atexit.register(self.stop)
        deadline = time.monotonic() + self._rollout.start_timeout
        try:
            endpoints = self._addresses()
            self._start_servers(endpoints, device, first_gpu)
            if endpoints.router and self._is_head:  # it waits for its servers itself, so all load together
                self._start_router(endpoints)
            self._wait_for_members(deadline, say)
            if self._is_head:
                self._wait_for_others(endpoints, deadline, say)
            if endpoints.router and self._is_head:
                self._wait_for_router(endpoints, deadline)
                say("router ready")
            self._endpoints = endpoints
        except BaseException:  # also Ctrl-C while loading
            self.stop()
            raise
        return self._endpoints

    def watch(self) -> None:
        """Restart what has died or hangs. To be called several times a second; returns at once.

        A restart is spread over many calls. A restarted process has the address, key and log of the old one;
        a restarted server serves the model it was started with until the next publish.

        Raises RolloutError, quoting the log, when one of them was restarted `rollout.server_restarts` times.
        """
        for member in self._members:
            member.watch()

    def stop(self) -> None:
        """End all processes and whatever they started. Idempotent; returns when none is left."""
        members, self._members = self._members, []
        for member in members:
            member.stop()
        end([member.child for member in members])
        self._lease.release()
        atexit.unregister(self.stop)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: server-0, …, router. The names are those of the logs."""
        return {member.name: member.child.pid for member in self._members}

    def _check(self) -> tuple[str, int]:
        """Everything that can be found wrong before a process is started. Returns device and first GPU."""
        rollout, model = self._rollout, Path(self._model_path)
        if self._mine and not (model / "config.json").is_file():
            raise UserError(
                f"model.path={self._model_path}: no config.json there; give a Hugging Face model directory"
            )
        if self._plan:
            self._check_plan(self._plan)
        elif rollout.port is not None:
            require_free(rollout.host, rollout.port, f"rollout.port={rollout.port}")
        import torch  # late: `megatron_stare serve --help` need not wait for it

        if not torch.cuda.is_available():
            return "cpu", 0
        gpus, needed = torch.cuda.device_count(), len(self._mine) * rollout.tp
        first = gpus - needed if rollout.first_gpu is None else rollout.first_gpu
        if needed and (first < 0 or first + needed > gpus):
            raise UserError(
                f"{len(self._mine)} servers (rollout.servers) x rollout.tp={rollout.tp} need {needed} GPUs "
                f"from number {max(first, 0)} on; this machine has {gpus}"
            )
        return "cuda", first

    def _check_plan(self, plan: FleetPlan) -> None:
        if len(plan.urls) != self._rollout.servers:
            raise UserError(
                f"rollout.servers={self._rollout.servers}, but the launch plan names {len(plan.urls)} servers"
            )
        for url in self._own_urls(plan):
            require_free(plan.bind, _port(url), f"{url} of the launch plan")

    def _own_urls(self, plan: FleetPlan) -> list[str]:
        """What this process starts, and so listens on."""
        router = [plan.router] if plan.router and self._is_head else []
        return [*(plan.urls[index] for index in self._mine), *router]

    def _addresses(self) -> Endpoints:
        plan, rollout = self._plan, self._rollout
        if plan:
            for url in self._own_urls(plan):
                self._lease.hold(_port(url))
            return Endpoints(list(plan.urls), plan.router, plan.api_key, plan.bind)
        ports = [self._lease.take(rollout.host) for _ in range(rollout.servers)]
        router = None
        if rollout.router:
            router = self._url(rollout.port or self._lease.take(rollout.host))
        elif rollout.port is not None:
            ports[0] = rollout.port
        return Endpoints([self._url(port) for port in ports], router, secrets.token_hex(32))

    def _start_servers(self, endpoints: Endpoints, device: str, first_gpu: int) -> None:
        rollout = self._rollout
        lines = {
            index: server_arguments(
                rollout, self._model_path, self._dtype,
                device=device, index=index, port=_port(endpoints.servers[index]), seed=self._seed,
                # As if the other nodes' servers had GPUs before those of this node.
                first_gpu=first_gpu - self._mine.start * rollout.tp,
            )
            for index in self._mine
        }  # fmt: skip
        for index, line in lines.items():
            url = endpoints.servers[index]
            self._start(
                f"server-{index}",
                "megatron_stare.rollout.sglang_entry",
                line,
                server_environment(rollout, device) | {API_KEY_VARIABLE: endpoints.api_key or ""},
                is_healthy=lambda url=url: _is_healthy(endpoints, url),
                warm_up=lambda url=url: _warm_up(endpoints, url),
            )

    def _start_router(self, endpoints: Endpoints) -> None:
        assert endpoints.router is not None
        line = router_arguments(
            self._rollout,
            endpoints.servers,
            port=_port(endpoints.router),
            metrics_port=self._lease.take(self._rollout.host),
        )
        self._start(
            "router",
            "megatron_stare.rollout.router_entry",
            line,
            {API_KEY_VARIABLE: endpoints.api_key or ""},
            is_healthy=lambda: _is_healthy(endpoints, endpoints.router),
            warm_up=lambda: None,
        )

    def _start(
        self,
        name: str,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        *,
        is_healthy: Callable[[], bool],
        warm_up: Callable[[], None],
    ) -> None:
        rollout = self._rollout
        program = Program(
            name, module, arguments, environment, self._logs / f"{name}.log", is_healthy, warm_up
        )
        limits = Limits(rollout.start_timeout, rollout.health_timeout, rollout.server_restarts)
        self._members.append(Member(program, limits, self._on_problem))

    def _url(self, port: int) -> str:
        host = self._rollout.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _wait_for_members(self, deadline: float, say: Progress) -> None:
        waiting = list(self._members)
        servers = len(self._mine)
        while waiting:
            for member in [member for member in waiting if member.is_up]:
                waiting.remove(member)
                if member.name != "router":
                    ready = servers - sum(member.name != "router" for member in waiting)
                    say(f"{member.name.replace('-', ' ')} ready ({ready} of {servers})")
            if waiting:
                self._pause(deadline, ", ".join(member.name for member in waiting))

    def _wait_for_others(self, endpoints: Endpoints, deadline: float, say: Progress) -> None:
        """The servers that other nodes start."""
        others = [url for index, url in enumerate(endpoints.servers) if index not in self._mine]
        while others:
            calls = {url: in_thread(_is_healthy, endpoints, url) for url in others}
            for url, call in calls.items():
                if call.exception() is None and call.result():
                    others.remove(url)
                    say(f"{url} ready")
            if others:
                self._pause(deadline, ", ".join(others))

    def _wait_for_router(self, endpoints: Endpoints, deadline: float) -> None:
        """The router answers before it knows its workers, so its list is polled until it is complete."""
        assert endpoints.router is not None
        while True:
            try:
                status, answer = endpoints.call(endpoints.router, "/workers", timeout=_HEALTH_SECONDS)
            except OSError:
                status, answer = 0, {}
            workers = answer.get("workers", []) if status == 200 and isinstance(answer, dict) else []
            if sum(bool(worker.get("is_healthy", True)) for worker in workers) >= len(endpoints.servers):
                return
            self._pause(deadline, "router")

    def _pause(self, deadline: float, waiting_for: str) -> None:
        for member in self._members:
            if reason := member.child.exit_reason():
                raise member.error(reason)
        if time.monotonic() > deadline:
            problem = f"not ready after rollout.start_timeout={self._rollout.start_timeout:g} s"
            first = waiting_for.split(", ")[0]
            member = next((member for member in self._members if member.name == first), None)
            if member is None:
                raise RolloutError(f"{waiting_for} {problem}; see the logs of the node that starts it")
            raise member.error(problem, waiting_for)
        time.sleep(_POLL_SECONDS)

    def _probe_external(self, say: Progress) -> Endpoints:
        urls = [url.rstrip("/") for url in self._rollout.endpoints]
        key = os.environ.get(API_KEY_VARIABLE) or None
        endpoints = Endpoints(urls, api_key=key, rendezvous=self._plan.bind if self._plan else None)
        for url in urls:
            try:
                status, answer = endpoints.call(url, "/model_info", timeout=10.0)
            except (OSError, ValueError) as error:
                raise UserError(f"rollout.endpoints: {url} does not answer ({error})") from None
            if status in (401, 403):
                raise UserError(f"rollout.endpoints: {url} demands an API key; set {API_KEY_VARIABLE}")
            if status != 200:
                quote = f"{status} {str(answer)[:200]}"
                raise UserError(f"rollout.endpoints: {url} is no SGLang server ({quote})")
            say(f"{url} answers")
        return endpoints


def _port(url: str) -> int:
    port = urlsplit(url).port
    if port is None:
        raise ValueError(f"{url} names no port")
    return port


def _is_healthy(endpoints: Endpoints, url: str) -> bool:
    return endpoints.call(url, "/health", timeout=_HEALTH_SECONDS)[0] == 200


def _warm_up(endpoints: Endpoints, url: str) -> None:
    # The first forward pass sets up kernels and buffers: not on the first sample's time. Id 0 is in every
    # vocabulary.
    first = {"input_ids": [0], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    endpoints.require(url, "/generate", first, timeout=_WARM_UP_SECONDS)
    # What is alive now stays: without this Python's collector goes through all of it again and again, for a
    # quarter of a small model's time. Older servers do not know the call.
    endpoints.call(url, "/freeze_gc", {}, timeout=60.0)
