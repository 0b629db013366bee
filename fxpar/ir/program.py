"""The program: an FX graph over global shapes with one frozen note on every node.

Enters: nothing of a device or a rank. Leaves: `Program`, the one value that passes take and return, `Note`, the one
record fxpar keeps on a node, and the helpers to read, set and traverse them. Notes live under `node.meta["custom"]`,
the only metadata key that a retrace keeps. It lets nodes share that dictionary: notes are replaced and never mutated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxpar.ir.symbols import Condition, Counted, Symbol
from fxpar.layout.layout import Layout, remembers_hash
from fxpar.layout.symbolic_sizes import Size, shape_text
from fxpar.mesh.axes import DENSE
from fxpar.mesh.mesh import Mesh
from fxpar.plan.plan import Plan
from fxpar.torch_internals import LazyGraphModule

# The element types that programs have, by the names of the text form and of a plan's precision.

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
# Of a program's floating parameters by the plan's precision; None leaves them as they are.
PRECISION_DTYPES: Mapping[str, torch.dtype | None] = {
    "as_is": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_weights": torch.bfloat16,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


# Copies of nodes, which every pass and check begins with.

_NUMBERED = re.compile(r"([a-zA-Z_][0-9a-zA-Z_]*?)(?:_(\d+))?")  # as fx takes names apart


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    """Copies a node to a graph's insertion point, under a name that is free there.

    Most of what `fx.Graph.node_copy` takes is a search of the arguments for symbolic integers, which no program has,
    and one for a name.

    Args:
        copies: what stands there for its operands.
    """
    args = map_arg(node.args, copies.__getitem__)
    kwargs = map_arg(node.kwargs, copies.__getitem__) if node.kwargs else node.kwargs
    new = fx.Node(graph, name, node.op, node.target, args, kwargs, node.type)
    _enter(graph, new, name)
    new.meta.update(node.meta)
    return new


def take_name(graph: Any, name: str) -> None:
    """Makes new nodes of a graph get other names, as if a node had this one."""
    base, number = _taken_apart(name)
    names = graph._graph_namespace
    names._used_names.add(name)
    names._base_count[base] = names._base_count.get(base, 0) if number is None else number


def _enter(graph: Any, new: fx.Node, name: str) -> None:
    """Enters a node as `fx.Graph.create_node` does with one that it has made; later names are as after that."""
    take_name(graph, name)
    graph._graph_namespace.associate_name_with_obj(name, new)
    graph._insert(new)
    graph._find_nodes_lookup_table.insert(new)
    graph._len += 1


@lru_cache(maxsize=65536)
def _taken_apart(name: str) -> tuple[str, int | None]:
    """Returns a name without its number, and that."""
    match = _NUMBERED.fullmatch(name)
    base, number = match.groups() if match is not None else (name, None)
    return base, None if number is None else int(number)


_Record = TypeVar("_Record")


def changed(record: _Record, **changes: Any) -> _Record:
    """Returns a note with other fields, in a fifth of the time of `dataclasses.replace`: passes ask for thousands.

    Raises:
        TypeError: it has no such field.
    """
    if not changes.keys() <= record.__dict__.keys():
        raise TypeError(f"a note has no {', '.join(changes.keys() - record.__dict__.keys())}")
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **changes)
    return new


_KEY = "fxpar"


@remembers_hash
@dataclass(frozen=True)
class TensorType:
    """Element type and global shape of a tensor value."""

    dtype: torch.dtype
    shape: tuple[Size, ...]

    @property
    def is_float(self) -> bool:
        """Returns whether a gradient can flow through values of this type."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]}{shape_text(self.shape)}"


@dataclass(frozen=True)
class ScalarType:
    """An integer known at trace time up to symbols, for example the batch size."""

    value: Size

    def __str__(self) -> str:
        return str(self.value)


ValueType: TypeAlias = TensorType | ScalarType | tuple[TensorType, ...] | None


@dataclass(frozen=True)
class Note:
    """What fxpar knows of a node.

    Attributes:
        type: element type and global shape; a tuple for nodes with several outputs; None for effects.
        layout: what the ranks hold (one for each output), once a pass provides layouts.
        needs: the layouts in which the node wants its tensor operands, from `annotate` to `insert_collectives`.
        role: column, row, head, replicate … of a node or parameter that a plan or a pass has given one.
        origin: why the layout is what it is (plan line, rule or cost).
        fqn: the module the node comes from.
        source: the author's source line, `file.py:41`.
        random: identity of a random node, the same under every plan; 0 for the others.
        recompute: number of the checkpointed region the author put the node into; 0 for none.
        phase: of a step (`fxpar.ir.step`), "" in the forward.
        region: name of the call that the node was written out of (`regions.inlined`).
        uncaptured: why no CUDA graph can hold the node of a step, or is to; empty where one can.
        stages: of a pipeline, that of the node; of a parameter, those that read it.
        buffer: through which ranks copy into each other's memory; 0 where they send through their process group.
        one_shot: whether one kernel copies, waits and adds, as nothing is computed alongside it, or picks rows.
        shard: of what gathers a parameter that data ranks share out, how long the whole lives: as `Plan.shard` says.
        eager: of a lowered program that is compiled, whether the node runs as it is, between what is compiled.
    """

    type: ValueType = None
    layout: Layout | tuple[Layout, ...] | None = None
    needs: tuple[Layout, ...] = ()
    role: str = ""
    origin: str = ""
    fqn: str = ""
    source: str = ""
    random: int = 0
    recompute: int = 0
    phase: str = ""
    region: str = ""
    uncaptured: str = ""
    stages: tuple[int, ...] = ()
    buffer: int = 0
    one_shot: bool = False
    shard: str = ""
    eager: bool = False


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """Returns the graph as a module whose code is written when it is first called: most programs are never run."""
    return LazyGraphModule(torch.nn.Module(), graph)


def note(node: fx.Node) -> Note:
    """Returns the node's note.

    Raises:
        KeyError: the node has none (a pass created it without `set_note`).
    """
    try:  # of what a compilation asks nothing is asked more often: nodes without a note are the exception
        entry = node.meta["custom"][_KEY]
    except KeyError:
        entry = None
    if isinstance(entry, Note):
        return entry
    raise KeyError(f"node %{node.name} has no fxpar note")


def has_note(node: fx.Node) -> bool:
    """Returns whether a note was set."""
    return isinstance(node.meta.get("custom", {}).get(_KEY), Note)


def set_note(node: fx.Node, value: Note) -> fx.Node:
    """Replaces the node's note and returns the node."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: value}
    return node


def update(node: fx.Node, **changes: Any) -> fx.Node:
    """Replaces fields of the node's note and returns the node."""
    return set_note(node, changed(note(node), **changes))


def tensor_type(node: fx.Node) -> TensorType:
    """Returns the type of a node with one tensor as output.

    Raises:
        TypeError: the node has another kind of output.
    """
    kind = note(node).type
    if not isinstance(kind, TensorType):
        raise TypeError(f"node %{node.name} is not a single tensor but {kind}")
    return kind


def output_types(node: fx.Node) -> tuple[TensorType, ...]:
    """Returns the types of all tensor outputs of a node; empty for scalars and effects."""
    kind = note(node).type
    if isinstance(kind, TensorType):
        return (kind,)
    return kind if isinstance(kind, tuple) else ()


def output_layouts(node: fx.Node) -> tuple[Layout, ...]:
    """Returns the layouts of all tensor outputs, in the order of `output_types`; empty where none is set."""
    layout = note(node).layout
    if layout is None:
        return ()
    return layout if isinstance(layout, tuple) else (layout,)


def is_tensor(node: fx.Node) -> bool:
    """Returns whether the node's output is one tensor."""
    return has_note(node) and isinstance(note(node).type, TensorType)


def describe(node: fx.Node) -> str:
    """Returns `%name (fqn, file.py:41)`, of a pipeline with the stage."""
    node_note = note(node)
    stages = [f"stage {'+'.join(map(str, node_note.stages))}"] if node_note.stages else []
    place = ", ".join([part for part in (node_note.fqn, node_note.source) if part] + stages)
    return f"%{node.name} ({place})" if place else f"%{node.name}"


@dataclass(frozen=True)
class Parameter:
    """A tensor the program owns.

    Attributes:
        fqn: the author's name for it; the first one where it is tied.
        node: name of its placeholder.
        kind: parameter, buffer or constant (a tensor the author made in `forward`).
        type: element type and global shape.
        trainable: whether a gradient is asked for.
        tied: further names of the same tensor.
        left_out: whether a step gives no gradient of it all the same: it was frozen after its layout was chosen.
    """

    fqn: str
    node: str
    kind: str
    type: TensorType
    trainable: bool
    tied: tuple[str, ...] = ()
    left_out: bool = False


@dataclass(frozen=True)
class Input:
    """A tensor the caller passes.

    Attributes:
        path: its place in the call (`input_ids`, `batch.0`).
        node: name of its placeholder.
        type: element type and global shape.
        carries: whether a gradient is asked for.
    """

    path: str
    node: str
    type: TensorType
    carries: bool = False


@dataclass(frozen=True)
class PassRecord:
    """What a pass did: wall time and the names of nodes it added and erased, and of those it changed in place."""

    name: str
    seconds: float
    added: tuple[str, ...]
    erased: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """Holds one model, or one rank's part of it, as a functional graph.

    Example:
        ```python
        program = model.program  # of a rank
        for name, node in program.output_nodes().items():
            print(name, node.target)
        ```

    Attributes:
        graph_module: its placeholders are parameters, buffers, constants and inputs. It has no attributes.
        parameters: what the program owns, in placeholder order.
        inputs: what the caller passes, in placeholder order.
        outputs: names of the returned tensors, in the order of the output node.
        symbols: the symbolic sizes.
        counted: numbers of rows that are counted while the program runs.
        plan: what the user asked for.
        properties: what is true of the program, as passes declare it (`layouts`, `collectives`, `local`, …).
        history: the passes that ran.
        constants: values of the parameters of kind constant, by name.
        loss: name of the output to differentiate; empty if there is none.
        conditions: what sizes must satisfy so that PyTorch differentiates the program in this way. Other sizes need
            another program.
    """

    graph_module: fx.GraphModule
    parameters: tuple[Parameter, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    plan: Plan
    properties: frozenset[str] = frozenset()
    history: tuple[PassRecord, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss: str = ""
    counted: tuple[Counted, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """Returns the graph of `graph_module`."""
        return self.graph_module.graph

    @property
    def layouts(self) -> dict[str, Layout | tuple[Layout, ...] | None]:
        """Returns the layout of each node, by its name."""
        return {node.name: note(node).layout for node in self.graph.nodes if node.op != "output"}

    @property
    def mesh(self) -> Mesh:
        """Returns the ranks that run the program, arranged along their axes."""
        return self.plan.mesh

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """Returns the sizes of the axes that layouts name: those larger than one, from the outermost."""
        return self.mesh.nested(DENSE)

    @property
    def all_symbols(self) -> tuple[Symbol | Counted, ...]:
        """Returns the symbolic sizes of inputs, and the numbers of rows that are counted."""
        return (*self.symbols, *self.counted)

    @property
    def sharded_parameters(self) -> tuple[Parameter, ...]:
        """Returns what data ranks share out where they divide it: what is trained; of all parameters, frozen ones too.

        A frozen parameter has no gradient and no optimizer state, so that there is only its memory to save.
        """
        if not self.plan.sharding_axes:
            return ()
        is_all = self.plan.shard == "parameters"
        return tuple(p for p in self.parameters if p.trainable or (is_all and p.kind == "parameter"))

    def copy(self) -> Program:
        """Returns the program with a copy of its graph. The copy shares the notes, which are frozen."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                graph.output(map_arg(node.args[0], copies.__getitem__))
                break
            copies[node] = copy_node(graph, node, copies, node.name)
        return dataclasses.replace(self, graph_module=module_of(graph), constants=dict(self.constants))

    def with_(self, **changes: Any) -> Program:
        """Returns a copy of the record with other fields. The copy shares the graph."""
        return dataclasses.replace(self, **changes)

    def placeholders(self) -> dict[str, fx.Node]:
        """Returns the nodes of parameters and inputs, by name."""
        return {node.name: node for node in self.graph.find_nodes(op="placeholder")}

    def node(self, name: str) -> fx.Node:
        """Returns the node of that name.

        Raises:
            KeyError: there is none.
        """
        known = self._found.get(name)
        if known is not None and known.name == name and not known._erased:
            return known
        node: fx.Node
        for node in self.graph.nodes:
            if node.name == name:
                self._found[name] = node
                return node
        raise KeyError(f"no node %{name}")

    @cached_property
    def _found(self) -> dict[str, fx.Node]:
        """Holds nodes that were looked up; passes may have renamed or erased them since."""
        return {}

    def parameter(self, node: fx.Node) -> Parameter | None:
        """Returns the parameter whose placeholder the node is, if any."""
        return self._by_node.get(node.name)

    @cached_property
    def _by_node(self) -> Mapping[str, Parameter]:
        return {p.node: p for p in reversed(self.parameters)}

    def output_nodes(self) -> dict[str, fx.Node]:
        """Returns the returned nodes by output name."""
        values = output_node(self.graph).args[0]
        return dict(zip(self.outputs, values, strict=True))  # type: ignore[arg-type]


def output_node(graph: fx.Graph) -> fx.Node:
    """Returns the graph's only output node."""
    output: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return output


def operands(node: fx.Node) -> list[fx.Node]:
    """Returns the tensor operands in argument order, lists flattened; a node used twice occurs twice."""
    nodes: list[fx.Node] = []
    _collect(node.args, nodes)
    if node.kwargs:
        _collect(node.kwargs.values(), nodes)
    return nodes


def _collect(values: Iterable[Any], nodes: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            if _is_tensor(value):
                nodes.append(value)
        elif value is None or isinstance(value, (int, float, str)):  # most arguments that are no nodes
            continue
        elif isinstance(value, (list, tuple)):
            _collect(value, nodes)
        elif isinstance(value, dict):
            _collect(value.values(), nodes)


def _is_tensor(node: fx.Node) -> bool:
    try:
        entry = node.meta["custom"][_KEY]
    except KeyError:
        return False
    return isinstance(entry, Note) and isinstance(entry.type, (TensorType, tuple))


def insert_call(
    place: fx.Node, target: Any, args: Sequence[Any], noted: Note, name: str | None = None, /, **kwargs: Any
) -> fx.Node:
    """Adds an operation with its note in front of a node of the graph.

    Args:
        name: of the new node; None to name it after the target.
        kwargs: keyword arguments of the operation.
    """
    with place.graph.inserting_before(place):
        new = place.graph.create_node("call_function", target, tuple(args), kwargs, name=name)
    return set_note(new, noted)


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Puts a value in the place of a node, whose name it takes."""
    name = node.name
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    new.name = name


def ancestors(ends: Iterable[fx.Node], leads_on: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """Returns some nodes and all on which they depend.

    Args:
        leads_on: whether what a node reads counts too.
    """
    pending, seen = list(ends), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes if leads_on(node) else ()
    return seen


def with_operands(node: fx.Node, replacements: Sequence[fx.Node]) -> None:
    """Replaces the tensor operands of a node one by one, in the order of `operands`."""
    remaining = iter(replacements)

    def visit(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return next(remaining) if _is_tensor(value) else value
        if isinstance(value, (list, tuple)):
            return type(value)(visit(item) for item in value)
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        return value

    node.args, node.kwargs = visit(node.args), visit(node.kwargs)


def name_sizes(program: Program) -> None:
    """Leaves one node for each symbol, named like it."""
    known: dict[str, fx.Node] = {}
    for node in list(program.graph.nodes):
        kind = note(node).type if node.op == "call_function" else None
        if node.target is not torch.ops.aten.sym_size.int or not isinstance(kind, ScalarType):
            continue
        name = str(kind.value)
        if name in known:
            node.replace_all_uses_with(known[name])
        elif name in {symbol.name for symbol in program.symbols}:
            if re.fullmatch(rf"{name}(_\d+)?", node.name) is None:  # a name that is taken has a number
                node.name = program.graph._graph_namespace.create_name(name, None)
            known[name] = node


def remove_dead(nodes: Sequence[fx.Node]) -> None:
    """Erases those of the nodes that nothing uses; draws stay, since those after them would take their bits."""
    for node in reversed(nodes):
        if node.op == "call_function" and not node.users and not note(node).random:
            node.graph.erase_node(node)
