"""Token ids to calibrate on and to compare log-probs on, from the user's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TOKENS = 512
"""A row is cut to this many tokens."""
_HELD_OUT = 4
_KEYS = ("messages", "prompt", "text")

_TEXTS = (
    "The tides rise and fall twice a day because the Moon pulls more strongly on the near side of the Earth "
    "than on the far side. The Sun does the same, less than half as strongly. When the two act along one "
    "line, at new and full moon, the tides are highest; they are lowest in the weeks between.",
    "Question: A baker sells 48 loaves in the morning and half as many in the afternoon. Each loaf costs 3 "
    "euros. How much does she take in a day?\nAnswer: In the afternoon she sells 48 / 2 = 24 loaves, so in "
    "a day 48 + 24 = 72 loaves. At 3 euros each that is 72 * 3 = 216 euros.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[middle]\n"
    "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
    "Ingredients: 200 g of flour, two eggs, a pinch of salt, 250 ml of milk. 1. Whisk the eggs and the milk. "
    "2. Add flour and salt, and let the batter rest for twenty minutes. 3. Fry thin pancakes in a hot pan.",
)


@dataclass(frozen=True)
class Calibration:
    """Rows of a dataset as token ids.

    Attributes:
        name: what the dataset is called, for the model card.
        samples: the rows to calibrate on.
        held_out: further rows, for the comparison only (the same ones where there are too few).
    """

    name: str
    samples: list[list[int]]
    held_out: list[list[int]]


def read_calibration(source: str, model: Path, samples: int) -> Calibration:
    """Read rows, evenly spread over the dataset.

    A row has `messages` (chat messages), or `prompt` (a string or chat messages, after which the model is to
    answer), or `text` (as it stands). Strings in `prompt` become a user's message if the tokenizer has a
    chat template.

    Args:
        source: what `task.source` takes: a .jsonl or .parquet file, reasoning_gym:NAME, or a function.
        model: directory with the tokenizer.
        samples: rows to calibrate on; all, if there are fewer.

    Raises:
        UserError: no such dataset, a broken row, or no tokenizer.
    """
    from megatron_stare.tasks.rows import open_rows
    from megatron_stare.tasks.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    try:
        rows = open_rows(source, samples + _HELD_OUT, 0, {})
    except UserError as error:  # they name the key that a run's configuration has
        raise UserError(str(error).replace("task.source=", "--calibration ")) from error
    total = min(len(rows), samples + _HELD_OUT)
    if not total:
        raise UserError(f"--calibration {source}: no rows")
    ids = [_encode(tokenizer, rows, i * len(rows) // total) for i in range(total)]
    name = Path(source).name
    if total <= _HELD_OUT:
        return Calibration(name, ids, ids)
    apart = set(range(0, total, total // _HELD_OUT)[:_HELD_OUT])
    return Calibration(
        name,
        [row for i, row in enumerate(ids) if i not in apart],
        [row for i, row in enumerate(ids) if i in apart],
    )


def built_in_texts(model: Path, vocab_size: int) -> list[list[int]]:
    """Four short texts; for a model without a tokenizer, random token ids."""
    from megatron_stare.tasks.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
        # A small vocabulary may know nothing of English.
        ids = [[i for i in tokenizer(text)["input_ids"] if 0 <= i < vocab_size] for text in _TEXTS]
        if all(len(row) > 1 for row in ids):
            return ids
    except UserError:
        pass
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (4, 64), generator=generator).tolist()


def _encode(tokenizer: PreTrainedTokenizerFast, rows: Any, index: int) -> list[int]:
    row = rows[index]
    key = next((key for key in _KEYS if key in row), None)
    if key is None:
        found = ", ".join(map(str, row)) or "(none)"
        raise UserError(f"{rows.where(index)}: needs one of {', '.join(_KEYS)}; the columns are {found}")
    value = row[key]
    if key == "text" or (isinstance(value, str) and not tokenizer.chat_template):
        text, special = value, key == "text"
    else:
        text, special = _render(tokenizer, value, key, rows.where(index)), False
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{rows.where(index)}: {key!r} must be a string that is not empty")
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])[:MAX_TOKENS]


def _render(tokenizer: PreTrainedTokenizerFast, value: Any, key: str, where: str) -> str:
    from megatron_stare.tasks.lookup import describe

    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        raise UserError(f"{where}: {key!r} must be a string or a list of chat messages")
    if not tokenizer.chat_template:
        raise UserError(f"{where}: {key!r} has chat messages, but the model's tokenizer has no chat template")
    asks = key == "prompt" or (bool(messages) and messages[-1].get("role") == "user")
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=asks, tokenize=False)
    except Exception as error:  # a template is a program of the model's authors: it may raise anything
        raise UserError(f"{where}: the chat template refuses the row: {describe(error)}") from error
