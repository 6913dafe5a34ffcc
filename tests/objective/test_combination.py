from __future__ import annotations

import itertools

import pytest

from megatron_stare.objective import (
    ClipCov,
    EntropyAdvantage,
    KlCov,
    ObjectiveSpec,
    TopEntropy,
    check_combination,
)

CONTROLS = [EntropyAdvantage(), TopEntropy(), ClipCov(), KlCov()]
LOSSES = ["ppo_clip", "gspo", "gspo_token", "cispo", "unclipped"]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: type(c).__name__)
def test_controls_that_choose_tokens_are_refused_beside_stare_with_a_reason(control) -> None:
    with pytest.raises(ValueError, match="does not go with STARE: ") as error:
        check_combination(ObjectiveSpec(), control=control, stare=True)
    assert "\n" not in str(error.value)


def test_stare_goes_with_every_token_loss_penalty_and_correction() -> None:
    for loss, correction in itertools.product(LOSSES, ["none", "truncate", "mask"]):
        spec = ObjectiveSpec(loss=loss, correction=correction, kl_coef=0.1, entropy_coef=0.01)
        if loss == "gspo":
            with pytest.raises(ValueError, match="STARE does not go with loss 'gspo'.*gspo_token"):
                check_combination(spec, stare=True)
        else:
            check_combination(spec, stare=True, updates_per_step=1)


@pytest.mark.parametrize("control", [None, *CONTROLS])
def test_without_stare_every_control_goes_with_every_token_loss(control) -> None:
    for loss in set(LOSSES) - {"gspo"}:
        check_combination(ObjectiveSpec(loss=loss), control=control, updates_per_step=2)


@pytest.mark.parametrize("control", [EntropyAdvantage(), TopEntropy(), ClipCov()])
def test_gspo_refuses_what_differs_by_token(control) -> None:
    with pytest.raises(ValueError, match=f"{type(control).__name__} does not go with loss 'gspo'"):
        check_combination(ObjectiveSpec(loss="gspo"), control=control)
    check_combination(ObjectiveSpec(loss="gspo"), control=KlCov())
    check_combination(ObjectiveSpec(loss="gspo"))


def test_kl_cov_needs_a_second_update() -> None:
    with pytest.raises(ValueError, match="at least 2 updates a step"):
        check_combination(ObjectiveSpec(), control=KlCov(), updates_per_step=1)
    check_combination(ObjectiveSpec(), control=KlCov())
