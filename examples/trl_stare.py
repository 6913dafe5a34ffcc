"""STARE inside TRL's GRPOTrainer (trl 1.16.0), offline on a CPU: python examples/trl_stare.py [STEPS]"""

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule, token_weights
from megatron_stare.tasks.sums import sum_pairs, write_tokenizer
from megatron_stare.weights import write_tiny_checkpoint

GATE = GateConfig("off", "pi", ReweightRule.c2(), "auto", auto_steps=3, auto_fraction=0.85, W_max=10)


class StareTrainer(GRPOTrainer):
    """Gives TRL g * w * A as each token's advantage: since g * w > 0, that scales its clipped objective."""

    gate = EntropyGate(GATE)

    @torch.no_grad()
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)  # this process's share of the step
        if not self.model.training:
            return batch
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)  # tokens that the policy wrote
        log_probs, entropy, _ = self._get_per_token_logps_and_entropies(
            self.model, ids, attention, mask.shape[1], self.args.per_device_train_batch_size, True
        )
        sums = torch.stack([(entropy * mask).sum(), mask.sum()])
        total, count = self.accelerator.reduce(sums)  # over all processes, before the division
        decision = self.gate.update((total / count).item())
        advantage = batch["advantages"][:, None].expand(mask.shape) * decision.advantage_factor
        if decision.rule is not None:  # None: plain GRPO
            group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
            advantage = advantage * token_weights(-log_probs, advantage, mask, decision.rule, group)
        reward, H, W = self._metrics["train"]["reward"][-1], decision.entropy, decision.W
        print(f"step {self.state.global_step}  entropy {H:.3f}  W {W:.3f}  reward {reward:.3f}", flush=True)
        return {**batch, "advantages": advantage}


def digits(completions, **_):
    return [sum(c in "0123456789" for c in text) / max(len(text), 1) for text in completions]


with tempfile.TemporaryDirectory() as scratch:
    write_tokenizer(f"{scratch}/tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(f"{scratch}/tokenizer", padding_side="left")
    model = write_tiny_checkpoint(f"{scratch}/model", vocab_size=16, tokenizer=tokenizer)
    options = {"max_steps": int(sys.argv[1]) if len(sys.argv) > 1 else 60, "max_completion_length": 6}
    options |= {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "num_generations": 8}
    options |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False}
    options |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    data, policy = Dataset.from_list(sum_pairs(256, seed=0)), AutoModelForCausalLM.from_pretrained(model)
    StareTrainer(policy, digits, GRPOConfig(scratch, **options), data, processing_class=tokenizer).train()
