"""Log-probs and entropy with their gradients: memory, time and error against the usual ways.

    python -m benchmarks.logprob [--tokens N] [--vocabulary N] [--hidden N] [--repeats N] [--threads N]

The rivals project all tokens and mask afterwards, as losses on logits do: `log_softmax` is torch's, with the
entropy from it, by autograd; `megatron` is Megatron's vocabulary-parallel cross-entropy (one rank over gloo)
on a copy of the logits, which it overwrites, with the entropy from the logits by a function that reuses its
buffers, as trainers on Megatron have it. Ours projects the masked-in
third. All get the same input and the same gradient of the loss, forward and backward, in float32.

Each measurement is a process of its own, the contestants in turn. Extra memory is the peak of resident memory
(VmHWM) less what the process held with its input in place; in the backward pass, less the two gradients that
it must return. Ours writes its gradients piece by piece, which would hide as much extra memory, so its memory
is measured apart from its time, with a malloc that writes to what it hands out. Seconds are wall clock.
`grad_error` compares with float64 on the same input at full size: the largest difference over the largest
gradient, of hidden states and of the weight, whichever is worse.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import psutil
import torch
from torch import Tensor

from benchmarks.common import note, report

_LOGIT_SPREAD = 4.0  # standard deviation of the logits: distributions with a few nats of entropy
_ROWS = 64  # that the float64 reference takes at once


@click.command()
@click.option("--tokens", default=4096, show_default=True)
@click.option("--vocabulary", default=151_936, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Times each is measured.")
@click.option("--threads", default=0, help="Of each contestant; default: one a core.")
def main(tokens: int, vocabulary: int, hidden: int, repeats: int, threads: int) -> None:
    """Print one JSON line: memory, time and gradient error, ours over the others."""
    matrix = 4 * tokens * vocabulary
    needed, free = 5 * matrix + 12 * vocabulary * hidden, psutil.virtual_memory().available
    if free < needed:
        raise click.ClickException(
            f"the rivals need about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are available: "
            "lower --tokens, or end something else"
        )
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="benchmark-logprob-") as scratch:
        note(f"{tokens} tokens x {vocabulary} ids x {hidden}: the float64 reference")
        _child("reference", scratch, tokens, vocabulary, hidden)
        first, timed = _measure(scratch, repeats)
    report("logprob", *_summary(first, timed, matrix, repeats))


def _measure(scratch: str, repeats: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Of each contestant, memory and errors, and all timed runs."""
    first = {"ours": _child("ours", scratch, 1, perturb=True)}
    timed: dict[str, list[Any]] = {name: [] for name in CONTESTANTS}
    for number in range(repeats):
        for name, seen in timed.items():
            compare = name not in first
            seen.append(_child(name, scratch, int(compare)))
            if compare:
                first[name] = seen[-1]
            extra = first[name]["extra"] / 1e9
            note(f"{number + 1} of {repeats}: {name} {seen[-1]['seconds']:.1f} s, {extra:.3f} GB")
    return first, timed


def _summary(
    first: dict[str, dict[str, float]], timed: dict[str, list[dict[str, float]]], matrix: int, repeats: int
) -> tuple[dict[str, float], dict[str, Any]]:
    seconds = {name: statistics.median(r["seconds"] for r in seen) for name, seen in timed.items()}
    cpu = {name: statistics.median(r["cpu_seconds"] for r in seen) for name, seen in timed.items()}
    peak = {name: one["extra"] for name, one in first.items()}
    share = first["ours"]["rows"] / first["log_softmax"]["rows"]
    ratios = {
        "peak_over_log_softmax": peak["ours"] / peak["log_softmax"],
        "peak_over_megatron": peak["ours"] / peak["megatron"],
        "time_over_log_softmax": seconds["ours"] / seconds["log_softmax"],
        "row_time_over_log_softmax": seconds["ours"] / seconds["log_softmax"] / share,
        "grad_error": first["ours"]["grad_error"],
    }
    figures: dict[str, Any] = {
        "repeats": repeats,
        "threads": int(first["ours"]["threads"]),
        "rows_projected": int(first["ours"]["rows"]),
        "logits_gb": matrix / 1e9,
        "cpu_time_over_log_softmax": cpu["ours"] / cpu["log_softmax"],
        "row_cpu_time_over_log_softmax": cpu["ours"] / cpu["log_softmax"] / share,
        "time_over_megatron": seconds["ours"] / seconds["megatron"],
    }
    for name in timed:
        figures |= {
            f"{name}_seconds": seconds[name],
            f"{name}_cpu_seconds": cpu[name],
            f"{name}_extra_gb": peak[name] / 1e9,
            f"{name}_extra_forward_gb": first[name]["extra_forward"] / 1e9,
            f"{name}_grad_error": first[name]["grad_error"],
            f"{name}_grad_error_l2": first[name]["grad_error_l2"],
            f"{name}_value_error": first[name]["value_error"],
        }
    return ratios, figures


def _child(name: str, scratch: str, *arguments: int, perturb: bool = False) -> Any:
    command = [sys.executable, "-m", "benchmarks.logprob", "--one", name, scratch, *map(str, arguments)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    if perturb:
        environment["MALLOC_PERTURB_"] = "1"  # any byte: memory is written to when it is allocated
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        # The kernel ends the largest process when memory is short, without a word.
        sys.exit(f"{name} ended with status {done.returncode}" + (": out of memory?" * (done.returncode < 0)))
    return json.loads(done.stdout.splitlines()[-1])


def _ours(case: dict[str, Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    from megatron_stare.engine.logprob import log_prob_and_entropy

    mask = case["mask"]
    return log_prob_and_entropy(hidden[mask], weight, case["targets"][mask], vocab_size=weight.shape[0])


def _log_softmax(case: dict[str, Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    chosen = log_p.gather(1, case["targets"][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.stack([chosen, entropy])[:, case["mask"]]


class _Entropy(torch.autograd.Function):
    """Entropy of the softmax, with few matrices beside the logits: the gradient takes the softmax's place."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        p = logits - logits.amax(-1, keepdim=True)
        total = p.exp_().sum(-1, keepdim=True)
        p.div_(total)
        mean = (p * logits).sum(-1, keepdim=True)
        ctx.save_for_backward(logits, p, mean)
        return (logits.amax(-1, keepdim=True) + total.log() - mean)[:, 0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        logits, p, mean = ctx.saved_tensors
        return p.mul_(logits.sub_(mean)).mul_(-grad[:, None])  # nothing else needs the logits


def _megatron(case: dict[str, Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = hidden @ weight.t()
    chosen = -vocab_parallel_cross_entropy(logits.clone()[:, None], case["targets"][:, None])[:, 0]
    entropy = _Entropy.apply(logits)
    return torch.stack([chosen, entropy])[:, case["mask"]]


CONTESTANTS = {"ours": _ours, "log_softmax": _log_softmax, "megatron": _megatron}


def _one(name: str, scratch: str, compare: bool) -> dict[str, float]:
    """One forward and backward pass in this process, which has done nothing before."""
    # Should memory run short after all, the kernel shall end this process and no other.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if name == "megatron":
        _one_rank()
    case = torch.load(f"{scratch}/case.pt")
    hidden, weight = case["hidden"].requires_grad_(), case["weight"].requires_grad_()
    CONTESTANTS[name](_small(case), *(t.detach().requires_grad_() for t in (hidden[:64], weight[:512])))
    before = _reset_peak()
    begin, work = perf_counter(), process_time()
    out = CONTESTANTS[name](case, hidden, weight)
    forward = _memory("VmHWM") - before
    _reset_peak()
    out.backward(case["upstream"])
    seconds, cpu_seconds = perf_counter() - begin, process_time() - work
    backward = _memory("VmHWM") - before - hidden.grad.nbytes - weight.grad.nbytes
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "extra": max(forward, backward),
        "extra_forward": forward,
        "rows": int(case["mask"].sum()) if name == "ours" else hidden.shape[0],
        "threads": torch.get_num_threads(),
    }
    return result | (_errors(scratch, out.detach(), hidden.grad, weight.grad) if compare else {})


def _small(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """To warm up libraries: the first 64 tokens, with ids below 512."""
    return {"mask": case["mask"][:64], "targets": case["targets"][:64] % 512}


def _one_rank() -> None:
    import torch.distributed as dist

    from megatron_stare.engine import device

    device.prepare()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _reset_peak() -> int:
    """Make the peak of resident memory begin now; resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _errors(scratch: str, out: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> dict[str, float]:
    """Relative to float64: the largest difference over the largest entry, and Euclidean norms."""
    exact = torch.load(f"{scratch}/exact.pt", mmap=True)
    largest, euclidean = zip(
        _difference(grad_hidden, exact["grad_hidden"]),
        _difference(grad_weight, exact["grad_weight"]),
        strict=True,
    )
    return {
        "grad_error": max(largest),
        "grad_error_l2": max(euclidean),
        "value_error": _difference(out, exact["out"])[0],
    }


def _difference(ours: Tensor, exact: Tensor) -> tuple[float, float]:
    pairs = list(zip(ours.split(4096), exact.split(4096), strict=True))
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    square = sum(float((a - b).square().sum()) for a, b in pairs)
    scale = max(float(b.abs().max()) for _, b in pairs)
    return largest / scale, (square / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def _reference(scratch: str, tokens: int, vocabulary: int, width: int) -> None:
    """Make the case, targets drawn from the model, and its values and gradients by autograd in float64.

    Gradients are sums over rows, so that a few rows at a time give the whole: memory allows full size.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(_LOGIT_SPREAD / width**0.5)
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[torch.randperm(tokens, generator=generator)[: tokens // 3]] = True
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, int(mask.sum()), generator=generator)

    exact_weight = weight.double().requires_grad_()
    exact_hidden = hidden[mask].double().requires_grad_()
    outs, chosen = [], targets[mask]
    for start in range(0, len(chosen), _ROWS):
        rows = slice(start, start + _ROWS)
        log_p = torch.log_softmax(exact_hidden[rows] @ exact_weight.t(), -1)
        chosen[rows] = torch.multinomial(log_p.detach().exp(), 1, generator=generator)[:, 0]
        log_p_chosen = log_p.gather(1, chosen[rows, None])[:, 0]
        out = torch.stack([log_p_chosen, -(log_p.exp() * log_p).sum(-1)])
        out.backward(upstream[:, rows].double())
        outs.append(out.detach())
    targets[mask] = chosen
    case = {"hidden": hidden, "weight": weight, "mask": mask, "targets": targets, "upstream": upstream}
    torch.save(case, f"{scratch}/case.pt")
    grad_hidden = torch.zeros(tokens, width, dtype=torch.float64)
    grad_hidden[mask] = exact_hidden.grad
    exact = {"out": torch.cat(outs, 1), "grad_hidden": grad_hidden, "grad_weight": exact_weight.grad}
    torch.save(exact, f"{scratch}/exact.pt")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, scratch, *numbers = sys.argv[2:]
        if name == "reference":
            _reference(scratch, *map(int, numbers))
            print("{}")
        else:
            print(json.dumps(_one(name, scratch, bool(int(numbers[0])))))
    else:
        main()
