"""What can go wrong around a fleet, and that nothing is left of it. Real processes, ended while they load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import UserError
from megatron_stare.rollout import RolloutError, ServerFleet
from megatron_stare.rollout.ports import PortLease

pytestmark = pytest.mark.timeout(120)
SMALL = {"max_response_tokens": 8, "context_length": 64}


def processes_mentioning(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if any(text in word for word in command) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_until_none(text: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_mentioning(text):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.1)


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """The tiny model under a path of its own, by which this test's processes are found."""
    path = tmp_path / "model"
    path.symlink_to(tiny_model_dir)
    return path


@pytest.mark.parametrize("router", [True, False])
def test_a_busy_port_is_named_before_anything_starts(model, tmp_path, router):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fleet = ServerFleet(
            RolloutSection(port=port, router=router, **SMALL), str(model), "float32", tmp_path / "run", 0
        )
        with pytest.raises(UserError, match=f"rollout.port={port}: port {port} on 127.0.0.1 is in use"):
            fleet.start()
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_named_before_anything_starts(tmp_path):
    fleet = ServerFleet(RolloutSection(**SMALL), str(tmp_path / "nowhere"), "float32", tmp_path / "run", 0)
    with pytest.raises(UserError, match="nowhere: no config.json there"):
        fleet.start()
    assert not (tmp_path / "run").exists()


def test_an_endpoint_that_does_not_answer_is_named(tmp_path):
    rollout = RolloutSection(endpoints=["http://127.0.0.1:9/"], **SMALL)
    with pytest.raises(UserError, match="http://127.0.0.1:9 does not answer"):
        ServerFleet(rollout, "unused", "float32", tmp_path, 0).start()


def test_running_servers_are_used_as_they_are(sglang_fleet, tmp_path, monkeypatch):
    url = sglang_fleet.endpoints.servers[0]
    rollout = RolloutSection(endpoints=[url + "/"], **SMALL)
    monkeypatch.delenv("MEGATRON_STARE_API_KEY", raising=False)
    with pytest.raises(UserError, match=f"{url} demands an API key; set MEGATRON_STARE_API_KEY"):
        ServerFleet(rollout, "unused", "float32", tmp_path, 0).start()
    monkeypatch.setenv("MEGATRON_STARE_API_KEY", sglang_fleet.endpoints.api_key)
    fleet = ServerFleet(rollout, "unused", "float32", tmp_path, 0)
    assert fleet.start().servers == [url]
    fleet.stop()
    assert sglang_fleet.endpoints.call(url, "/health", timeout=10)[0] == 200


def test_a_server_that_is_killed_ends_the_start_with_its_name_and_log(model, tmp_path):
    fleet = ServerFleet(RolloutSection(servers=2, **SMALL), str(model), "float32", tmp_path / "run", 0)

    def kill_soon() -> None:
        while "server-1" not in fleet.pids:
            time.sleep(0.05)
        (tmp_path / "run/logs/server-1.log").write_text("the last words\n")
        os.kill(fleet.pids["server-1"], signal.SIGKILL)

    threading.Thread(target=kill_soon).start()
    message = r"server-1 was ended by SIGKILL; .*server-1.log:\n(.*\n)*  \| the last words"
    with pytest.raises(RolloutError, match=message):
        fleet.start()
    assert fleet.pids == {}
    wait_until_none(str(model), 1.0)
    fleet.stop()


def test_a_server_that_is_not_ready_in_time_is_named(model, tmp_path):
    rollout = RolloutSection(start_timeout=0.5, router=False, **SMALL)
    with pytest.raises(RolloutError, match="server-0 not ready after rollout.start_timeout=0.5 s"):
        ServerFleet(rollout, str(model), "float32", tmp_path / "run", 0).start()
    wait_until_none(str(model), 1.0)


def test_nothing_outlives_a_parent_that_is_killed(model, tmp_path):
    script = textwrap.dedent(
        f"""
        from megatron_stare.config.schema import RolloutSection
        from megatron_stare.rollout import ServerFleet
        rollout = RolloutSection(max_response_tokens=8, context_length=64)
        ServerFleet(rollout, {str(model)!r}, "float32", {str(tmp_path / "run")!r}, 0).start()
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 60
        while not [p for p in processes_mentioning("rollout.sglang_entry") if str(model) in p.cmdline()]:
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.0)  # both children are past their first lines
    finally:
        parent.kill()
        parent.wait()
    wait_until_none(str(tmp_path))


def test_two_leases_never_hold_one_port():
    first, second = PortLease(), PortLease()
    try:
        ports = [lease.take("127.0.0.1") for lease in (first, second) for _ in range(50)]
        assert len(set(ports)) == 100
    finally:
        first.release()
        second.release()


def test_the_entry_loads_nothing_heavy_and_stand_ins_give_way_to_real_packages(tmp_path):
    (tmp_path / "triton.py").write_text("real = True\n")
    script = textwrap.dedent(
        """
        import sys
        import megatron_stare.rollout.sglang_entry as entry
        assert not {"torch", "sglang", "pydantic", "aiohttp"} & set(sys.modules)
        assert entry.without_cuda(["--device", "cpu"]) and not entry.without_cuda(["--device=cuda"])
        from megatron_stare.rollout import standins
        standins.install()
        import triton, torchvision.transforms.v2
        assert triton.real is True
        assert torchvision.transforms.v2.functional.resize is not None and torchvision.__version__ == "0.0.0"
        assert not {"torch", "sglang"} & set(sys.modules)
        from sgl_kernel import assign_req_to_token_pool_cpu, moe_align
        try:
            moe_align()
        except NotImplementedError as error:
            assert "sgl_kernel.moe_align" in str(error)
        """
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=60)
