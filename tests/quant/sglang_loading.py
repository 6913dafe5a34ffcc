"""SGLang's own server as far as the weights: `MODEL DUMP`, or `--rules` for its rules on block sizes.

With MODEL, starts the real server (stand-ins for the GPU's kernels as elsewhere) and, when its loader has put
all weights into SGLang's modules, writes them to DUMP and ends: the FP8 kernels that come next need a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

from megatron_stare.rollout import sglang_entry, standins

ARGUMENTS = [
    *("--host", "127.0.0.1", "--port", "1", "--device", "cpu", "--dtype", "bfloat16"),
    *("--skip-tokenizer-init", "--skip-server-warmup", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"),
    *("--disable-overlap-schedule", "--max-total-tokens", "512", "--context-length", "128"),
]


def dump_instead_of_postprocessing(path: str) -> None:
    """Replace what follows the loading of weights; holds in the scheduler, which imports this file."""
    from safetensors.torch import save_file
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def dump(model, target_device):
        tensors = {name: p.data.clone().contiguous() for name, p in model.named_parameters()}
        save_file(tensors, f"{path}.part")
        os.rename(f"{path}.part", path)
        os._exit(0)

    DefaultModelLoader.postprocess_weights = staticmethod(dump)


def rules() -> None:
    """Reads [[tp, inputs, inputs a process, outputs, outputs of each part]…]; prints which are accepted."""
    standins.install()
    sys.modules.setdefault("megatron", None)
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    config = SimpleNamespace(weight_block_size=[128, 128])
    answers = []
    for tp, size, share, total, parts in json.load(sys.stdin):
        layer = SimpleNamespace(tp_group=SimpleNamespace(world_size=tp))
        try:
            Fp8LinearMethod.validate_block_quant_shapes(layer, config, size, share, total, sum(parts), parts)
            answers.append(True)
        except ValueError:
            answers.append(False)
    print(json.dumps(answers))


if __name__ in ("__main__", "__mp_main__") and sys.argv[1:] != ["--rules"]:
    sglang_entry.prepare(ARGUMENTS)
    dump_instead_of_postprocessing(sys.argv[2])
if __name__ == "__main__":
    if sys.argv[1:] == ["--rules"]:
        rules()
    else:
        sglang_entry.main([*ARGUMENTS, "--model-path", sys.argv[1]])
