"""Directories that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_stare.errors import UserError


def refuse_existing(directory: str | Path) -> None:
    """Raise UserError when something is already at `directory`."""
    if os.path.lexists(directory):
        raise UserError(f"{directory} exists already; remove it or choose another directory")


@contextmanager
def staged_directory(target: str | Path) -> Iterator[Path]:
    """A new directory beside `target` that takes its name only once it is complete and on the disk.

    On an error the staging directory is removed; a killed process leaves `NAME.tmp-*` at worst, never
    a half-written `target`.

    Raises:
        UserError: `target` exists already, or its parent cannot be written.
    """
    target = Path(target)
    refuse_existing(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    except OSError as error:
        raise UserError(f"cannot write to {target.parent}: {error}") from error
    try:
        yield stage
        _finish(stage)
        refuse_existing(target)  # rename would silently replace an empty directory
        stage.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finish(root: Path) -> None:
    """Put all on the disk, with ordinary permissions: mkdtemp and safetensors make theirs private."""
    open_to_others = 0o777 & ~_umask()
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            path.chmod(open_to_others & 0o666)
            _sync(path)
        Path(folder).chmod(open_to_others)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
