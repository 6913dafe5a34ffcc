"""Estimators of the KL divergence from log-probs of sampled tokens."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3", "abs"]

# exp(20) is 5e8: far outside any clip range, far inside float32.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(kind: KlEstimator, log_probs: Tensor, other: Tensor) -> Tensor:
    """A token's estimate of KL(policy || other), for tokens that the policy wrote; with gradient.

    With d = log_probs - other (J. Schulman, "Approximating KL divergence", 2020):

    - "k1": d. Unbiased, of either sign. As a loss it does nothing on average: its gradient is that of
      the log-prob, whose expectation is 0.
    - "k2": d^2 / 2. Biased, never negative; its gradient is the unbiased one of the KL divergence.
    - "k3": exp(-d) - 1 + d. Unbiased, never negative, the penalty of GRPO (arXiv 2402.03300, eq. 4).
    - "abs": |d|, the penalty in the released code of KL-Cov. Not an estimate of the divergence.

    d is limited to [-20, 20], beyond which the gradient is 0.

    Args:
        log_probs, other: equal shapes, nats. `other` is taken as a constant.
    """
    d = (log_probs - other.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match kind:
        case "k1":
            return d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            return (-d).expm1() + d
        case "abs":
            return d.abs()
    raise ValueError(f"KL estimator {kind!r} is none of {', '.join(get_args(KlEstimator))}")
