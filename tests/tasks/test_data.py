from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_stare.config.schema import TaskSection
from megatron_stare.errors import UserError
from megatron_stare.tasks import OverlongPrompt, load_tokenizer, open_source
from megatron_stare.tasks.sums import write_tokenizer

GOOD = {"prompt": "7+5?", "answer": "12"}

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "7+5?"}],
    "ability": "math",
    "reward_model": {"ground_truth": "12", "style": "rule"},
    "extra_info": {"index": 0, "answer": "7+5=12 #### 12"},
}


def write_jsonl(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_a_string_prompt_becomes_one_user_message(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD | {"level": 3, "data_source": "mine"})
    prompt = open_source(TaskSection(source=path), tokenizer, 0)[0]
    assert prompt.text == "<user>7+5?</s><assistant>"
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+5?"}], add_generation_prompt=True, return_dict=False
    )
    assert prompt.token_ids == expected and type(prompt.token_ids) is list
    assert (prompt.index, prompt.answer, prompt.data_source, prompt.extra) == (0, "12", "mine", {"level": 3})


def test_the_system_prompt_comes_first_in_place_of_the_rows_own(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, VERL)
    source = open_source(TaskSection(source=path, system_prompt="Be brief."), tokenizer, 0)
    assert source[0].text == source[1].text == "<system>Be brief.</s><user>7+5?</s><assistant>"


def test_plain_text_gets_no_special_token(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, {"prompt": "<s>7", "answer": ""})
    source = open_source(TaskSection(source=path, chat_template=False), tokenizer, 0)
    assert tokenizer.decode(source[0].token_ids) == source[0].text == "7+5?"
    assert tokenizer("7+5?")["input_ids"][0] == tokenizer.bos_token_id  # what is avoided
    assert source[1].token_ids[0] == tokenizer.bos_token_id  # written in the prompt: kept
    with pytest.raises(IndexError):
        source[2]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_verls_layout_is_recognised_and_equal_in_both_formats(
    tmp_path: Path, tokenizer: Any, suffix: str
) -> None:
    # A second row with further fields makes Parquet fill them with null in the first.
    other = VERL | {"prompt": [{"role": "user", "content": "é", "name": "Ann"}]}
    path = tmp_path / f"train{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, VERL, other)
    else:
        pq.write_table(pa.Table.from_pylist([VERL, other]), path)
    source = open_source(TaskSection(source=str(path)), tokenizer, 0)
    prompt = source[0]
    assert len(source) == 2
    assert prompt.text == "<system>Think.</s><user>7+5?</s><assistant>"
    assert (prompt.answer, prompt.data_source) == ("12", "openai/gsm8k")
    assert prompt.extra["extra_info"] == VERL["extra_info"]
    supervised = open_source(TaskSection(source=str(path), answer_key="extra_info.answer"), tokenizer, 0)
    assert supervised[0].answer == "7+5=12 #### 12"


BROKEN = [
    ('{"prompt": "x", "answer"', r"d\.jsonl:4: not JSON: .* at column"),
    ("[1, 2]", r"d\.jsonl:4: a JSON object is needed, found list"),
    ({"prompt": "x", "answr": 1}, r"d\.jsonl:4: no 'answer' \(task\.answer_key\); the columns are "
     r"prompt, answr; did you mean 'answr'\?"),
    ({"question": "x", "answer": 1}, r"d\.jsonl:4: no 'prompt' \(task\.prompt_key\)"),
    ({"prompt": " ", "answer": 1}, r"d\.jsonl:4: 'prompt' is empty"),
    ({"prompt": 5, "answer": 1}, r"d\.jsonl:4: 'prompt' is a int"),
    ({"prompt": "x", "answer": None}, r"d\.jsonl:4: the answer is null"),
    ({"prompt": [], "answer": 1}, r"d\.jsonl:4: 'prompt' is an empty list"),
    ({"prompt": ["x"], "answer": 1}, r"d\.jsonl:4: 'prompt': message 0 is not an object"),
    ({"prompt": [{"role": "user"}], "answer": 1}, r"d\.jsonl:4: 'prompt': message 0: 'content' must be"),
    ({"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}, r"d\.jsonl:4: 'prompt' ends with"),
    ({"prompt": [{"role": "critic", "content": "x"}], "answer": 1}, r"d\.jsonl:4: .*no critics here"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_found_at_opening_and_named(
    tmp_path: Path, tokenizer: Any, line: Any, message: str
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", GOOD, "", GOOD, line, GOOD)  # the blank line counts as a line
    with pytest.raises(UserError, match=message):
        open_source(TaskSection(source=path), tokenizer, 0)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x", "answer": 1}\n{"prompt": "\xff"}')
    with pytest.raises(UserError, match=r"d\.jsonl:2: not UTF-8 \(byte 12\)"):
        open_source(TaskSection(source=str(tmp_path / "d.jsonl")), tokenizer, 0)


def test_a_broken_parquet_row_or_file_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD, GOOD | {"prompt": ""}]), path)
    with pytest.raises(UserError, match=r"d\.parquet: row 1: 'prompt' is empty"):
        open_source(TaskSection(source=str(path)), tokenizer, 0)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"d\.parquet: not a readable Parquet file"):
        open_source(TaskSection(source=str(path)), tokenizer, 0)


def test_chat_messages_without_a_template_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", VERL)
    with pytest.raises(UserError, match="needs task.chat_template=true"):
        open_source(TaskSection(source=path, chat_template=False), tokenizer, 0)
    write_tokenizer(tmp_path / "plain")
    with pytest.raises(UserError, match="tokenizer has no chat template; use false"):
        open_source(TaskSection(source=path), load_tokenizer(tmp_path / "plain"), 0)


SOURCES = [
    ("trian.jsonl", r"trian\.jsonl: no such file; did you mean 'train\.jsonl'\?"),
    ("train.json", "not a .jsonl or .parquet file, reasoning_gym:NAME, or package.module:function"),
    ("folder.jsonl", "a directory"),
    ("empty.jsonl", "no rows"),
    ("reasoning_gym:chain_sun", "no such task; did you mean 'chain_sum'"),
    ("no_such_package.tasks:rows", "no module named 'no_such_package'"),
    ("user_functions:row", "user_functions has no 'row'; did you mean 'rows'"),
    ("user_functions:NOT_A_FUNCTION", "a int, not a function"),
    ("user_functions:raising_rows", "raised RuntimeError: no connection to the catalogue"),
    ("user_functions:broken_rows", "user_functions:broken_rows: row 1: a dict is needed, found list"),
    ("broken_module:rows", "broken_module cannot be imported: ZeroDivisionError: division by zero"),
    ("lacking_module:rows", "lacking_module cannot be imported: No module named 'no_such_dependency'"),
]


@pytest.mark.parametrize(("source", "message"), SOURCES)
def test_a_source_that_is_not_there_is_explained(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_jsonl(tmp_path / "train.jsonl", GOOD)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "lacking_module.py").write_text("import no_such_dependency")
    with pytest.raises(UserError, match=message):
        open_source(TaskSection(source=source), tokenizer, 0)


ARGUMENTS = [
    ("user_functions:rows", {"wrod": "x"}, "unexpected keyword argument 'wrod'"),
    ("reasoning_gym:chain_sum", {"min_term": 3}, r"source_args\.min_term: .*did you mean 'min_terms'"),
    ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "refuses .*max_terms must be >= min_terms"),
    ("train.jsonl", {"x": 1}, "a file takes none"),
]


@pytest.mark.parametrize(("source", "arguments", "message"), ARGUMENTS)
def test_wrong_source_arguments_are_explained(
    tokenizer: Any, source: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_source(TaskSection(source=source, source_args=arguments), tokenizer, 0)


def test_a_users_function_gives_rows(tokenizer: Any) -> None:
    task = TaskSection(source="user_functions:rows", size=5, source_args={"word": "item"})
    source = open_source(task, tokenizer, 7)
    assert len(source) == 5
    assert source[4].text == "<user>item 7 4</s><assistant>"
    assert (source[4].answer, source[4].extra) == (4, {"level": 1})


def test_reasoning_gym_gives_rows_that_follow_from_the_seed(tokenizer: Any) -> None:
    task = TaskSection(source="reasoning_gym:chain_sum", size=20, source_args={"max_terms": 3})
    first, again, other = (open_source(task, tokenizer, seed) for seed in (1, 1, 2))
    assert first[3] == again[3] != other[3]
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first[3].extra["reasoning_gym"]["answer"] == first[3].answer
    assert first[3].data_source == "reasoning_gym:chain_sum"


def test_reasoning_gym_mixtures_are_given_as_plain_values(tokenizer: Any) -> None:
    specs = [{"name": "chain_sum", "weight": 2.0}, {"name": "leg_counting", "config": {"max_animals": 4}}]
    task = TaskSection(source="reasoning_gym:composite", size=30, source_args={"datasets": specs})
    source = open_source(task, tokenizer, 1)
    names = {source[index].data_source for index in range(30)}
    assert names == {"reasoning_gym:chain_sum", "reasoning_gym:leg_counting"}


def test_overlong_prompts_are_errors_or_left_out_with_a_count(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", GOOD, GOOD | {"prompt": "é" * 20}, GOOD)
    task = TaskSection(source=path, max_prompt_tokens=42)
    with pytest.raises(
        UserError, match=r"d\.jsonl:2: the prompt has 43 tokens, more than task\.max_prompt_t"
    ):
        open_source(task, tokenizer, 0)
    assert (
        len(open_source(task.model_copy(update={"max_prompt_tokens": 43}), tokenizer, 0)[1].token_ids) == 43
    )

    with caplog.at_level(logging.WARNING):
        source = open_source(task.model_copy(update={"overlong": "drop"}), tokenizer, 0)
    assert "1 of 3 prompts exceed 42 tokens: left out" in caplog.text
    assert [source.get(i) is None for i in range(3)] == [False, True, False]
    with pytest.raises(OverlongPrompt):
        source[1]
    with pytest.raises(UserError, match="all 3 prompts"):
        open_source(task.model_copy(update={"overlong": "drop", "max_prompt_tokens": 2}), tokenizer, 0)


def test_a_large_file_opens_quickly_and_replacing_it_changes_nothing(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "big.jsonl"
    write_jsonl(path, *({"prompt": f"{i}+1?", "answer": i + 1} for i in range(5000)))
    source = open_source(TaskSection(source=str(path)), tokenizer, 0)
    replacement = tmp_path / "new.jsonl"
    write_jsonl(replacement, GOOD)
    replacement.rename(path)
    assert source[4321].text == "<user>4321+1?</s><assistant>"


def test_a_misspelt_answer_key_does_not_fall_back_to_verls(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", VERL)
    with pytest.raises(UserError, match=r"d\.jsonl:1: no 'abilty' .*did you mean 'ability'"):
        open_source(TaskSection(source=path, answer_key="abilty"), tokenizer, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system_prompt": "x", "chat_template": False}, "system_prompt needs chat_template=true"),
        ({"reward": "exat"}, "reward=exat is not one of exact, math, reasoning_gym or"),
        ({"reward": "reasoning_gym"}, "needs source=reasoning_gym:NAME, not a.jsonl"),
    ],
)
def test_impossible_combinations_are_refused_by_the_configuration(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TaskSection(source="a.jsonl", **options)
