"""Manifests against Kubernetes' published schemas, and what of them matters to a run."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from megatron_stare.cli import run
from megatron_stare.config import load_config
from megatron_stare.launch.kubernetes import Cluster, secret
from megatron_stare.run.job import API_KEY_VARIABLE, Job

VERSIONS = ["1.31", kubernetes_validate.latest_version()]


def documents(tmp_path: Path) -> list[dict]:
    return list(yaml.safe_load_all((tmp_path / "run" / "launch" / "job.yaml").read_text()))


@pytest.fixture
def job_options(tmp_path: Path) -> list[str]:
    return [
        "--scheduler=kubernetes", "--nodes=3", "--trainer-nodes=2", "--gpus-per-node=8",
        "--namespace=training", "--image=registry.example/image:1", f"--volume=shared:{tmp_path}",
        "--option=rdma/hca=1", "--option=cpu=32",
    ]  # fmt: skip


@pytest.fixture
def manifests(write_config, job_options, tmp_path) -> list[dict]:
    config = write_config(objective="rl", batch={"prompts_per_step": 16}, task={"reward": "exact"})
    assert run(["launch", str(config), *job_options, "--dry-run"]) == 0
    return documents(tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(manifests, version):
    assert [m["kind"] for m in manifests] == ["ConfigMap", "Service", "Job"]
    for manifest in [*manifests, secret(Cluster("image", []), manifests[0]["metadata"]["name"])]:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_would_find_mistakes(manifests):
    job = manifests[2]
    for path, value in [
        (("spec", "podFailurePolicy", "rules", 0, "action"), 3),
        (("spec", "template", "spec", "containers", 0, "images"), "x"),
        (("spec", "completions"), "two"),
    ]:
        damaged = copy.deepcopy(job)
        target = damaged
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(damaged, VERSIONS[-1], strict=True)


def test_a_pod_knows_its_node_and_the_config_that_it_runs(manifests, tmp_path):
    config_map, service, job = manifests
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    saved = tmp_path / "saved.yaml"
    saved.write_text(config_map["data"]["config.yaml"])
    config = load_config(saved)
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment[API_KEY_VARIABLE] is None
    hosts = environment["MEGATRON_STARE_HOSTS"].split(",")
    # An indexed job's pod has the host name JOB-INDEX, in the domain of the service.
    assert hosts == [f"{name}-{index}.{pod['subdomain']}" for index in range(3)]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    here = environment | {"MEGATRON_STARE_HOSTS": "127.0.0.1,127.0.0.1,127.0.0.1", API_KEY_VARIABLE: "key"}
    found = Job.from_environment(config, here | {"MEGATRON_STARE_NODE": "2"})
    assert (found.id, found.trainer_nodes, found.ranks_per_node, found.trains) == (name, 2, 8, False)
    assert config.parallel.world_size == 16
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": "1", "cpu": "32"}
    assert pod["terminationGracePeriodSeconds"] > config.run.grace_seconds


def test_exit_codes_decide_whether_a_pod_starts_again(manifests):
    spec = manifests[2]["spec"]
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {75: "Ignore", 1: "FailJob", 2: "FailJob"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # demanded by a failure policy


def test_the_key_goes_to_kubectl_by_standard_input_only(write_config, job_options, tmp_path, monkeypatch):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    # Notes each call's arguments, and what came by standard input.
    (bin_folder / "kubectl").write_text(
        f"#!/bin/bash\necho \"$*\" >> {tmp_path}/calls\n"
        f"[ \"${{@: -1}}\" = - ] && cat > {tmp_path}/stdin\nexit 0\n"
    )
    (bin_folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    config = write_config(objective="rl", batch={"prompts_per_step": 16}, task={"reward": "exact"})
    assert run(["launch", str(config), *job_options]) == 0
    made = json.loads((tmp_path / "stdin").read_text())
    name = documents(tmp_path)[2]["metadata"]["name"]
    assert (made["kind"], made["metadata"]["name"]) == ("Secret", name)
    key = made["stringData"]["api-key"]
    assert len(key) == 64
    calls = (tmp_path / "calls").read_text()
    assert calls.splitlines() == [
        "--namespace training create -f -",
        f"--namespace training create -f {tmp_path}/run/launch/job.yaml",
    ]
    (tmp_path / "stdin").unlink()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if key in file.read_text(errors="replace")]


def test_what_the_cluster_refuses_is_taken_back_and_quoted(
    write_config, job_options, tmp_path, capsys, monkeypatch
):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "kubectl").write_text(
        f"#!/bin/bash\necho \"$*\" >> {tmp_path}/calls\n"
        "case \"$*\" in *job.yaml) echo 'error: quota exceeded' >&2; exit 1;; esac\n"
    )
    (bin_folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    config = write_config(objective="rl", batch={"prompts_per_step": 16}, task={"reward": "exact"})
    assert run(["launch", str(config), *job_options]) == 2
    assert "quota exceeded" in capsys.readouterr().err
    assert "delete job,service,configmap,secret -l" in (tmp_path / "calls").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--volume=shared:/elsewhere", "is on none of the volumes"),
        ("--volume=shared", "--volume=shared: must be CLAIM:PATH"),
        ("--image=", "--image: is missing"),
        ("--partition=gpu", "--partition: belongs to --scheduler=slurm"),
    ],
)
def test_mistakes_are_named(change, named, write_config, job_options, capsys):
    config = write_config(objective="rl", batch={"prompts_per_step": 16}, task={"reward": "exact"})
    kept = [option for option in job_options if option.split("=")[0] != change.split("=")[0]]
    assert run(["launch", str(config), *kept, change, "--dry-run"]) == 2
    assert named in capsys.readouterr().err


def test_a_model_that_only_the_cluster_has_is_left_to_it(write_config, job_options, tmp_path, capsys):
    config = write_config(model={"path": "/shared/models/none"})
    assert run(["launch", str(config), *job_options, "--dry-run"]) == 0
    assert "is checked in the cluster" in capsys.readouterr().err
    assert documents(tmp_path)[2]["spec"]["completions"] == 3
