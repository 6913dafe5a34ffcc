"""A supervised run small enough for whole jobs, and the command `launch` on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def write_config(tmp_path: Path, tiny_model_dir: Path):
    """write_config(**sections) -> path of a config for a run in tmp_path/run; sections replace values."""

    def write(**sections) -> Path:
        rows = [{"prompt": f"{number + 23}=", "answer": f"{number}+23"} for number in range(10, 50)]
        data = tmp_path / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        values: dict = {
            "objective": "sft",
            "run": {"name": "Test run", "dir": str(tmp_path / "run"), "steps": 12, "grace_seconds": 60},
            "model": {"path": str(tiny_model_dir), "dtype": "float32", "vocab_multiple": 8},
            "task": {"source": str(data), "chat_template": False, "max_prompt_tokens": 8},
            "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "max_tokens_per_microbatch": 64},
            "rollout": {"max_response_tokens": 6, "context_length": 64, "max_total_tokens": 4096},
            "checkpoint": {"every": 0},
            "report": {"tensorboard": False, "plot_every": 0},
        }
        for section, changes in sections.items():
            values[section] = values[section] | changes if isinstance(changes, dict) else changes
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write
