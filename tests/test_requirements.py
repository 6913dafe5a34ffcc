"""The pinned environments agree with what the package asks for, and the image installs the pinned one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(file: str, environment: dict[str, str]) -> dict[str, Version]:
    found = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        text = line.split(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


@pytest.mark.parametrize(
    ("files", "python", "extras"),
    [
        (["torch.txt", "cpu.txt"], "3.11", ["dev", "gguf"]),
        (["torch.txt", "cpu.txt"], "3.12", ["dev", "gguf"]),
        (["gpu.txt"], "3.12", ["gpu"]),
    ],
)
def test_pins_satisfy_what_the_package_declares(files, python, extras):
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    pinned = {name: version for file in files for name, version in pins(file, environment).items()}
    declared = project()
    wanted = [*declared["dependencies"], *(r for e in extras for r in declared["optional-dependencies"][e])]
    wrong = []
    for text in wanted:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{text}: pinned {version}")
    assert wrong == []


def test_image_builds_the_pinned_transformer_engine():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (built,) = re.findall(r"transformer-engine-torch==(\S+)", dockerfile)
    assert pins("gpu.txt", {"python_version": "3.12"})["transformer-engine"] == Version(built)


def test_image_copies_only_what_exists():
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in dockerfile.splitlines() if re.match(r"COPY (?!--from)", line)]
    missing = [path for paths in copied for path in paths if not (ROOT / path).exists()]
    assert copied
    assert missing == []
