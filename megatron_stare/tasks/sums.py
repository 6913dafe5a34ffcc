"""A procedural task with many right answers: write two numbers that make a given sum.

    prompt  47=        response  23+24

Each target from 10 to 98 has as many right answers as it has splits into two
two-digit, zero-padded numbers (11 to 99 of them), so a policy that collapses to one habit is
visible: its reward stays high while the number of distinct right answers falls.

In a configuration:

    task.source: megatron_stare.tasks.sums:sum_pairs          # for reinforcement learning
    task.source: megatron_stare.tasks.sums:sum_pairs_sft      # for the supervised warm-up
    task.reward: megatron_stare.tasks.sums:reward
    task.chat_template: false
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

MIN_TARGET, MAX_TARGET = 10, 98

BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
VOCABULARY = [*"0123456789", "+", "=", BOS, EOS, PAD, UNK]
"""Token of each id; ids 0 to 9 are the digits."""

_RESPONSE = re.compile(r"([0-9]{2})\+([0-9]{2})")


def sum_pairs(size: int, seed: int) -> list[dict[str, Any]]:
    """Rows for reinforcement learning: the prompt "47=" and the answer 47, targets drawn uniformly."""
    rng = random.Random(f"sum_pairs/{seed}")
    return [_row(rng.randint(MIN_TARGET, MAX_TARGET)) for _ in range(size)]


def sum_pairs_sft(size: int, seed: int, noise: float = 0.0) -> list[dict[str, Any]]:
    """Rows for supervised training: the prompt "47=" and a response to learn, such as "23+24".

    Args:
        size: number of rows.
        seed: of the rows.
        noise: probability that a row teaches a wrong sum (still of the right form), from 0 to 1.
            Reinforcement learning needs a start that is often, not always, right.

    Raises:
        ValueError: noise is outside [0, 1].
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"noise={noise}: a probability from 0 to 1 is needed")
    rng = random.Random(f"sum_pairs_sft/{seed}")
    rows = []
    for _ in range(size):
        target = rng.randint(MIN_TARGET, MAX_TARGET)
        first = rng.randint(0, target)
        second = target - first
        if rng.random() < noise:
            # One of the 98 other numbers, so that the share of wrong rows is `noise` and not a little less.
            second = (second + rng.randint(1, 98)) % 99
        rows.append(_row(target) | {"answer": f"{first:02d}+{second:02d}"})
    return rows


def reward(response_text: str, answer: int | str) -> float:
    """1.0 if the response is exactly two two-digit numbers, a plus between them, that sum to the answer."""
    numbers = _RESPONSE.fullmatch(response_text)
    return float(numbers is not None and int(numbers[1]) + int(numbers[2]) == int(answer))


def write_tokenizer(path: str | Path) -> None:
    """Write a character-level tokenizer for this task (16 tokens, see VOCABULARY) as Hugging Face files."""
    # Imported here: reward workers load this module too, and must start fast.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    # Without a decoder, word-level tokens are joined by spaces: "2 3 + 2 4".
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK
    )
    tokenizer.save_pretrained(str(path))


def _row(target: int) -> dict[str, Any]:
    return {"prompt": f"{target:02d}=", "answer": target, "data_source": "sums"}
