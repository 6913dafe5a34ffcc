"""Other controls of the policy's entropy, to be run beside STARE.

Each chooses tokens by the whole batch, as STARE's thresholds do, so that microbatches and ranks change
nothing: `prepare` is called once a step with this rank's tokens, after the pass that measures log-probs and
entropy under the policy at the start of the step. It gives `TokenTerms`, which `objective_loss` takes by
microbatch.

The papers' released code chooses inside each minibatch, with the current policy; for one minibatch and one
update a step both agree. W-REINFORCE is an advantage, the entropy bonus a setting of `ObjectiveSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.objective.selection import count_of_all, exact_means, random_priority, top_share
from megatron_stare.objective.spec import at_least_zero
from megatron_stare.objective.tensors import check_shapes, masked
from megatron_stare.objective.terms import TokenTerms


@dataclass(frozen=True)
class EntropyAdvantage:
    """Entropy-shaped advantage: A + min(alpha * H, |A| / kappa) (arXiv 2506.14758).

    H is the token's entropy, as a constant. kappa > 1 keeps the sign of A. The paper's alpha is 0.4 for
    GRPO, its kappa 2.
    """

    alpha: float = 0.4
    kappa: float = 2.0

    def __post_init__(self) -> None:
        at_least_zero("alpha", self.alpha)
        if not self.kappa > 1:
            raise ValueError(f"kappa={self.kappa} is not above 1: advantages would change their sign")


@dataclass(frozen=True)
class TopEntropy:
    """80/20: only the `fraction` of tokens with the highest entropy has a policy term (arXiv 2506.01939).

    The number that the loss is divided by stays that of all tokens, as in the paper's objective. Tokens
    that tie exactly at the threshold share the places left.
    """

    fraction: float = 0.2

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)


@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov: no policy term for a random few tokens of high covariance (arXiv 2505.22617, section 4).

    A token's covariance is (ln pi - mean ln pi)(A - mean A), means over the global batch. Of the tokens
    with low <= covariance <= high, floor(fraction * all tokens), at least 1, are chosen at random.
    Defaults as in the paper's code.
    """

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        if not self.low <= self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")


@dataclass(frozen=True)
class KlCov:
    """KL-Cov: a KL penalty on the tokens of highest covariance (arXiv 2505.22617, section 4).

    Covariance as in `ClipCov`. The floor(fraction * all tokens), at least 1, tokens of highest covariance
    get the penalty coef * KL to the policy at the start of the step (`ObjectiveSpec.old_kl`). Tokens of a
    covariance of 0 or less are never among them: they do not lower the entropy. Tokens that tie exactly
    share the places left. The paper's term is not clipped otherwise: loss "unclipped" is its objective.
    At the first update of a step the policy is that of its start and the penalty has no gradient.
    """

    fraction: float = 2e-3
    coef: float = 1.0

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        at_least_zero("coef", self.coef)


EntropyControl = EntropyAdvantage | TopEntropy | ClipCov | KlCov

# Names for a config.
ENTROPY_CONTROLS: dict[str, type[EntropyControl]] = {
    "entropy_advantage": EntropyAdvantage,
    "top_entropy": TopEntropy,
    "clip_cov": ClipCov,
    "kl_cov": KlCov,
}


@torch.no_grad()
def prepare(
    control: EntropyControl | None,
    *,
    log_probs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    token_ids: Tensor | None = None,
    seed: int = 0,
    step: int = 0,
    group: dist.ProcessGroup | None = None,
) -> TokenTerms | None:
    """What `control` asks of this rank's tokens of the step; None for no control.

    Collective over `group`: every rank calls it once a step, also one without tokens. The result is the
    same to the bit however the tokens are spread over ranks and ordered.

    Args:
        log_probs, entropy: [tokens], under the policy at the start of the step, nats.
        advantages: [tokens].
        mask: [tokens], bool or 0/1; None for all. Terms outside it are 0 (weight 1) and mean nothing.
        token_ids: int64 [tokens], for `ClipCov`: a number for each token that no other token of the step
            has, on any rank, and that does not depend on the layout: see `global_token_ids`.
        seed, step: with them and the token's id goes the random choice of `ClipCov`.
        group: the ranks that share the batch; None for this process alone.

    Raises:
        ValueError: unequal shapes, no token_ids where they are needed; or, on every rank alike, a masked
            token anywhere whose entropy is NaN or negative (`TopEntropy`), or whose log-prob or
            advantage is not finite (`ClipCov`, `KlCov`).
    """
    if control is None:
        return None
    check_shapes(log_probs, entropy=entropy, advantages=advantages, mask=mask, token_ids=token_ids)
    inside = mask != 0 if mask is not None else torch.ones_like(log_probs, dtype=torch.bool)
    match control:
        case EntropyAdvantage(alpha, kappa):
            a = masked(advantages, inside).float()
            h = masked(entropy, inside).float().clamp(min=0)  # -1e-8 is rounding
            return TokenTerms(advantage=torch.minimum(alpha * h, a.abs() / kappa))
        case TopEntropy(fraction):
            share = top_share(entropy, inside, fraction, group, name="entropy")
            return TokenTerms(weight=torch.where(inside, share, 1))
        case ClipCov(fraction, low, high):
            if token_ids is None:
                raise ValueError("Clip-Cov chooses at random by token_ids: there are none")
            covariance, tokens = token_covariance(log_probs, advantages, inside, group)
            eligible = inside & (covariance >= low) & (covariance <= high)
            priority = random_priority(token_ids, seed, step)
            share = top_share(priority, eligible, count_of_all(fraction, tokens), group, name="priority")
            return TokenTerms(weight=1 - share)
        case KlCov(fraction, coef):
            covariance, tokens = token_covariance(log_probs, advantages, inside, group)
            positive = inside & (covariance > 0)
            share = top_share(covariance, positive, count_of_all(fraction, tokens), group, name="covariance")
            return TokenTerms(kl_coef=coef * share)
    raise ValueError(f"{control!r} is no entropy control")


def token_covariance(
    log_probs: Tensor, advantages: Tensor, inside: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, int]:
    """(ln pi - mean ln pi)(A - mean A) of each token (arXiv 2505.22617, section 4), and the global count.

    float32, shaped like `log_probs`, 0 outside the mask. Collective over `group`, over which the means go.

    Raises:
        ValueError: on every rank alike, a masked log-prob or advantage that is not finite.
    """
    named = {"log-prob": log_probs, "advantage": advantages}
    (mean_log_prob, mean_advantage), tokens = exact_means(named, inside, group)
    centred = (log_probs.double() - mean_log_prob) * (advantages.double() - mean_advantage)
    return torch.where(inside, centred, 0).float(), tokens


def global_token_ids(sequences: list[int], lengths: list[int], device: torch.device | None = None) -> Tensor:
    """Ids for `prepare`: int64 [sum of lengths], from the number of each sequence in the whole step.

    Args:
        sequences: for this rank's sequences, in the order of its tokens: their numbers in the step.
        lengths: their response tokens.
    """
    counts = torch.tensor(lengths, dtype=torch.int64)
    first = torch.tensor(sequences, dtype=torch.int64).repeat_interleave(counts)
    positions = [torch.arange(length) for length in lengths]
    return ((first << 32) + torch.cat([first.new_empty(0), *positions])).to(device)


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} is not above 0 and at most 1")
