"""Where the rows of a task come from: JSONL, Parquet, reasoning-gym, or a user's function.

A source of rows is a sequence of dicts. Reading a row may raise UserError,
which names the place; `where(i)` names the place of a good row for messages
of whoever finds fault with its content.
"""

from __future__ import annotations

import codecs
import inspect
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_stare.errors import UserError
from megatron_stare.tasks.lookup import describe, import_function, is_function_path, nearest

Row = dict[str, Any]

GYM_PREFIX = "reasoning_gym:"
GYM_ENTRY = "reasoning_gym"
"""Column, and key of Prompt.extra, that holds a reasoning-gym entry."""

_FORMS = "a .jsonl or .parquet file, reasoning_gym:NAME, or package.module:function"


class Rows(Protocol):
    """A sequence of raw rows that knows where each comes from.

    `cheap` tells whether going through all of them before a run is affordable.
    """

    cheap: bool

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    def __iter__(self) -> Iterator[Row]: ...
    def where(self, index: int) -> str: ...


def open_rows(source: str, size: int, seed: int, args: dict[str, Any]) -> Rows:
    """Open what `task.source` names. `size`, `seed` and `args` are for procedural sources.

    Raises:
        UserError: no such file, task or function; a file that is not what its suffix says; arguments refused.
    """
    if source.startswith(GYM_PREFIX):
        return ReasoningGymRows(source.removeprefix(GYM_PREFIX), size, seed, args)
    readers = {".jsonl": JsonlRows, ".parquet": ParquetRows}
    path = Path(source)
    if path.suffix in readers:
        if args:
            raise UserError(f"task.source_args={args}: a file takes none (task.source={source})")
        return readers[path.suffix](_existing(path))
    if is_function_path(source):
        return FunctionRows(source, size, seed, args)
    raise UserError(f"task.source={source}: not {_FORMS}")


class JsonlRows:
    """One JSON object a line (UTF-8, blank lines ignored). In memory are only the places of the lines."""

    cheap = True

    def __init__(self, path: Path) -> None:
        self._path = path
        # Kept open, so that a file replaced during the run does not change what is read.
        self._file = path.open("rb")
        self._starts, self._lengths, self._lines = array("q"), array("q"), array("q")
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._starts.append(start)
                self._lengths.append(len(line))
                self._lines.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        # pread leaves no file position behind, so threads may read at once.
        line = os.pread(self._file.fileno(), self._lengths[index], self._starts[index])
        try:
            row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{self.where(index)}: not UTF-8 (byte {error.start})") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{self.where(index)}: not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise UserError(f"{self.where(index)}: a JSON object is needed, found {type(row).__name__}")
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"


class ParquetRows:
    """A Parquet file, kept in memory in Arrow's compact form."""

    cheap = True

    def __init__(self, path: Path) -> None:
        # Imported here: only this source needs it, and reward workers import this package too.
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        try:
            self._table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable Parquet file: {describe(error)}") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"


class ReasoningGymRows:
    """A reasoning-gym task. Rows are generated when they are read, the same for the same index and seed."""

    # Some families take a second for a row (sokoban, knight_swap), so a run cannot wait for all of them.
    cheap = False

    def __init__(self, name: str, size: int, seed: int, args: dict[str, Any]) -> None:
        self._name = name
        self._dataset = create_gym(name, size, seed, args)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        entry = self._dataset[index]
        source = entry.get("metadata", {}).get("source_dataset", self._name)
        return {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "data_source": f"{GYM_PREFIX}{source}",
            GYM_ENTRY: entry,
        }

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{GYM_PREFIX}{self._name}: row {index}"


class FunctionRows:
    """What a user's factory returned: function(size=…, seed=…, **source_args) -> sequence of dicts."""

    cheap = True

    def __init__(self, path: str, size: int, seed: int, args: dict[str, Any]) -> None:
        self._path = path
        function = import_function(path, "task.source")
        try:
            inspect.signature(function).bind(size=size, seed=seed, **args)
        except TypeError as error:
            raise UserError(
                f"task.source={path}: {error}; it is called with size, seed and task.source_args={args}"
            ) from error
        except ValueError:
            pass  # a builtin has no signature to check
        try:
            self._rows: Sequence[Row] = function(size=size, seed=seed, **args)
        except Exception as error:
            raise UserError(f"task.source={path} raised {describe(error)}") from error
        if not (hasattr(self._rows, "__len__") and hasattr(self._rows, "__getitem__")):
            raise UserError(
                f"task.source={path} returned a {type(self._rows).__name__}; a sequence of dicts is needed"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise UserError(f"{self.where(index)}: a dict is needed, found {type(row).__name__}")
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"


def create_gym(name: str, size: int, seed: int, args: dict[str, Any]) -> Any:
    """A reasoning-gym dataset by name. For "composite", `datasets` is a list of {name, weight, config}.

    Raises:
        UserError: unknown name (the nearest are named), or arguments that the task refuses.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(
            f"task.source={GYM_PREFIX}{name}: reasoning-gym has no such task{nearest(name, DATASETS)}"
            f" ({len(DATASETS)} tasks)"
        )
    allowed = {field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("size", "seed")}
    for key in args:
        if key not in allowed:
            raise UserError(
                f"task.source_args.{key}: {name} does not know it{nearest(key, allowed)} "
                f"(allowed: {', '.join(sorted(allowed))})"
            )
    try:
        if name == "composite":
            defaults = {"weight": 1.0, "config": {}}
            args = args | {
                "datasets": [DatasetSpec(**(defaults | spec)) for spec in args.get("datasets", [])]
            }
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **args)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"task.source={GYM_PREFIX}{name} refuses source_args={args}: {describe(error)}"
        ) from error


def _existing(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"task.source={path}: a directory; a file is needed")
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"task.source={path}: no such file{nearest(path.name, names)}")
