"""Conversion of checkpoints on disk: what it needs, its plan, and a target that is complete or absent."""

from __future__ import annotations

import fcntl
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_stare.errors import UserError
from megatron_stare.weights.dcp import is_megatron
from megatron_stare.weights.files import StagedDirectory, free_space, refuse_existing
from megatron_stare.weights.hf_config import read_hf_config
from megatron_stare.weights.pool import default_workers
from megatron_stare.weights.save import copy_companions
from megatron_stare.weights.source import INDEX, SINGLE
from megatron_stare.weights.to_hf import ToHF
from megatron_stare.weights.to_megatron import ToMegatron
from megatron_stare.weights.vocabulary import check_vocabulary

TO_MEGATRON, TO_HF = "to_megatron", "to_hf"
_STEP = re.compile(r"step_(\d{7,})")
_MINIMUM_FREE = 64 * 2**20
_PROCESS_BYTES = 300 * 2**20  # Python and torch


@dataclass(frozen=True)
class Conversion:
    """A checked plan; nothing is written before `run`.

    Attributes:
        source: the checkpoint itself, where a run directory was given.
        config_dir: where config.json and the tokenizer come from.
        direction: TO_MEGATRON or TO_HF.
    """

    source: Path
    target: Path
    config_dir: Path
    plan: ToMegatron | ToHF
    workers: int

    @property
    def direction(self) -> str:
        return TO_MEGATRON if isinstance(self.plan, ToMegatron) else TO_HF

    @property
    def read_bytes(self) -> int:
        """Bytes of the source's tensors, in the form of the pieces: what progress counts."""
        return sum(self.plan.sizes)

    @property
    def written_bytes(self) -> int:
        """Size of the weight files to come."""
        return sum(size for _, size in self.plan.files(self.workers))

    @property
    def peak_bytes(self) -> int:
        """Estimated memory of the largest process."""
        return _PROCESS_BYTES + 3 * max(self.plan.sizes)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of the target's tensors."""
        return sorted(set(self.plan.dtypes.values()), key=str)

    def lines(self) -> list[str]:
        """The plan in words."""
        entries = self.plan.entries
        files = self.plan.files(self.workers)
        tensors = sum(len(entry.hf) for entry in entries)
        forms = {TO_MEGATRON: ("Hugging Face", "Megatron"), TO_HF: ("Megatron", "Hugging Face")}
        before, after = forms[self.direction]
        return [
            f"from {self.source} ({before}, {self.plan.config.architecture})",
            f"to {self.target} ({after}, {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)})",
            f"{tensors} Hugging Face tensors, {len(self.plan.dtypes)} Megatron tensors, "
            f"{len(self.plan.items)} pieces, {gigabytes(self.read_bytes)} to read",
            f"{len(files)} weight files, {gigabytes(self.written_bytes)} to write",
            *(f"  {name}  {gigabytes(size)}" for name, size in files[:20]),
            *([f"  and {len(files) - 20} more"] if len(files) > 20 else []),
            f"{self.workers} worker processes, about {gigabytes(self.peak_bytes)} of memory at most in each",
        ]

    def run(
        self,
        advance: Callable[[int], None] = lambda _bytes: None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Convert; the target appears when it is complete and on the disk.

        Args:
            advance: called with the bytes that were read.
            check: called with the complete directory before it takes its name; raising prevents that.

        Raises:
            UserError: the source is damaged, or the target cannot be written.
        """
        try:
            with _staged(self.target) as stage:
                self.plan.run(stage, self.workers, advance)
                dtypes = self.dtypes
                copy_companions(self.config_dir, stage, dtypes[0] if len(dtypes) == 1 else None)
                if check is not None:
                    check(stage)
        except OSError as error:
            raise UserError(f"cannot write {self.target}: {error}") from error


def plan_conversion(
    source: str | Path,
    target: str | Path,
    *,
    direction: str | None = None,
    dtype: torch.dtype | None = None,
    workers: int | None = None,
    max_shard_bytes: int = 4 * 10**9,
    vocab_multiple: int = 128,
    hf_config: str | Path | None = None,
) -> Conversion:
    """Look at the source and find all that would go wrong.

    Args:
        source: a Hugging Face directory, a Megatron distributed checkpoint, or a run's directory: its newest
            checkpoint.
        direction: refuse a source that would be converted the other way.
        dtype: of the target; None: as stored.
        workers: processes; None: one a core, at most 8.
        max_shard_bytes: largest weight file of a Hugging Face directory.
        vocab_multiple: of the rows of a Megatron vocabulary.
        hf_config: directory with config.json and tokenizer, for a Megatron checkpoint without them.

    Raises:
        UserError: see `ToMegatron` and `ToHF`; also the tokenizer has ids that the model lacks, the target
            exists, or there is too little room for it.
    """
    source, target = Path(source), Path(target)
    refuse_existing(target)
    source, found = locate(source)
    if direction not in (None, found):
        other = {TO_MEGATRON: "Hugging Face", TO_HF: "Megatron"}[found]
        raise UserError(f"{source} is a {other} checkpoint already; this command converts the other way")
    config_dir = source if hf_config is None else Path(hf_config)
    if found == TO_HF and hf_config is None and not (source / "config.json").is_file():
        raise UserError(f"{source} has no config.json: name a directory that has one by --hf-config")
    config = read_hf_config(config_dir)
    if found == TO_MEGATRON:
        plan = ToMegatron(source, config, dtype, vocab_multiple)
    else:
        plan = ToHF(source, config, dtype, max_shard_bytes)
    check_vocabulary(config_dir, config.vocab_size)
    workers = min(workers or default_workers(), len(plan.items))
    conversion = Conversion(source, target, config_dir, plan, workers)
    _check_room(target, conversion.written_bytes)
    return conversion


def locate(path: Path) -> tuple[Path, str]:
    """The checkpoint at a path, and the direction in which it can be converted.

    Raises:
        UserError: there is neither a Hugging Face nor a Megatron checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"{path} does not exist, or is not a directory")
    if is_megatron(path):
        return path, TO_HF
    if (path / "config.json").is_file() or (path / INDEX).is_file() or (path / SINGLE).is_file():
        return path, TO_MEGATRON
    steps = [
        (int(match[1]), child)
        for folder in (path, path / "checkpoints")
        if folder.is_dir()
        for child in folder.iterdir()
        if (match := _STEP.fullmatch(child.name)) and is_megatron(child)
    ]
    if steps:
        return max(steps)[1], TO_HF
    raise UserError(
        f"{path} is neither a Hugging Face checkpoint (config.json) nor a Megatron one (metadata.json), "
        "nor the directory of a run that has saved one"
    )


def gigabytes(size: float) -> str:
    """A size for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A directory that becomes `target`, whose name `TARGET.converting` holds meanwhile, under a lock.

    The system frees the lock with the process: whoever finds the file unlocked knows that its conversion was
    killed, and removes what that left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = StagedDirectory(target)
    staged.join(f"{target.name}.tmp-{secrets.token_hex(4)}")
    path = target.with_name(f"{target.name}.converting")
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another conversion to {target} is running") from error
        file.seek(0)
        abandoned = file.read()
        if re.fullmatch(rf"{re.escape(target.name)}\.tmp-\w+", abandoned):
            shutil.rmtree(target.with_name(abandoned), ignore_errors=True)
        file.truncate(0)
        file.write(staged.name)
        file.flush()
        try:
            staged.path.mkdir()
            yield staged.path
            staged.publish()
        except BaseException:
            staged.discard()
            raise
        finally:
            path.unlink()


def _check_room(target: Path, needed: int) -> None:
    folder, free = free_space(target)
    if free < needed + _MINIMUM_FREE:
        raise UserError(f"{folder} has {gigabytes(free)} free, but {target.name} needs {gigabytes(needed)}")
