"""Which of a job's nodes train, which serve, and with how many ranks and servers."""

from __future__ import annotations

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError


def starts_servers(config: Config) -> bool:
    """Whether the run starts SGLang servers itself."""
    return config.objective == "rl" and not config.rollout.endpoints


def spread(servers: int, nodes: int, trainer_nodes: int) -> list[range]:
    """For every node the indices of its servers: consecutive, and as even as can be.

    They go to the nodes that do not train; where all train, to all.
    """
    first = trainer_nodes if trainer_nodes < nodes else 0
    share, more = divmod(servers, nodes - first)
    shares, start = [range(0)] * first, 0
    for place in range(nodes - first):
        stop = start + share + (place < more)
        shares.append(range(start, stop))
        start = stop
    return shares


def ranks_per_node(config: Config, nodes: int, trainer_nodes: int, gpus: int) -> int:
    """Trainer ranks on each trainer node: `parallel.world_size` shared out, else the GPUs that servers leave.

    Args:
        gpus: of one node; 0 on machines without any.

    Raises UserError where ranks and servers do not fit on the nodes.
    """
    serves = starts_servers(config)
    shares = spread(config.rollout.servers, nodes, trainer_nodes) if serves else [range(0)] * nodes
    tp = config.rollout.tp
    if serves and trainer_nodes < nodes and config.rollout.servers < nodes - trainer_nodes:
        raise UserError(
            f"rollout.servers={config.rollout.servers}: fewer than the {nodes - trainer_nodes} nodes that "
            "serve; start fewer nodes or more servers"
        )
    ranks = config.parallel.world_size
    if ranks is not None and ranks % trainer_nodes:
        raise UserError(
            f"parallel.world_size={ranks}: is not a multiple of the {trainer_nodes} nodes that train"
        )
    if gpus == 0:
        return ranks // trainer_nodes if ranks is not None else config.parallel.model_size
    most = max(map(len, shares)) * tp
    if most > gpus:
        raise UserError(
            f"rollout.servers={config.rollout.servers} x rollout.tp={tp} need {most} GPUs on a node; "
            f"--gpus-per-node is {gpus}"
        )
    if ranks is not None:
        if ranks // trainer_nodes > gpus:
            raise UserError(
                f"parallel.world_size={ranks}: {ranks // trainer_nodes} ranks on each of {trainer_nodes} "
                f"trainer nodes, which have {gpus} GPUs"
            )
        return ranks // trainer_nodes
    taken = {len(share) * tp for share in shares[:trainer_nodes]}
    if len(taken) > 1:
        raise UserError(
            f"rollout.servers={config.rollout.servers}: is not a multiple of the {nodes} nodes, so that they "
            "would leave different numbers of GPUs to the trainer; change it, or set parallel.world_size"
        )
    left = gpus - taken.pop()
    if left < 1:
        raise UserError(
            f"rollout.servers={config.rollout.servers} x rollout.tp={tp} leave no GPU of {gpus} for the "
            "trainer; lower them, use --trainer-nodes, or set parallel.world_size to share GPUs"
        )
    return left
