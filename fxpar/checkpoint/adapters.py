"""Adapters that peft has put around a model's layers (LoRA): saved and loaded as peft does, or merged into the base.

peft's own objects say how tensors are called in its files and what is merged, so that both are as peft does them. They
run on the unsplit model without memory, whose layers get values one at a time. Whoever has such a model has
imported peft: nothing else here needs it.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fxpar.checkpoint.safetensors_files import Checkpoint, Spec, split_files
from fxpar.checkpoint.state_dicts import RankTensors, on_all, save_configuration, saved_entries, write_checkpoint
from fxpar.errors import CheckpointError, InputError
from fxpar.runtime.shard_spec import ModelTensor

_FILE, _CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"
# Settings of which tensors of the same shapes make other values.
_MEANING = (
    *("peft_type", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "fan_in_fan_out"),
    "trainable_token_indices",
)


def adapter_of(model: nn.Module) -> str:
    """Returns the name of the adapter of peft that a model has; empty where it has none."""
    peft: Any = sys.modules.get("peft")  # nobody has such a model without it
    return next(iter(model.peft_config), "") if peft is not None and isinstance(model, peft.PeftModel) else ""


def save_adapter(weights: RankTensors, model: nn.Module, folder: str | Path) -> None:
    """Writes an adapter from rank 0, as peft's `save_pretrained` does; see `ParallelModule.save_checkpoint`.

    Args:
        model: the unsplit one; its tensors are not looked at.
    """
    names, entries = _names_by_key(model, weights.saved), saved_entries(weights)
    specs = {key: Spec.of(entries[name].tensor) for key, name in names.items()}

    def gather(key: str) -> Tensor:
        # Tied names share memory, which safetensors refuses.
        return on_all(weights, entries[names[key]]).to("cpu", copy=True)

    files = {_FILE: list(specs)}  # peft reads one file alone
    write_checkpoint(weights, folder, files, specs, gather, lambda path: save_adapter_configuration(path, model))


def _names_by_key(model: Any, saved: Sequence[str]) -> dict[str, str]:
    """Returns the model's name of each tensor in the adapter's file, by its key there.

    Args:
        saved: the names that the model saves.
    """
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(0, device="meta") for name in saved}
    names = {id(mark): name for name, mark in marks.items()}
    chosen = get_peft_model_state_dict(model, state_dict=marks, adapter_name=adapter_of(model))
    return {key: names[id(mark)] for key, mark in chosen.items()}


def save_adapter_configuration(path: Path, model: Any) -> None:
    """Writes the adapter's configuration, as peft does: for inference, and with the base model's class or name.

    OSError where that cannot be.
    """
    base = model.get_base_model()
    config = copy.copy(model.peft_config[adapter_of(model)])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
    classes = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(path, auto_mapping_dict=classes if config.task_type is None else None)


def open_adapter(model: nn.Module, path: Path, saved: Sequence[str]) -> Checkpoint | None:
    """Opens the file of an adapter under the names of a model that has one; None where the path is none of it.

    Raises:
        CheckpointError: it cannot be read, or is an adapter of another configuration.
    """
    file = path if path.name == _FILE else path / _FILE
    if not file.is_file():
        return None
    _check_configuration(file.with_name(_CONFIGURATION), model)
    return Checkpoint(file).of_part({key: (name,) for key, name in _names_by_key(model, saved).items()}, saved)


def check_adapter(folder: Path, model: nn.Module) -> None:
    """Checks that an adapter saved with its base, as in a training, means the same in the model.

    Raises:
        CheckpointError: it is of another configuration.
    """
    configuration = folder / _CONFIGURATION
    if adapter_of(model) and configuration.is_file():
        _check_configuration(configuration, model)


def names_by_base_name(model: Any, saved: Sequence[str]) -> dict[str, list[str]]:
    """Returns the model's names of each tensor of the base model, by its name there."""
    prefix, names = _prefix(model), dict[str, list[str]]()
    layers = dict(_adapted_layers(model))
    for name in saved:
        if not any(name.startswith(f"{path}.") for path in layers):
            names[name.removeprefix(prefix)] = [name]
    for path, layer in layers.items():
        # What is trained as a whole is a copy of the base's module.
        copies = getattr(layer, "modules_to_save", {})
        tuner = getattr(layer, "token_adapter", layer)
        originals = [layer.original_module, *copies.values()] if copies else [tuner.get_base_layer()]
        paths = {id(module): other for other, module in layer.named_modules(prefix=path, remove_duplicate=False)}
        for original in originals:
            for key in original.state_dict():
                names.setdefault(f"{path}.{key}".removeprefix(prefix), []).append(f"{paths[id(original)]}.{key}")
    return names


def _prefix(model: Any) -> str:
    """Returns what the names of the base model's tensors begin with in the model."""
    base = model.get_base_model()
    path: str = next(name for name, module in model.named_modules() if module is base)
    return f"{path}."


def initialiser_of(model: nn.Module, layer: nn.Module) -> Callable[[], None] | None:
    """Returns what fills the matrices of an adapter as peft's constructor does; None where a module is no such layer.

    Raises:
        InputError: peft makes them of the base's weights.
    """
    name = adapter_of(model)
    reset: Any = getattr(layer, "reset_lora_parameters", None) if name else None
    if reset is None:
        return None
    kind = cast(Any, model).peft_config[name].init_lora_weights
    if not isinstance(kind, bool) and kind != "gaussian":
        remedy = "take init_lora_weights=True, or give the model values before"
        raise InputError("is made of the base's weights, which have no values", where=f"{kind!r}", remedy=remedy)
    return partial(reset, name, kind)


def _check_configuration(path: Path, model: Any) -> None:
    """Refuses an adapter whose tensors would mean something else in the model."""
    try:
        there = dict[str, Any](json.loads(path.read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        remedy = "name a folder that save_checkpoint or peft's save_pretrained has written"
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy=remedy) from error
    here = model.peft_config[adapter_of(model)].to_dict()
    for key in _MEANING:
        if key in there and there[key] != here[key]:
            raise CheckpointError(
                f"has {key}={there[key]!r}, and the model's adapter {here[key]!r}",
                where=str(path),
                remedy="make the model's adapter with the same configuration: peft.PeftConfig.from_pretrained(folder)",
            )


# ---------------------------------------------------------------------- merged


def save_merged(weights: RankTensors, model: nn.Module, folder: str | Path, limit: int) -> None:
    """Writes the base model from rank 0, with its adapter merged in; see `ParallelModule.save_checkpoint`.

    A rank holds one layer with its adapter at a time, rank 0 besides the tensors of one file.

    Args:
        model: the unsplit one; its tensors are not looked at.
        limit: the most bytes of tensors in a file.
    """
    merged = _Merged(weights, model)
    specs = merged.specs
    files = split_files("model", specs, limit)
    configure = partial(save_configuration, model=merged.base, specs=specs.values())
    write_checkpoint(weights, folder, files, specs, merged.gather, configure)


class _Merged:
    """The tensors of a base model with an adapter merged in.

    Args:
        weights: what this rank has.
        model: the unsplit one.

    Attributes:
        base: the model that peft has put adapters into.
        specs: types and whole shapes by the base's names.

    Raises:
        InputError: peft does not merge the adapter, or what it would merge into is tied to other parts of the model.
    """

    def __init__(self, weights: RankTensors, model: Any) -> None:
        self._weights, self._entries = weights, weights.entries()
        self.base: nn.Module = model.get_base_model()
        prefix = self._prefix = _prefix(model)
        self._layers: dict[str, Any] = dict(_adapted_layers(model))
        self._layer_of: dict[str, str] = {}  # by the base's names, of what an adapter changes
        self._entry_of: dict[str, ModelTensor] = {}  # and of the rest
        self._merged: tuple[str, Mapping[str, Tensor]] = "", {}
        self.specs: dict[str, Spec] = {}
        known = set[str]()  # first names
        for name, entry in saved_entries(weights).items():
            path = next((path for path in self._layers if name.startswith(f"{path}.")), "")
            if not path and entry.first not in known:
                known.add(entry.first)
                self._entry_of[name.removeprefix(prefix)] = entry
                self.specs[name.removeprefix(prefix)] = Spec.of(entry.tensor)
            elif path and path not in known:
                known.add(path)
                self._check_ties(path)
                # Without values it tells all ranks what peft would refuse, in front of the first gather.
                for key, value in self._merge(path, without_values=True).items():
                    self._layer_of[f"{path}.{key}".removeprefix(prefix)] = path
                    self.specs[f"{path}.{key}".removeprefix(prefix)] = Spec.of(value)

    def gather(self, name: str) -> Tensor:
        """Returns a tensor by the base's name; all ranks gather what it is made of. A collective call."""
        if name in self._entry_of:
            return on_all(self._weights, self._entry_of[name])
        path = self._layer_of[name]
        if self._merged[0] != path:
            self._merged = "", {}
            self._merged = path, self._merge(path)
        return self._merged[1][f"{self._prefix}{name}".removeprefix(f"{path}.")]

    def _merge(self, path: str, without_values: bool = False) -> dict[str, Tensor]:
        """Returns the state of a layer of which peft has merged the adapter, by names within the layer."""
        layer, values = self._layers[path], dict[int, Any]()
        tensors = (*layer.named_parameters(path, True, False), *layer.named_buffers(path, True, False))
        for name, tensor in tensors:
            if id(tensor) in values:
                continue
            entry = self._entries[name]
            if without_values:
                whole = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device="meta")
            else:  # peft writes in place, and a whole tensor may be the module's memory
                whole = on_all(self._weights, entry).to("cpu", copy=True)
            values[id(tensor)] = nn.Parameter(whole, requires_grad=False) if entry.is_parameter else whole
        try:
            with torch.no_grad():
                return _unloaded(copy.deepcopy(layer, values)).state_dict()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            remedy = "leave merged=True out, to save the adapter by itself"
            raise InputError(f"peft cannot merge its adapter: {error}", where=path, remedy=remedy) from error

    def _check_ties(self, path: str) -> None:
        """Refuses a layer whose tensors are others' too: those would change with it, or no longer be tied."""
        for name, entry in self._entries.items():
            others = [other for other in entry.names if not other.startswith(f"{path}.")]
            if name.startswith(f"{path}.") and others:
                raise InputError(
                    f"has an adapter, and is tied to {others[0]}, which the merge would untie or change",
                    where=name,
                    remedy="leave merged=True out, to save the adapter by itself; to merge it, untie the base model "
                    "before get_peft_model",
                )


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the outermost modules that peft has put in place of a layer, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    last = ""
    for path, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not (last and path.startswith(last)):
            last = f"{path}."
            yield path, module


def _unloaded(layer: Any) -> nn.Module:
    """Merges the adapter of one layer, and returns what peft's `merge_and_unload` puts in the layer's place."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        replacement: nn.Module = layer.unload_and_optionally_merge_module(True, False, None)
        return replacement
    layer.merge(safe_merge=False, adapter_names=None)
    base: nn.Module = layer.get_base_layer()
    return base
