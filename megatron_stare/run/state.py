"""What a run needs to go on, beside weights and optimizer, and how a session gets it back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_stare.errors import UserError

_FORMAT = 2


@dataclass(frozen=True)
class RunState:
    """A run between two steps, as plain JSON values.

    Attributes:
        steps: finished ones.
        skipped: optimizer updates that were skipped in a row, up to here.
        stare: the gate's and the thresholds' state; None where STARE is off.
        source: where the next step's prompts start; None before the first step.
        bound: what the next run's config may not differ in, see `resume.saved_values`.

    No random numbers are kept: each is drawn from a generator of its own that (seed, step, purpose) names.
    """

    steps: int = 0
    skipped: int = 0
    stare: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    bound: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any], name: str) -> RunState:
        """The state in the checkpoint `name`. Raises UserError where another version wrote it."""
        values = dict(values)
        found = values.pop("format", None)
        if found != _FORMAT:
            raise UserError(
                f"{name} has run state of format {found}, this version reads {_FORMAT}; "
                "start anew from an export of it"
            )
        try:
            return cls(**values)
        except TypeError:
            raise UserError(f"{name} has a run state with unknown or missing parts") from None
