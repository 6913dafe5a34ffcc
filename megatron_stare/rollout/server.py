"""A fleet: N SGLang servers and a router, started together, watched, and ended together."""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import UserError
from megatron_stare.rollout.arguments import router_arguments, server_arguments, server_environment
from megatron_stare.rollout.child import API_KEY_VARIABLE
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.ports import PortLease, require_free
from megatron_stare.rollout.process import Child, end

_POLL_SECONDS = 0.3
Progress = Callable[[str], None]


class ServerFleet:
    """The SGLang servers of a run, and their router.

    With `rollout.endpoints` set nothing is started: those servers are asked whether they are there, and
    their key, if they have one, is read from MEGATRON_STARE_API_KEY. Otherwise a key is made for each
    run; it goes to the processes by environment only, and is masked in their logs.

    The processes live in sessions of their own, log to RUN/logs, and are killed by the kernel when the
    thread that called start() ends, so call it from the main thread.
    """

    def __init__(
        self, rollout: RolloutSection, model_path: str, dtype: str, run_dir: str | Path, seed: int
    ) -> None:
        self._rollout = rollout
        self._model_path = model_path
        self._dtype = dtype
        self._logs = Path(run_dir) / "logs"
        self._seed = seed
        self._children: list[Child] = []
        self._lease = PortLease()
        self._endpoints: Endpoints | None = None

    @property
    def endpoints(self) -> Endpoints:
        """Where the servers are. Raises RolloutError before start()."""
        if self._endpoints is None:
            raise RolloutError("the servers have not been started")
        return self._endpoints

    def start(self, on_progress: Progress | None = None) -> Endpoints:
        """Start everything and wait until all of it answers.

        Args:
            on_progress: called with a short line whenever something became ready.

        Raises:
            UserError: before anything starts: model missing, `rollout.port` busy, an argument not allowed.
            RolloutError: a process ended or was not ready within `rollout.start_timeout`; quotes its log.
        """
        say = on_progress or (lambda line: None)
        if self._rollout.endpoints:
            self._endpoints = self._probe_external(say)
            return self._endpoints
        if self._children:
            raise RolloutError("the servers are already started")
        device, first_gpu = self._check()
        atexit.register(self.stop)
        deadline = time.monotonic() + self._rollout.start_timeout
        try:
            endpoints = self._launch_servers(device, first_gpu)
            if self._rollout.router:  # it waits for its servers itself, so all load at the same time
                endpoints = self._launch_router(endpoints)
            self._wait_for_servers(endpoints, deadline, say)
            if endpoints.router:
                self._wait_for_router(endpoints, deadline)
                say("router ready")
            self._endpoints = endpoints
        except BaseException:  # also Ctrl-C while loading
            self.stop()
            raise
        return self._endpoints

    def check(self) -> None:
        """Raise RolloutError, quoting its log, if a process of the fleet has ended."""
        for child in self._children:
            reason = child.exit_reason()
            if reason is not None:
                raise RolloutError(f"{child.name} {reason}; the end of {child.log}:\n{child.log_tail()}")

    def stop(self) -> None:
        """End all processes and whatever they started. Idempotent; returns when none is left."""
        children, self._children = self._children, []
        end(children)
        self._lease.release()
        atexit.unregister(self.stop)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: server-0, …, router. The names are those of the logs."""
        return {child.name: child.pid for child in self._children}

    def _check(self) -> tuple[str, int]:
        """Everything that can be found wrong before a process is started. Returns device and first GPU."""
        rollout, model = self._rollout, Path(self._model_path)
        if not (model / "config.json").is_file():
            raise UserError(
                f"model.path={self._model_path}: no config.json there; give a Hugging Face model directory"
            )
        if rollout.port is not None:
            require_free(rollout.host, rollout.port, "rollout.port")
        import torch  # late: `megatron_stare serve --help` need not wait for it

        if not torch.cuda.is_available():
            return "cpu", 0
        gpus, needed = torch.cuda.device_count(), rollout.servers * rollout.tp
        first = gpus - needed if rollout.first_gpu is None else rollout.first_gpu
        if first < 0 or first + needed > gpus:
            raise UserError(
                f"rollout.servers={rollout.servers} x rollout.tp={rollout.tp} need {needed} GPUs "
                f"from number {max(first, 0)} on; this machine has {gpus}"
            )
        return "cuda", first

    def _launch_servers(self, device: str, first_gpu: int) -> Endpoints:
        rollout = self._rollout
        key = secrets.token_hex(32)
        ports = [self._lease.take(rollout.host) for _ in range(rollout.servers)]
        if rollout.port is not None and not rollout.router:
            ports[0] = rollout.port
        endpoints = Endpoints([self._url(port) for port in ports], api_key=key)
        environment = {**server_environment(rollout, device), API_KEY_VARIABLE: key}
        lines = [
            server_arguments(
                rollout, self._model_path, self._dtype,
                device=device, index=index, port=port, seed=self._seed, first_gpu=first_gpu,
            )
            for index, port in enumerate(ports)
        ]  # fmt: skip
        for index, line in enumerate(lines):
            self._spawn(f"server-{index}", "megatron_stare.rollout.sglang_entry", line, environment)
        return endpoints

    def _launch_router(self, endpoints: Endpoints) -> Endpoints:
        rollout = self._rollout
        port = rollout.port or self._lease.take(rollout.host)
        line = router_arguments(
            rollout, endpoints.servers, port=port, metrics_port=self._lease.take(rollout.host)
        )
        key = endpoints.api_key
        assert key is not None
        self._spawn("router", "megatron_stare.rollout.router_entry", line, {API_KEY_VARIABLE: key})
        return Endpoints(endpoints.servers, self._url(port), key)

    def _spawn(self, name: str, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self._children.append(Child(name, module, arguments, environment, self._logs / f"{name}.log"))

    def _url(self, port: int) -> str:
        host = self._rollout.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _wait_for_servers(self, endpoints: Endpoints, deadline: float, say: Progress) -> None:
        waiting = dict(enumerate(endpoints.servers))
        while waiting:
            for index, url in list(waiting.items()):
                if _healthy(endpoints, url):
                    # The first forward pass sets up kernels and buffers: not on the first sample's time.
                    # Id 0 is in every vocabulary.
                    first = {"input_ids": [0], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
                    endpoints.require(url, "/generate", first, timeout=max(1.0, deadline - time.monotonic()))
                    # What is alive now stays: without this Python's collector goes through all of it again
                    # and again, for a quarter of a small model's time. Older servers do not know the call.
                    endpoints.call(url, "/freeze_gc", {}, timeout=60.0)
                    del waiting[index]
                    ready = len(endpoints.servers) - len(waiting)
                    say(f"server {index} ready ({ready} of {len(endpoints.servers)})")
            if waiting:
                names = ", ".join(f"server-{index}" for index in waiting)
                self._pause(deadline, names)

    def _wait_for_router(self, endpoints: Endpoints, deadline: float) -> None:
        """The router answers before it knows its workers, so its list is polled until it is complete."""
        assert endpoints.router is not None
        while True:
            try:
                status, answer = endpoints.call(endpoints.router, "/workers", timeout=5.0)
            except OSError:
                status, answer = 0, {}
            workers = answer.get("workers", []) if status == 200 and isinstance(answer, dict) else []
            if sum(bool(worker.get("is_healthy", True)) for worker in workers) >= len(endpoints.servers):
                return
            self._pause(deadline, "router")

    def _pause(self, deadline: float, waiting_for: str) -> None:
        self.check()
        if time.monotonic() > deadline:
            child = next(c for c in self._children if c.name == waiting_for.split(", ")[0])
            raise RolloutError(
                f"{waiting_for} not ready after rollout.start_timeout={self._rollout.start_timeout:g} s; "
                f"the end of {child.log}:\n{child.log_tail()}"
            )
        time.sleep(_POLL_SECONDS)

    def _probe_external(self, say: Progress) -> Endpoints:
        urls = [url.rstrip("/") for url in self._rollout.endpoints]
        endpoints = Endpoints(urls, api_key=os.environ.get(API_KEY_VARIABLE) or None)
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


def _healthy(endpoints: Endpoints, url: str) -> bool:
    try:
        return endpoints.call(url, "/health", timeout=5.0)[0] == 200
    except OSError:
        return False
