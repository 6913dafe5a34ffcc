"""A plan for people: tables on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_stare.plan.plan import Plan

_GB = 1e9


def show_plan(plan: Plan, console: Console) -> None:
    """Print everything that a plan says."""
    model, parallel = plan.model, plan.config.parallel
    console.print(f"[bold]{plan.config.run.name}[/]: {model.source}", highlight=False)
    console.print(
        f"{model.parameters:,} parameters ({model.active_parameters / 1e9:.2f} B a token); "
        f"{plan.trainer_ranks} trainer ranks"
        + (f" + {plan.served.gpus} GPUs of servers" if plan.served else ""),
        highlight=False,
    )
    console.print(f"layout: {describe_layout(plan)}; recompute {parallel.recompute}", highlight=False)
    if plan.rules:
        console.print("\n[bold red]broken rules[/] (nothing was measured)")
    for line in (*plan.rules, *plan.problems):
        console.print(f"  [red]{line}[/]", highlight=False, soft_wrap=True)
    if plan.stages:
        console.print(_memory_table(plan))
        console.print(_traffic_table(plan))
        if plan.served:
            _show_serving(plan, console)
        console.print(_time_table(plan))
    console.print("[bold]assumptions[/]")
    for line in plan.assumptions():
        console.print(f"  - {line}", highlight=False, soft_wrap=True)
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]does not fit, or breaks a rule[/]"
    console.print(f"{plan.config.run.name}: {verdict}", highlight=False)


def describe_layout(plan: Plan) -> str:
    """`TP 8 (SP) · PP 4 · DP 16`: sizes above 1, and always DP."""
    p = plan.config.parallel
    sizes = [("TP", p.tp), ("PP", p.pp), ("VPP", p.vpp or 1), ("CP", p.cp), ("EP", p.ep)]
    parts = [
        f"{name} {size}" + (" with SP" if name == "TP" and p.sequence_parallel else "")
        for name, size in sizes
        if size > 1
    ]
    optimizer = ", distributed optimizer" if p.distributed_optimizer else ""
    return " · ".join([*parts, f"DP {plan.work.replicas}{optimizer}"])


def show_search(plans: list[Plan], console: Console, limit: int = 10) -> None:
    """Print the layouts that fit, best first."""
    if not plans:
        console.print("[bold red]no layout fits[/]: more GPUs, more memory, or a smaller "
                      "batch.max_tokens_per_microbatch")  # fmt: skip
        return
    columns = ["layout", "recompute", "GB a GPU", "step", "tokens/s/GPU"]
    table = _table(f"{len(plans)} layouts fit; the fastest by estimate", *columns)
    for plan in plans[:limit]:
        table.add_row(
            describe_layout(plan),
            plan.config.parallel.recompute,
            f"{plan.worst.total / _GB:.1f}",
            f"{plan.time.total:.1f} s",
            f"{plan.work.tokens / plan.time.total / plan.gpus:.0f}",
        )
    console.print(table)
    best = plans[0].config.parallel
    keys = ("tp", "pp", "cp", "ep", "sequence_parallel", "distributed_optimizer", "overlap", "recompute")
    values = " ".join(f"parallel.{k}={str(getattr(best, k)).lower()}" for k in keys)
    console.print(f"the first: {values}", highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _memory_table(plan: Plan) -> Table:
    room = plan.hardware.memory - plan.hardware.reserve
    table = _table(
        f"memory of a trainer rank, GB ({room / _GB:.1f} are free; log-prob is part of activ.)",
        *("stage", "B params", "weights", "grads", "optim.", "activ.", "in flight"),
        *("log-prob", "other", "total"),
    )
    for s in plan.stages:
        worst = s is plan.worst
        other = s.total - s.weights - s.gradients - s.optimizer - s.activations
        table.add_row(
            f"{s.stage}{' *' if worst and len(plan.stages) > 1 else ''}",
            f"{s.parameters / 1e9:.2f}",
            *(f"{value / _GB:.1f}" for value in (s.weights, s.gradients, s.optimizer, s.activations)),
            str(s.in_flight),
            f"{s.log_prob / _GB:.1f}",
            f"{max(0, other) / _GB:.1f}",
            f"{s.total / _GB:.1f}",
            style="bold" if worst else None,
        )
    return table


def _traffic_table(plan: Plan) -> Table:
    table = _table("sent by the busiest rank in a step", "kind", "GB")
    for name, size in sorted(plan.sent.items()):
        table.add_row(name, f"{size / _GB:.2f}")
    if plan.served:
        table.add_row("weight update, by rank 0", f"{plan.served.sync_bytes / _GB:.2f}")
    return table


def _show_serving(plan: Plan, console: Console) -> None:
    s = plan.served
    table = _table(f"SGLang: {s.servers} servers of {s.gpus // s.servers} GPUs", "of a server", "")
    table.add_row("weights a GPU", f"{s.weights_a_gpu / _GB:.1f} GB")
    table.add_row("KV cache a token", f"{s.kv_bytes_a_token:,} bytes")
    table.add_row("tokens that fit", f"{s.kv_tokens:,}")
    table.add_row("responses of full context length", f"{s.full_length_responses:,}")
    table.add_row("responses of mean length", f"{s.mean_length_responses:,}")
    table.add_row("responses at once (assumed)", f"{s.concurrent:,}")
    console.print(table)


def _time_table(plan: Plan) -> Table:
    t = plan.time
    table = _table("estimated time of a step", "part", "seconds")
    for name in ("rollout", "measure", "learn", "communication", "sync"):
        table.add_row(name, f"{getattr(t, name):.1f}")
    table.add_row("total", f"{t.total:.1f}", style="bold")
    table.add_row("tokens a second and GPU", f"{plan.work.tokens / t.total / plan.gpus:.0f}")
    return table
