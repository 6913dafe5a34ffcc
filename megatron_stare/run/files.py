"""Names inside a run directory, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_stare.config import Config, run_directory


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what."""

    root: Path

    @classmethod
    def of(cls, config: Config) -> RunFiles:
        """The run directory that the config names."""
        return cls(run_directory(config).resolve())

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.root / "config.yaml"

    @property
    def logs(self) -> Path:
        """Logs of servers and of trainer ranks."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Megatron distributed checkpoints."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    @property
    def hf(self) -> Path:
        """The Hugging Face export at the end."""
        return self.root / "hf"

    def hf_step(self, steps: int) -> Path:
        """The Hugging Face export after so many steps."""
        return self.root / "hf-steps" / f"step_{steps:07d}"

    @property
    def weights(self) -> Path:
        """Scratch space of weight sync by disk."""
        return self.root / "weights"

    @property
    def stop_request(self) -> Path:
        """Appears when the run is asked to save and stop."""
        return self.root / "stop.request"

    @property
    def journal(self) -> Path:
        """Each step's rollouts."""
        return self.root / "journal"

    @property
    def progress(self) -> Path:
        """How far the trainer is: one JSON object, replaced by rank 0 at each change of phase."""
        return self.root / "progress.json"

    @property
    def nodes(self) -> Path:
        """What each node of the job runs: NUMBER.json, replaced every few seconds."""
        return self.root / "nodes"

    @property
    def lock(self) -> Path:
        """Held by the job that uses this directory."""
        return self.root / "run.lock"

    @property
    def problems(self) -> Path:
        """What went wrong and was survived, or ended the run: one JSON object each."""
        return self.root / "problems.jsonl"

    @property
    def outcome(self) -> Path:
        """How the trainer ranks ended: written by rank 0, read by the supervisor."""
        return self.root / "outcome.json"
