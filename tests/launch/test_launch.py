"""`megatron-stare launch`: what is refused before anything is submitted, and what the jobs' files say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_stare.cli import run
from megatron_stare.config import load_config
from megatron_stare.errors import UserError
from megatron_stare.launch.plan import parse_options, plan_launch
from megatron_stare.run.job import API_KEY_VARIABLE, HOSTS_VARIABLE, JOB_VARIABLE, NODE_VARIABLE


def launch(*arguments: str | Path) -> int:
    return run(["launch", *map(str, arguments)])


def program(folder: Path, name: str, body: str) -> None:
    """A command of the scheduler's that does what `body` says."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_dry_run_writes_and_shows_the_script_and_submits_nothing(
    write_config, tmp_path, capsys, monkeypatch
):
    program(tmp_path / "bin", "sbatch", "echo submitted >> $0.called")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    options = ("--nodes=3", "--partition=gpu", "--time=1:00:00", "--option=qos=high", "--option=mem=no")
    config = write_config(batch={"prompts_per_step": 6})
    assert launch(config, "optimizer.lr=2e-4", "--scheduler", "slurm", *options, "--dry-run") == 0
    script = (tmp_path / "run" / "launch" / "job.sbatch").read_text()
    assert script in capsys.readouterr().out
    asked = {line for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {
        "#SBATCH --job-name=test-run", "#SBATCH --nodes=3", "#SBATCH --requeue",
        "#SBATCH --open-mode=append", "#SBATCH --signal=B:TERM@120", "#SBATCH --partition=gpu",
        "#SBATCH --time=1:00:00", "#SBATCH --qos=high",
    } <= asked  # fmt: skip
    assert not any("mem" in line or "gpus" in line for line in asked)
    assert not (tmp_path / "bin" / "sbatch.called").exists()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    saved = load_config(tmp_path / "run" / "launch" / "config.yaml")
    # A job that is started again goes on, from the first time on.
    assert (saved.optimizer.lr, saved.resume.mode, saved.parallel.world_size) == (2e-4, "auto", 3)


def test_paths_with_spaces_and_quotes_stay_whole_in_scripts(write_config, tmp_path):
    odd = tmp_path / "it's a run"
    config = write_config(run={"dir": str(odd)})
    assert launch(config, "--scheduler", "slurm", "--dry-run") == 0
    script = (odd / "launch" / "job.sbatch").read_text()
    # The trap's command, as bash understands it.
    (trap,) = (line for line in script.splitlines() if line.startswith("trap "))
    subprocess.run(["bash", "-c", f"{trap}; kill -TERM $$; true"], check=True)
    assert (odd / "stop.request").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nodes=2", "parallel.world_size=3"], "parallel.world_size=3"),
        (["--nodes=3", "batch.prompts_per_step=4"], "3 data-parallel ranks"),
        (["--nodes=1", "--trainer-nodes=2"], "--trainer-nodes=2"),
        (["--time=00:02:00"], "--time=00:02:00: is not longer than the 120 s"),
        (["--option", "a b=c"], "--option 'a b=c'"),
        (["--hosts=a,b"], "--hosts: belongs to --scheduler=torchrun, not to slurm"),
        (["--image=x"], "--image: belongs to --scheduler=kubernetes"),
        (["optimizr.lr=1"], "optimizr.lr: no such key"),
        (["model.path=nowhere"], "model.path=nowhere"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(arguments, named, write_config, tmp_path, capsys):
    assert launch(write_config(), "--scheduler=slurm", *arguments, "--dry-run") == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("scheduler", "tool"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_without_the_schedulers_tool_the_error_names_it(
    scheduler, tool, write_config, tmp_path, capsys, monkeypatch
):
    options = ["--image=x", f"--volume=runs:{tmp_path}"] if scheduler == "kubernetes" else []
    config = write_config()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert launch(config, f"--scheduler={scheduler}", *options) == 2
    assert f"there is no {tool} here" in capsys.readouterr().err


def test_a_refusal_by_sbatch_is_quoted(write_config, tmp_path, capsys, monkeypatch):
    program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    config = write_config()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert launch(config, "--scheduler=slurm") == 2
    assert "invalid partition" in capsys.readouterr().err


def test_a_login_node_without_gpus_may_launch_what_needs_them(write_config):
    config = write_config(
        objective="rl",
        model={"dtype": "bfloat16", "layers": "transformer_engine", "fp8": "blockwise"},
        task={"reward": "exact"},
        rollout={"servers": 4},
        batch={"prompts_per_step": 48},
    )
    planned = plan_launch(config, [], nodes=2, trainer_nodes=None, gpus=8)
    assert (planned.ranks, planned.config.parallel.world_size) == (6, 12)
    assert planned.config.model.fp8 == "blockwise"
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        plan_launch(config, [], nodes=2, trainer_nodes=None, gpus=0)


def test_options_are_names_with_or_without_a_value():
    assert parse_options(("a=b=c", "exclusive", "--x=", "rdma/hca=1")) == {
        "a": "b=c", "exclusive": None, "x": "", "rdma/hca": "1",
    }  # fmt: skip
    for wrong in ("", "=3", "x;y=1", "a=b\nc"):
        with pytest.raises(UserError):
            parse_options((wrong,))


def test_the_key_is_in_no_file_and_made_anew_at_each_start(write_config, tmp_path):
    config = write_config(objective="rl")
    assert launch(config, "--scheduler=slurm", "--nodes=2", "--dry-run") == 0
    script = (tmp_path / "run" / "launch" / "job.sbatch").read_text()
    # The script's own lines, with a srun and a scontrol that only show what they are given.
    program(tmp_path / "bin", "scontrol", "echo n1; echo n2")
    program(tmp_path / "bin", "srun", f"echo ${API_KEY_VARIABLE} ${HOSTS_VARIABLE} ${JOB_VARIABLE}")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "3",
    }  # fmt: skip
    shown = [
        subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment, check=True)
        for _ in range(2)
    ]
    keys = [done.stdout.split()[0] for done in shown]
    assert shown[0].stdout.split()[1:] == ["n1,n2", "7.3"]
    assert len(set(keys)) == 2
    assert all(len(key) == 64 for key in keys)
    # Supervised training has no servers, and no key.
    assert launch(config, "objective=sft", "--scheduler=slurm", "--dry-run") == 0
    assert API_KEY_VARIABLE not in (tmp_path / "run" / "launch" / "job.sbatch").read_text()


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (0, 0, False), (1, 0, False), (2, 0, False),
        (75, 0, True), (75, 500, True), (137, 0, True), (137, 10, False),
    ],
)  # fmt: skip
def test_slurm_starts_a_job_again_that_saved_or_was_killed(code, restarts, again, write_config, tmp_path):
    assert launch(write_config(), "--scheduler=slurm", "--dry-run") == 0
    program(tmp_path / "bin", "scontrol", f"[ $1 = requeue ] && echo $2 > {tmp_path}/requeued; exit 0")
    program(tmp_path / "bin", "srun", f"exit {code}")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1",
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip
    done = subprocess.run(["bash", tmp_path / "run" / "launch" / "job.sbatch"], env=environment)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == again


def test_the_script_of_a_start_by_hand_tells_its_node(write_config, tmp_path, capsys):
    arguments = ("--scheduler=torchrun", "--nodes=2", "--hosts=node-a,node-b")
    assert launch(write_config(objective="rl"), *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("ssh ")[1].split()[0] for line in lines if "ssh " in line] == ["node-a", "node-b"]
    script = tmp_path / "run" / "launch" / "node.sh"
    shown = tmp_path / "shown.sh"
    shown.write_text(script.read_text().replace("exec ", "env #"))
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", shown, "1", "4"],
        input="the-key\n",
        text=True,
        capture_output=True,
        env=environment,
        check=True,
    )
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("MEGATRON_STARE_"))
    assert told[NODE_VARIABLE] == "1"
    assert told[HOSTS_VARIABLE] == "node-a,node-b"
    assert told[JOB_VARIABLE] == "test-run.4"
    assert told[API_KEY_VARIABLE] == "the-key"
    missing = subprocess.run(["bash", script], capture_output=True, text=True, env=environment)
    assert "the index of this node is missing" in missing.stderr
    assert launch(write_config(), "--scheduler=torchrun", "--nodes=2", "--hosts=node-a") == 2
    assert "names 1 nodes" in capsys.readouterr().err
