"""What FP8 recipes do to a policy as RL sees it: log-probs, entropy, thresholds, the choice of tokens.

    python -m studies.fp8 --model DIR        # e.g. from python -m checkpoints_tools.smollm2 DIR

The model answers sums 8 times each, in float32. The same responses are then read in bfloat16 and with each
emulated recipe (megatron_stare/quant/emulation.py), and compared with float32: every response token's
log-prob and entropy, the thresholds, the chosen tokens, and the gradient of the policy objective.
Prints a table in Markdown and draws docs/images/study-fp8.png.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from megatron_stare.engine.logprob import log_prob_and_entropy
from megatron_stare.objective import advantages
from megatron_stare.quant.emulation import RECIPES, emulate
from megatron_stare.stare import ReweightRule, surprisal_thresholds

PROMPTS, RESPONSES, TOKENS = 24, 8, 32
GRADIENT_ROWS = 16  # responses of which the gradient is taken
RULE = ReweightRule.c2()


@dataclass
class Responses:
    """ids: prompts (padded on the left) and responses; mask: [responses, TOKENS]; advantage: [responses]."""

    ids: torch.Tensor
    attention: torch.Tensor
    mask: torch.Tensor
    advantage: torch.Tensor


@dataclass
class Reading:
    """What one precision says of the responses: log-prob and entropy (nats) of each token, and a gradient."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    gradient: torch.Tensor


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--images", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True)
def main(model: Path, images: Path) -> None:
    """The study."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    responses = sample(exact, AutoTokenizer.from_pretrained(model, padding_side="left"))
    reference = read(exact, responses)
    readings = {}
    for name, change in _variants().items():
        click.echo(name, err=True)
        readings[name] = read(change(copy.deepcopy(exact)), responses)
    click.echo(table(reference, readings, responses))
    plot(reference, readings, responses, images / "study-fp8.png")


def _variants() -> dict[str, Callable[[Any], Any]]:
    def with_recipe(name: str, keep_ends: int) -> Callable[[Any], Any]:
        def change(model: Any) -> Any:
            emulate(model.model.layers, RECIPES[name], keep_ends=keep_ends)
            return model

        return change

    recipes = {name: with_recipe(name, 0) for name in RECIPES}
    kept = {
        f"{name}, two layers kept at either end": with_recipe(name, 2) for name in ("tensorwise", "blockwise")
    }
    return {"bfloat16": operator.methodcaller("to", torch.bfloat16)} | recipes | kept


@torch.no_grad()
def sample(model: Any, tokenizer: Any) -> Responses:
    """Answers to sums at temperature 1, with GRPO's advantages of whether they hold the right number."""
    torch.manual_seed(0)
    sums = [(2 + i % 8, 3 + 5 * i % 7) for i in range(PROMPTS)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}? Answer with a short sentence."}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for a, b in sums
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids = model.generate(
        **batch, do_sample=True, top_k=0, max_new_tokens=TOKENS, num_return_sequences=RESPONSES
    )
    start = batch.input_ids.shape[1]
    answers = ids[:, start:]
    over = (answers == tokenizer.eos_token_id).cumsum(1)
    mask = (over == 0) | ((over == 1) & (answers == tokenizer.eos_token_id))
    written = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [
        str(a + b) in written[i * RESPONSES + j] for i, (a, b) in enumerate(sums) for j in range(RESPONSES)
    ]
    rewards = torch.tensor(right, dtype=torch.float64).view(PROMPTS, RESPONSES)
    click.echo(f"{int(mask.sum())} response tokens, {rewards.mean():.2f} right", err=True)
    attention = torch.cat([batch.attention_mask.repeat_interleave(RESPONSES, 0), mask.long()], 1)
    return Responses(ids, attention, mask, advantages("grpo", rewards).flatten().float())


def read(model: Any, responses: Responses) -> Reading:
    """Every response token's log-prob and entropy, and the gradient of the policy objective of some."""
    with torch.no_grad():
        parts = [_token_values(model, responses, slice(i, i + 32)) for i in range(0, len(responses.ids), 32)]
    log_probs, entropy = (torch.cat(values)[responses.mask] for values in zip(*parts, strict=True))
    chosen = responses.advantage.abs().topk(GRADIENT_ROWS).indices
    model.zero_grad()
    values, _ = _token_values(model, responses, chosen)
    (-(values * responses.advantage[chosen, None])[responses.mask[chosen]].mean()).backward()
    layers = model.model.layers.parameters()
    return Reading(log_probs, entropy, torch.cat([p.grad.flatten().float() for p in layers]))


def _token_values(model: Any, responses: Responses, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, attention = responses.ids[rows], responses.attention[rows]
    hidden = model.model(ids, attention_mask=attention).last_hidden_state[:, -TOKENS - 1 : -1]
    targets, weight = ids[:, -TOKENS:], model.lm_head.weight
    result = log_prob_and_entropy(hidden.flatten(0, 1), weight, targets.flatten(), vocab_size=weight.shape[0])
    return tuple(part.view(targets.shape) for part in result)


def _choice(reading: Reading, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds of A > 0 and A < 0 (nats), and which tokens are high."""
    mask = torch.ones_like(advantage, dtype=torch.bool)
    limits = surprisal_thresholds(-reading.log_probs, advantage, mask, RULE).value
    surprisal = -reading.log_probs
    high = ((advantage > 0) & (surprisal >= limits[0])) | ((advantage < 0) & (surprisal >= limits[1]))
    return limits, high


def table(reference: Reading, readings: dict[str, Reading], responses: Responses) -> str:
    """A row a precision: differences from float32."""
    advantage = responses.advantage[:, None].expand(responses.mask.shape)[responses.mask]
    limits, high = _choice(reference, advantage)
    head = [
        *("precision", "mean abs log-prob (nats)", "largest", "mean entropy, float32 = "),
        *("thresholds A > 0, A < 0 (nats)", "same chosen tokens", "gradient: cosine", "length"),
    ]
    head[3] += f"{reference.entropy.mean():.4f}"
    rows = [head, ["---"] * len(head)]
    for name, reading in {"float32": reference, **readings}.items():
        gap = (reading.log_probs - reference.log_probs).abs()
        theirs, chosen = _choice(reading, advantage)
        # In float64: over so many elements float32 sums are off by per cents.
        ours, exact = reading.gradient.double(), reference.gradient.double()
        length = ours.norm() / exact.norm()
        cosine = (ours @ exact) / (ours.norm() * exact.norm())
        rows.append(
            [
                name,
                f"{gap.mean():.4f}",
                f"{gap.max():.3f}",
                f"{reading.entropy.mean():.4f}",
                f"{theirs[0]:.3f}, {theirs[1]:.3f}",
                f"{100 * (chosen & high).sum() / high.sum():.1f} %",
                f"{cosine:.4f}",
                f"{length:.3f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(reference: Reading, readings: dict[str, Reading], responses: Responses, path: Path) -> None:
    """How log-prob differences are spread, and where they fall: against the token's surprisal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    spread, where = figure.subplots(1, 2)
    shares = torch.linspace(0, 1, 200)
    edges = torch.quantile(-reference.log_probs, torch.linspace(0, 1, 11))
    bins = torch.bucketize(-reference.log_probs, edges[1:-1])
    for name, reading in readings.items():
        gap = (reading.log_probs - reference.log_probs).abs()
        spread.plot(torch.quantile(gap, shares).clamp(min=1e-6), shares, label=name)
        where.plot(range(1, 11), [gap[bins == i].mean() for i in range(10)], "o-", label=name)
    spread.set_xscale("log")
    spread.set_xlabel("difference of a token's log-prob from float32 (nats)")
    spread.set_ylabel("share of the tokens below")
    spread.legend(fontsize="small")
    where.set_yscale("log")
    where.set_xlabel("tenth of the tokens by surprisal (10: highest)")
    where.set_ylabel("mean difference (nats)")
    for ax in (spread, where):
        ax.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
