from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stare.errors import UserError
from megatron_stare.tasks import Group, Prompt, Response, encode_response, fill_texts, load_tokenizer


def test_a_missing_directory_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(UserError, match=r"smolm2: no such directory; did you mean 'smollm2'\?"):
        load_tokenizer(tmp_path / "smolm2")


def test_a_directory_without_tokenizer_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer files"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_files_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_token_is_an_error(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    made.save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="end-of-sequence"):
        load_tokenizer(tmp_path)


def test_a_response_to_learn_ends_with_eos_and_decodes_to_its_text(tokenizer: Any) -> None:
    prompt = Prompt(0, tokenizer("<user>7+5", add_special_tokens=False)["input_ids"], "<user>7+5", "12")
    token_ids = encode_response(tokenizer, prompt, " is 12 é")
    assert token_ids[-1] == tokenizer.eos_token_id and tokenizer.bos_token_id not in token_ids
    group = Group(prompt, [Response(token_ids, [0.0] * len(token_ids), "stop", 0)])
    fill_texts(tokenizer, [group])
    assert group.responses[0].text == " is 12 é"


def test_a_response_is_encoded_alone_where_it_would_merge_with_the_prompt() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    backend = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert encode_response(tokenizer, Prompt(0, [0], "a", ""), "b") == [1, 3]
