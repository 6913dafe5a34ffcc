"""Checkpoint directories: what makes one good, and what is said of one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.weights import publication
from tests.support.disk import no_file_beyond


def make(directory: Path, step: int) -> Path:
    """A published checkpoint with one writer's file, a small one, and one in a folder."""
    aside = directory / f"{publication.directory_name(step)}.tmp"
    (aside / "objects").mkdir(parents=True)
    total, data = publication.Sum(), bytes(range(256)) * 40
    (aside / "__0_0.distcp").write_bytes(data)
    for begin in range(0, len(data), 1000):
        total.update(data[begin : begin + 1000])
    publication.write_sums(aside, 0, {"__0_0.distcp": total.entry()})
    (aside / "objects" / "extra.pt").write_bytes(b"object")
    publication.write_json(aside / publication.RUN_STATE, {"steps": step})
    target = directory / publication.directory_name(step)
    publication.publish(aside, target)
    return target


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_published_checkpoint_lists_every_file_and_is_good(tmp_path):
    path = make(tmp_path, 7)
    files = json.loads((path / publication.MANIFEST).read_text())["files"]
    assert sorted(files) == ["__0_0.distcp", "objects/extra.pt", publication.RUN_STATE]
    assert publication.find_damage(path) is None
    assert names(tmp_path) == ["step_0000007"]
    assert publication.published(tmp_path) == [(7, path)]


def test_shares_of_several_ranks_find_what_one_would(tmp_path):
    path = make(tmp_path, 7)
    (path / "objects" / "extra.pt").write_bytes(b"0bject")
    shares = [publication.find_damage(path, slice(rank, None, 2)) for rank in (0, 1)]
    assert [share for share in shares if share] == [publication.find_damage(path)]


def test_the_same_step_may_be_published_again(tmp_path):
    make(tmp_path, 7)
    make(tmp_path, 7)
    assert names(tmp_path) == ["step_0000007"]


def test_the_last_ones_and_those_of_every_so_many_steps_are_kept(tmp_path):
    for step in range(1, 9):
        make(tmp_path, step)
    (tmp_path / "step_0000001").rename(tmp_path / "step_0000001.damaged")
    publication.prune(tmp_path, keep_last=2, keep_every=3)
    assert names(tmp_path) == [
        "step_0000001.damaged",
        "step_0000003",
        "step_0000006",
        "step_0000007",
        "step_0000008",
    ]


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_removed(tmp_path):
    make(tmp_path, 7)
    (tmp_path / "step_0000009.tmp").mkdir()
    assert [step for step, _ in publication.published(tmp_path)] == [7]
    publication.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step_0000007"]


def test_damaged_ones_are_set_aside_and_never_overwritten(tmp_path):
    for _ in range(2):
        publication.set_aside(make(tmp_path, 7))
    assert names(tmp_path) == ["step_0000007.damaged", "step_0000007.damaged-2"]
    assert publication.published(tmp_path) == []
    assert len(publication.damaged(tmp_path)) == 2


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_name(tmp_path):
    make(tmp_path, 7)
    with no_file_beyond(100), pytest.raises(OSError, match="File too large"):
        make(tmp_path, 8)
    assert [step for step, _ in publication.published(tmp_path)] == [7]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _manifest(change):
    def damage(path: Path) -> None:
        content = json.loads((path / publication.MANIFEST).read_text())
        change(content)
        (path / publication.MANIFEST).write_text(json.dumps(content))

    return damage


DAMAGES = {
    "data cut": (lambda p: _cut(p / "__0_0.distcp"), "__0_0.distcp has 10239 bytes instead of 10240"),
    "data longer": (lambda p: (p / "__0_0.distcp").open("ab").write(b"x"), "has 10241 bytes instead"),
    "data empty": (lambda p: (p / "__0_0.distcp").write_bytes(b""), "has 0 bytes instead of 10240"),
    "data missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "data flipped at the start": (lambda p: _flip(p / "__0_0.distcp", 0), "does not have the checksum"),
    "data flipped at the end": (lambda p: _flip(p / "__0_0.distcp", -1), "does not have the checksum"),
    "data is a folder": (
        lambda p: ((p / "__0_0.distcp").unlink(), (p / "__0_0.distcp").mkdir()),
        "__0_0.distcp",
    ),
    "object flipped": (lambda p: _flip(p / "objects" / "extra.pt", 2), "objects/extra.pt does not have"),
    "object missing": (lambda p: (p / "objects" / "extra.pt").unlink(), "objects/extra.pt is missing"),
    "run state cut": (lambda p: _cut(p / "run_state.json"), "run_state.json has"),
    "run state flipped": (lambda p: _flip(p / "run_state.json", 3), "run_state.json does not have"),
    "run state missing": (lambda p: (p / "run_state.json").unlink(), "run_state.json is missing"),
    "run state empty": (lambda p: (p / "run_state.json").write_text(""), "run_state.json has 0 bytes"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "manifest cut": (lambda p: _cut(p / "manifest.json"), "manifest.json cannot be read"),
    "manifest of another kind": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json cannot be"),
    "manifest binary": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be"),
    "manifest without checksums": (
        _manifest(lambda c: c["files"]["__0_0.distcp"].pop("sha256")),
        "manifest.json cannot be read",
    ),
    "manifest without the run state": (
        _manifest(lambda c: c["files"].pop("run_state.json")),
        "run_state.json is not in its manifest.json",
    ),
    "newer format": (_manifest(lambda c: c.update(format=99)), "it has format 99; this version reads 1"),
    "manifest names a file too many": (
        _manifest(lambda c: c["files"].update(more={"bytes": 1, "sha256": ""})),
        "more is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(tmp_path, name):
    path = make(tmp_path, 7)
    damage, message = DAMAGES[name]
    damage(path)
    assert message in publication.find_damage(path)
