"""Compare the engine's log-probs with transformers' on a text.

    python -m checkpoints_tools.compare_log_probs MODEL TEXT

Loads a Hugging Face checkpoint into Megatron in float32 on one process, measures every token of the text
with the pass that training uses, and prints the largest and the mean difference. Exit code 1 above --limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from megatron_stare.errors import UserError


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=512, show_default=True, help="Read at most this many tokens of the text.")
@click.option("--limit", default=1e-3, show_default=True, help="Largest difference that is accepted.")
def main(model: Path, text: Path, tokens: int, limit: float) -> None:
    """Compare Megatron's log-probs of TEXT with transformers', for the checkpoint in MODEL."""
    from megatron_stare.engine.verify import transformers_log_probs
    from megatron_stare.tasks import load_tokenizer

    try:
        ids = load_tokenizer(str(model))(text.read_text(encoding="utf-8"))["input_ids"][:tokens]
        ours = engine_log_probs(model, ids)
    except UserError as error:
        raise click.UsageError(str(error)) from error
    theirs = transformers_log_probs(model, [ids], None).tolist()
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    print(f"{len(gaps)} tokens: largest difference {max(gaps):.2e}, mean {sum(gaps) / len(gaps):.2e}")
    sys.exit(int(max(gaps) > limit))


def engine_log_probs(model: Path, ids: list[int]) -> list[float]:
    """Log-prob of each token from the second on, by Megatron."""
    import numpy as np

    from megatron_stare.config import Config
    from megatron_stare.engine.batch import TrainSequence
    from megatron_stare.engine.device import current
    from megatron_stare.engine.engine import Engine
    from megatron_stare.engine.parallel import initialize, shut_down

    config = Config.model_validate(
        {"model": {"path": str(model), "dtype": "float32"}, "task": {"source": "none.jsonl"}}
    )
    engine = Engine(config, current(), initialize(current(), tp=1, pp=1))
    sequence = TrainSequence(np.array(ids), np.arange(len(ids)) > 0)
    signals = engine.measure(engine.pack([[sequence]]))
    shut_down()
    return signals.log_probs[0].tolist()


if __name__ == "__main__":
    main()
