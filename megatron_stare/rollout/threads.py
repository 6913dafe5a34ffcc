"""Calls in daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(function: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """Call it in a daemon thread: one that hangs, say on a server that is gone, keeps nobody from ending.

    The threads of a ThreadPoolExecutor would: they are joined at the interpreter's exit.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rollout-call", daemon=True).start()
    return future
