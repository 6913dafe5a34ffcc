"""The examples in this folder, as `megatron-stare launch` writes them: `python launch/make_examples.py`.

tests/launch/test_examples.py keeps them true.
"""

from __future__ import annotations

from pathlib import Path

from megatron_stare.config import load_config
from megatron_stare.launch import by_hand, kubernetes, slurm
from megatron_stare.launch.plan import Launch

HERE = Path(__file__).resolve().parent
_CONFIG = HERE.parent / "configs" / "qwen2.5-14b.yaml"


def examples() -> dict[str, str]:
    """The examples' texts by path within this folder: two nodes of 8 GPUs, one trains, one serves."""
    config = load_config(_CONFIG, ["run.dir=/shared/runs/qwen2.5-14b", "resume.mode=auto"])
    launch = Launch(
        config, nodes=2, trainer_nodes=1, ranks=8, gpus=8, directory=Path("/shared/work"),
        python="/shared/work/.venv/bin/python",
    )  # fmt: skip
    cluster = kubernetes.Cluster(
        "registry.example/megatron-stare:latest", ["shared:/shared"], "training", "/shared/work"
    )
    return {
        "slurm/job.sbatch": slurm.files(launch, {"partition": "gpu", "time": "2-00:00:00"})[slurm.SCRIPT],
        "kubernetes/job.yaml": kubernetes.files(launch, cluster, "qwen2-5-14b-1a2b3c")[kubernetes.MANIFEST],
        "torchrun/node.sh": by_hand.files(launch, "node-a,node-b")[by_hand.SCRIPT],
    }


if __name__ == "__main__":
    for name, text in examples().items():
        (HERE / name).write_text(text, encoding="utf-8")
