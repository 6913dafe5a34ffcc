from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.tasks import load_tokenizer
from megatron_stare.tasks.sums import VOCABULARY, reward, sum_pairs, sum_pairs_sft, write_tokenizer


def test_every_target_has_target_plus_one_right_answers() -> None:
    right = [f"{a:02d}+{b:02d}" for a in range(100) for b in range(100) if reward(f"{a:02d}+{b:02d}", 47)]
    assert len(right) == 48
    assert "00+47" in right and "47+00" in right


@pytest.mark.parametrize(
    "response", ["23+24 ", " 23+24", "23+24+00", "23+2", "3+44", "23-24", "", "23+24\n", "٢٣+٢٤", "23+25"]
)
def test_anything_but_the_exact_form_and_sum_is_worth_nothing(response: str) -> None:
    assert reward(response, "47") == 0.0


def test_rows_follow_from_the_seed_and_cover_all_targets() -> None:
    assert sum_pairs(50, 3) == sum_pairs(50, 3) != sum_pairs(50, 4)
    assert {row["answer"] for row in sum_pairs(3000, 0)} == set(range(10, 99))
    assert all(row["prompt"] == f"{row['answer']:02d}=" for row in sum_pairs(50, 3))


@pytest.mark.parametrize("noise", [0.0, 0.35, 1.0])
def test_supervised_rows_are_wrong_in_the_given_share(noise: float) -> None:
    rows = sum_pairs_sft(4000, 1, noise=noise)
    wrong = sum(not reward(row["answer"], row["prompt"].rstrip("=")) for row in rows) / len(rows)
    assert wrong == pytest.approx(noise, abs=0.03 if 0 < noise < 1 else 0)
    assert all(len(row["answer"]) == 5 for row in rows)


def test_noise_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="noise=1.5"):
        sum_pairs_sft(1, 0, noise=1.5)


def test_the_written_tokenizer_is_one_token_a_character_in_both_directions(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    # Beside a model's config, transformers could take another tokenizer class for this architecture.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == len(VOCABULARY) == 16
    assert tokenizer("47=23+24", add_special_tokens=False)["input_ids"] == [4, 7, 11, 2, 3, 10, 2, 4]
    assert tokenizer("47=")["input_ids"] == [4, 7, 11]
    assert tokenizer.decode([2, 3, 10, 2, 4, tokenizer.eos_token_id], skip_special_tokens=True) == "23+24"
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [12, 13, 14]
