"""transformers' model of a checkpoint, as what ours is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def log_probs(model: Any, ids: Sequence[int]) -> Tensor:
    """Log-prob of every token but the first, by a transformers model: float32 [len(ids) - 1], nats."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits_TV = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Without transformers' bars for loading and saving, which for a small model take longer than that."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
