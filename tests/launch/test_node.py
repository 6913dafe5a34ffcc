"""What a node of a launched job finds out by itself."""

from __future__ import annotations

import os
import subprocess
import sys

from megatron_stare.launch.node import node_environment
from megatron_stare.run.job import HOSTS_VARIABLE, NODE_VARIABLE


def test_the_scheduler_tells_which_node_this_is():
    hosts = {HOSTS_VARIABLE: "localhost,127.0.0.1"}
    slurm = node_environment(hosts | {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1"})
    assert slurm == {NODE_VARIABLE: "1", HOSTS_VARIABLE: "localhost,127.0.0.1"}
    assert node_environment(hosts | {"JOB_COMPLETION_INDEX": "0"}) == {NODE_VARIABLE: "0"}
    assert node_environment(hosts | {NODE_VARIABLE: "1"}) == {}


def test_a_slurm_node_without_a_name_of_its_own_is_reached_as_slurm_reaches_it(tmp_path, monkeypatch):
    shown = "NodeName=$3 NodeAddr=address-of-$3 Port=7"
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "{shown}"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environment = {HOSTS_VARIABLE: "n1.invalid,localhost", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    assert node_environment(environment)[HOSTS_VARIABLE] == "address-of-n1.invalid,localhost"


def test_it_becomes_the_train_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_stare.launch.node", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("none.yaml: no such config file\n")
