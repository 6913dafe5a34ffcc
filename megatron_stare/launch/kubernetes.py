"""Kubernetes: the manifests of a job, one pod a node, and their submission with kubectl."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from megatron_stare.errors import UserError
from megatron_stare.launch.plan import Launch
from megatron_stare.run import job

MANIFEST = "job.yaml"
_CONTAINER = "run"
_KEY = "api-key"
_CONFIG_FOLDER = "/etc/megatron_stare"
# Pods that failed for another reason than an eviction or exit code 75.
_BACKOFF = 10
_PREEMPTED, _FAILED, _REFUSED = 75, 1, 2

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """Where pods run.

    Attributes:
        volumes: "CLAIM:PATH": persistent volume claims and where all pods mount them.
        workdir: where relative paths start and the user's modules are found; None: the image's.
    """

    image: str
    volumes: Sequence[str]
    namespace: str | None = None
    workdir: str | None = None

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims and mount paths. Raises UserError for texts that are not CLAIM:PATH."""
        pairs = []
        for text in self.volumes:
            claim, _, path = text.partition(":")
            if not claim or not path.startswith("/"):
                raise UserError(f"--volume={text}: must be CLAIM:PATH with an absolute path, as runs:/runs")
            pairs.append((claim, path))
        return pairs


def files(launch: Launch, cluster: Cluster, name: str | None = None) -> dict[str, str]:
    """The files of the job by name; the API key is in none of them.

    Args:
        name: of the job and of all that belongs to it; default: a new one.

    Raises UserError when the run directory is on no volume.
    """
    root = launch.files.root
    if not any(PurePosixPath(root).is_relative_to(path) for _, path in cluster.mounts):
        raise UserError(
            f"run.dir={root}: is on none of the volumes; give one that all pods can write, "
            "as --volume CLAIM:PATH, and a run.dir below PATH"
        )
    name = name or f"{launch.name}-{secrets.token_hex(3)}"
    documents = [_config_map(launch, cluster, name), _service(cluster, name), _job(launch, cluster, name)]
    text = "---\n".join(yaml.dump(d, sort_keys=False, width=110, Dumper=_Dumper) for d in documents)
    return {MANIFEST: text}


def secret(cluster: Cluster, name: str) -> Manifest:
    """A Secret with a new API key; for kubectl's standard input only."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(cluster, name),
        "immutable": True,
        "stringData": {_KEY: secrets.token_hex(32)},
    }


def submit(launch: Launch, cluster: Cluster) -> str:
    """Create the job in the cluster that kubectl is set to. Returns its name; raises UserError."""
    path = launch.folder / MANIFEST
    name = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))[-1]["metadata"]["name"]
    if launch.needs_key:
        _kubectl(cluster, "create", "-f", "-", stdin=json.dumps(secret(cluster, name)))
    try:
        _kubectl(cluster, "create", "-f", str(path))
    except UserError:
        _kubectl(cluster, "delete", "job,service,configmap,secret", "-l", f"{_LABEL}={name}")
        raise
    return name


def _kubectl(cluster: Cluster, *arguments: str, stdin: str = "") -> None:
    namespace = ["--namespace", cluster.namespace] if cluster.namespace else []
    try:
        subprocess.run(
            ["kubectl", *namespace, *arguments], input=stdin, capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise UserError(
            "--scheduler=kubernetes: there is no kubectl here; install it, or use --dry-run"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--scheduler=kubernetes: {error.stderr.strip() or 'kubectl failed'}") from None


_LABEL = "app.kubernetes.io/instance"


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "megatron-stare", _LABEL: name}


def _metadata(cluster: Cluster, name: str) -> Manifest:
    namespace = {"namespace": cluster.namespace} if cluster.namespace else {}
    return {"name": name, **namespace, "labels": _labels(name)}


def _config_map(launch: Launch, cluster: Cluster, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cluster, name),
        "data": {"config.yaml": launch.config_text},
    }


def _service(cluster: Cluster, name: str) -> Manifest:
    """Gives every pod a name: POD.SERVICE. It is no address of its own."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(cluster, name),
        # Pods must find one another before they are ready, and never count as ready without a probe.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(name)},
    }


def _job(launch: Launch, cluster: Cluster, name: str) -> Manifest:
    exit_codes = {"containerName": _CONTAINER, "operator": "In"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(cluster, name),
        "spec": {
            "completions": launch.nodes,
            "parallelism": launch.nodes,
            "completionMode": "Indexed",
            "backoffLimit": _BACKOFF,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    # A drained node, or a run that saved and stopped: start again, as often as it happens.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": {**exit_codes, "values": [_PREEMPTED]}},
                    # The same again would end the same way.
                    {"action": "FailJob", "onExitCodes": {**exit_codes, "values": [_FAILED, _REFUSED]}},
                ]
            },
            "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(launch, cluster, name)},
        },
    }


def _pod(launch: Launch, cluster: Cluster, name: str) -> Manifest:
    mounts = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": name}},
        # NCCL and data loaders need more than the 64 MiB that containers have.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    for number, (claim, path) in enumerate(cluster.mounts):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    limits = {"nvidia.com/gpu": str(launch.gpus)} if launch.gpus else {}
    limits |= {option: value or "1" for option, value in launch.options.items()}
    container = {
        "name": _CONTAINER,
        "image": cluster.image,
        "command": ["python", "-m", "megatron_stare.launch.node", f"{_CONFIG_FOLDER}/config.yaml"],
        "workingDir": cluster.workdir,
        "env": _variables(launch, name),
        "resources": {"limits": limits} if limits else None,
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": launch.grace,
        # The supervisor is then not process 1, which would have to reap orphans and to catch every signal.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [{field: value for field, value in container.items() if value is not None}],
        "volumes": volumes,
    }


def _variables(launch: Launch, name: str) -> list[Manifest]:
    values = {
        job.JOB_VARIABLE: name,
        job.HOSTS_VARIABLE: ",".join(f"{name}-{index}.{name}" for index in range(launch.nodes)),
        **launch.exports,
        "PYTHONUNBUFFERED": "1",
    }
    variables: list[Manifest] = [{"name": variable, "value": value} for variable, value in values.items()]
    if launch.needs_key:
        reference = {"secretKeyRef": {"name": name, "key": _KEY}}
        variables.append({"name": job.API_KEY_VARIABLE, "valueFrom": reference})
    return variables


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, nothing by reference, lists indented: people read it."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
