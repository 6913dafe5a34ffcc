"""Prompts of a task: rows checked, shown through the chat template, tokenised.

Everything that can be wrong with a dataset is found when it is opened, before
servers start: every row of a file or of a user's function is read once then.
What stays in memory is small; a prompt is tokenised when it is drawn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_stare.errors import UserError
from megatron_stare.tasks.lookup import describe, nearest
from megatron_stare.tasks.rows import GYM_PREFIX, Row, Rows, open_rows
from megatron_stare.tasks.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_stare.config.schema import TaskSection

log = logging.getLogger(__name__)

_CHECK_SECONDS = 10.0
"""How long a source that generates its rows slowly is checked; its rows differ in content, not in form."""
_FINGERPRINT_ROWS = 4
"""Rows of such a source that its fingerprint covers."""


class OverlongPrompt(UserError):
    """A prompt has more tokens than task.max_prompt_tokens."""


def open_source(task: TaskSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> PromptSource:
    """Open and check the task's prompts.

    Layouts of a row (JSONL, Parquet and user's functions alike):
        * `task.prompt_key`: a string, or a list of chat messages {role, content}; `task.answer_key`: anything
          but null. Dotted keys reach into columns: `extra_info.answer`.
        * verl's: where `answer_key` is left as it is and there is no such column but
          `reward_model: {ground_truth: …}`, that is the answer.
        * `data_source` is kept where it is a string; all further columns become Prompt.extra.

    A string prompt becomes one user message. With `chat_template=false` it is encoded as it stands, and
    no special token is added: a model that wants one at the start (BOS) needs it written in the prompt.

    Args:
        task: the `task` section.
        tokenizer: of the policy.
        seed: of a procedural source.

    Raises:
        UserError: anything wrong with the source or one of its rows; the message names file and line.
    """
    return PromptSource(open_rows(task.source, task.size, seed, task.source_args), task, tokenizer)


class PromptSource:
    """A checked, read-only sequence of prompts. Made by `open_source`.

    Attributes:
        fingerprint: hash of the content (for reasoning-gym: of its arguments and first rows); it tells a
            resumed run that the data changed.
    """

    def __init__(self, rows: Rows, task: TaskSection, tokenizer: PreTrainedTokenizerBase) -> None:
        self._rows = rows
        self._task = task
        self._tokenizer = tokenizer
        generated = task.source.startswith(GYM_PREFIX)
        self._prompt_key = "prompt" if generated else task.prompt_key
        self._answer_key = "answer" if generated else task.answer_key
        # Some reasoning-gym tasks have no single answer and leave it to their scorer.
        self._answer_may_be_null = generated
        if task.chat_template and not tokenizer.chat_template:
            raise UserError("task.chat_template=true: this model's tokenizer has no chat template; use false")
        if not len(rows):
            raise UserError(f"task.source={task.source}: no rows")
        self.fingerprint = self._check()

    def __len__(self) -> int:
        """Number of rows, counting those whose prompt is dropped as too long."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        """The prompt of a row.

        Raises:
            IndexError: no such row.
            OverlongPrompt: more than max_prompt_tokens, whatever `overlong` says; see `get`.
            UserError: the row is broken (found at the opening already, if the source could be read through).
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self._rows[index]
        content, answer, extra = self._parts(row, index)
        text = self._render(content, index)
        token_ids = self._encode(text)
        if len(token_ids) > self._task.max_prompt_tokens:
            raise OverlongPrompt(
                f"{self._rows.where(index)}: the prompt has {len(token_ids)} tokens, more than "
                f"task.max_prompt_tokens={self._task.max_prompt_tokens} "
                "(task.overlong=drop leaves such rows out)"
            )
        source = row.get("data_source")
        return Prompt(index, token_ids, text, answer, source if isinstance(source, str) else "", extra)

    def get(self, index: int) -> Prompt | None:
        """The prompt of a row, or None if it is too long and `task.overlong` is "drop"."""
        try:
            return self[index]
        except OverlongPrompt:
            if self._task.overlong == "drop":
                return None
            raise

    def _check(self) -> str:
        """Read every row (or, of a slow source, as many as time allows); return the fingerprint."""
        task = self._task
        digest = hashlib.sha256()
        if not self._rows.cheap:
            digest.update(_canonical([task.source, task.source_args, len(self)]))
        started, long, checked = time.monotonic(), 0, 0
        for index, row in enumerate(self._rows):
            in_sample = self._rows.cheap or index < _FINGERPRINT_ROWS
            if not in_sample and time.monotonic() - started > _CHECK_SECONDS:
                log.info("%s: %d of %d rows checked, the others when drawn", task.source, index, len(self))
                break
            content, answer, _ = self._parts(row, index)
            text = self._render(content, index)
            if in_sample:
                digest.update(_canonical([content, answer]))
            if self._may_be_overlong(text) and self.get(index) is None:
                long += 1
            checked += 1
        if long == checked:
            raise UserError(
                f"task.source={task.source}: all {checked} prompts have more than "
                f"task.max_prompt_tokens={task.max_prompt_tokens} tokens"
            )
        if long:
            limit = task.max_prompt_tokens
            log.warning("%s: %d of %d prompts exceed %d tokens: left out", task.source, long, checked, limit)
        return digest.hexdigest()

    def _parts(self, row: Row, index: int) -> tuple[str | list[dict[str, Any]], Any, dict[str, Any]]:
        """Prompt, answer and further columns of a raw row, checked."""
        content = self._column(row, self._prompt_key, "task.prompt_key", index)
        model = row.get("reward_model")
        used = {self._prompt_key, "data_source"}
        # Only where the configuration names no column of its own: a misspelt one must not pass silently.
        default_key = self._answer_key == "answer" and "answer" not in row
        if default_key and isinstance(model, Mapping) and "ground_truth" in model:
            answer = model["ground_truth"]
        else:
            answer = self._column(row, self._answer_key, "task.answer_key", index)
            used.add(self._answer_key)
        if answer is None and not self._answer_may_be_null:
            raise UserError(f"{self._rows.where(index)}: the answer is null")
        if isinstance(content, str):
            if not content.strip():
                raise UserError(f"{self._rows.where(index)}: {self._prompt_key!r} is empty")
        else:
            content = self._messages(content, index)
        return content, answer, {key: value for key, value in row.items() if key not in used}

    def _column(self, row: Row, key: str, option: str, index: int) -> Any:
        if key in row:
            return row[key]
        value: Any = row
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(
                    f"{self._rows.where(index)}: no {key!r} ({option}); the columns are "
                    f"{', '.join(map(str, row)) or '(none)'}{nearest(key, map(str, row))}"
                )
            value = value[part]
        return value

    def _messages(self, content: Any, index: int) -> list[dict[str, Any]]:
        where = f"{self._rows.where(index)}: {self._prompt_key!r}"
        if not isinstance(content, list | tuple):
            kind = type(content).__name__
            raise UserError(f"{where} is a {kind}; a string or a list of chat messages is needed")
        if not self._task.chat_template:
            raise UserError(f"{where} is a list of chat messages, which needs task.chat_template=true")
        if not content:
            raise UserError(f"{where} is an empty list of chat messages")
        for number, message in enumerate(content):
            if not isinstance(message, Mapping):
                raise UserError(f"{where}: message {number} is not an object with role and content")
            for field in ("role", "content"):
                if not isinstance(message.get(field), str):
                    raise UserError(f"{where}: message {number}: {field!r} must be a string")
        if content[-1]["role"] == "assistant":
            raise UserError(f"{where} ends with the assistant's message, so nothing is left to answer")
        # Parquet fills fields that only other rows have with null, which templates may take for a value.
        return [{name: value for name, value in message.items() if value is not None} for message in content]

    def _render(self, content: str | list[dict[str, Any]], index: int) -> str:
        if not self._task.chat_template:
            assert isinstance(content, str)
            return content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if self._task.system_prompt is not None:
            messages = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self._task.system_prompt}, *messages]
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            raise UserError(
                f"{self._rows.where(index)}: the chat template refuses the prompt: {describe(error)}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        # Special tokens written in the text (by the template) are recognised; none is added around it.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _may_be_overlong(self, text: str) -> bool:
        """False where counting the tokens can be skipped, which makes opening a large dataset fast.

        A token stands for at least one byte of the normalised text, and normalising (NFC) makes UTF-8 at most
        three times as long, ASCII not at all. Drawing a prompt counts exactly.
        """
        size = len(text.encode()) * (1 if text.isascii() else 3)
        return size + 8 > self._task.max_prompt_tokens


def _canonical(value: Any) -> bytes:
    # Objects without a JSON form count by type: their repr may hold an address, which differs each time.
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__qualname__).encode() + b"\n"
