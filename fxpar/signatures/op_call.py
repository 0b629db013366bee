"""Calls: an operation as the rules see it.

Enters: a node with its note. Leaves: its arguments by name, and the `OpCall` that it makes on one mesh axis; which
operations take the shape of their result; and defaults that depend on the element type.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpar.ir.operators import GraphOperator
from fxpar.ir.program import ScalarType, TensorType, has_note, note, output_types, tensor_type
from fxpar.layout.symbolic_sizes import Size


@dataclass(frozen=True)
class OpCall:
    """An operation as the rules see it, over global shapes.

    Attributes:
        target: the operator.
        arguments: by schema name; tensors are left out, scalars are ints or symbolic sizes.
        operands: types of the tensor operands, lists flattened.
        names: the schema name of each operand; the items of a list share one.
        outputs: types of the tensor outputs.
        n: ranks of the axis.
        decides: of an operation that gives indices: whether the program computes with them, and does not just
            return them.
        rows: where the plan declares that the operation computes the rows of the batch apart, their number as the axis
            sees it.
    """

    target: Any
    arguments: Mapping[str, Any]
    operands: tuple[TensorType, ...]
    names: tuple[str, ...]
    outputs: tuple[TensorType, ...]
    n: int
    decides: bool = False
    rows: Size | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a non-tensor argument."""
        return self.arguments.get(name, default)

    def position(self, name: str) -> int | None:
        """Returns the index of the operand of that schema name; None where it was not passed."""
        return self.names.index(name) if name in self.names else None


def _scalar(value: Any) -> Any:
    if isinstance(value, fx.Node):
        kind = note(value).type if has_note(value) else None
        return kind.value if isinstance(kind, ScalarType) else value
    if isinstance(value, (list, tuple)):
        return [_scalar(item) for item in value]
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and has_note(value) and isinstance(note(value).type, (TensorType, tuple))


def bind_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns arguments by name: by schema for operators of torch, by signature for fxpar's, by position elsewhere.

    Given arguments stand in the order of `operands(node)`, defaults after them.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        names, defaults = _schema(node.target)
    else:
        function = node.target.stub if isinstance(node.target, GraphOperator) else node.target
        code = getattr(function, "__code__", None)
        if code is None or code.co_flags & 0x04:  # a builtin, or *args
            return {**{str(i): a for i, a in enumerate(node.args)}, **node.kwargs}
        names = code.co_varnames[: code.co_argcount]
        values = getattr(function, "__defaults__", None) or ()
        defaults = dict(zip(names[len(names) - len(values) :], values, strict=True))
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {**arguments, **{k: v for k, v in defaults.items() if k not in arguments}}


@lru_cache(maxsize=4096)
def _schema(target: torch._ops.OpOverload) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Returns names of what an operator of torch takes, and defaults."""
    arguments = target._schema.arguments
    return [a.name for a in arguments], {a.name: a.default_value for a in arguments if a.has_default_value()}


def call_of(node: fx.Node, n: int) -> OpCall:
    """Returns the call that a node makes, on an axis of n ranks."""
    kinds: list[TensorType] = []
    names: list[str] = []
    plain: dict[str, Any] = {}
    for name, value in bind_arguments(node).items():
        items = value if isinstance(value, (list, tuple)) else [value]
        tensors = [item for item in items if _is_tensor(item)]
        for item in tensors:
            for kind in output_types(item):
                kinds.append(kind)
                names.append(name)
        if not tensors:
            plain[name] = _scalar(value)
        elif isinstance(value, (list, tuple)):
            plain[name] = [None if not _is_tensor(item) else item for item in value]
    return OpCall(node.target, plain, tuple(kinds), tuple(names), output_types(node), n, decides(node))


def decides(node: fx.Node) -> bool:
    """Returns whether indices that a node finds decide what the forward computes."""
    kinds = output_types(node)
    indices = [i for i, kind in enumerate(kinds) if not (kind.is_float or kind.dtype.is_complex)]
    if len(kinds) > 1:
        items = [user for user in node.users if user.target is operator.getitem and user.args[1] in indices]
    else:
        items = [node] if indices else []
    # Its gradient goes back to what was found, and computes nothing with it.
    return any(user.op != "output" and not _is_backward(user) for item in items for user in item.users)


def _is_backward(node: fx.Node) -> bool:
    return has_note(node) and note(node).phase != ""


aten = torch.ops.aten

# What gives an image other numbers of pixels.
RESAMPLED = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
""".split()


def _named(name: str, *targets: torch._ops.OpOverload) -> dict[torch._ops.OpOverload, int]:
    return {target: [argument.name for argument in target._schema.arguments].index(name) for target in targets}


# The place of the shape among the arguments.
SIZED: Mapping[torch._ops.OpOverload, int] = {
    **_named("size", aten.view.default, aten.expand.default),
    **_named("shape", aten.reshape.default),
    **_named("input_size", *(getattr(aten, f"{name}_backward").default for name in RESAMPLED)),
}


def name_of_sizes(target: torch._ops.OpOverload) -> str:
    """Returns the name of the argument that is the shape of the result."""
    return str(target._schema.arguments[SIZED[target]].name)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which kernels compute: half precision in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# By operator: names of arguments that may be missing, and the number that PyTorch takes for an operand of a type.
_DEFAULTS: Mapping[Any, Mapping[str, Callable[[torch.dtype], float]]] = {
    aten.rms_norm.default: {"eps": lambda dtype: torch.finfo(_computed_in(dtype)).eps},
    aten._fused_rms_norm.default: {"eps": lambda dtype: torch.finfo(_computed_in(dtype)).eps},
    aten.nan_to_num.default: {
        "nan": lambda dtype: 0.0,
        "posinf": lambda dtype: torch.finfo(dtype).max,
        "neginf": lambda dtype: torch.finfo(dtype).min,
    },
}


def write_defaults(nodes: Iterable[fx.Node]) -> None:
    """Writes the number wherever an operator would take it from the type of its operand.

    Args:
        nodes: with notes; calls of integers are left as they are.
    """
    for node in nodes:
        defaults = _DEFAULTS.get(node.target, {}) if node.op == "call_function" else {}
        if not defaults:
            continue
        dtype = tensor_type(node.args[0]).dtype  # type: ignore[arg-type]
        if not dtype.is_floating_point and not dtype.is_complex:
            continue
        places = {argument.name: i for i, argument in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
        for name, number in defaults.items():
            place = places[name]
            if place < len(node.args):
                if node.args[place] is None:
                    node.update_arg(place, number(dtype))
            elif node.kwargs.get(name) is None:
                node.update_kwarg(name, number(dtype))
