from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.tasks import load_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def user_module() -> None:
    """Make user_functions importable, as a user's module in the working directory is."""
    sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer that adds <s> around plain text by default, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<system>", "<user>", "<assistant>"])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(str(path))
    return load_tokenizer(path)
