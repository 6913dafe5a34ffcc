"""The policy's tokenizer: from its directory, for prompts, responses to learn, and texts to score."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_stare.errors import UserError
from megatron_stare.tasks.lookup import describe, nearest
from megatron_stare.tasks.sample import Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a Hugging Face model directory. Nothing is downloaded, no code from there is run.

    Raises:
        UserError: no such directory, no (readable) tokenizer in it, or one without an end-of-sequence token.
    """
    # Imported here: it takes seconds, and reward workers import this package too.
    from transformers import AutoTokenizer

    path = Path(model_path)
    if not path.is_dir():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"model.path={path}: no such directory{nearest(path.name, names)}")
    if not any((path / name).is_file() for name in _FILES):
        raise UserError(f"model.path={path}: no tokenizer files there (such as {', '.join(_FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # damaged files raise whatever the parser of that format raises
        raise UserError(f"model.path={path}: the tokenizer cannot be read: {describe(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path={path}: the tokenizer names no end-of-sequence token (eos_token)")
    return tokenizer


def encode_response(tokenizer: PreTrainedTokenizerFast, prompt: Prompt, text: str) -> list[int]:
    """Token ids of a response to learn, ending with the end-of-sequence token.

    Encoded after the prompt, because some tokenizers mark the start of a text (SentencePiece writes a space
    there). Where the border merges into one token, the response is encoded alone: the prompt's ids are fixed.
    """
    whole = list(tokenizer(prompt.text + text, add_special_tokens=False)["input_ids"])
    length = len(prompt.token_ids)
    if whole[:length] == prompt.token_ids:
        token_ids = whole[length:]
    else:
        token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*token_ids, tokenizer.eos_token_id]


def decode_response(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> str:
    """The text that rewards see: without special tokens, spaces as they were written."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def fill_texts(tokenizer: PreTrainedTokenizerFast, groups: Iterable[Group]) -> None:
    """Set `text` of every response from its token ids."""
    for group in groups:
        for response in group.responses:
            response.text = decode_response(tokenizer, response.token_ids)
