"""The examples in launch/ are what the command writes today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import kubernetes_validate
import yaml

FOLDER = Path(__file__).parents[2] / "launch"


def test_examples_are_what_the_command_writes():
    spec = importlib.util.spec_from_file_location("make_examples", FOLDER / "make_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.examples()
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, f"{name}: run python launch/make_examples.py"
    for manifest in yaml.safe_load_all(made["kubernetes/job.yaml"]):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
