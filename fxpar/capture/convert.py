"""From an exported graph to a `Program`: its nodes and their notes, parameters, inputs, outputs and loss.

Enters: a `Trace` and the traced model. Leaves: the program over global shapes and the `CallSpec` that maps a user's
call to its inputs and its outputs back to the model's own output type.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from fxpar.capture import places
from fxpar.capture.places import source_of
from fxpar.capture.recording import RECOMPUTE_KEY, refuse_foreign
from fxpar.capture.size_expressions import SizeError, of_rows, written
from fxpar.capture.trace import Trace
from fxpar.errors import CaptureError, CheckFailed
from fxpar.experts.compiler.choices import PICKS, PICKS_TOO, choice_of, picked_rows_error
from fxpar.ir.program import (
    DTYPE_NAMES,
    Input,
    Note,
    Parameter,
    Program,
    ScalarType,
    TensorType,
    ValueType,
    module_of,
    set_note,
    tensor_type,
)
from fxpar.ir.step import buffer_name, is_buffer
from fxpar.ir.symbols import Counted, Symbol
from fxpar.layout.symbolic_sizes import Size, evaluate, names, product, simplify, symbol
from fxpar.ops.small_operators import function
from fxpar.plan.plan import Plan
from fxpar.signatures.pointwise import draws_bits
from fxpar.torch_internals import is_fake


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
        """Returns the program's inputs, by path, of a call `(args, kwargs)`.

        Raises:
            CheckFailed: the call has another structure than the traced one.
        """
        leaves, spec = pytree.tree_flatten(call)
        if spec != self.in_spec:
            raise CheckFailed("the batch has another structure than the example", where="batch")
        pairs = zip(self.in_leaves, leaves, strict=True)
        return {str(what): value for (kind, what), value in pairs if kind == "input"}

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the trace is the model for inputs of these sizes, by symbol.

        A trace takes it for granted that symbols are not 1, and records none of the branches that are decided by that.
        """
        if 1 in sizes.values():
            return False
        return all(bool(r.subs({s: sizes[str(s)] for s in r.free_symbols})) for r in self.conditions)


@dataclass(frozen=True)
class _Conversion:
    """One conversion: what it is of, and the graph that it makes, whose nodes `mapping` has by those of the trace."""

    traced: Trace
    model: nn.Module
    notes: Notes
    graph: fx.Graph
    mapping: dict[fx.Node, fx.Node]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns parameters and buffers of the model by all their names."""
        tensors: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        tensors.update(self.model.named_buffers(remove_duplicate=False))
        return tensors

    @cached_property
    def names(self) -> dict[int, str]:
        """Returns the first name of each of these, by identity."""
        # Reversed, so that the first name of a tied tensor is entered last, and stays.
        return {id(tensor): fqn for fqn, tensor in reversed(list(self.tensors.items()))}


def _path(keys: Any) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys)


def convert(traced: Trace, model: nn.Module, plan: Plan, loss: str | None) -> tuple[Program, CallSpec]:
    """Returns the program of a trace, and how calls map to it.

    Args:
        loss: name of the output to differentiate; None for `loss`, else the only scalar that there is; empty for none.
    """
    graph, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    state = _Conversion(traced, model, Notes(traced), graph, mapping)
    in_spec = traced.exported.call_spec.in_spec
    if traced.keywords:
        (keywords,), _ = _numbered(in_spec)
        in_spec = pytree.tree_structure(((), keywords))
    paths = [_path(keys) for keys, _ in pytree.tree_flatten_with_path(_numbered(in_spec))[0]]
    parameters, inputs, constants, in_leaves = _placeholders(state, paths)
    for node in traced.exported.graph.nodes:
        if node.op == "call_function" and not _is_promise(node):
            mapping[node] = _copy(state, node)
            if node.target is torch.ops.aten._assert_tensor_metadata.default:  # the program runs elsewhere too
                mapping[node].kwargs = {name: v for name, v in mapping[node].kwargs.items() if name != "device"}
        elif node.op == "get_attr":
            raise CaptureError(f"the trace refers to {node.target}", where=f"%{node.name}", remedy="report this model")
    outputs, out_leaves = _outputs(state)
    program = Program(
        module_of(graph),
        tuple(parameters),
        tuple(inputs),
        tuple(outputs),
        tuple(state.notes.symbols),
        plan,
        constants=constants,
        counted=tuple(state.notes.counted),
    )
    program = program.with_(loss=_loss_name(program, loss))
    taken = conditions(traced, state.notes.substitution)
    spec = CallSpec(in_spec, tuple(in_leaves), traced.exported.call_spec.out_spec, tuple(out_leaves), taken)
    return program, spec


def _name_of(state: _Conversion, target: Any) -> str:
    """Returns the first name that the author's model has for a parameter or buffer of the trace."""
    exported = state.traced.exported
    actual = exported.state_dict.get(target, exported.constants.get(target))
    actual = state.traced.originals.get(id(actual), actual)
    fqn = state.names.get(id(actual)) or str(target).removeprefix(state.traced.prefix)
    if fqn not in state.tensors:
        refuse_foreign(fqn)
    return state.names[id(state.tensors[fqn])]


def _numbered(spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(list(range(spec.num_leaves)), spec)


def _clean(paths: list[str]) -> list[str]:
    """Shortens `1.input_ids` to `input_ids` (keyword calls), `0.0.x` to `x` (one batch), `0.1` to `1` (positional)."""
    short = [p.split(".", 1)[-1] for p in paths]
    if short and all(p.startswith("0.") for p in short):
        short = [p.split(".", 1)[1] for p in short]
    return short if len(set(short)) == len(short) else paths


def _placeholders(
    state: _Conversion, paths: list[str]
) -> tuple[list[Parameter], list[Input], dict[str, torch.Tensor], list[tuple[str, Any]]]:
    exported, mapping = state.traced.exported, state.mapping
    tensors = state.tensors
    aliases: dict[str, list[str]] = {}
    for fqn, tensor in tensors.items():
        aliases.setdefault(state.names[id(tensor)], []).append(fqn)
    owned: dict[str, fx.Node] = {}
    parameters, inputs, constants, leaves = [], [], {}, []
    shown = iter(_clean(paths))
    holders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    pending: list[tuple[fx.Node, str]] = []
    for node, spec in zip(holders, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            fqn = _name_of(state, spec.target)
            if fqn not in owned:
                owned[fqn] = _placeholder(state, node, fqn)
                kind = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
                trainable = kind == "parameter" and bool(tensors[fqn].requires_grad)
                parameters.append(_parameter(owned[fqn], fqn, kind, trainable, tuple(aliases.get(fqn, [fqn])[1:])))
            mapping[node] = owned[fqn]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            fqn = str(spec.target).removeprefix(state.traced.prefix)
            constants[fqn] = _constant(node, fqn, exported.constants[spec.target])
            mapping[node] = _placeholder(state, node, fqn)
            parameters.append(_parameter(mapping[node], fqn, "constant", False, ()))
        elif spec.kind is InputKind.USER_INPUT:
            path = next(shown)
            if isinstance(spec.arg, ConstantArgument):
                leaves.append(("constant", spec.arg.value))
                continue
            state.notes.declare(path, node.meta["val"])
            pending.append((node, path))
            leaves.append(("input", path))
        else:
            raise CaptureError(
                f"an input of kind {spec.kind.name} is not supported", where=f"%{node.name}", remedy="report this model"
            )
    # Inputs are placed when all have declared their symbols, of which their types speak.
    for node, path in pending:
        mapping[node] = _placeholder(state, node, "", path)
        inputs.append(Input(path, mapping[node].name, tensor_type(mapping[node])))
    return parameters, inputs, constants, leaves


def _constant(node: fx.Node, name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns the value of a tensor that belongs to the trace and not to the model."""
    if is_fake(value):
        raise CaptureError(
            "reads a value that the forward computes and the trace lost: torch takes it for a constant",
            where=next(filter(None, map(source_of, node.users)), name),
            remedy="compute it outside of torch's own contexts of tracing; and let no thread walk the frames of others "
            "meanwhile, as profilers in Python do (sys._current_frames), since torch.export loses values beside it",
        )
    if value.is_meta:
        raise CaptureError(
            f"the model uses a tensor {list(value.shape)} of the meta device, which has no values",
            where=name,
            remedy="register it as a buffer, or make it in forward",
        )
    return value.detach().clone()


def _placeholder(state: _Conversion, node: fx.Node, fqn: str, place: str = "") -> fx.Node:
    name = re.sub(r"\W", "_", fqn) if fqn else node.name
    # Names in nn.Sequential begin with a digit, which names of Python cannot.
    name = f"p_{name}" if name[0].isdigit() else name
    new = state.graph.create_node("placeholder", name, name=name)
    return set_note(new, Note(type=state.notes.placed_type(node, place or fqn), fqn=fqn.rpartition(".")[0]))


def _parameter(node: fx.Node, fqn: str, kind: str, trainable: bool, tied: tuple[str, ...]) -> Parameter:
    return Parameter(fqn, node.name, kind, tensor_type(node), trainable, tied)


def _copy(state: _Conversion, node: fx.Node) -> fx.Node:
    def swap(value: fx.Node) -> fx.Node:
        if value not in state.mapping:
            raise CaptureError(
                f"the value %{value.name} is a constant of the call", where=f"%{node.name}", remedy="report this model"
            )
        return state.mapping[value]

    args, kwargs = map_arg(node.args, swap), map_arg(node.kwargs, swap)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    target = PICKS if target is PICKS_TOO else target
    if target is torch.ops.aten.bincount.default:
        target, args = torch.ops.fxpar.bin_counts.default, _counted(node, args)
        kwargs = {}
    name = node.name
    recorded = state.traced.recorder.functions.get(str(target))
    if recorded is not None:
        path, constants, positions = recorded
        full = list(constants)
        for position, value in zip(positions, args, strict=True):
            full[position] = value
        target, args, kwargs = function, tuple(full), {"path": path}
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path.rpartition(".")[2]).lower()
    new = state.graph.create_node("call_function", target, args, kwargs, name=name)
    return set_note(new, state.notes.note(node))


def _counted(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Returns what a `bincount` counts, and how many counts the trace had (`patches.known_counts`)."""
    if len(args) > 1 and args[1] is not None:
        raise CaptureError(
            "sums of weights by number are as many as values of tensors say",
            where=source_of(node) or f"%{node.name}",
            remedy="write weights.new_zeros(count).index_add(0, x, weights)",
        )
    count = node.meta["val"].shape[0]
    if not isinstance(count, int):
        raise CaptureError(
            "how many counts it gives depends on values of tensors",
            where=source_of(node) or f"%{node.name}",
            remedy="give it a minlength that no value reaches",
        )
    return args[0], count


def _is_promise(node: fx.Node) -> bool:
    """Returns whether it says of a number of rows that a loop picks in which range it is, which nothing reads."""
    if node.target is torch.ops.aten._assert_scalar.default:
        return isinstance(node.args[0], fx.Node) and _is_promise(node.args[0])
    value = node.meta.get("val")
    if node.target not in (operator.ge, operator.le) or not isinstance(value, torch.SymBool):
        return False
    asserts = all(user.target is torch.ops.aten._assert_scalar.default for user in node.users)
    return asserts and bool(free_unbacked_symbols(value))


def _outputs(state: _Conversion) -> tuple[list[str], list[tuple[str, Any]]]:
    exported = state.traced.exported
    values = next(n for n in reversed(exported.graph.nodes) if n.op == "output").args[0]
    out_spec = exported.call_spec.out_spec
    paths = [_path(keys) or "output" for keys, _ in pytree.tree_flatten_with_path(_numbered(out_spec))[0]]
    names, leaves, nodes = [], [], []
    specs = list(zip(exported.graph_signature.output_specs, values, strict=True))
    new = {_name_of(state, spec.target): value for spec, value in specs if spec.kind is OutputKind.BUFFER_MUTATION}
    rest = [pair for pair in specs if pair[0].kind is not OutputKind.BUFFER_MUTATION]
    for path, (spec, value) in zip(paths, rest, strict=True):
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"an output of kind {spec.kind.name} is not supported", where=path, remedy="return tensors"
            )
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            names.append(path)
            nodes.append(state.mapping[value])
            leaves.append(("output", path))
        elif isinstance(value, fx.Node):
            raise CaptureError("an output is a size that varies", where=path, remedy="return tensors or constants")
        else:
            leaves.append(("constant", value))
    if not nodes:
        raise CaptureError("the model returns no tensor", where="outputs", remedy="return the loss, or outputs")
    names += [buffer_name(fqn) for fqn in new]
    state.graph.output((*nodes, *(state.mapping[value] for value in new.values())))
    return names, leaves


def _loss_name(program: Program, requested: str | None) -> str:
    scalars = [
        name
        for name, node in program.output_nodes().items()
        if not is_buffer(name)
        and isinstance(kind := node.meta["custom"]["fxpar"].type, TensorType)
        and kind.is_float
        and not kind.shape
    ]
    if requested == "":
        return ""
    if requested is not None:
        if requested not in scalars:
            raise CaptureError(
                f"is not a scalar output (those are: {', '.join(scalars) or 'none'})",
                where=f"loss={requested!r}",
                remedy="name one of them, or pass the labels that the loss needs",
            )
        return requested
    if "loss" in scalars:
        return "loss"
    if len(scalars) > 1:
        raise CaptureError(
            f"the model returns several scalars ({', '.join(scalars)})",
            where="loss",
            remedy="name one: parallelize(…, loss='…')",
        )
    return scalars[0] if scalars else ""


def conditions(traced: Trace, names: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Returns relations between the symbols of a program.

    Args:
        traced: the trace.
        names: the program's symbol for each symbol of the trace.
    """
    environment = _environment(traced.exported)
    if environment is None:
        return ()
    relations: dict[Any, None] = {}
    known = set().union(*(sympy.sympify(size).free_symbols for size in names.values()))
    for expression in (*(guard.expr for guard in environment.guards), *_assumed(traced)):
        relation = _plain(expression, environment.replacements).subs(names)
        if relation is not sympy.true and set(relation.free_symbols) <= known:
            relations[relation] = None
    return tuple(relations)


def _assumed(traced: Trace) -> Iterator[Any]:
    """Yields what Dynamo assumed, in the symbols of the export."""
    specs = traced.exported.graph_signature.input_specs
    holders = [n for n in traced.exported.graph.nodes if n.op == "placeholder"]
    leaves = [n for n, spec in zip(holders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]
    for assumption in traced.assumptions:
        sizes = {}
        for variable, (leaf, dim) in assumption.sizes.items():
            size = leaves[leaf].meta["val"].shape[dim]
            sizes[variable] = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        yield assumption.relation.subs(sizes, simultaneous=True)


def _plain(expression: Any, replacements: Mapping[Any, Any]) -> Any:
    """Returns symbols that the trace replaced by others or by numbers, and the rest by their names' plain symbols."""
    # A symbol may be replaced by one that is replaced itself. The bound ends a cycle.
    for _ in range(len(replacements) + 1):
        replaced = expression.xreplace(dict(replacements))
        if replaced == expression:
            break
        expression = replaced
    plain = {s: sympy.Symbol(s.name, integer=True, positive=True) for s in expression.free_symbols}
    return expression.xreplace(plain)


def _environment(exported: ExportedProgram) -> Any:
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


class _DataError(CaptureError):
    """A size that depends on values."""


class Notes:
    """Notes types in the program's symbols, places and random identities of its nodes.

    Inputs are declared first: sizes are written in their symbols.

    Attributes:
        symbols: the program's, in the order in which they were declared.
        counted: numbers of rows that loops pick by the choice of a router.
        substitution: what stands for each symbol of the trace: one of these, or a number.
    """

    def __init__(self, traced: Trace) -> None:
        self.symbols: list[Symbol] = []
        self.counted: list[Counted] = []
        self.substitution: dict[Any, Any] = {}
        self._prefix = traced.prefix
        self._random: Counter[str] = Counter()
        self._sizes: dict[Any, Size] = {}
        self._types: dict[TensorType, TensorType] = {}
        # Sizes of the inputs by dimension; numbers where the trace fixed them.
        users = [s.arg.name for s in traced.exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        values = [n.meta.get("val") for n in traced.exported.graph.nodes if n.name in users]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        self._groups = of_rows(shapes, (node.meta.get("val") for node in traced.exported.graph.nodes))
        self._pinned = {(dim, str(size)) for shape in shapes for dim, size in enumerate(shape)}

    def _size(self, value: Any) -> Size:
        if isinstance(value, int):
            return value
        # What stands for a symbol is what was declared so far.
        key = value.node.expr, len(self.substitution)
        if key not in self._sizes:
            self._sizes[key] = self._written(value)
        return self._sizes[key]

    def _written(self, value: Any) -> Size:
        parsed = written(value, self._groups)
        if isinstance(parsed, int):
            return parsed
        unknown = names([parsed]) - {str(s) for s in self.substitution}
        if unknown:
            raise _DataError(
                f"the size {parsed} depends on values of tensors ({', '.join(sorted(unknown))})",
                remedy="use shapes that follow from the inputs' shapes (torch.where, masked_fill)",
            )
        size = simplify(parsed.subs(self.substitution))
        images = {s.name for s in self.symbols if s.dim > 1}
        if not isinstance(size, int) and not size.is_polynomial() and names([size]) & images:
            raise SizeError(f"the size {size} of an image is not a polynomial", remedy="give images of one size")
        return size

    def _type(self, value: Any) -> ValueType:
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPE_NAMES:
                raise CaptureError(f"the element type {value.dtype} is not supported", remedy="cast it")
            kind = TensorType(value.dtype, tuple(self._size(s) for s in value.shape))
            return self._types.setdefault(kind, kind)  # one object is soon found equal
        if isinstance(value, (tuple, list)):
            return tuple(self._type(v) for v in value if isinstance(v, torch.Tensor))  # type: ignore[misc]
        if isinstance(value, (int, torch.SymInt)):
            return ScalarType(self._size(value))
        return None

    def placed_type(self, node: fx.Node, place: str = "") -> ValueType:
        """Returns the type of a node's value; errors name the place, or the author's line."""
        try:
            return self._type(node.meta.get("val"))
        except _DataError as error:
            if self._declare_picked(node):
                return self._type(node.meta.get("val"))
            where = source_of(node) or f"%{node.name}"
            if choice_of(node) is not None:
                raise picked_rows_error(where, places.module_of(node).removeprefix(self._prefix)) from None
            raise CaptureError(error.reason, where=place or where, remedy=error.remedy) from None
        except CaptureError as error:
            raise type(error)(
                error.reason, where=place or source_of(node) or f"%{node.name}", remedy=error.remedy
            ) from None

    def _declare_picked(self, node: fx.Node) -> bool:
        """Names how many rows a loop picks by a choice: `recognize_experts` is to recognise it, or refuses it."""
        choice = choice_of(node) if node.target in (PICKS, PICKS_TOO) else None
        if choice is None:
            return False
        (mask,) = (value.meta["val"] for value in node.all_input_nodes)
        size, ways = node.meta["val"][0].shape[0], int(choice.all_input_nodes[0].meta["val"].shape[-1])
        pairs, taken = product([self._size(dim) for dim in mask.shape]), {s.name for s in self.symbols}
        share = simplify(sympy.floor((pairs + ways - 1) / sympy.Integer(ways)))
        name = next(n for n in (f"e{i}" for i in range(len(self.counted), 9999)) if n not in taken)
        self.substitution[symbol(str(size.node.expr))] = symbol(name)
        examples = {s.name: s.example for s in self.symbols}
        self.counted.append(Counted(name, share, max(evaluate(share, examples), 1)))
        return True

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
            if (dim, str(size.node.hint)) in self._pinned:
                self.substitution[symbol(str(key))] = int(size.node.hint)
                continue
            hint, group = int(size.node.hint), self._groups.get(str(key), 1)
            known = next((s for s in self.symbols if s.dim == dim and s.example * s.multiple == hint), None)
            if known is not None:
                self.substitution[symbol(str(key))] = known.size
                continue
            base = ("b", "s")[dim] if dim < 2 else f"d{dim}"
            taken = {s.name for s in self.symbols}
            name = next(n for n in (base, *(f"{base}{i}" for i in range(2, 99))) if n not in taken)
            self.symbols.append(Symbol(name, path, dim, hint // group, group, group))
            self.substitution[symbol(str(key))] = self.symbols[-1].size

    def note(self, node: fx.Node) -> Note:
        """Returns the note of an operation.

        Raises:
            CaptureError: its type cannot be written, or it reads a tensor's value on the host.
        """
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool) and free_unbacked_symbols(value):
            raise CaptureError(
                "reads the value of a tensor on the host, which no graph of all ranks can hold",
                where=source_of(node) or f"%{node.name}",
                remedy="keep it a tensor (no item(), tolist() or float())",
            )
        fqn = places.module_of(node).removeprefix(self._prefix)
        fqn = "" if self._prefix and fqn == self._prefix.rstrip(".") else fqn
        return Note(
            type=self.placed_type(node),
            fqn=fqn,
            source=source_of(node),
            random=self._random_identity(node, fqn),
            recompute=node.meta.get("custom", {}).get(RECOMPUTE_KEY, 0),
        )

    def _random_identity(self, node: fx.Node, fqn: str) -> int:
        """Returns a number from the node's module and its position there: the same under every plan."""
        if not draws_bits(node):
            return 0
        self._random[fqn] += 1
        digest = hashlib.sha256(f"{fqn}#{self._random[fqn]}".encode()).digest()
        return int.from_bytes(digest[:4], "little") or 1
