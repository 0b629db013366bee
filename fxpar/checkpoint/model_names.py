"""Opens a checkpoint under a model's names: those of an adapter or its base, or those that a library has changed since.

transformers keeps the names and shapes of published checkpoints in files, and other ones in memory: it stacks the
experts of a layer, say. Its own tables say which tensor becomes which. Here they are applied to names and places alone,
so that a rank still reads no more than its part of what is stacked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from fxpar.checkpoint.adapters import adapter_of, check_adapter, names_by_base_name, open_adapter
from fxpar.checkpoint.safetensors_files import Checkpoint
from fxpar.checkpoint.tensor_pieces import Entry, concatenated, divided, stacked
from fxpar.errors import CheckpointError


def open_for(model: nn.Module, checkpoint: str | Path | Checkpoint, saved: Sequence[str]) -> Checkpoint:
    """Opens a checkpoint under the model's names; of a model with an adapter also the adapter's or the base model's.

    Args:
        model: its tensors are not looked at.
        saved: the names that it saves.

    Raises:
        CheckpointError: it cannot be read, is an adapter of another configuration, or transformers changes its tensors
            in a way that is not followed here.
    """
    if adapter_of(model) and isinstance(checkpoint, (str, Path)):
        adapter = open_adapter(model, Path(checkpoint), saved)
        if adapter is not None:
            return adapter
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    if not adapter_of(model):
        return _converted(opened, model, saved)
    if opened.shapes.keys().isdisjoint(saved):
        names = names_by_base_name(model, saved)
        return _converted(opened, cast(Any, model).get_base_model(), list(names)).of_part(names, saved)
    check_adapter(opened.path if opened.path.is_dir() else opened.path.parent, model)
    return opened


def _converted(checkpoint: Checkpoint, model: nn.Module, saved: Sequence[str]) -> Checkpoint:
    """Returns the checkpoint with the names and shapes that transformers would give its tensors.

    Args:
        saved: the names that the model saves.
    """
    transformers: Any = sys.modules.get("transformers")  # nobody has such a model without it
    is_known = checkpoint.shapes.keys() <= set(saved)
    if is_known or transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return checkpoint
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    changes: list[Any] = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    names: dict[str, Any] = dict.fromkeys(saved, True)
    sources: dict[str, dict[str, list[Entry]]] = {}
    for key in sorted(checkpoint.shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        sources.setdefault(name, {}).setdefault(pattern or "", []).append(checkpoint.entries[key])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    entries: dict[str, Entry] = {}
    for name, matches in sources.items():
        if "" in matches:
            converted = {name: _only(matches, f"{checkpoint.path}: {name}")}
        else:
            converted = _applied(by_pattern[next(iter(matches))], matches, name, f"{checkpoint.path}: {name}")
        entries |= converted
    return checkpoint.with_entries(entries)


def _only(sources: Mapping[str, Sequence[Entry]], where: str) -> Entry:
    """Returns the one tensor that gets a name."""
    entries = [entry for group in sources.values() for entry in group]
    if len(entries) > 1:
        reason = f"{entries[0].key} and {entries[1].key} get the same name"
        raise CheckpointError(reason, where=where, remedy="leave one of them out by fxpar.Checkpoint(path, rename=…)")
    return entries[0]


def _applied(converter: Any, sources: Mapping[str, list[Entry]], name: str, where: str) -> dict[str, Entry]:
    """Returns what a converter of transformers makes of tensors, by the model's names.

    Args:
        sources: the tensors that match each of its patterns, in the order of their numbers.
        name: the model's name for the first tensor that it makes.
    """
    converted: dict[str, list[Entry]] = dict(sources)
    targets: list[str] = converter.target_patterns
    for operation in converter.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", None)
        several = [entry for pattern in converter.source_patterns for entry in converted.get(pattern, ())]
        if kind == "MergeModulelist" and dim == 0:
            converted = {pattern: [stacked(entries, where)] for pattern, entries in converted.items()}
        elif kind == "Concatenate" and isinstance(dim, int):
            converted = {converter.source_patterns[0]: [concatenated(several, dim, where)]}
        elif kind == "Chunk" and isinstance(dim, int) and operation.num_shards_attribute is None:
            parts = divided(_only(converted, where), dim, len(targets))
            return _named(dict(zip(targets, parts, strict=True)), name)
        else:
            raise CheckpointError(
                f"transformers makes it of {several[0].key if several else 'others'} by {operation!r}, "
                "which no rank can do for its part",
                where=where,
                remedy="load it by the model's from_pretrained, and parallelize that model without checkpoint=",
            )
    return _named({targets[0]: _only(converted, where)}, name)


def _named(converted: Mapping[str, Entry], name: str) -> dict[str, Entry]:
    """Returns tensors by the model's names, which have the patterns of the targets in them."""
    prefix, suffix = _around(converted, name)
    return {prefix + pattern + suffix: entry for pattern, entry in converted.items()}


def _around(patterns: Iterable[str], name: str) -> tuple[str, str]:
    pattern = next(pattern for pattern in patterns if pattern in name)
    prefix, _, suffix = name.partition(pattern)
    return prefix, suffix
