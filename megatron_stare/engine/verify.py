"""Whether a converted checkpoint computes what its source computes: Megatron beside transformers.

Both sides compute in float32 from the weights as they are stored; where the conversion rounds weights, those
of transformers are rounded alike. What is compared is therefore the conversion and nothing else, and the
bound is float32's for every dtype.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_stare.engine.batch import TrainSequence, pack_update
from megatron_stare.engine.checkpoint import load_weights
from megatron_stare.engine.device import current
from megatron_stare.engine.model import build_models, transformer_config
from megatron_stare.engine.parallel import initialize, shut_down
from megatron_stare.engine.step import measure
from megatron_stare.errors import UserError
from megatron_stare.weights.convert import TO_MEGATRON, Conversion
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.reference import log_probs, no_progress_bar

LIMIT = 1e-4
_TEXTS = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "If 3x + 5 = 20, then x = 5, because 3 times 5 is 15 and 15 + 5 = 20.",
)
_TOKENS = 64


def verify_conversion(conversion: Conversion, stage: Path) -> str:
    """Compare log-probs of a few prompts; a line that says how well they agree.

    Args:
        conversion: that wrote `stage`.

    Raises:
        UserError: the largest difference is above LIMIT, or not a number.
    """
    to_megatron = conversion.direction == TO_MEGATRON
    hf_dir, megatron_dir = (conversion.source, stage) if to_megatron else (stage, conversion.source)
    rounded = conversion.dtypes[0] if len(conversion.dtypes) == 1 else None
    config = conversion.plan.config
    prompts = _prompts(conversion.config_dir, config.vocab_size)
    theirs = transformers_log_probs(hf_dir, prompts, rounded)
    ours = megatron_log_probs(megatron_dir, config, prompts, rounded)
    gaps = (theirs - ours).abs()
    worst, mean = gaps.max().item(), gaps.mean().item()
    words = f"largest difference of {len(gaps)} log-probs {worst:.1e}, mean {mean:.1e}"
    if not worst <= LIMIT:  # also when it is NaN
        raise UserError(f"verification failed, nothing was written: {words}; at most {LIMIT:.0e} is accepted")
    return f"verified: {words}"


def megatron_log_probs(
    directory: Path, hf: HFConfig, prompts: list[list[int]], rounded: torch.dtype | None
) -> torch.Tensor:
    """Log-prob of every token but each prompt's first, from a Megatron checkpoint on one process."""
    device = current()
    parallel = initialize(device, tp=1, pp=1)
    try:
        config = transformer_config(hf, parallel, device, dtype=torch.float32)
        models = build_models(hf, config, parallel, device, layers="local")
        load_weights(directory, models)
        _round(models[0], rounded)
        sequences = [TrainSequence(np.array(ids), np.arange(len(ids)) > 0) for ids in prompts]
        microbatches = pack_update([sequences], common_length=None, multiple=1, device=device.torch)
        return measure(models, microbatches, parallel).log_probs[0].cpu()
    finally:
        shut_down()


def transformers_log_probs(
    directory: Path, prompts: list[list[int]], rounded: torch.dtype | None
) -> torch.Tensor:
    """The same from a Hugging Face directory, by transformers."""
    from transformers import AutoModelForCausalLM

    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    _round(model, rounded)
    return torch.cat([log_probs(model, ids) for ids in prompts])


def _round(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.to(dtype))


def _prompts(directory: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of a few texts; without a tokenizer, random ones."""
    from transformers import AutoTokenizer

    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        found = [tokenizer(text)["input_ids"][:_TOKENS] for text in _TEXTS]
        return [ids for ids in found if len(ids) > 1]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (len(_TEXTS), _TOKENS), generator=generator).tolist()
