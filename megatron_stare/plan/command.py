"""The command `plan`: its options, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from megatron_stare.plan.hardware import Hardware, parse_bytes

_RATES = {
    "flops": (1e12, "TFLOP/s of a GPU in bf16."),
    "hbm": (1e12, "TB/s of a GPU's memory."),
    "nvlink": (1e9, "GB/s a GPU and direction within a node."),
    "network": (1e9, "GB/s a GPU and direction between nodes."),
}
_SHARES = {
    "train_efficiency": "Share of the peak FLOP/s that training reaches.",
    "decode_efficiency": "Share of the memory's bandwidth that decoding reaches.",
    "link_efficiency": "Share of the links' bandwidth that collectives reach.",
    "overlap": "Share of the gradients' reduction that hides, with parallel.overlap.",
}


def plan_options(command: Callable) -> Callable:
    """All options of `plan`, after CONFIG and its overrides."""
    defaults = Hardware()
    options = [
        click.option("--gpus", type=click.IntRange(min=1), help="GPUs of trainer and servers together; "
                     "default: parallel.world_size, and the servers'."),
        click.option("--memory", default="80GB", show_default=True, help="Memory of a GPU."),
        click.option("--reserve", default="4GB", show_default=True,
                     help="Kept free for CUDA, NCCL and the allocator's gaps."),
        click.option("--model", help="A shipped architecture or a directory, instead of model.path."),
        click.option("--layers", type=click.Choice(["transformer_engine", "local"]),
                     help="Default: Transformer Engine's, unless model.layers=local."),
        click.option("--mean-prompt", type=click.IntRange(min=1), 
                     help="Tokens; default: max_prompt_tokens / 4."),
        click.option("--mean-response", type=click.IntRange(min=1),
                     help="Tokens; default: max_response_tokens / 2."),
        click.option("--gpus-per-node", type=click.IntRange(min=1), default=defaults.gpus_per_node,
                     show_default=True),
        click.option("--search", "searching", is_flag=True, help="Propose layouts that fit, fastest first."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables."),
    ]  # fmt: skip
    for name, (unit, text) in _RATES.items():
        value = getattr(defaults, name) / unit
        kind = click.FloatRange(min=0, min_open=True)
        options.append(click.option(f"--{name}", type=kind, default=value, show_default=True, help=text))
    for name, text in _SHARES.items():
        kind = click.FloatRange(min=0, max=1, min_open=name != "overlap")
        flag = f"--{name.replace('_', '-')}"
        options.append(
            click.option(flag, name, type=kind, default=getattr(defaults, name), show_default=True, help=text)
        )
    for option in reversed(options):
        command = option(command)
    return command


def plan_command(
    config: Path, overrides: list[str], *, searching: bool, as_json: bool, **options: Any
) -> bool:
    """Print the plan (or, with `searching`, the layouts that fit) of a configuration; whether it fits.

    Raises UserError for a configuration, a model or an option that cannot be read.
    """
    from rich.console import Console
    from rich.progress import track

    from megatron_stare.config.load import load_config
    from megatron_stare.plan.architecture import find_architecture
    from megatron_stare.plan.plan import Options, make_plan
    from megatron_stare.plan.show import show_plan, show_search

    loaded = load_config(config, overrides)
    model = find_architecture(loaded.model.path, options["model"])
    wanted = Options(
        hardware=_hardware(options),
        **{name: options[name] for name in ("gpus", "mean_prompt", "mean_response", "layers")},
    )
    console, progress = Console(), Console(stderr=True)
    if searching:
        from megatron_stare.plan.search import search

        def bar(candidates):
            return track(candidates, "trying layouts", console=progress, transient=True)

        plans = search(loaded, model, wanted, bar)
        if as_json:
            print(json.dumps([plan.to_json() for plan in plans]))
        else:
            show_search(plans, console)
        return bool(plans)
    plan = make_plan(loaded, model, wanted)
    if as_json:
        print(json.dumps(plan.to_json()))
    else:
        show_plan(plan, console)
    return plan.fits


def _hardware(options: dict[str, Any]) -> Hardware:
    return Hardware(
        memory=parse_bytes(options["memory"]),
        reserve=parse_bytes(options["reserve"]),
        gpus_per_node=options["gpus_per_node"],
        **{name: options[name] * unit for name, (unit, _) in _RATES.items()},
        **{name: options[name] for name in _SHARES},
    )
