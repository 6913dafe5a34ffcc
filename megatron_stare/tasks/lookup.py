"""Finding what a user named: functions by import path, and the nearest name to a misspelt one."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from megatron_stare.errors import UserError

_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_function_path(text: str) -> bool:
    """Whether the text has the form package.module:function."""
    return _FUNCTION_PATH.fullmatch(text) is not None


def import_function(path: str, key: str) -> Callable[..., Any]:
    """Import package.module:function. The working directory is searched too, after everything else.

    Args:
        path: such as "my_rewards:length_penalty".
        key: the configuration key that named it, for messages.

    Raises:
        UserError: the form is wrong, the module cannot be imported, or it has no such function.
    """
    if not is_function_path(path):
        raise UserError(f"{key}={path}: not of the form package.module:function")
    module_name, _, name = path.partition(":")
    # An installed console script, unlike `python -m`, does not search the directory it is started in.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Tell a wrong path from a module that is there and lacks one of its own imports.
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise UserError(
                f"{key}={path}: no module named {error.name!r} installed or in {os.getcwd()}"
            ) from error
        raise UserError(f"{key}={path}: {module_name} cannot be imported: {error}") from error
    except Exception as error:
        raise UserError(f"{key}={path}: {module_name} cannot be imported: {describe(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{key}={path}: {module_name} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{key}={path}: a {type(found).__name__}, not a function")
    return found


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for the end of a message: "; did you mean 'answer'?", or nothing if no name is near."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def describe(error: BaseException, limit: int = 300) -> str:
    """An exception on one line: its type and message, cut to `limit` characters."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # str() of a foreign exception may itself raise
        message = ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
