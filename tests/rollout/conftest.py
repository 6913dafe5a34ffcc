"""One fleet of two servers and a router that tests may kill, with what a trainer has around it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_stare.config.schema import RolloutSection
from megatron_stare.rollout import RolloutClient, ServerFleet, make_publisher
from megatron_stare.rollout.threads import in_thread

VOCABULARY = 16


class Stand:
    """A fleet with what a trainer has: client, publisher, weights, and a main thread that watches.

    The servers are seeded ones; the client asks them without seeds, through the router.
    """

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.rollout = RolloutSection(
            servers=2,
            max_response_tokens=100,
            context_length=128,
            max_running_requests=16,
            start_timeout=240.0,
            request_timeout=120.0,
            bucket_mb=1,
            health_timeout=6.0,
            outage_timeout=200.0,
            server_restarts=6,
        )
        seeded = self.rollout.model_copy(update={"seeded": True})
        self.problems: list[tuple[str, str]] = []
        self.logs = run_dir / "logs"
        self.fleet = ServerFleet(
            seeded, str(model), "float32", run_dir, 0,
            on_problem=lambda name, message: self.problems.append((name, message)),
        )  # fmt: skip
        self.weights = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
        self.version = 100

    def watch(self, until: Callable[[], Any], seconds: float = 240.0) -> None:
        """Watch the fleet, as the supervisor does; that must never take long."""
        deadline = time.monotonic() + seconds
        while not until():
            start = time.monotonic()
            assert start < deadline, f"still waiting; {self.problems}"
            self.fleet.watch()
            assert time.monotonic() - start < 0.5
            time.sleep(0.05)

    def watched(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a call that is made in another thread while the fleet is watched in this one."""
        call = in_thread(function, *arguments, **options)
        self.watch(call.done)
        return call.result()

    def all_up(self) -> bool:
        urls = [*self.fleet.endpoints.servers, self.fleet.endpoints.router]
        try:
            answers = [self.fleet.endpoints.call(url, "/health", timeout=1.0)[0] for url in urls]
        except OSError:
            return False
        return answers == [200] * 3 and all(member.is_up for member in self.fleet._members)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.fleet.pids[name]
        os.kill(pid, number)
        return pid

    def killing(self, name: str, at: int) -> Callable[[int, int], None]:
        """For on_progress: kill `name` when `at` groups are done."""
        return lambda done, total: self.kill(name) and None if done == at else None

    def publish(self) -> list[str]:
        """Publish the weights as a new version."""
        self.version += 1
        return self.publisher.publish(self.weights.items(), self.version)


@pytest.fixture(scope="session")
def started(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tiny_model_dir, tmp_path_factory.mktemp("faults"))
    try:
        stand.fleet.start()
        stand.publisher = make_publisher(stand.rollout, stand.fleet.endpoints, "gloo", stand.logs)
        yield stand
        stand.publisher.close()
    finally:
        started = [psutil.Process(pid) for pid in stand.fleet.pids.values()]
        members = [*started, *(child for process in started for child in process.children(recursive=True))]
        stand.fleet.stop()
        _, left = psutil.wait_procs(members, timeout=0.5)
        assert not left, f"left running: {left}"


@pytest.fixture
def stand(started: Stand) -> Iterator[Stand]:
    """All up, and all with the same new weights."""
    started.watch(started.all_up)
    started.problems.clear()
    assert started.publish() == []
    assert started.publisher.outdated(started.version) == []
    with RolloutClient(started.fleet.endpoints, started.rollout, VOCABULARY) as client:
        started.client = client
        yield started
