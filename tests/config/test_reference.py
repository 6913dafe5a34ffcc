"""The reference of all keys says what the schema says."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.config import config_keys
from megatron_stare.config.reference import _MEANINGS, meanings, page
from megatron_stare.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_up_to_date():
    command = "python -m megatron_stare.config.reference > docs/config.md"
    assert PAGE.read_text(encoding="utf-8") == page(), f"the schema changed: run {command}"


def test_every_key_is_listed_with_its_meaning():
    known = meanings()
    assert list(known) == sorted(known, key=config_keys().index) and set(known) == set(config_keys())
    assert [key for key, meaning in known.items() if not meaning] == []


def test_meanings_are_given_for_keys_that_exist():
    assert set(_MEANINGS) <= set(config_keys()) | set(Config.model_fields)
