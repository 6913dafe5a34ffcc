"""TRL's side of benchmarks.step: GRPOTrainer on the sums task; prints tokens and seconds of each step.

python -m benchmarks.trl_steps MODEL SCRATCH STEPS
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.step import PROMPTS, RESPONSE_TOKENS, RESPONSES


def main(model: str, scratch: str, steps: str) -> None:
    """Train, and print one JSON list."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megatron_stare.tasks.sums import reward, sum_pairs

    rows: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()
            self.tokens = trainer.tokens

        def on_step_end(self, *_, **__):
            rows.append({"tokens": trainer.tokens - self.tokens, "seconds": time.perf_counter() - self.begin})

    class Counting(GRPOTrainer):
        tokens = 0

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            self.tokens += int(batch["completion_mask"].sum())
            return batch

    def right(completions, answer, **_):
        return [reward(text, wanted) for text, wanted in zip(completions, answer, strict=True)]

    # One batch of all responses, one update, no reference model, nothing written or logged: as little as
    # TRL can do for the same step.
    options = {
        "max_steps": int(steps),
        "max_completion_length": RESPONSE_TOKENS,
        "per_device_train_batch_size": PROMPTS * RESPONSES,
        "num_generations": RESPONSES,
        "learning_rate": 1e-3,
        "beta": 0.0,
        "temperature": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model)
    trainer = Counting(
        policy,
        right,
        GRPOConfig(scratch, **options),
        Dataset.from_list(sum_pairs(1024, seed=0)),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
