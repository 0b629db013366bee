"""From an exported graph to a `Program`: names, symbols, types and notes.

Enters: a `Trace` and the traced model. Leaves: the program over global shapes and the `CallSpec` that maps a user's
call to its inputs and its outputs back to the model's own output type.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from fxpar.capture.conditions import conditions
from fxpar.capture.places import module_of, source_of
from fxpar.capture.recording import RECOMPUTE_KEY, refuse_foreign
from fxpar.capture.sizes import SizeError, written
from fxpar.capture.trace import Trace
from fxpar.errors import CaptureError, CheckFailed
from fxpar.layout.symbols import Size, names, simplify, symbol
from fxpar.ops.functions import function
from fxpar.plan.plan import Plan
from fxpar.program.program import (
    DTYPE_NAMES,
    Input,
    Note,
    Parameter,
    Program,
    ScalarType,
    Symbol,
    TensorType,
    ValueType,
    set_note,
    tensor_type,
)
from fxpar.signatures.randomness import draws_bits


@dataclass(frozen=True)
class CallSpec:
    """How a call maps to the program.

    Attributes:
        in_spec: nest of `(args, kwargs)` the model was traced with.
        in_leaves: for each leaf an input path, or the constant it had (which later calls must repeat).
        out_spec: nest of the model's output.
        out_leaves: for each leaf an output name, or a constant.
        conditions: relations between symbols under which the trace is the model; a call that breaks one needs another.
    """

    in_spec: pytree.TreeSpec
    in_leaves: tuple[tuple[str, Any], ...]
    out_spec: pytree.TreeSpec
    out_leaves: tuple[tuple[str, Any], ...]
    conditions: tuple[Any, ...] = ()

    def inputs(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
        """The program's inputs, by path, of a call `(args, kwargs)`.

        Raises:
            CheckFailed: the call has another structure than the traced one.
        """
        leaves, spec = pytree.tree_flatten(call)
        if spec != self.in_spec:
            raise CheckFailed("the batch has another structure than the example", where="batch")
        pairs = zip(self.in_leaves, leaves, strict=True)
        return {str(what): value for (kind, what), value in pairs if kind == "input"}

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether the trace is the model for inputs of these sizes, by symbol.

        A trace takes it for granted that symbols are not 1, and records none of the branches that are decided by that.
        """
        if 1 in sizes.values():
            return False
        return all(bool(r.subs({s: sizes[str(s)] for s in r.free_symbols})) for r in self.conditions)


class _Converter:
    """State of one conversion: symbol names and what was recorded."""

    def __init__(self, traced: Trace, model: nn.Module) -> None:
        self.traced = traced
        self.model = model
        self.signature = traced.exported.graph_signature
        self.substitution: dict[Any, Any] = {}
        self.symbols: list[Symbol] = []
        self.random: Counter[str] = Counter()
        # Sizes of the inputs by dimension; numbers where the trace fixed them.
        users = [s.arg.name for s in self.signature.input_specs if s.kind is InputKind.USER_INPUT]
        values = [n.meta.get("val") for n in traced.exported.graph.nodes if n.name in users]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        self.pinned = {(dim, str(size)) for shape in shapes for dim, size in enumerate(shape)}

    def size(self, value: Any) -> Size:
        if isinstance(value, int):
            return value
        parsed = written(value)
        if isinstance(parsed, int):
            return parsed
        unknown = names([parsed]) - {str(s) for s in self.substitution}
        if unknown:
            raise CaptureError(
                f"the size {parsed} depends on values of tensors ({', '.join(sorted(unknown))})",
                remedy="use shapes that follow from the inputs' shapes (torch.where, masked_fill)",
            )
        size = simplify(parsed.subs(self.substitution))
        images = {s.name for s in self.symbols if s.dim > 1}
        if not isinstance(size, int) and not size.is_polynomial() and names([size]) & images:
            raise SizeError(f"the size {size} of an image is no polynomial", remedy="give images of one size")
        return size

    def type(self, value: Any) -> ValueType:
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPE_NAMES:
                raise CaptureError(f"the element type {value.dtype} is not supported", remedy="cast it")
            return TensorType(value.dtype, tuple(self.size(s) for s in value.shape))
        if isinstance(value, (tuple, list)):
            return tuple(self.type(v) for v in value if isinstance(v, torch.Tensor))  # type: ignore[misc]
        if isinstance(value, (int, torch.SymInt)):
            return ScalarType(self.size(value))
        return None

    def placed_type(self, node: fx.Node, place: str = "") -> ValueType:
        """The type of a node's value; errors name the place, or the author's line."""
        try:
            return self.type(node.meta.get("val"))
        except CaptureError as error:
            raise type(error)(
                error.reason, where=place or source_of(node) or f"%{node.name}", remedy=error.remedy
            ) from None

    def declare(self, path: str, value: torch.Tensor) -> None:
        """Names the symbols that first occur in this input: `b` in front, then `s`, then by number.

        Inputs whose examples agree in the same dimension share its symbol (labels and tokens have one batch and one
        sequence length, which tracing alone does not find out); calls are checked against that. Where the model takes
        one size only (tokens as long as its mask), those that agree with it are that number.
        """
        for dim, size in enumerate(value.shape):
            if isinstance(size, int):
                continue
            key = size.node.expr
            if not key.is_Symbol or symbol(str(key)) in self.substitution:
                continue
            if (dim, str(size.node.hint)) in self.pinned:
                self.substitution[symbol(str(key))] = int(size.node.hint)
                continue
            known = next((s for s in self.symbols if s.dim == dim and s.example == int(size.node.hint)), None)
            if known is not None:
                self.substitution[symbol(str(key))] = symbol(known.name)
                continue
            base = ("b", "s")[dim] if dim < 2 else f"d{dim}"
            taken = {s.name for s in self.symbols}
            name = next(n for n in (base, *(f"{base}{i}" for i in range(2, 99))) if n not in taken)
            self.substitution[symbol(str(key))] = symbol(name)
            self.symbols.append(Symbol(name, path, dim, int(size.node.hint)))

    def note(self, node: fx.Node) -> Note:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value):
            raise CaptureError(
                "reads the value of a tensor on the host, which no graph of all ranks can hold",
                where=source_of(node) or f"%{node.name}",
                remedy="keep it a tensor (no item(), tolist() or float())",
            )
        fqn = module_of(node).removeprefix(self.traced.prefix)
        fqn = "" if self.traced.prefix and fqn == self.traced.prefix.rstrip(".") else fqn
        return Note(
            type=self.placed_type(node),
            fqn=fqn,
            source=source_of(node),
            random=self.random_identity(node, fqn),
            recompute=node.meta.get("custom", {}).get(RECOMPUTE_KEY, 0),
        )

    def random_identity(self, node: fx.Node, fqn: str) -> int:
        """A number from the node's module and its position there: the same under every plan."""
        if not draws_bits(node):
            return 0
        self.random[fqn] += 1
        digest = hashlib.sha256(f"{fqn}#{self.random[fqn]}".encode()).digest()
        return int.from_bytes(digest[:4], "little") or 1


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def _path(keys: Any) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys)


def convert(traced: Trace, model: nn.Module, plan: Plan, loss: str | None) -> tuple[Program, CallSpec]:
    """The program of a trace, and how calls map to it.

    Args:
        loss: name of the output to differentiate; None for `loss`, else the only scalar that there is; empty for none.
    """
    state = _Converter(traced, model)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    in_spec = traced.exported.call_spec.in_spec
    if traced.keywords:
        (keywords,), _ = _numbered(in_spec)
        in_spec = pytree.tree_structure(((), keywords))
    paths = [_path(keys) for keys, _ in pytree.tree_flatten_with_path(_numbered(in_spec))[0]]
    parameters, inputs, constants, in_leaves = _placeholders(state, graph, mapping, paths)
    for node in traced.exported.graph.nodes:
        if node.op == "call_function":
            mapping[node] = _copy(state, graph, node, mapping)
            if node.target is torch.ops.aten._assert_tensor_metadata.default:  # the program runs elsewhere too
                mapping[node].kwargs = {name: v for name, v in mapping[node].kwargs.items() if name != "device"}
        elif node.op == "get_attr":
            raise CaptureError(f"the trace refers to {node.target}", where=f"%{node.name}", remedy="report this model")
    outputs, out_leaves = _outputs(state, graph, mapping)
    program = Program(
        fx.GraphModule(nn.Module(), graph),
        tuple(parameters),
        tuple(inputs),
        tuple(outputs),
        tuple(state.symbols),
        plan,
        constants=constants,
    )
    program = program.with_(loss=_loss_name(program, loss))
    taken = conditions(traced, state.substitution)
    spec = CallSpec(in_spec, tuple(in_leaves), traced.exported.call_spec.out_spec, tuple(out_leaves), taken)
    return program, spec


def _numbered(spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(list(range(spec.num_leaves)), spec)


def _clean(paths: list[str]) -> list[str]:
    """`1.input_ids` → `input_ids` (keyword calls), `0.0.x` → `x` (one batch), `0.1` → `1` (positional)."""
    short = [p.split(".", 1)[-1] for p in paths]
    if short and all(p.startswith("0.") for p in short):
        short = [p.split(".", 1)[1] for p in short]
    return short if len(set(short)) == len(short) else paths


def _placeholders(
    state: _Converter, graph: fx.Graph, mapping: dict[fx.Node, fx.Node], paths: list[str]
) -> tuple[list[Parameter], list[Input], dict[str, torch.Tensor], list[tuple[str, Any]]]:
    exported = state.traced.exported
    tensors = _tensors_of(state.model)
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for fqn, tensor in tensors.items():
        aliases.setdefault(first.setdefault(id(tensor), fqn), []).append(fqn)
    owned: dict[str, fx.Node] = {}
    parameters, inputs, constants, leaves = [], [], {}, []
    shown = iter(_clean(paths))
    holders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    by_identity = {id(t): fqn for fqn, t in reversed(list(tensors.items()))}
    pending: list[tuple[fx.Node, str]] = []
    for node, spec in zip(holders, state.signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            actual = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            actual = state.traced.originals.get(id(actual), actual)
            fqn = by_identity.get(id(actual)) or str(spec.target).removeprefix(state.traced.prefix)
            if fqn not in tensors:
                refuse_foreign(fqn)
            fqn = first.get(id(tensors[fqn]), fqn)
            if fqn not in owned:
                owned[fqn] = _placeholder(state, graph, node, fqn)
                kind = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
                trainable = kind == "parameter" and bool(tensors[fqn].requires_grad)
                parameters.append(_parameter(owned[fqn], fqn, kind, trainable, tuple(aliases.get(fqn, [fqn])[1:])))
            mapping[node] = owned[fqn]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            fqn = str(spec.target).removeprefix(state.traced.prefix)
            mapping[node] = _placeholder(state, graph, node, fqn)
            parameters.append(_parameter(mapping[node], fqn, "constant", False, ()))
            constants[fqn] = _constant(fqn, exported.constants[spec.target])
        elif spec.kind is InputKind.USER_INPUT:
            path = next(shown)
            if isinstance(spec.arg, ConstantArgument):
                leaves.append(("constant", spec.arg.value))
                continue
            state.declare(path, node.meta["val"])
            pending.append((node, path))
            leaves.append(("input", path))
        else:
            raise CaptureError(
                f"an input of kind {spec.kind.name} is not supported", where=f"%{node.name}", remedy="report this model"
            )
    for node, path in pending:
        mapping[node] = _placeholder(state, graph, node, "", path)
        inputs.append(Input(path, mapping[node].name, tensor_type(mapping[node])))
    return parameters, inputs, constants, leaves


def _constant(name: str, value: torch.Tensor) -> torch.Tensor:
    """The value of a tensor that belongs to the trace and not to the model."""
    if value.is_meta:
        raise CaptureError(
            f"the model uses a tensor {list(value.shape)} of the meta device, which has no values",
            where=name,
            remedy="register it as a buffer, or make it in forward",
        )
    return value.detach().clone()


def _placeholder(state: _Converter, graph: fx.Graph, node: fx.Node, fqn: str, place: str = "") -> fx.Node:
    name = re.sub(r"\W", "_", fqn) if fqn else node.name
    name = f"p_{name}" if name[0].isdigit() else name
    new = graph.create_node("placeholder", name, name=name)
    return set_note(new, Note(type=state.placed_type(node, place or fqn), fqn=fqn.rpartition(".")[0]))


def _parameter(node: fx.Node, fqn: str, kind: str, trainable: bool, tied: tuple[str, ...]) -> Parameter:
    return Parameter(fqn, node.name, kind, tensor_type(node), trainable, tied)


def _copy(state: _Converter, graph: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node:
    def swap(value: fx.Node) -> fx.Node:
        if value not in mapping:
            raise CaptureError(
                f"the value %{value.name} is a constant of the call", where=f"%{node.name}", remedy="report this model"
            )
        return mapping[value]

    args, kwargs = map_arg(node.args, swap), map_arg(node.kwargs, swap)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    name = node.name
    recorded = state.traced.recorder.functions.get(str(target))
    if recorded is not None:
        path, constants, positions = recorded
        full = list(constants)
        for position, value in zip(positions, args, strict=True):
            full[position] = value
        target, args, kwargs = function, tuple(full), {"path": path}
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path.rpartition(".")[2]).lower()
    new = graph.create_node("call_function", target, args, kwargs, name=name)
    return set_note(new, state.note(node))


def _outputs(
    state: _Converter, graph: fx.Graph, mapping: Mapping[fx.Node, fx.Node]
) -> tuple[list[str], list[tuple[str, Any]]]:
    exported = state.traced.exported
    values = next(n for n in reversed(exported.graph.nodes) if n.op == "output").args[0]
    out_spec = exported.call_spec.out_spec
    paths = [_path(keys) or "output" for keys, _ in pytree.tree_flatten_with_path(_numbered(out_spec))[0]]
    names_, leaves, nodes = [], [], []
    for path, spec, value in zip(paths, state.signature.output_specs, values, strict=True):
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"an output of kind {spec.kind.name} is not supported", where=path, remedy="return tensors"
            )
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            names_.append(path)
            nodes.append(mapping[value])
            leaves.append(("output", path))
        elif isinstance(value, fx.Node):
            raise CaptureError("an output is a size that varies", where=path, remedy="return tensors or constants")
        else:
            leaves.append(("constant", value))
    if not nodes:
        raise CaptureError("the model returns no tensor", where="outputs", remedy="return the loss, or outputs")
    graph.output(tuple(nodes))
    return names_, leaves


def _loss_name(program: Program, wanted: str | None) -> str:
    scalars = [
        name
        for name, node in program.output_nodes().items()
        if isinstance(kind := node.meta["custom"]["fxpar"].type, TensorType) and kind.is_float and not kind.shape
    ]
    if wanted == "":
        return ""
    if wanted is not None:
        if wanted not in scalars:
            raise CaptureError(
                f"is no scalar output (those are: {', '.join(scalars) or 'none'})",
                where=f"loss={wanted!r}",
                remedy="name one of them, or pass the labels that the loss needs",
            )
        return wanted
    if "loss" in scalars:
        return "loss"
    if len(scalars) > 1:
        raise CaptureError(
            f"the model returns several scalars ({', '.join(scalars)})",
            where="loss",
            remedy="name one: parallelize(…, loss='…')",
        )
    return scalars[0] if scalars else ""
