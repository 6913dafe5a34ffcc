"""A family's declarations, expanded for one model: every parameter, its tensors and its layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatron_stare.errors import UserError
from megatron_stare.weights.families import Rule
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.layouts import QKV, Column, GateUp, Layout, Replicated, Row, Vocab

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+|(?<=weight)\d+$")


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of a model.

    Attributes:
        names: names the parameter may have, layers and experts numbered over the whole model: with local
            layers and, where it differs, with Transformer Engine's.
        hf: names of the Hugging Face tensors in it.
        layout: how they lie in it.
        key: name in a Megatron distributed checkpoint, of a tensor that holds this parameter of all layers
            and experts.
        place, grid: the parameter's index in the first axes of that tensor, and their sizes: (), (layers)
            or (layers, experts).
        copy: the parameter repeats another one (the output layer's copy of tied embeddings on the last
            pipeline stage): loaded, never exported.
    """

    names: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    key: str
    place: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    copy: bool = False

    @property
    def hf_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each Hugging Face tensor in the parameter."""
        return list(zip(self.hf, self.layout.hf_shapes, strict=True))

    @property
    def is_expert(self) -> bool:
        """Whether this is an expert's: on one rank of the expert-parallel group, whole there."""
        return len(self.place) == 2

    def tp_size(self, tp_size: int) -> int:
        """Into how many parts the parameter is cut where dense ones are cut into `tp_size`."""
        return 1 if self.is_expert else tp_size


def model_entries(config: HFConfig) -> list[Entry]:
    """Every parameter of the model, in Hugging Face's order: embedding, layers, norm, head."""
    family = config.family
    entries = [_entry(rule, config) for rule in family.before]
    dense = [rule for rule in family.layer if not rule.is_expert]
    experts = [rule for rule in family.layer if rule.is_expert]
    for layer in range(config.num_layers):
        entries += [_entry(rule, config, (layer,)) for rule in dense]
        for expert in range(config.num_experts):
            entries += [_entry(rule, config, (layer, expert)) for rule in experts]
    return entries + [_entry(rule, config) for rule in family.after]


def check_tp(config: HFConfig, tp_size: int) -> None:
    """Raise UserError when tensor parallelism of this size cannot cut the model evenly."""
    for name, size in (("key-value heads", config.num_kv_heads), ("MLP rows", config.dense_ffn_size)):
        if size % tp_size:
            raise UserError(
                f"tp={tp_size} does not divide the model's {size} {name}; "
                f"tp values that work: {', '.join(map(str, tp_choices(config)))}"
            )


def tp_choices(config: HFConfig) -> list[int]:
    """The tensor-parallel sizes that this model can be cut into."""
    return [
        n
        for n in range(1, config.num_kv_heads + 1)
        if config.num_kv_heads % n == 0 and config.dense_ffn_size % n == 0
    ]


def unwrap(model: nn.Module) -> nn.Module:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def check_tied(models: Sequence[nn.Module], config: HFConfig) -> None:
    """Raise ValueError when a GPTModel shares its embeddings and the checkpoint does not, or the reverse.

    Undetected, an output layer would keep its random weights, or be trained apart and never exported.
    """
    for model in map(unwrap, models):
        shared = getattr(model, "share_embeddings_and_output_weights", config.tied_embeddings)
        if shared != config.tied_embeddings:
            raise ValueError(
                f"the model has share_embeddings_and_output_weights={shared}, "
                f"the checkpoint tie_word_embeddings={config.tied_embeddings}"
            )


def global_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters by name, layers and experts numbered over the whole model and not over the rank.

    Args:
        models: the rank's chunks of the model (several with virtual pipeline stages), wrapped or not.
    """
    found: dict[str, nn.Parameter] = {}
    for model in map(unwrap, models):
        for name, parameter in model.named_parameters():
            match = _LAYER.match(name)
            if match:
                layer = model.decoder.layers[int(match[1])]
                name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"  # counted from 1
                if ".mlp.experts." in name:
                    numbers = layer.mlp.local_expert_indices
                    name = _EXPERT.sub(lambda m, n=numbers: str(n[int(m[0])]), name)
            if name in found:
                raise ValueError(f"two model chunks hold a parameter {name}")
            found[name] = parameter
    return found


def match_entries(
    entries: Sequence[Entry], parameters: dict[str, nn.Parameter], tp_size: int
) -> list[tuple[Entry, nn.Parameter]]:
    """Pair this rank's parameters with their entries, in the entries' order.

    Args:
        parameters: as `global_parameters` gives them.

    Raises:
        UserError: a parameter has no entry, an entry's layer is here but the parameter is not, or a
            parameter's shape is not that of the checkpoint's model cut into `tp_size`.
    """
    left = dict(parameters)
    layers_here = {m[1] for m in map(_LAYER.match, left) if m}
    pairs = []
    for entry in entries:
        name = next((n for n in entry.names if n in left), None)
        if name is None:
            layer = _LAYER.match(entry.names[0])
            if layer and layer[1] in layers_here and not entry.is_expert:
                raise UserError(
                    f"the Megatron model has no parameter {entry.names[0]} for {', '.join(entry.hf)}"
                )
            continue
        parameter = left.pop(name)
        wanted = entry.layout.shard_shape(entry.tp_size(tp_size))
        if wanted is None:  # a vocabulary: any padding that holds it
            rows, width = entry.layout.hf_shapes[0]
            fits = parameter.shape[0] * tp_size >= rows and tuple(parameter.shape[1:]) == (width,)
            wanted = (f">={-(-rows // tp_size)}", width)
        else:
            fits = tuple(parameter.shape) == wanted
        if not fits:
            raise UserError(
                f"Megatron parameter {name} has shape {list(parameter.shape)}, but the checkpoint's "
                f"{', '.join(entry.hf)} give [{', '.join(map(str, wanted))}] at tp={tp_size}"
            )
        pairs.append((entry, parameter))
    if left:
        raise UserError(
            f"the checkpoint's family has no tensor for the Megatron parameter {', '.join(sorted(left))}"
        )
    return pairs


def _entry(rule: Rule, config: HFConfig, place: tuple[int, ...] = ()) -> Entry:
    numbers = dict(zip("le", place, strict=False))
    tied = rule.tied_to is not None and config.tied_embeddings
    names = (rule.local,) if rule.fused is None else (rule.local, rule.fused)
    key = rule.key or names[-1].replace(".{l}.", ".")
    return Entry(
        names=tuple(name.format(**numbers) for name in names),
        hf=(rule.tied_to,) if tied else tuple(name.format(**numbers) for name in rule.hf),
        layout=_layout(rule, config),
        key=key,
        place=place,
        grid=(config.num_layers, config.num_experts)[: len(place)],
        copy=tied,
    )


def _layout(rule: Rule, config: HFConfig) -> Layout:
    hidden = config.hidden_size
    tail = () if rule.local.endswith(".bias") else (hidden,)
    match rule.kind:
        case "replicated":
            return Replicated((getattr(config, rule.size),))
        case "replicated_matrix":
            return Replicated((getattr(config, rule.size), hidden))
        case "vocab":
            return Vocab(config.vocab_size, hidden)
        case "row":
            return Row((hidden, getattr(config, rule.size)))
        case "column":
            return Column((getattr(config, rule.size), *tail))
        case "qkv":
            return QKV(config.num_heads, config.num_kv_heads, config.head_dim, tail)
        case "gate_up":
            return GateUp(getattr(config, rule.size), tail)
    raise ValueError(f"{rule.local}: unknown kind {rule.kind!r}")
