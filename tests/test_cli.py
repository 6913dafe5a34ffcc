from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_stare.cli import run
from megatron_stare.config import load_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: nowhere}\ntask: {source: rows.jsonl}\n")
    return path


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "megatron_stare", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_print_config_shows_the_resolved_config(config, tmp_path, capsys):
    assert run(["train", str(config), "optimizer.lr=2e-6", "--print-config"]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(shown) == load_config(config, ["optimizer.lr=2e-6"])


@pytest.mark.parametrize("name", ["train", "serve"])
def test_mistakes_are_error_lines_and_exit_2(config, name, capsys):
    assert run([name, str(config), "optimzer.lr=1", "run.steps=0"]) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert lines == [
        "error: optimzer.lr: no such key; did you mean optimizer.lr? (command line)",
        "error: run.steps=0: must be at least 1 (command line)",
    ]
    assert output.out == ""


def test_a_missing_config_file_is_an_error_line(tmp_path, capsys):
    assert run(["train", str(tmp_path / "no.yaml")]) == 2
    assert capsys.readouterr().err.endswith("no.yaml: no such config file\n")


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"], ["train", "x.yaml", "--no-such-option"]])
def test_wrong_usage_exits_2(arguments, capsys):
    assert run(arguments) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["train", "--help"], ["--version"]])
def test_help_and_version_exit_0(arguments, capsys):
    assert run(arguments) == 0
    assert "megatron-stare" in capsys.readouterr().out


def test_the_module_runs_as_the_command(config):
    done = command("train", config, "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("objective: rl\n")
    failed = command("train", config, "lr=1")
    assert failed.returncode == 2
    assert failed.stderr == "error: lr: no such key; did you mean optimizer.lr? (command line)\n"


def test_looking_at_a_config_loads_nothing_heavy(config):
    code = (
        "import sys; from megatron_stare.cli import run;"
        f"code = run(['train', {str(config)!r}, '--print-config']);"
        "print([m for m in ('torch', 'megatron', 'sglang', 'transformers', 'matplotlib', 'numpy')"
        " if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert time.monotonic() - start < 10  # a fraction of a second on an idle machine
