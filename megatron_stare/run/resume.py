"""What a resumed run's config may differ in from the one that its checkpoint was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError

_LIBERTIES = {  # None: all keys of the section
    "run": {"name", "dir", "steps", "grace_seconds", "restarts", "hang_factor", "hang_seconds"},
    "resume": None,
    "report": None,
    "evaluation": None,
    "checkpoint": None,
    "model": {"path", "layers", "vocab_multiple"},  # what the path holds is compared by itself
    "parallel": None,
    "batch": {"max_tokens_per_microbatch"},
    "optimizer": {"skip_grad_norm", "max_skipped"},
    "task": {"source", "reward_timeout", "reward_workers"},  # the cursor compares the data itself
}
_ROLLOUT = {"temperature", "max_response_tokens", "seeded", "wire"}
# The optimizer's part of a checkpoint has another form under each of these.
_FORMS = ("model.dtype", "parallel.distributed_optimizer")


def binding_values(config: Config) -> dict[str, Any]:
    """The values by dotted key that decide what the run learns: all but those that say how and where.

    Equal values, equal data and an equal seed make equal runs, up to the rounding of another layout.
    """
    values: dict[str, Any] = {"objective": config.objective}
    for section, content in config.model_dump(mode="json").items():
        if isinstance(content, dict):
            values |= {f"{section}.{key}": value for key, value in content.items() if _binds(section, key)}
    if config.optimizer.schedule != "constant":
        values["run.steps"] = config.run.steps  # the learning rate of every step depends on the last
    for key in _FORMS:
        values[key] = _value(config, key)
    return values


def saved_values(config: Config, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of the config, for `check_same` when it is resumed."""
    return {
        "values": binding_values(config),
        "architecture": dict(architecture),
        "experts_apart": config.parallel.ep > 1,
    }


def check_same(config: Config, architecture: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """Raise UserError naming every key that keeps the checkpoint `name` from being resumed with `config`.

    `resume.allow` may name keys that are to differ, except those that the stored form depends on.
    """
    mine = saved_values(config, architecture)
    lines = []
    for key, before in sorted(saved["values"].items()):
        now = mine["values"].get(key, before)
        if now == before:
            continue
        if key in _FORMS:
            lines.append(
                f"{key}={now} cannot resume {name}, saved with {key}={before}: the optimizer is stored "
                "in another form; keep the value, or start anew from an export"
            )
        elif key not in config.resume.allow:
            lines.append(
                f"{key}={now} is not what {name} was saved with ({key}={before}); keep the value, "
                f"or allow the change with resume.allow=[{key}]"
            )
    if mine["experts_apart"] != saved["experts_apart"]:
        lines.append(
            f"parallel.ep={config.parallel.ep} cannot resume {name}, saved "
            f"{'with' if saved['experts_apart'] else 'without'} expert parallelism: the optimizer is stored "
            "in another form"
        )
    different = [k for k, v in mine["architecture"].items() if saved["architecture"].get(k, v) != v]
    if different:
        lines.append(
            f"model.path={config.model.path} holds another model than {name} was saved with: "
            f"{', '.join(different)} differ"
        )
    if lines:
        raise UserError("\n".join(lines))


def check_allowances(config: Config) -> None:
    """Raise UserError for an entry of `resume.allow` that is no key, or that may differ anyway."""
    known = binding_values(config)
    for key in config.resume.allow:
        if key in _FORMS:
            raise UserError(f"resume.allow={key}: a checkpoint cannot be read with another {key}")
        if key not in known and key != "run.steps":
            raise UserError(
                f"resume.allow={key}: no such key that a checkpoint binds; an example is optimizer.lr"
            )


def _binds(section: str, key: str) -> bool:
    if section == "rollout":
        return key in _ROLLOUT
    free = _LIBERTIES.get(section, set())
    return free is not None and key not in free


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
