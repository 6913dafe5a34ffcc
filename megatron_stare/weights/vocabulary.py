"""Whether a tokenizer fits a model, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_stare.errors import UserError


def check_vocabulary(directory: Path, vocab_size: int) -> None:
    """Raise UserError when the directory's tokenizer has an id that the model's embedding lacks.

    Fewer ids than rows are normal. A tokenizer that is stored only as a SentencePiece model is not looked at.
    """
    found = _largest_id(directory)
    if found is not None and found[0] >= vocab_size:
        raise UserError(
            f"{found[1]} has token id {found[0]}, but config.json's vocab_size is {vocab_size}: "
            "the tokenizer does not belong to this model"
        )


def _largest_id(directory: Path) -> tuple[int, Path] | None:
    candidates = []
    for name, ids in (
        ("tokenizer.json", _of_tokenizer),
        ("vocab.json", lambda content: content.values()),
        ("added_tokens.json", lambda content: content.values()),
    ):
        path = directory / name
        if not path.is_file():
            continue
        try:
            numbers = [n for n in ids(json.loads(path.read_text(encoding="utf-8"))) if isinstance(n, int)]
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise UserError(f"{path} is not a readable tokenizer file: {error!r}") from error
        if numbers:
            candidates.append((max(numbers), path))
    return max(candidates, default=None)


def _of_tokenizer(content: dict[str, Any]) -> list[int]:
    vocabulary = content["model"].get("vocab") or {}
    # A unigram model lists its tokens in the order of their ids.
    ids = list(range(len(vocabulary))) if isinstance(vocabulary, list) else list(vocabulary.values())
    return ids + [token["id"] for token in content.get("added_tokens") or []]
