"""Which parts of an objective go together."""

from __future__ import annotations

from megatron_stare.objective.entropy_control import (
    ClipCov,
    EntropyAdvantage,
    EntropyControl,
    KlCov,
    TopEntropy,
)
from megatron_stare.objective.spec import ObjectiveSpec

_NOT_WITH_STARE: dict[type[EntropyControl], str] = {
    TopEntropy: (
        "80/20 (top_entropy) does not go with STARE: both choose tokens by how uncertain the policy is, and "
        "the expected tokens that STARE balances the surprising ones against would have no gradient"
    ),
    ClipCov: (
        "Clip-Cov does not go with STARE: it silences expected tokens of good responses, which STARE weighs "
        "the surprising ones against, so the two undo each other's choice"
    ),
    KlCov: (
        "KL-Cov does not go with STARE: it holds back tokens by probability and advantage, as STARE does, so "
        "the two undo each other's choice"
    ),
    EntropyAdvantage: (
        "the entropy-shaped advantage does not go with STARE: it already raises uncertain tokens of good "
        "responses and lowers those of bad ones, beyond the weights that STARE's schedule accounts for"
    ),
}


def check_combination(
    spec: ObjectiveSpec,
    *,
    control: EntropyControl | None = None,
    stare: bool = False,
    updates_per_step: int | None = None,
) -> None:
    """Raise ValueError, with one line that says why, for parts that do not go together.

    Args:
        spec: the loss.
        control: an entropy control, or None.
        stare: whether STARE's weights are on.
        updates_per_step: optimizer updates on the data of one step; None if unknown.
    """
    if stare and control is not None:
        raise ValueError(_NOT_WITH_STARE[type(control)])
    by_token = stare or isinstance(control, EntropyAdvantage | TopEntropy | ClipCov)
    if spec.loss == "gspo" and by_token:
        who = "STARE" if stare else type(control).__name__
        raise ValueError(
            f"{who} does not go with loss 'gspo': the gradient of the sequence's ratio spreads what is asked "
            "of one token over all of its response; 'gspo_token' keeps it"
        )
    if isinstance(control, KlCov) and updates_per_step == 1:
        raise ValueError(
            "KL-Cov needs at least 2 updates a step: at the first one the policy is that of the step's "
            "start, and a KL penalty towards it has no gradient"
        )
