"""What every process that a fleet starts does first: die with its parent, keep the API key out of sight."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from megatron_stare.parent import end_with_parent

API_KEY_VARIABLE = "MEGATRON_STARE_API_KEY"
PARENT_VARIABLE = "MEGATRON_STARE_PARENT"


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that happens.

    The parent's pid comes by environment, because a parent that was gone before prctl() sends no
    signal any more; children of this process find this one's there. Linux only; elsewhere the
    fleet's stop() is all there is.
    """
    if not sys.platform.startswith("linux"):
        return
    end_with_parent()
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        raise SystemExit(f"process {parent}, which started this one, is gone")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def api_key() -> str | None:
    """The run's API key: by environment, because other users can read a command line."""
    return os.environ.get(API_KEY_VARIABLE) or None


def mask_in_logs(secret: str | None) -> None:
    """Replace `secret` in every log record of this process: SGLang logs all of its arguments."""
    if not secret:
        return
    make = logging.getLogRecordFactory()

    def masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        if secret in text:
            record.msg, record.args = text.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(masked)
