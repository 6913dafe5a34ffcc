"""From YAML files and `key=value` overrides to a `Config`, or to errors that tell what is wrong."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_stare.config import yaml_text
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError

COMMAND_LINE = "command line"


class ConfigError(UserError):
    """One or more mistakes in a configuration, one line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a YAML file with `key=value` overrides applied.

    A file may name others by `extends: other.yaml` (or a list; paths are relative to the file): they are
    merged deeply, a later one over an earlier one and the file itself over all. An override's key is
    dotted and its value is YAML (`optimizer.lr=2e-6`, `rollout.endpoints=[]`, `run.dir=null`); it
    replaces what it names, except that a section keeps the keys that the value does not mention.

    Raises:
        ConfigError: a file is missing or broken, a key is unknown, a value is not allowed.
    """
    tree = _Tree()
    tree.merge_file(Path(path), chain=())
    problems = [p for text in overrides if (p := tree.override(text)) is not None]
    if problems:
        raise ConfigError(problems)
    return _validate(tree)


def dump_config(config: Config) -> str:
    """The whole configuration as YAML; `load_config` of this text gives an equal one."""
    return yaml_text.dump(config.model_dump(mode="json"))


def config_keys() -> list[str]:
    """Every key that takes a value, dotted, in the order of the schema."""
    return list(_LEAVES)


# ---------------------------------------------------------------------------------------------- schema


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


_Sections = dict[str, type[BaseModel]]


def _walk(model: type[BaseModel], prefix: str = "") -> tuple[dict[str, FieldInfo], _Sections]:
    leaves: dict[str, FieldInfo] = {}
    sections: _Sections = {}
    for name, info in model.model_fields.items():
        section = next(
            (t for t in _options(info.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None
        )
        if section is None:
            leaves[prefix + name] = info
        else:
            sections[prefix + name] = section
            below, sections_below = _walk(section, f"{prefix}{name}.")
            leaves |= below
            sections |= sections_below
    return leaves, sections


_LEAVES, _SECTIONS = _walk(Config)


def _is_text(key: str) -> bool:
    return key in _LEAVES and str in _options(_LEAVES[key].annotation)


def _is_open(key: str) -> bool:
    """Whether the key holds a mapping of the user's own keys."""
    return key in _LEAVES and any(
        t is dict or typing.get_origin(t) is dict for t in _options(_LEAVES[key].annotation)
    )


def _open_parent(key: str) -> str | None:
    parts = key.split(".")
    return next((p for n in range(1, len(parts)) if _is_open(p := ".".join(parts[:n]))), None)


def nearest_key(key: str) -> str | None:
    """The valid key that was most likely meant: in the same section first, then anywhere."""
    section, _, last = key.rpartition(".")
    if section in _SECTIONS:
        names = {k.rpartition(".")[2]: k for k in _LEAVES if k.rpartition(".")[0] == section}
        if close := difflib.get_close_matches(last, names, 1, 0.6):
            return names[close[0]]

    def likeness(valid: str) -> tuple[float, float]:
        whole = difflib.SequenceMatcher(None, key, valid).ratio()
        name = difflib.SequenceMatcher(None, last, valid.rpartition(".")[2]).ratio()
        return max(whole, name), whole

    best = max([*_LEAVES, *(_SECTIONS if not section else ())], key=likeness)
    return best if likeness(best)[0] >= 0.7 else None


def _unknown(key: str) -> str:
    if near := nearest_key(key):
        return f"{key}: no such key; did you mean {near}?"
    section = key.rpartition(".")[0]
    while section and section not in _SECTIONS:
        section = section.rpartition(".")[0]
    if section:
        names = _SECTIONS[section].model_fields
        return f"{key}: no such key; the keys of {section} are {', '.join(names)}"
    return f"{key}: no such key; the sections are {', '.join(Config.model_fields)}"


# ------------------------------------------------------------------------------------------------ tree


@dataclass
class _Tree:
    """Merged values, and where each of them was written."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def merge_file(self, path: Path, chain: tuple[Path, ...]) -> None:
        resolved = path.resolve()
        if resolved in chain:
            names = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
            raise ConfigError(f"{path}: extends goes in a circle: {names}")
        values, lines = _read(path, chain[-1] if chain else None)
        parents = values.pop("extends", None)
        if parents is None:
            parents = []
        elif isinstance(parents, str):
            parents = [parents]
        if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
            raise ConfigError(f"{path}: extends={_show(parents)}: must be a file name or a list of them")
        for parent in parents:
            self.merge_file(path.parent / parent, (*chain, resolved))
        self.origins |= {key: f"{path}:{line}" for key, line in lines.items()}
        _merge(self.values, values)

    def override(self, text: str) -> str | None:
        """Applies one `key=value`; returns what is wrong with it, if anything."""
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            return f"{text!r} is not an override: write key=value, for example optimizer.lr=1e-6"
        try:
            value, _ = yaml_text.parse(raw)
        except yaml.YAMLError as error:
            if not _is_text(key):
                return f"{key}={raw}: broken YAML: {yaml_text.describe(error)[1]}"
            value = raw
        # `run.name=7` on a command line is text: nobody quotes there.
        if _is_text(key) and not isinstance(value, str | None):
            value = raw.strip()
        self.origins[key] = COMMAND_LINE
        node = self.values
        *above, last = key.split(".")
        for part in above:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        if key in _SECTIONS and isinstance(value, dict) and isinstance(node.get(last), dict):
            _merge(node[last], value)
        else:
            node[last] = value
        return None

    def origin(self, key: str) -> str:
        """` (where)` of the key or of the nearest part above it; empty for a default."""
        while key:
            if key in self.origins:
                return f" ({self.origins[key]})"
            key = key.rpartition(".")[0]
        return ""


def _read(path: Path, parent: Path | None) -> tuple[dict[str, Any], dict[str, int]]:
    wanted_by = f", which {parent.name} extends" if parent else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{wanted_by}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read{wanted_by}: {reason}") from None
    try:
        values, lines = yaml_text.parse(text)
    except yaml.YAMLError as error:
        line, reason = yaml_text.describe(error)
        raise ConfigError(f"{path}:{line or 1}: broken YAML: {reason}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold keys and values, not {_show(values)}")
    return values, lines


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


# ------------------------------------------------------------------------------------------ validation


def _validate(tree: _Tree) -> Config:
    # A section whose keys are all commented out is null in YAML and means its defaults.
    values = _without_empty_sections(tree.values)
    leaves = _flatten(values)
    problems = [
        f"{_unknown(key)}{tree.origin(key)}"
        for key in leaves
        if key not in _LEAVES and key not in _SECTIONS and _open_parent(key) is None
    ]
    problems += [
        f"{key}={_show(value)}: must be a finite number{tree.origin(key)}"
        for key, value in leaves.items()
        if key in _LEAVES and isinstance(value, float) and not math.isfinite(value)
    ]
    try:
        # strict: "3" is not 3, and true is not 1
        config = Config.model_validate(values, strict=True)
    except ValidationError as error:
        named = tuple(p.partition(":")[0] + ":" for p in problems)
        lines = (_describe(details, tree) for details in error.errors(include_url=False))
        problems += [line for line in lines if line is not None and not line.startswith(named)]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def _without_empty_sections(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in _SECTIONS and value is None:
            value = {}
        elif key in _SECTIONS and isinstance(value, dict):
            value = _without_empty_sections(value, f"{key}.")
        result[name] = value
    return result


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in _LEAVES:
            leaves |= _flatten(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves


_NEEDS = {
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text (in a file: in quotes)",
    "list_type": "must be a list, like [a, b]",
    "dict_type": "must be keys and values, like {{a: 1}}",
    "string_too_short": "must not be empty",
}


def _describe(details: Mapping[str, Any], tree: _Tree) -> str | None:
    kind, value = details["type"], details["input"]
    key = _key_of(details["loc"])
    context = details.get("ctx") or {}
    if kind in ("extra_forbidden", "invalid_key"):
        return None  # found before, with the whole dotted key
    if kind == "missing":
        meaning = _LEAVES[key].description if key in _LEAVES else None
        if key in _SECTIONS:
            needed = [f"{key}.{n}" for n, f in _SECTIONS[key].model_fields.items() if f.is_required()]
            key, meaning = ", ".join(needed) or key, None
        return f"{key}: is missing" + (f": {meaning}" if meaning else "")
    if kind == "value_error":
        # A check over several keys: its text begins with the one at fault. Config's own names them in full.
        text = str(context["error"])
        if not key:
            return text
        first = text.partition("=")[0]
        return f"{key}.{text}" if first in _SECTIONS[key].model_fields else f"{key}: {text}"
    if kind == "literal_error":
        allowed = ", ".join(str(v) for v in _literals(key)) or context.get("expected", "")
        need = f"allowed: {allowed}"
    elif key in _SECTIONS:
        need = f"is a section; its keys are {', '.join(_SECTIONS[key].model_fields)}"
    elif kind == "int_type" and isinstance(value, float) and value.is_integer():
        need = f"must be a whole number: write {int(value)}"
    elif kind in _NEEDS:
        need = _NEEDS[kind].format(**context)
    else:
        need = details["msg"]
    if key in _LEAVES and type(None) in _options(_LEAVES[key].annotation):
        need += " or null"
    return f"{key}={_show(value)}: {need}{tree.origin(key)}"


def _key_of(loc: tuple[Any, ...]) -> str:
    """Dotted key of pydantic's location, without the names of union members that it appends."""
    parts: list[str] = []
    for part in loc:
        if ".".join(parts) in _LEAVES and not isinstance(part, int) and not _is_open(".".join(parts)):
            break
        if part != "[key]":  # pydantic's word for a key of the wrong type
            parts.append(str(part))
    return ".".join(parts)


def _literals(key: str) -> list[Any]:
    if key not in _LEAVES:
        return []
    options = _options(_LEAVES[key].annotation)
    return [v for t in options if typing.get_origin(t) is typing.Literal for v in typing.get_args(t)]


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else yaml_text.dump(value, one_line=True)
    text = " ".join(text.split())
    if isinstance(value, str) and (value == "" or not isinstance(_plain(value), str)):
        text = repr(value)  # the text "3" is not the number 3
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(text: str) -> Any:
    try:
        return yaml_text.parse(text)[0]
    except yaml.YAMLError:
        return text
