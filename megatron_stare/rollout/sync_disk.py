"""Weights by way of a directory that trainer and servers share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_stare.config.schema import RolloutSection
from megatron_stare.rollout.endpoints import Endpoints
from megatron_stare.rollout.sync import Publisher, buckets
from megatron_stare.rollout.threads import in_thread

_SHARD_BYTES = 4 << 30
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")  # config and tokenizer; never weights or their index


class DiskPublisher(Publisher):
    """Writes sharded safetensors with an index, then has every server load them.

    Memory stays at one shard. The copy before the last is deleted once the servers have the new one.
    """

    def __init__(
        self, rollout: RolloutSection, endpoints: Endpoints, scratch_dir: Path, model_path: Path | None
    ) -> None:
        super().__init__(rollout, endpoints)
        self._scratch = scratch_dir.absolute()  # servers may run in another directory
        self._model_path = model_path
        self._last: Path | None = None

    def _send(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        directory = self._scratch / f"weights-{version}"
        self._write(named_tensors, directory)
        self._choose()
        self._pause()
        # A server that fails on the way holds a mixture.
        marking = in_thread(self._set_version, f"incomplete-{version}")
        self._flush()
        self._wait([marking])
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": False}
        self._each("/update_weights_from_disk", body, timeout=self._rollout.request_timeout)
        if self._last not in (None, directory):
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = directory

    def _write(self, named_tensors: Iterator[tuple[str, torch.Tensor]], directory: Path) -> None:
        aside = directory.with_name(directory.name + ".partial")
        for old in (aside, directory):  # of an interrupted run, or of a version published again
            shutil.rmtree(old, ignore_errors=True)
        aside.mkdir(parents=True)
        where: dict[str, str] = {}
        size = 0
        for number, bucket in enumerate(buckets(named_tensors, _SHARD_BYTES), start=1):
            file = f"model-{number:05d}.safetensors"
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
            save_file(tensors, aside / file, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, file)
            size += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        if self._model_path is not None:
            for pattern in _BESIDE:
                for file in self._model_path.glob(pattern):
                    if not file.name.endswith(".index.json"):
                        shutil.copy2(file, aside / file.name)
        aside.rename(directory)

    def close(self) -> None:
        super().close()
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
            self._last = None
