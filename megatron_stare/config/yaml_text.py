"""YAML as its 1.2 core schema reads it, with the line of every key.

PyYAML follows YAML 1.1, which reads `1e-6` as a string, `off` as false and `12:30` as 750.
`lr: 1e-6` and `gate: off` must mean what they say.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = [
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands here a second time", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


class _Dumper(yaml.SafeDumper):
    """Quotes a string if either YAML version would read it as something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse(text: str) -> tuple[Any, dict[str, int]]:
    """The value, and the line (from 1) of every dotted key in it.

    Raises:
        yaml.YAMLError: the text is not YAML, or a mapping holds a key twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[str, int] = {}
        _collect_lines(node, "", lines, depth=0)
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], depth: int) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    if depth > 20:  # most likely an anchor that contains itself
        raise yaml.constructor.ConstructorError(None, None, "nested too deeply", node.start_mark)
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        lines[key] = key_node.start_mark.line + 1
        _collect_lines(value_node, f"{key}.", lines, depth + 1)


def dump(value: Any, one_line: bool = False) -> str:
    """YAML text that `parse` reads back to an equal value."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=one_line,
        width=10**6 if one_line else 100,
    )
    return text.removesuffix("...\n").rstrip("\n") if one_line else text


def describe(error: yaml.YAMLError) -> tuple[int | None, str]:
    """Line (from 1, if known) and reason of a YAML error, in one line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = getattr(error, "problem", None) or str(error)
    return (mark.line + 1 if mark else None), " ".join(str(reason).split())
