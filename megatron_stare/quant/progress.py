"""Progress bars on stderr, gone when they are done; none where it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(description: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar for `total` items or bytes; gives a function that is called with what was done since."""
    amount = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    # The stream of this moment: ModelOpt's messages are kept off the console by redirecting sys.stderr.
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
