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


def free_space(target: str | Path) -> tuple[Path, int]:
    """Where something named `target` would lie, as far as that exists, and the bytes that are free there."""
    folder = next(path for path in Path(target).absolute().parents if path.is_dir())
    return folder, shutil.disk_usage(folder).free


class StagedDirectory:
    """A directory beside `target` that takes its name only once it is complete and on the disk.

    A killed process leaves `NAME.tmp-*` at worst, never a half-written `target`. Several processes may
    fill it: one creates and publishes it, the others `join` it by its name.

    Raises:
        UserError: `target` exists already, or its parent cannot be written.
    """

    def __init__(self, target: str | Path) -> None:
        self.target = Path(target)
        self.name = ""

    @property
    def path(self) -> Path:
        """Where to write meanwhile."""
        return self.target.with_name(self.name)

    def create(self) -> None:
        """Make the directory."""
        refuse_existing(self.target)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f"{self.target.name}.tmp-", dir=self.target.parent)
        except OSError as error:
            raise UserError(f"cannot write to {self.target.parent}: {error}") from error
        self.name = Path(made).name

    def join(self, name: str) -> None:
        """Fill a directory that another process created."""
        self.name = name

    def publish(self) -> None:
        """Put all on the disk and give the directory its name."""
        _finish(self.path)
        refuse_existing(self.target)  # rename would silently replace an empty directory
        self.path.rename(self.target)
        sync_to_disk(self.target.parent)

    def discard(self) -> None:
        """Remove what was written."""
        if self.name:
            shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def staged_directory(target: str | Path) -> Iterator[Path]:
    """A `StagedDirectory` for one process: published at the end of the block, discarded on an error."""
    staged = StagedDirectory(target)
    staged.create()
    try:
        yield staged.path
        staged.publish()
    except BaseException:
        staged.discard()
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
            sync_to_disk(path)
        Path(folder).chmod(open_to_others)
        sync_to_disk(Path(folder))


def sync_to_disk(path: Path) -> None:
    """Return when what a file holds, or which names a directory has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
