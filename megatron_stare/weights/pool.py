"""Worker processes that share out the tensors of a checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from megatron_stare.errors import UserError

_TASK_BYTES = 64 * 2**20
_job: Job


class Job(Protocol):
    """What a worker does; travels to it by pickle."""

    def open(self) -> None:
        """Prepare, in the worker."""

    def do(self, item: Any) -> Any:
        """Convert one item."""


def default_workers() -> int:
    """The cores that this process may use, at most 8: more would wait for the disk."""
    return min(8, len(os.sched_getaffinity(0)))


def share_out(
    job: Job,
    items: Sequence[Any],
    sizes: Sequence[int],
    *,
    workers: int,
    advance: Callable[[int], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Let `workers` processes do all items, and return their results in the items' order.

    Args:
        sizes: bytes of each item; small neighbours are handed out together.
        advance: called with the bytes that were done.
        meanwhile: called once, while the workers work.

    Raises:
        UserError: from an item, or when a worker was killed. The other workers end with their item.
    """
    tasks = _portions(items, sizes, min(_TASK_BYTES, sum(sizes) // (4 * workers)))
    results: dict[int, list[Any]] = {}
    context = multiprocessing.get_context(_start_method())
    workers = min(workers, len(tasks))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(job,)) as pool:
        waiting = {pool.submit(_do, task): (i, size) for i, (task, size) in enumerate(tasks)}
        try:
            meanwhile()
            for future in as_completed(waiting):
                number, size = waiting[future]
                results[number] = future.result()
                advance(size)
        except BrokenProcessPool as error:
            raise UserError("a worker process was killed; is there enough memory?") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [result for number in range(len(tasks)) for result in results[number]]


def _start_method() -> str:
    """Forked workers have torch imported already, but a fork copies only one thread of several."""
    return "fork" if threading.active_count() == 1 else "spawn"


def _portions(items: Sequence[Any], sizes: Sequence[int], limit: int) -> list[tuple[list[Any], int]]:
    tasks: list[list[Any]] = []
    totals: list[int] = []
    for item, size in zip(items, sizes, strict=True):
        if not tasks or totals[-1] + size > limit:
            tasks.append([])
            totals.append(0)
        tasks[-1].append(item)
        totals[-1] += size
    return list(zip(tasks, totals, strict=True))


def _begin(job: Job) -> None:
    import torch

    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the processes are the parallelism
    _keep_freed_memory()
    _job = job
    _job.open()


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, which would wait for their next task for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _keep_freed_memory() -> None:
    """Let freed tensors' memory be used again at once.

    glibc gives large blocks back to the system when they are freed, and the next one is then zeroed page by
    page, which takes longer than reading a tensor into it.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    trim_threshold, max_mapped = -1, -4
    mallopt(max_mapped, 0)
    mallopt(trim_threshold, 2**31 - 1)


def _do(items: list[Any]) -> list[Any]:
    return [_job.do(item) for item in items]
