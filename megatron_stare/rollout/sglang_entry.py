"""`python -m megatron_stare.rollout.sglang_entry ARGS`: SGLang's launch_server, also where there is no GPU.

ARGS are SGLang's own. With CUDA this is `sglang.launch_server` and nothing else.
Without, the stand-ins of `standins.py` are installed first. SGLang spawns
processes, which import this file again as `__mp_main__`: hence the code at module
level. A plain import of this module does nothing and loads nothing.
"""

from __future__ import annotations

import os
import sys

from megatron_stare.rollout import child, standins


def without_cuda(arguments: list[str]) -> bool:
    """Whether the server is to run without CUDA: asked for by `--device cpu`, or there is none."""
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag == "--device":
            return value == "cpu"
        if flag.startswith("--device="):
            return flag == "--device=cpu"
    import torch

    return not torch.cuda.is_available()


def prepare(arguments: list[str]) -> None:
    """What must hold in the server's first process and in all that it spawns."""
    child.mask_in_logs(child.api_key())
    if without_cuda(arguments):
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        # Compiling pays on no CPU here; a repetition penalty would stop the server 17 s for it.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        standins.install()
        # A debugging aid of SGLang imports Megatron where it is installed: 4 s in each process, for nothing.
        sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
        if "torch_native" in arguments:
            from megatron_stare.rollout import cpu_attention

            cpu_attention.register(exact="--enable-deterministic-inference" in arguments)
        standins.skip_garbage_collection()
        if "--enable-deterministic-inference" in arguments:
            standins.allow_seeded_sampling()


def main(arguments: list[str]) -> None:
    """Serve until a signal ends it."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    key = child.api_key()
    # One word: a key that begins with a dash, as every 64th does, would else be taken for an option.
    server_args = prepare_server_args([*arguments, *([f"--api-key={key}"] if key else [])])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    child.die_with_parent()
    prepare(sys.argv[1:])
if __name__ == "__main__":
    main(sys.argv[1:])
