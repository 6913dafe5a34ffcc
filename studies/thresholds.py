"""How far STARE's thresholds of a small batch are from those of a large one, and what threshold_ema changes.

    python -m studies.thresholds --model runs/study-entropy/warm-up-0-0.03/hf

A policy of the sums task answers 1,024 prompts 16 times each. Batches of 1 to 256 of these groups are drawn
at random; each draw's thresholds are compared with those of all groups, and its choice of tokens with theirs.
Prints a table in Markdown and draws docs/images/study-thresholds.png.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import torch

from megatron_stare.objective import advantages
from megatron_stare.stare import ReweightRule, ThresholdEMA, surprisal_thresholds

PROMPTS, RESPONSES, TOKENS = 1024, 16, 6
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECAYS = (0.0, 0.5, 0.9, 0.97)
DRAWS, SETTLE = 400, 100  # steps of one series, and those after which an average has settled
RULE = ReweightRule.c2()


@dataclass
class Pool:
    """Groups of responses, each [groups, tokens of a group]: surprisal (nats), advantage, mask."""

    surprisal: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """`count` groups, drawn with replacement, flat."""
        rows = torch.randint(len(self.mask), (count,), generator=generator)
        return tuple(part[rows].flatten() for part in (self.surprisal, self.advantage, self.mask))

    def draw_all(self) -> tuple[torch.Tensor, ...]:
        """Every group once, flat."""
        return tuple(part.flatten() for part in (self.surprisal, self.advantage, self.mask))


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--images", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True)
def main(model: Path, images: Path) -> None:
    """The study."""
    pool = sample(model)
    whole = surprisal_thresholds(*pool.draw_all(), RULE).value
    errors = {
        (size, decay): series(pool, whole, size, decay, seed=index)
        for index, size in enumerate(SIZES)
        for decay in DECAYS
    }
    click.echo(table(errors))
    plot(errors, images / "study-thresholds.png")


@torch.no_grad()
def sample(model: Path) -> Pool:
    """Responses of the policy with their log-probs, by transformers; rewards and GRPO's advantages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_stare.tasks.sums import reward, sum_pairs

    torch.manual_seed(0)
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows = sum_pairs(PROMPTS, seed=1)
    prompts = torch.tensor([tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows])
    ids = policy.generate(
        prompts, do_sample=True, top_k=0, max_new_tokens=TOKENS, num_return_sequences=RESPONSES
    )
    answers = ids[:, prompts.shape[1] :]
    log_probs = policy(ids).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    surprisal = -log_probs.gather(-1, answers[..., None])[..., 0]
    ended = (answers == tokenizer.eos_token_id).cumsum(1)
    mask = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))  # the end itself counts
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    wanted = [row["answer"] for row in rows for _ in range(RESPONSES)]
    rewards = torch.tensor([reward(text, answer) for text, answer in zip(texts, wanted, strict=True)])
    click.echo(f"reward {rewards.mean():.3f}, mean surprisal {surprisal[mask].mean():.3f} nats", err=True)
    per_response = advantages("grpo", rewards.double().view(PROMPTS, RESPONSES)).float()
    spread = per_response[..., None].expand(-1, -1, answers.shape[1])
    return Pool(*(part.reshape(PROMPTS, -1) for part in (surprisal, spread, mask)))


@dataclass
class Error:
    """Of one series: per advantage sign, the root mean square of the threshold's error in nats, and of the
    share of tokens at or above it (10 % is asked for)."""

    threshold: tuple[float, float]
    share: tuple[float, float]


def series(pool: Pool, whole: torch.Tensor, size: int, decay: float, seed: int) -> Error:
    """A run of steps with batches of `size` groups from a policy that stands still."""
    generator = torch.Generator().manual_seed(seed)
    average = ThresholdEMA(decay) if decay else None
    surprisal, advantage, mask = pool.draw_all()
    sides = [surprisal[mask & (advantage > 0)], surprisal[mask & (advantage < 0)]]
    values, shares = [], []
    for _ in range(DRAWS):
        found = surprisal_thresholds(*pool.draw(size, generator), RULE)
        value = (average.update(found) if average else found).value
        values.append(value)
        # What the threshold would select of the whole distribution: the error that matters.
        shares.append([(side >= limit).double().mean() for side, limit in zip(sides, value, strict=True)])
    late = torch.stack(values)[SETTLE:].double()
    late_shares = torch.tensor(shares)[SETTLE:]
    finite = late.isfinite().all(1)  # a step without any advantage of one sign has no threshold
    spread = (late[finite] - whole).square().mean(0).sqrt()
    return Error(tuple(spread.tolist()), tuple((late_shares - 0.1).square().mean(0).sqrt().tolist()))


def table(errors: dict[tuple[int, float], Error]) -> str:
    """A row a batch size, a column a decay: the error of the selected share, A > 0 and A < 0."""
    head = ["groups", *(f"ema {decay:g}" for decay in DECAYS)]
    rows = [head, ["---"] * len(head)]
    for size in SIZES:
        cells = (errors[size, decay].share for decay in DECAYS)
        rows.append([str(size), *(f"{100 * plus:.1f} / {100 * minus:.1f}" for plus, minus in cells)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(errors: dict[tuple[int, float], Error], path: Path) -> None:
    """Threshold error against batch size, a line a decay, a panel a sign of the advantage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for sign, ax in enumerate(figure.subplots(1, 2, sharey=True)):
        for decay in DECAYS:
            ax.plot(SIZES, [errors[size, decay].threshold[sign] for size in SIZES], "o-", label=f"{decay:g}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("prompts a step, 16 responses each")
        ax.set_title("A > 0" if sign == 0 else "A < 0")
        ax.grid(alpha=0.25)
        ax.legend(title="threshold_ema", fontsize="small")
    figure.axes[0].set_ylabel("error of the threshold (nats, root mean square)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
