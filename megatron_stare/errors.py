"""Errors that a user can mend. The command line prints them as one line; nothing else does."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: a key, a file, a value. The message says which and what is allowed."""


class Preempted(Exception):
    """The run was asked to stop; its state is to be saved and the process to exit with code 75."""


class TrainingFailed(Exception):
    """The run cannot go on, and starting its ranks again would end the same way. The message says why."""
