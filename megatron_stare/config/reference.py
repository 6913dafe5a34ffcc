"""The page docs/config.md, made from the schema.

    python -m megatron_stare.config.reference > docs/config.md

A test compares the page with this module's output, so neither can go its own way.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from megatron_stare.config import yaml_text
from megatron_stare.config.schema import Config, Section

_HEAD = """\
# Configuration: every key

<!-- Made by `python -m megatron_stare.config.reference > docs/config.md`. Do not edit. -->

A run is one YAML file: `megatron-stare train run.yaml [KEY=VALUE]...`. Only `model.path` and
`task.source` must be given. `megatron-stare train run.yaml --print-config` shows all keys with the
values that a run would use, and stops; the same text is kept with the run as `config.yaml`.

- **`extends: other.yaml`** (or a list of files, relative to the file that names them) takes another
  file's keys first. Sections are merged key by key; later files win, and the file itself wins over all
  that it extends.
- **`KEY=VALUE`** on the command line wins over files. Keys are dotted, values are YAML:
  `optimizer.lr=2e-6`, `rollout.endpoints=[]`, `run.dir=null`, `"task.source_args={max_terms: 3}"`.
- **Types are strict.** `"3"` is not 3, and `2.0` is not a whole number. YAML is read as version 1.2:
  `1e-6` is a number and `off` is text.
- **Mistakes end the command with exit code 2** before anything starts, one line each: an unknown key
  (with the nearest valid one), a wrong type, a value that is not allowed, and combinations that cannot
  work with this model, dataset or machine. [troubleshooting.md](troubleshooting.md) explains the messages.
"""

_TYPES = {str: "text", int: "whole number", float: "number", bool: "true / false"}
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))

# For the page only: keys whose meaning the schema leaves to their name, or that need more words here.
_MEANINGS = {
    "objective": "`rl`, or supervised training on the task's answers, without servers",
    "run.name": "name in reports; the run directory is runs/NAME where `run.dir` is null",
    "run.seed": "of prompt order, procedural rows, the servers' sampling and Megatron's generators",
    "run.steps": "steps of the whole run, those before a resume included",
    "model.path": "Hugging Face directory with tokenizer; families: [add-a-model.md](add-a-model.md)",
    "model.dtype": "of the weights in trainer and servers",
    "parallel.world_size": "trainer ranks on this node; default: GPUs left by servers; one copy on a CPU",
    "parallel.tp": "tensor parallelism; must divide heads, key-value heads and feed-forward columns",
    "parallel.pp": "pipeline stages; pp (times vpp) must divide the layers",
    "parallel.cp": "context parallelism: sequences are padded to a multiple of 2 * cp and shared out",
    "parallel.ep": "expert parallelism: must divide the experts and tp * cp * replicas; needed where tp > 1",
    "parallel.sequence_parallel": "Megatron's sequence parallelism; needs tp > 1",
    "parallel.distributed_optimizer": "spread the optimizer's state over the data-parallel ranks",
    "parallel.overlap": "overlap the reduction of gradients with the backward pass",
    "parallel.recompute": "activations computed again in the backward pass",
    "batch.prompts_per_step": "prompts of a step; with `sft`: rows of a step",
    "batch.responses_per_prompt": "responses to a prompt, which are compared; at least 2; unused with `sft`",
    "batch.max_tokens_per_microbatch": "tokens packed together; the longest prompt and response must fit",
    "optimizer.lr": "learning rate after the warm-up",
    "optimizer.min_lr": "where `linear` and `cosine` end",
    "optimizer.schedule": "of the learning rate after the warm-up",
    "optimizer.warmup_steps": "length of the linear warm-up, in optimizer updates",
    "optimizer.weight_decay": "Adam's weight decay",
    "optimizer.beta1": "Adam's average of gradients",
    "optimizer.beta2": "Adam's average of squared gradients",
    "optimizer.eps": "Adam's epsilon",
    "algorithm": "The policy objective; [objectives.md](objectives.md) has formulas and sources.",
    "algorithm.advantage": "how much better a response is than others",
    "algorithm.loss": "`ppo_clip` is also GRPO's and DAPO's; the `gspo` and `cispo` kinds clip otherwise",
    "algorithm.normalization": "what the sum over the update's tokens, over all ranks, is divided by",
    "algorithm.clip_low": "the probability ratio is clipped below at 1 - clip_low; below 1, or 1 for `cispo`",
    "algorithm.clip_high": "and above at 1 + clip_high",
    "algorithm.dual_clip": "largest ratio that counts where the advantage is negative; null: no limit",
    "stare.enabled": "false: plain GRPO",
    "algorithm.kl_estimator": "how that KL is estimated from sampled tokens",
    "algorithm.correction_level": "the ratio of each token, or of its whole response",
    "algorithm.correction_cap": "largest ratio: beyond it truncated, or masked",
    "algorithm.entropy_control": "another control of the entropy, to compare with STARE; not beside it",
    "stare.rule": "`o1` applies W; `c2` applies W and M; `four_quadrant` M and M_low; `custom` weights",
    "stare.W": "weight of high-surprisal tokens with positive advantage; where `sign` starts; unused by `pi`",
    "stare.M": "weight of high-surprisal tokens with negative advantage (rule `c2`); as W otherwise",
    "stare.top_fraction": "share of the tokens of each advantage sign that counts as high-surprisal",
    "stare.gate": "when, and how strongly, tokens are reweighted; see [concepts.md](concepts.md)",
    "stare.target_entropy": "mean token entropy to hold, in nats, above 0; `auto` measures it",
    "stare.schedule": "how W and M move from step to step; `pi` is meant for `gate: off`",
    "stare.alpha": "step of `sign`",
    "stare.W_max": "largest W of `sign` and `pi`",
    "stare.M_min": "smallest M of `sign` and `pi`",
    "stare.kp": "proportional gain of `pi`",
    "stare.ki": "integral gain of `pi`, per step; kp and ki must not both be 0",
    "rollout.host": "address that servers, router and the weight update's rendezvous listen on",
    "rollout.temperature": "of sampling; the trainer's log-probs and entropy are taken at the same one",
    "rollout.top_p": "only 1 is accepted, see [rollouts.md](rollouts.md)",
    "rollout.top_k": "only -1 or 0 (off) is accepted",
    "rollout.min_p": "only 0 is accepted",
    "rollout.max_response_tokens": "longest response; a longer one is cut off",
    "rollout.context_length": "longest prompt and response together; at most the model's positions",
    "rollout.max_running_requests": "responses that a server works on at once",
    "rollout.sync": "how new weights reach the servers",
    "task.source": "required: a .jsonl or .parquet file, `reasoning_gym:NAME`, or `package.module:function`",
    "task.reward": "`exact`, `math`, `reasoning_gym`, or `package.module:function`",
    "task.max_prompt_tokens": "longest prompt, after the chat template",
    "evaluation.every": "steps between evaluations; 0: none but `at_end`",
    "evaluation.at_end": "evaluate after the last step",
    "evaluation.prompts": "how many prompts: the first ones of the source",
    "evaluation.source": "default: the task's own, with another seed if procedural (a file: its first rows)",
    "checkpoint.at_end": "save after the last step",
    "checkpoint.keep_last": "how many checkpoints are kept",
    "checkpoint.hf_every": "every so many steps, write a Hugging Face checkpoint to RUN/hf-steps; 0: never",
    "checkpoint.hf_at_end": "write the policy as a Hugging Face checkpoint to RUN/hf after the last step",
    "report.tensorboard": "event files in RUN/tensorboard",
    "report.wandb": "Weights & Biases: online where someone is logged in, else files in RUN",
    "report.wandb_project": "project name there",
}


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD, _table("", {k: i for k, i in Config.model_fields.items() if _section(i) is None})]
    for name, info in Config.model_fields.items():
        if section := _section(info):
            about = _MEANINGS.get(name) or (section.__doc__ or "").strip().splitlines()[0]
            parts.append(f"## `{name}`\n\n{about}\n\n" + _table(f"{name}.", section.model_fields))
    return "\n".join(parts)


def meanings() -> dict[str, str | None]:
    """The line of meaning of every key; None where there is none."""
    return {key: _MEANINGS.get(key) or info.description for key, info in _leaves()}


def _leaves() -> Iterator[tuple[str, FieldInfo]]:
    for name, info in Config.model_fields.items():
        section = _section(info)
        if section is None:
            yield name, info
        else:
            yield from ((f"{name}.{key}", below) for key, below in section.model_fields.items())


def _section(info: FieldInfo) -> type[Section] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    known = meanings()
    lines = ["| key | type | default | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, info in fields.items():
        key = prefix + name
        cells = (f"`{key}`", _type(info), _default(info), _allowed(info), known[key] or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _options(info: FieldInfo) -> list[Any]:
    """The types that a key takes, without null."""
    union = typing.get_origin(info.annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(info.annotation) if union else [info.annotation]
    return [kind for kind in members if kind is not type(None)]


def _nullable(info: FieldInfo) -> bool:
    return type(None) in typing.get_args(info.annotation)


def _type(info: FieldInfo) -> str:
    return " or ".join(_type_name(kind) for kind in _options(info))


def _type_name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "choice"
    if origin is list:
        return f"list of {_TYPES[typing.get_args(kind)[0]]}"
    if origin is dict:
        return "keys and values"
    return _TYPES[kind]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return f"`{yaml_text.dump(info.get_default(call_default_factory=True), one_line=True)}`"


def _allowed(info: FieldInfo) -> str:
    choices = [kind for kind in _options(info) if typing.get_origin(kind) is typing.Literal]
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in _BOUNDS
        if getattr(rule, name, None) is not None
    ]
    allowed = bounds + ["not empty" for rule in info.metadata if getattr(rule, "min_length", None)]
    allowed += [f"`{value}`" for kind in choices for value in typing.get_args(kind)]
    if _nullable(info):
        allowed = [*(allowed or ["any"]), "`null`"]
    return ", ".join(allowed)


if __name__ == "__main__":
    print(page(), end="")
