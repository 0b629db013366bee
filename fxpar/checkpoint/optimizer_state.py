"""Says what of an optimizer is saved: tensors by state key and parameter, and JSON of what is no tensor.

One rule for all optimizers: what has a parameter's shape is cut as the parameter is, what is one number is the same on
all ranks. Anything else is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpar.checkpoint.safetensors_files import Checkpoint, can_hold
from fxpar.checkpoint.state_dicts import PipelineRanks, RankTensors
from fxpar.errors import CheckpointError, InputError, shown
from fxpar.ir.program import DTYPE_NAMES, DTYPES
from fxpar.layout.layout import Layout
from fxpar.runtime.sharded import Sharded, local_of
from fxpar.runtime.training import ClippingOptimizer

# How a step is computed on the machine at hand, and not what.
_MACHINE = frozenset(("foreach", "fused", "capturable", "differentiable"))
_NAMES = frozenset(("params", "param_names"))
_KEY = re.compile(r"[A-Za-z_][\w-]*")
_ELEMENTWISE = "use an optimizer that treats each element by itself (AdamW, SGD, Adagrad, RMSprop, …)"


@dataclass(frozen=True)
class OptimizerState:
    """What of an optimizer is saved.

    Attributes:
        tensors: by state key, then by parameter; of the meta device what other ranks of a pipeline hold.
        document: class, parameter groups and values that are no tensors, plain.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    document: Mapping[str, Any]


def collect(weights: RankTensors, optimizer: Optimizer) -> OptimizerState:
    """Returns the state of an optimizer of a module's parameters.

    Raises:
        InputError: it is no optimizer, or one of other parameters.
        CheckpointError: a state that cannot be saved by shards.
    """
    names = _names(weights, optimizer)
    stray = [key for key in optimizer.state if not isinstance(key, Tensor) or id(key) not in names]
    if stray:
        what = f"a {type(stray[0]).__name__}" if not isinstance(stray[0], str) else repr(stray[0])
        raise CheckpointError(f"has state for {what}, no parameter", where="optimizer", remedy=_ELEMENTWISE)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, name in ((p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            where = f"optimizer state {key} of {name}"
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise CheckpointError(f"has no name but {key!r}", where=where, remedy="name states by identifiers")
            if isinstance(value, Tensor):
                _check_state(value, parameter, where)
                tensors.setdefault(key, {})[name] = value
            else:
                values.setdefault(name, {})[key] = encode(value, where)
    groups = [
        {
            "parameters": [names[id(p)] for p in group["params"]],
            "options": {
                key: encode(value, f"{key} of parameter group {number}")
                for key, value in group.items()
                if key not in _NAMES
            },
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    host = [
        key
        for key, by_name in tensors.items()
        if all(v.dim() == 0 and v.device.type == "cpu" for v in by_name.values())
    ]
    local = OptimizerState(tensors, {"class": class_name(optimizer), "groups": groups, "values": values, "host": host})
    return local if weights.pipeline is None else _of_all(weights, weights.pipeline, local)


def _of_all(weights: RankTensors, pipeline: PipelineRanks, local: OptimizerState) -> OptimizerState:
    """Joins the states of the optimizers of all ranks of a pipeline. A collective call.

    Raises:
        InputError: their classes or options differ, or the numbers of their parameter groups.
    """
    kinds = {
        key: {name: (tuple(value.shape), value.dtype) for name, value in by_name.items()}
        for key, by_name in local.tensors.items()
    }
    weights.agree({}, "")  # no rank has an objection
    gathered: list[tuple[Any, Mapping[str, Any]]] = pipeline.gathered((kinds, local.document))
    order = {name: place for place, name in enumerate(weights.saved)}
    documents = [document for _, document in gathered]
    for what, seen in (
        ("class", [document["class"] for document in documents]),
        ("number of parameter groups", [len(document["groups"]) for document in documents]),
        ("options", [[group["options"] for group in document["groups"]] for document in documents]),
    ):
        if any(other != seen[0] for other in seen):
            remedy = "make it alike on every rank, with a group for each kind of parameters even where it is empty"
            raise InputError(f"its {what} differs between the ranks of a pipeline", where="optimizer", remedy=remedy)
    tensors: dict[str, dict[str, Tensor]] = {}
    for key in sorted({key for rank_kinds, _ in gathered for key in rank_kinds}):
        merged = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for rank_kinds, _ in gathered
            for name, (shape, dtype) in rank_kinds.get(key, {}).items()
        }
        merged |= local.tensors.get(key, {})
        tensors[key] = {name: merged[name] for name in sorted(merged, key=order.__getitem__)}
    groups = [
        {
            "parameters": sorted({name for group in parts for name in group["parameters"]}, key=order.__getitem__),
            "options": parts[0]["options"],
        }
        for parts in zip(*(document["groups"] for document in documents), strict=True)
    ]
    values = {name: value for document in documents for name, value in document["values"].items()}
    elsewhere = {key for rank_kinds, document in gathered for key in rank_kinds if key not in document["host"]}
    host = [key for key in tensors if key not in elsewhere]
    document = {"class": documents[0]["class"], "groups": groups, "values": values, "host": host}
    return OptimizerState(tensors, document)


def _check_state(value: Tensor, parameter: Tensor, where: str) -> None:
    if value.layout != torch.strided or not can_hold(value.dtype):
        kind = value.dtype if value.layout == torch.strided else value.layout
        raise CheckpointError(f"safetensors have no {kind}", where=where, remedy="keep dense floats and integers there")
    if value.dim() == 0 and not isinstance(value, Sharded):
        return
    if value.shape != parameter.shape:
        raise CheckpointError(
            f"has the shape {list(value.shape)}: neither one number nor the parameter's {list(parameter.shape)}",
            where=where,
            remedy=_ELEMENTWISE,
        )
    if isinstance(value, Sharded) != isinstance(parameter, Sharded):
        raise CheckpointError(
            "is whole where the parameter is cut", where=where, remedy="make it with torch.zeros_like(parameter)"
        )


def check_fits(weights: RankTensors, optimizer: Optimizer, document: Mapping[str, Any], where: str) -> None:
    """Checks that a saved state is one of this optimizer.

    Raises:
        CheckpointError: another class, or other parameter groups.
        InputError: it is no optimizer of the module's parameters.
    """
    names = _names(weights, optimizer)
    others = weights.entries().keys() - weights.by_name().keys()
    if document["class"] != class_name(optimizer):
        raise CheckpointError(
            f"holds the state of {document['class']} and not of {class_name(optimizer)}",
            where=where,
            remedy="resume with the optimizer that was saved",
        )
    for number, (saved_group, group) in enumerate(zip(document["groups"], optimizer.param_groups, strict=False)):
        was, is_now = saved_group["options"].get("algorithm"), group.get("algorithm")
        if was != is_now:
            reason = f"parameter group {number} was stepped by {was}, and is by {is_now}"
            raise CheckpointError(reason, where=where, remedy="resume with the optimizer that was saved")
    saved = [set(group["parameters"]) for group in document["groups"]]
    here = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    if len(saved) != len(here):
        raise CheckpointError(
            f"has {len(saved)} parameter groups, and the optimizer {len(here)}", where=where, remedy=_SAME_GROUPS
        )
    for number, (saved_names, local_names) in enumerate(zip(saved, here, strict=True)):
        odd = sorted((saved_names - others) ^ local_names)
        if odd:
            side = "in the save alone" if odd[0] in saved_names else "in the optimizer alone"
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise CheckpointError(
                f"parameter group {number} differs: {odd[0]}{more} is {side}", where=where, remedy=_SAME_GROUPS
            )


_SAME_GROUPS = "make the optimizer with the parameter groups that it was saved with"


def restore(
    weights: RankTensors, optimizer: Optimizer, document: Mapping[str, Any], checkpoints: Mapping[str, Checkpoint]
) -> None:
    """Gives an optimizer a saved state, for which `check_fits` holds.

    Args:
        document: with options and values decoded.
        checkpoints: the tensors of each state key, by the names of parameters.
    """
    names = _names(weights, optimizer)
    for group, saved_group in zip(optimizer.param_groups, document["groups"], strict=True):
        _restore_options(group, saved_group["options"])
    with contextlib.ExitStack() as stack, torch.no_grad():
        readers = {key: stack.enter_context(checkpoint.reading()) for key, checkpoint in checkpoints.items()}
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                name = names[id(parameter)]
                state: dict[str, Any] = dict(document["values"].get(name, {}))
                for key in (key for key, checkpoint in checkpoints.items() if name in checkpoint.shapes):
                    is_number = not checkpoints[key].shapes[name] and bool(weights.shape_of(name))
                    layout = Layout() if is_number else weights.layout_of(name)
                    part = readers[key].part(name, layout, weights.axes, weights.coordinates)
                    if is_number:
                        # torch has the step of a fused or capturable optimizer on the device, and of others on the
                        # host. It follows the optimizer that resumes, not the one that was saved.
                        is_host = not on_device if key == "step" else key in document["host"]
                        state[key] = part if is_host else part.to(parameter.device)
                    else:
                        state[key] = _memory(optimizer, parameter, key, part.dtype)
                        local_of(state[key]).copy_(part)
                optimizer.state.pop(parameter, None)
                if state:
                    optimizer.state[parameter] = state


def _memory(optimizer: Optimizer, parameter: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """Returns memory for a state like its parameter: of the optimizer's choice, which may be the host's."""
    known = optimizer.empty_state(parameter, key) if isinstance(optimizer, ClippingOptimizer) else None
    return torch.empty_like(parameter.detach(), dtype=dtype, requires_grad=False) if known is None else known


def _restore_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key in _MACHINE and key in group:
            continue
        current = group.get(key)
        if isinstance(current, Tensor):  # a graph may have captured it
            current.fill_(value)
        else:
            group[key] = value.item() if isinstance(value, Tensor) and current is not None else value


def _names(weights: RankTensors, optimizer: Any) -> dict[int, str]:
    """Returns the name under which each of the optimizer's parameters is saved."""
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"must be a torch.optim.Optimizer, got a {type(optimizer).__name__}",
            where="optimizer",
            remedy="pass the optimizer",
        )
    saved = set(weights.saved)
    names = {
        id(entry.tensor): next((name for name in entry.names if name in saved), entry.first)
        for entry in weights.tensors
        if entry.is_parameter
    }
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise InputError(
                    f"parameter {index} of group {number}, of shape {list(parameter.shape)}, is not the module's",
                    where="optimizer",
                    remedy="make it of model.parameters(), after parallelize",
                )
    return names


def class_name(value: Any) -> str:
    """Returns the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


_TAGS = ("tuple", "float", "items", "counter", "scalar")


def encode(value: Any, where: str) -> Any:
    """Returns a value of JSON from which `decode` makes the same again.

    Args:
        where: what the value is, for errors.

    Raises:
        CheckpointError: something in it has no plain form; names the place.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        # JSON has neither infinities nor NaN.
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (list, tuple):
        encoded = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return encoded if type(value) is list else {"tuple": encoded}
    if type(value) is Counter or isinstance(value, dict):
        return _encode_mapping(value, where)
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in DTYPE_NAMES and not value.is_complex():
        return {"scalar": [DTYPE_NAMES[value.dtype], encode(value.item(), where)]}
    raise CheckpointError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON",
        where=where,
        remedy="keep numbers, texts, lists and dicts there; set the rest up again before resuming",
    )


def _encode_mapping(value: dict[Any, Any], where: str) -> Any:
    if type(value) not in (dict, Counter):
        raise CheckpointError(
            f"a {type(value).__qualname__} cannot be written as JSON", where=where, remedy="keep a plain dict there"
        )
    items = [[encode(key, f"{where}: a key"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    if type(value) is Counter:
        return {"counter": items}
    # A dict whose only key is a tag would be read back as what the tag stands for.
    if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)) in _TAGS):
        return dict(items)
    return {"items": items}


def decode(value: Any) -> Any:
    """Returns what `encode` was called with; ValueError where `encode` would not have returned the value."""
    try:
        return _decoded(value)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"{shown(value)} stands for nothing") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag == "tuple":
        return tuple(_decoded(content))
    if tag == "float":
        return float(str(content))
    if tag == "items":
        return {_decoded(key): _decoded(item) for key, item in content or ()}
    if tag == "counter":
        return Counter({_decoded(key): _decoded(item) for key, item in content or ()})
    if tag == "scalar":
        name, number = content or ("f32", 0.0)
        return torch.tensor(_decoded(number), dtype=DTYPES[name]).reshape(())
    return {key: _decoded(item) for key, item in value.items()}


def misfit(value: Any, form: Any, where: str) -> str:
    """Says where a value of JSON differs from a form; nothing where it does not.

    Args:
        form: a type, `object` for any; a list of one form, for lists of any length; a tuple of forms, for lists of that
            length; a dict of forms by key, or by `str` for any keys.
        where: what the value is.
    """
    if isinstance(form, dict) and isinstance(value, dict):
        keys = value if str in form else form
        if str not in form and value.keys() != form.keys():
            return f"{where} has other entries than {', '.join(form)}"
        pairs = [(value[key], form.get(str, form.get(key)), f"{where}: {key}") for key in keys]
    elif isinstance(form, (list, tuple)) and isinstance(value, list):
        if isinstance(form, tuple) and len(form) != len(value):
            return f"{where} has {len(value)} entries and not {len(form)}"
        forms = form if isinstance(form, tuple) else form * len(value)
        pairs = [(item, kind, f"{where}[{index}]") for index, (item, kind) in enumerate(zip(value, forms, strict=True))]
    else:
        return "" if form is object or type(value) is form else f"{where} is {shown(value)}"
    return next(filter(None, (misfit(*pair) for pair in pairs)), "")


def document(value: Any) -> bytes:
    """Returns the bytes of a document of JSON."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
