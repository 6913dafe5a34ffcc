"""The two passes of a step: measure (log-probs and entropy, no gradient) and learn (one optimizer update).

Both run through Megatron's own forward-backward schedules, so pipeline, virtual pipeline and gradient
overlap are Megatron's. Every sum is taken over microbatches, replicas and context-parallel ranks before
anything is divided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_stare.engine.balance import announce_tokens
from megatron_stare.engine.batch import Microbatch
from megatron_stare.engine.parallel import Parallel

# (number of the microbatch, its log-probs [N], its entropy [N]) -> (sum over its tokens, sums to report)
LossFunction = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass
class Signals:
    """What the policy says of this rank's tokens of the batch at the start of the step.

    `log_probs` and `entropy` hold float32 [N] a microbatch (nats); `mean_entropy` is the mean over the
    response tokens of the whole global batch; `tokens` is their number.
    """

    log_probs: list[torch.Tensor]
    entropy: list[torch.Tensor]
    mean_entropy: float
    tokens: int


@dataclass
class UpdateStats:
    """An optimizer update: the loss, the gradient norm before clipping, and the objective's sums.

    `skipped` counts updates that were computed but not made, because their gradient was not sound.
    """

    loss: float
    grad_norm: float
    sums: dict[str, float]
    skipped: int = 0


def measure(models: list[torch.nn.Module], microbatches: list[Microbatch], parallel: Parallel) -> Signals:
    """Log-probs and entropy of every response token, equal on all ranks that hold the same tokens."""
    with torch.no_grad():
        outputs = _run(
            models,
            microbatches,
            parallel,
            lambda _i, output, non_loss_data=False: output,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel.is_last_stage:
        outputs = [mb.advantages.new_empty((2, mb.response_tokens)) for mb in microbatches]
    outputs = [parallel.from_last_stage(output.contiguous()) for output in outputs]
    totals = torch.zeros(2, dtype=torch.float64, device=microbatches[0].tokens.device)
    for output in outputs:
        totals += torch.stack([output[1].double().sum(), output.new_tensor(output.shape[1]).double()])
    dist.all_reduce(totals, group=parallel.dp_cp_group)
    entropy, tokens = totals.tolist()
    return Signals(
        log_probs=[output[0] for output in outputs],
        entropy=[output[1] for output in outputs],
        mean_entropy=entropy / tokens if tokens else float("nan"),
        tokens=int(tokens),
    )


def learn(
    models: list[torch.nn.Module],
    optimizer,
    microbatches: list[Microbatch],
    loss: LossFunction,
    parallel: Parallel,
    *,
    normalizer: float,
    lr: float,
    largest_norm: float = math.inf,
    before_update: Callable[[], None] = lambda: None,
) -> UpdateStats:
    """One optimizer update on `loss` summed over the global batch and divided by `normalizer`.

    It is skipped, and parameters and moments stay as they are, where the gradient's norm is not finite or is
    above `largest_norm`. `before_update` is called when they are about to change.
    """
    announce_tokens(models, microbatches, parallel)
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)

    def scaled_loss(i: int, output: torch.Tensor):
        total, sums = loss(i, output[0], output[1])
        # The token count that Megatron would divide by: already done (see optimizer.finalize).
        unused_count = torch.zeros((), dtype=torch.int, device=output.device)
        return total / normalizer, unused_count, {"loss": total.detach(), **sums}

    collected = _run(models, microbatches, parallel, scaled_loss, forward_only=False)
    sums = _reduce_sums(collected, parallel)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())  # equal on all ranks, so they skip together
    sound = math.isfinite(norm) and norm <= largest_norm
    if sound:
        before_update()
        optimizer.step()
    return UpdateStats(sums.pop("loss", 0.0) / normalizer, norm, sums, skipped=0 if sound else 1)


def _run(models, microbatches, parallel, closure, **schedule):
    """Run Megatron's schedule over `microbatches`; what the closure collected, on the last stage only."""

    def forward_step(numbered: Iterator[tuple[int, Microbatch]], model):
        i, mb = next(numbered)
        output = model(
            mb.tokens,
            mb.positions,
            None,
            labels=mb.labels,
            loss_mask=mb.loss_mask,
            packed_seq_params=mb.packed,
            padding_mask=mb.padding,
        )
        return output, lambda out, **kwargs: closure(i, out, **kwargs)

    feeds = [iter(enumerate(microbatches)) for _ in models]
    several = len(models) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feeds if several else feeds[0],
        model=models if several else models[0],
        num_microbatches=len(microbatches),
        # Of all context-parallel ranks: the schedule divides it by their number.
        seq_length=microbatches[0].length * parallel.cp_size,
        micro_batch_size=1,
        **schedule,
    )


def _reduce_sums(collected: list[dict[str, torch.Tensor]], parallel: Parallel) -> dict[str, float]:
    """Add the microbatches' sums up over microbatches and ranks; equal on all ranks afterwards."""
    box = [None]
    if parallel.is_last_stage:
        names = sorted(set(itertools.chain.from_iterable(collected)))
        totals = torch.stack([sum(mb[name].double() for mb in collected) for name in names])
        dist.all_reduce(totals, group=parallel.dp_cp_group)
        box = [dict(zip(names, totals.tolist(), strict=True))]
    if parallel.pp_size > 1:
        dist.broadcast_object_list(box, src=parallel.last_stage_rank, group=parallel.pp_group)
    return box[0]
