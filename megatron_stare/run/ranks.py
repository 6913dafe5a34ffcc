"""How many trainer ranks this node runs."""

from __future__ import annotations

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.run.layout import starts_servers


def trainer_ranks(config: Config) -> int:
    """`parallel.world_size`; else the GPUs that servers leave; one copy of the model where there is none.

    Raises UserError when the servers leave no GPU.
    """
    if config.parallel.world_size is not None:
        return config.parallel.world_size
    import torch

    if not torch.cuda.is_available():
        return config.parallel.model_size
    rollout = config.rollout
    served = rollout.servers * rollout.tp if starts_servers(config) else 0
    gpus = torch.cuda.device_count()
    if served >= gpus:
        raise UserError(
            f"rollout.servers={rollout.servers} x rollout.tp={rollout.tp} leave no GPU of {gpus} for the "
            "trainer; lower them, or set parallel.world_size to share GPUs"
        )
    return gpus - served
