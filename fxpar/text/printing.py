"""The text form of a program: one line a node, the same for every rank, parseable back.

Enters: a program. Leaves: its text; `fxpar.text.parsing` is the way back. `docs/dev/layouts-and-rules.md` explains it;
in short::

    fxpar 2
    plan {"tp": 2}
    properties canonical layouts
    symbol b = input_ids.0 like 3
    loss loss
    %w = parameter["mlp.down.weight"] : f32[64, 96] tp:S(1)
    %down = aten.linear.default(%h, %w) : f32[b, s, 64] tp:P  # mlp.down model.py:41
    %out = fxpar.reduce_from[tp](%down) : f32[b, s, 64] tp:P→I  # mlp.down model.py:41
    return loss=%out

Equal layers of a step are a region, written once above the nodes; a call names who takes each of its results::

    region layer  # layers.0
    %x = operand : f32[b, s, 64] tp:I
    %rng = operand : i64[3] tp:R
    %h = fxpar.dropout(%x, %rng, 0.1) : f32[b, s, 64] tp:I {random=1}
    result %h
    %layer_1 = region.layer(%x, %rng, random=[17]) gives %y  # layers.0

Without a loss the line `loss -` says so where an output is a scalar. A name with a space or another sign that the
grammar uses stands in quotes. A plan without axes leaves values with an empty layout, written `-`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import TextError
from fxpar.ir.operators import GraphOperator, axes_of
from fxpar.ir.program import DTYPE_NAMES, Program, TensorType, note, operands, output_layouts, output_node, output_types
from fxpar.ir.regions import Region, region_of, regions
from fxpar.layout.layout import Layout, Placement, shard
from fxpar.layout.nesting import seen_by
from fxpar.layout.symbolic_sizes import Size
from fxpar.ops.collectives import COERCION_OF

VERSION = "fxpar 2"
NO_LOSS = "-"  # in place of the loss's name

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "lshift", "rshift")
_LOGIC = ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "invert")

_ENDLESS = ("factorial", "comb", "perm")  # of a large number
# Every callable besides torch.ops and fxpar's own that a text may name: functions of numbers without effects.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (*_ARITHMETIC, *_LOGIC, "getitem")},
    **{f"torch.{name}": f for name, f in vars(torch).items() if name.startswith("sym_") and callable(f)},
    **{f"math.{n}": f for n, f in vars(math).items() if not n.startswith("_") and callable(f) and n not in _ENDLESS},
}

_PLAIN_WORD = re.compile(r"[^\s\",=]+")


def target_name(node: fx.Node) -> str:
    """Returns a call's operator as the text names it: `aten.view.default`, `fxpar.copy_to[tp]`."""
    target = node.target
    if isinstance(target, (torch._ops.OpOverload, Region)):
        return str(target)
    if isinstance(target, GraphOperator):
        axis = node.kwargs.get("axis")
        return f"{target}[{axis}]" if axis is not None else str(target)
    for name, function in FUNCTIONS.items():
        if function is target:
            return name
    raise TextError(
        f"the target {target!r} has no text form",
        where=f"%{node.name}",
        remedy="call operators of torch.ops or fxpar, or functions of numbers",
    )


def word(text: str) -> str:
    """Returns a name as the text writes it: as it is, or in quotes where the grammar could misread it."""
    return text if _PLAIN_WORD.fullmatch(text) and text != "-" else json.dumps(text)


def value_text(value: Any) -> str:
    """Returns an argument: a node, a literal, or lists of them (a tuple is written as a list).

    Raises:
        TextError: the value is of another kind.
    """
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return f"dtype.{DTYPE_NAMES[value]}"
    if isinstance(value, torch.device):
        # Without the index of the device: the text is the same for all ranks.
        return f"device.{value.type}"
    if isinstance(value, (torch.memory_format, torch.layout)):
        return str(value).replace("torch.", "memory_format." if isinstance(value, torch.memory_format) else "layout.")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(v) for v in value) + "]"
    if isinstance(value, float):
        # repr gives the shortest text that is read back as the same number.
        return "nan" if math.isnan(value) else repr(value)
    if isinstance(value, complex):
        return f"complex({value_text(value.real)}, {value_text(value.imag)})"
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    kind = type(value).__name__
    raise TextError(f"the literal {value!r} of type {kind} has no text form", remedy="pass a number or text")


def placement_text(placement: Placement, shape: Sequence[Size]) -> str:
    """Writes `str(placement)`, but a shard whose only run is not the dimension of `shape` says so: `S(1: 64)`."""
    if not placement.is_shard or not placement.pieces:
        return str(placement)
    if 0 <= placement.dim < len(shape) and placement == shard(placement.dim, shape[placement.dim]):
        return f"S({placement.dim})"
    return f"S({placement.dim}: {placement.cut_text})"


def layout_text(layout: Layout, shape: Sequence[Size], axes: Mapping[str, int]) -> str:
    """Returns `dp:I tp:S(1)`, or `-` for the empty layout.

    Args:
        axes: sizes of the mesh axes.
    """
    seen = seen_by(layout, shape, axes)
    return " ".join(f"{axis}:{placement_text(placement, seen[axis])}" for axis, placement in layout) or "-"


def need_shapes(node: fx.Node) -> list[tuple[Size, ...]]:
    """Returns the shapes that a node's `needs` are about: those of its tensor operands, several outputs one by one."""
    return [kind.shape for operand in operands(node) for kind in output_types(operand)]


def node_text(node: fx.Node, program: Program) -> str:
    """Returns the node's line."""
    noted = note(node)
    line = f"%{node.name} = {_head(node, program)}"
    region = region_of(node)
    if region is not None:
        line += f" gives {', '.join(_taken(node, len(region.results)))}"
    elif noted.type is not None:
        line += f" : {_type_text(node, program.axes)}"
    attributes = _attributes(node, program.axes)
    if attributes:
        line += " {" + ", ".join(attributes) + "}"
    if noted.fqn or noted.source:
        line += f"  # {word(noted.fqn) if noted.fqn else '-'}" + (f" {word(noted.source)}" if noted.source else "")
    return line


def _head(node: fx.Node, program: Program) -> str:
    if node.op == "placeholder":
        owned = program.parameter(node)
        if owned is None:
            entry = next(i for i in program.inputs if i.node == node.name)
            return f"input[{json.dumps(entry.path)}]" + ("(gradient)" if entry.carries else "")
        details = [] if owned.trainable or owned.kind != "parameter" else ["frozen"]
        details += ["left_out"] if owned.left_out else []
        details += [f"tied={json.dumps(name)}" for name in owned.tied]
        if owned.kind == "constant":
            details.append(_tensor_text(program.constants[owned.fqn]))
        return f"{owned.kind}[{json.dumps(owned.fqn)}]" + (f"({', '.join(details)})" if details else "")
    arguments = [value_text(a) for a in node.args]
    shown_with_target = "axis" if isinstance(node.target, GraphOperator) else ""
    arguments += [f"{k}={value_text(v)}" for k, v in node.kwargs.items() if k != shown_with_target]
    return f"{target_name(node)}({', '.join(arguments)})"


def _taken(call: fx.Node, count: int) -> list[str]:
    """Returns who takes each result of a region's call."""
    takers = {user.args[1]: f"%{user.name}" for user in call.users}
    return [takers.get(index, "-") for index in range(count)]


def region_text(region: Region, program: Program) -> list[str]:
    """Returns the lines of a region: its operands, what it computes, and what it gives."""
    lines = [f"region {region.name}" + (f"  # {word(region.fqn)}" if region.fqn else "")]
    for node in region.operands:
        lines.append(f"%{node.name} = operand : {_type_text(node, program.axes)}")
    lines += [node_text(node, program) for node in region.body]
    return [*lines, "result " + ", ".join(f"%{node.name}" for node in region.results)]


def _tensor_text(value: torch.Tensor) -> str:
    flat = value.detach().cpu().reshape(-1).tolist()
    if value.is_complex():
        raise TextError("a complex constant has no text form", remedy="build it from two real tensors")
    return value_text(flat)


def _type_text(node: fx.Node, axes: Mapping[str, int]) -> str:
    kind = note(node).type
    layouts = output_layouts(node)
    if not isinstance(kind, tuple):
        return f"{kind} {_layout_text(node, layouts[0], axes)}" if layouts else str(kind)
    if layouts and len(layouts) != len(kind):
        raise TextError(
            f"{len(kind)} outputs have {len(layouts)} layouts", where=f"%{node.name}", remedy="set one for each output"
        )
    parts = [f"{t} {layout_text(layouts[i], t.shape, axes)}" if layouts else str(t) for i, t in enumerate(kind)]
    return "(" + "; ".join(parts) + ")"


def _layout_text(node: fx.Node, layout: Layout, axes: Mapping[str, int]) -> str:
    """Does as `layout_text`; for a coercion the source stands before an arrow: `tp:P→I`."""
    kinds = output_types(node)
    shape = kinds[0].shape if kinds else ()
    row = COERCION_OF.get(node.target) if node.op == "call_function" else None
    sources = output_layouts(operands(node)[0])[:1] if row is not None else ()
    if not sources:
        return layout_text(layout, shape, axes)
    before = dict(sources[0])
    seen_before = seen_by(sources[0], output_types(operands(node)[0])[0].shape, axes)
    seen, shown = seen_by(layout, shape, axes), []
    for name, placement in layout:
        arrow = name in axes_of(node) and name in before
        source = f"{placement_text(before[name], seen_before[name])}→" if arrow else ""
        shown.append(f"{name}:{source}{placement_text(placement, seen[name])}")
    return " ".join(shown) or "-"


def _attributes(node: fx.Node, axes: Mapping[str, int]) -> list[str]:
    noted = note(node)
    attributes = []
    if noted.needs:
        shapes = need_shapes(node)
        if len(shapes) != len(noted.needs):
            raise TextError(
                f"{len(shapes)} operands have {len(noted.needs)} needs",
                where=f"%{node.name}",
                remedy="set one for each operand",
            )
        texts = [layout_text(n, s, axes) for n, s in zip(noted.needs, shapes, strict=True)]
        attributes.append("needs=" + " ; ".join(texts))
    attributes += [f"{key}={json.dumps(getattr(noted, key))}" for key in ("role", "origin") if getattr(noted, key)]
    plain = ("random", "recompute", "buffer", "phase", "region", "shard")
    attributes += [f"{key}={getattr(noted, key)}" for key in plain if getattr(noted, key)]
    attributes += ["one_shot=true"] if noted.one_shot else []
    attributes += ["stage=" + "+".join(map(str, noted.stages))] if noted.stages else []
    return [*attributes, f"uncaptured={json.dumps(noted.uncaptured)}"] if noted.uncaptured else attributes


def has_scalar(program: Program) -> bool:
    """Returns whether an output could be the loss, so that the text says which it is, or that there is none."""
    kinds = [note(node).type for node in output_node(program.graph).args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    return any(isinstance(kind, TensorType) and kind.is_float and not kind.shape for kind in kinds)


def print_program(program: Program) -> str:
    """Returns the program's text, ending in a newline.

    Raises:
        TextError: a node has a target or literal without a text form.
    """
    lines = [VERSION, f"plan {json.dumps(program.plan.to_dict())}"]
    lines.append(" ".join(["properties", *sorted(program.properties)]))
    for s in program.symbols:
        share = f" / {s.multiple}" if s.multiple > 1 else ""
        share += f" in groups of {s.group}" if s.group > 1 else ""
        lines.append(f"symbol {s.name} = {word(s.path)}.{s.dim}{share} like {s.example}")
    lines += [f"counted {symbol.name} = {symbol.balanced} like {symbol.example}" for symbol in program.counted]
    lines += [f"condition {condition}" for condition in program.conditions]
    if program.loss or has_scalar(program):
        lines.append(f"loss {word(program.loss) if program.loss else NO_LOSS}")
    for region in regions(program):
        lines += region_text(region, program)
    for node in program.graph.nodes:
        # The line of the call names who takes its results.
        is_result = node.target is operator.getitem and region_of(node.args[0]) is not None
        if node.op != "output" and not is_result:
            lines.append(node_text(node, program))
    values = output_node(program.graph).args[0]
    pairs = zip(program.outputs, values, strict=True)  # type: ignore[arg-type]
    lines.append("return " + ", ".join(f"{word(name)}={value_text(value)}" for name, value in pairs))
    return "\n".join(lines) + "\n"
