"""Checkpoints as directories that are whole or not there: names, manifest, verification, retention.

    step_0000120/            published: manifest.json names every file with its size and SHA-256
    step_0000140.tmp/        being written, or left by a process that was killed: never read
    step_0000100.damaged/    was found not to be what had been published: kept, never read again

Writers sum up what they write, on its way, in `sums-RANK.json`; `publish` makes the manifest of them, and
renames.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_stare.weights.files import sync_to_disk

MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d{7})")
_SUMS = "sums-*.json"


def directory_name(step: int) -> str:
    """Of the checkpoint after so many finished steps."""
    return f"step_{step:07d}"


def published(directory: Path) -> list[tuple[int, Path]]:
    """(finished steps, path) of what bears a checkpoint's name, newest first; nothing is looked into."""
    entries = directory.iterdir() if directory.is_dir() else []
    found = [(int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


class Sum:
    """Size and checksum of a file's bytes, taken while they are written."""

    def __init__(self) -> None:
        self._bytes, self._sha256 = 0, hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        """Go on with the next bytes."""
        self._bytes += len(data)
        self._sha256.update(data)

    def entry(self) -> dict[str, Any]:
        """What the manifest says of the file."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


def write_sums(directory: Path, rank: int, sums: dict[str, dict[str, Any]]) -> None:
    """Record size and checksum of the files that this rank has written, by their names."""
    write_json(directory / f"sums-{rank}.json", sums)


def publish(aside: Path, target: Path) -> None:
    """Make the finished directory `aside` appear as `target`, in place of an earlier one.

    Files that no writer has summed up are small, and are read again. Raises OSError.
    """
    sums: dict[str, Any] = {}
    for path in aside.glob(_SUMS):
        sums |= json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    for path in _files(aside):
        name = str(path.relative_to(aside))
        if name not in sums:
            sync_to_disk(path)
            sums[name] = _summed(path)
    write_json(aside / MANIFEST, {"format": FORMAT, "files": sums})
    for folder in {path.parent for path in _files(aside)}:
        sync_to_disk(folder)
    if target.exists():  # the same step, saved by a run that went back behind it
        shutil.rmtree(target)
    aside.rename(target)
    sync_to_disk(target.parent)


def find_damage(path: Path, share: slice = slice(None)) -> str | None:
    """What is wrong with this share of a checkpoint's files, in a sentence; None where nothing is.

    Sizes are compared before checksums: a file that was cut is found at once.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        found, files = manifest["format"], manifest["files"]
        listed = sorted(files.items())
        for _, expected in listed:
            expected["bytes"], expected["sha256"]  # noqa: B018
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not finished, or is older than version 0.2"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if found != FORMAT:
        return f"it has format {found}; this version reads {FORMAT}"
    if RUN_STATE not in files:
        return f"{RUN_STATE} is not in its {MANIFEST}"
    for name, expected in listed[share]:
        if problem := _compare(path / name, expected):
            return f"{name} {problem}"
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is never considered again; its new path."""
    target = path.with_name(f"{path.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(target)
    return target


def damaged(directory: Path) -> list[Path]:
    """What has been set aside."""
    return sorted(directory.glob("step_*.damaged*"))


def remove_unfinished(directory: Path) -> None:
    """Delete what killed writers have left."""
    for path in list(directory.glob("step_*.tmp")):
        shutil.rmtree(path, ignore_errors=True)


def prune(directory: Path, keep_last: int, keep_every: int) -> None:
    """Delete all but the last `keep_last` checkpoints, and those of every `keep_every`-th step."""
    for step, path in published(directory)[keep_last:]:
        if not (keep_every and step % keep_every == 0):
            shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _compare(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"has {size} bytes instead of {expected['bytes']}"
        if _digest(path) != expected["sha256"]:
            return "does not have the checksum that it was written with"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _summed(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())
