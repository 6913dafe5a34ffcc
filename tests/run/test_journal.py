"""Rollouts come back as they were sampled, or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_stare.run.journal import Journal, Rollouts
from megatron_stare.tasks.sample import Group, Prompt, Response
from tests.support.disk import no_file_beyond

BINDING = {"optimizer.lr": 1e-3, "run.seed": 0}


def rollouts() -> Rollouts:
    """Groups of unequal sizes and lengths, a failed reward, a reward that no float32 holds."""
    groups = [
        Group(
            Prompt(7, [1, 2, 3], "", None),
            [
                Response([4, 5], [-0.5, -1.25], "stop", 3, reward=1 / 3),
                Response([6], [-2.0], "length", 3, reward=0.0, reward_error="timed out"),
            ],
        ),
        Group(Prompt(0, [9], "", None), [Response([8, 8, 8], [-0.125] * 3, "stop", 3, reward=-1.0)]),
    ]
    return Rollouts(groups, {"sampling/rounds": 2.0}, {"cursor": {"position": 12}})


def journal(directory, binding=BINDING) -> tuple[Journal, list[str]]:
    problems: list[str] = []
    return Journal(directory / "journal", binding, problems.append), problems


def test_what_was_written_is_read(tmp_path):
    kept, problems = journal(tmp_path)
    kept.write(5, rollouts())
    assert kept.read(5) == rollouts()
    assert kept.read(4) is None
    assert problems == []


def test_rollouts_of_another_config_are_not_used(tmp_path):
    journal(tmp_path)[0].write(5, rollouts())
    other, problems = journal(tmp_path, BINDING | {"optimizer.lr": 1e-4})
    assert other.read(5) is None
    assert "comes from another run or another config" in problems[0]


def test_an_entry_under_another_step_is_not_used(tmp_path):
    kept, problems = journal(tmp_path)
    kept.write(5, rollouts())
    (tmp_path / "journal/step_0000005.safetensors").rename(tmp_path / "journal/step_0000006.safetensors")
    assert kept.read(6) is None
    assert len(problems) == 1


def damages():
    def cut(path, data):
        path.write_bytes(data[: len(data) // 2])

    def empty(path, data):
        path.write_bytes(b"")

    def flip(path, data):
        damaged = bytearray(data)
        damaged[-3] ^= 1
        path.write_bytes(damaged)

    def flip_header(path, data):
        damaged = bytearray(data)
        damaged[20] ^= 1
        path.write_bytes(damaged)

    def directory(path, data):
        path.unlink()
        path.mkdir()

    def newer(path, data):
        with safe_open(path, "np") as file:
            header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, metadata=header | {"format": "99"})

    def without_a_tensor(path, data):
        save_file({"rewards": np.zeros(1)}, path, metadata={"format": "1"})

    return [cut, empty, flip, flip_header, directory, newer, without_a_tensor]


@pytest.mark.parametrize("damage", damages(), ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_a_problem_and_its_step_is_sampled_again(tmp_path, damage):
    kept, problems = journal(tmp_path)
    kept.write(5, rollouts())
    path = tmp_path / "journal/step_0000005.safetensors"
    damage(path, path.read_bytes())
    assert kept.read(5) is None
    assert str(path) in problems[0]
    assert "sampled again" in problems[0]


def test_a_full_disk_costs_the_entry_alone(tmp_path):
    kept, problems = journal(tmp_path)
    with no_file_beyond(100):
        kept.write(5, rollouts())
    assert "step 5 could not be kept" in problems[0]
    assert list((tmp_path / "journal").iterdir()) == []
    kept.write(5, rollouts())
    assert kept.read(5) == rollouts()


def test_entries_that_no_checkpoint_leads_to_are_forgotten(tmp_path):
    kept, _ = journal(tmp_path)
    for step in range(6):
        kept.write(step, rollouts())
    (tmp_path / "journal/step_0000009.tmp").write_bytes(b"cut off")
    (tmp_path / "journal/notes.txt").write_text("not ours")
    kept.forget_before(4)
    names = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert names == ["notes.txt", "step_0000004.safetensors", "step_0000005.safetensors"]


def test_an_entry_takes_few_bytes_a_token(tmp_path):
    kept, _ = journal(tmp_path)
    response = Response(list(range(3000)), [-0.7] * 3000, "stop", 0)
    kept.write(0, Rollouts([Group(Prompt(0, [1] * 100, "", None), [response] * 8)], {}, {}))
    size = (tmp_path / "journal/step_0000000.safetensors").stat().st_size
    assert size < 8.1 * 24_100


def test_its_header_is_readable_json(tmp_path):
    kept, _ = journal(tmp_path)
    kept.write(5, rollouts())
    with safe_open(tmp_path / "journal/step_0000005.safetensors", "np") as file:
        header = file.metadata()
    assert json.loads(header["source"]) == {"cursor": {"position": 12}}
    assert json.loads(header["reward_errors"]) == {"1": "timed out"}
