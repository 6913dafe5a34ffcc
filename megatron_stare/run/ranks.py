"""How many trainer ranks this node runs."""

from __future__ import annotations

from megatron_stare.config.schema import Config


def trainer_ranks(config: Config) -> int:
    """`parallel.world_size`, or the node's GPUs, or one copy of the model where there is none."""
    if config.parallel.world_size is not None:
        return config.parallel.world_size
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else config.parallel.model_size
