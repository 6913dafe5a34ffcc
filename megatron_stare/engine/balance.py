"""Balance of a model's experts: Megatron's auxiliary loss, as a mean over the tokens of an update.

Megatron's own scaling divides by the number of tokens of a rank and lets the caller divide by that of the
batch, which here has happened before (`optimizer.finalize`). In this router a microbatch's loss counts by its
share of the update's tokens, however these are laid out over ranks, and padding counts nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_stare.engine.batch import Microbatch
from megatron_stare.engine.parallel import Parallel


class BalancingRouter(TopKRouter):
    """Megatron's router; `update_tokens` is the number of tokens of the update over all ranks."""

    update_tokens: int = 1
    _here: torch.Tensor  # tokens of the microbatch on this rank, padding aside

    def forward(self, hidden, padding_mask):
        """As Megatron's, with the padding [T, 1] of `hidden` [T, 1, H]."""
        self._here = (~padding_mask).sum()
        return super().forward(hidden, padding_mask)

    def attach_and_log_load_balancing_loss(
        self,
        activation,
        aux_loss_coeff,
        aux_loss,
        aux_loss_name,
        reduce_group,
        **_counts,
    ):
        """Add the microbatch's loss to what the backward pass descends."""
        # Counted here: of the number that Megatron passes, reducing the load in place has made the group's
        # where the group has several ranks, but not where it has one.
        tokens = self._here.clone()
        dist.all_reduce(tokens, group=reduce_group)
        if tokens == 0:  # a microbatch of padding, whose loss is 0 / 0
            return activation
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * (tokens / self.update_tokens))


def announce_tokens(
    models: list[torch.nn.Module], microbatches: list[Microbatch], parallel: Parallel
) -> None:
    """Tell balancing routers how many tokens the update has; collective where there are any."""
    routers = [m for model in models for m in model.modules() if isinstance(m, BalancingRouter)]
    if not routers:
        return
    total = torch.stack([(~mb.padding).sum() for mb in microbatches]).sum()
    dist.all_reduce(total, group=parallel.dp_cp_group)
    for router in routers:
        router.update_tokens = max(int(total), 1)
