"""From a program to a module that runs: graph operators become implementations bound to process groups.

Enters: a program (a whole one, or a localised one) and the process groups of its axes. Leaves: a `GraphModule` whose
inputs are the program's placeholders and one rank index for each axis, and whose outputs are the program's. The module
is the same on every rank: ranks differ by the index tensors they pass.
What stands in place of a graph operator its record says (`fxpar.ops.operator`). What communicates becomes two calls:
one that starts where the operator stands, and one that waits in front of the first reader.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar.ir.program import (
    Note,
    Program,
    ScalarType,
    has_note,
    module_of,
    note,
    operands,
    output_layouts,
    set_note,
    tensor_type,
    update,
)
from fxpar.ir.regions import inlined
from fxpar.ir.step import ONCE, PARAMETER, phase_of
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import names, product
from fxpar.ops.layer_prefetch import move_between_layers
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import TORCH_OPERATORS, Operator, PaddingRows, is_view
from fxpar.ops.process_group import BUCKET, Group, start_gather, start_gathers, start_scatter, start_scatters

# Placeholders of the rows that all ranks and those before this one bring.
ROWS = ("rows_total", "rows_before")
# Operators without a derivative, which Python's functions of that name do not ask for.
_UNDERIVED = frozenset({torch.ops.aten.randint_like.default, torch.ops.aten.randint_like.low_dtype})
# Operators whose kernels refuse scores that are not contiguous, which torch's own functions make so before.
_DENSE = frozenset({torch.ops.aten.nll_loss2d_backward.default})


@dataclass(frozen=True)
class Lowered:
    """A runnable module.

    Attributes:
        module: called with `inputs` in order, then the indices and the rows.
        inputs: names of the program's placeholders.
        indices: axes whose rank index (i64 scalar) follows.
        outputs: names of the results.
        takes_rows: whether the numbers of rows that all ranks and those before this one bring (i64 scalars) follow.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    indices: tuple[str, ...]
    outputs: tuple[str, ...]
    takes_rows: bool

    @property
    def places(self) -> tuple[str, ...]:
        """Returns the names of the placeholders of indices and rows, which follow the inputs."""
        rows = ROWS if self.takes_rows else ()
        return (*(f"{axis}_rank" for axis in self.indices), *rows)

    @property
    def sources(self) -> tuple[str, ...]:
        """Returns the names of all placeholders in order."""
        return (*self.inputs, *self.places)

    def only(self, names: tuple[str, ...]) -> Lowered:
        """Returns a copy, with code of its own, that returns some of the outputs."""
        graph = fx.Graph()
        results: Any = graph.graph_copy(self.module.graph, {})
        by_name = dict(zip(self.outputs, results, strict=True))
        graph.output(tuple(by_name[name] for name in names))
        graph.eliminate_dead_code(is_impure_node=_is_kept)
        return replace(self, module=fx.GraphModule(self.module, graph), outputs=names)


def lower(
    program: Program, groups: Mapping[str, Group], device: torch.device | str = "cpu", *, uneven_rows: bool = False
) -> Lowered:
    """Lowers a program.

    Args:
        program: a program with property `local`, or one without mesh axes.
        groups: process group of each axis of the program.
        device: where factory operators put their tensors.
        uneven_rows: whether data ranks may bring other numbers of rows.

    Raises:
        KeyError: an axis has no group.
    """
    program = inlined(program.copy())
    graph = program.graph
    inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    rank = OnRank(program, groups, torch.device(device), uneven_rows=uneven_rows)
    waits = move_between_layers(program)
    if program.plan.compile:
        _leave_eager(program)
    for node in waits:
        _replace(node, node.target, rank, waits)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, Operator):
            _replace(node, node.target, rank, waits)
        elif isinstance(node.target, torch._ops.OpOverload):
            _place(node, rank.device)
    _send_together(program, waits)
    leave_unread(graph)
    module = module_of(graph)
    return Lowered(module, inputs, tuple(rank.indices), tuple(program.outputs), uneven_rows)


def _is_kept(node: fx.Node) -> bool:
    """Returns whether a node stays that nobody reads: communication goes too, as it does on all ranks."""
    return node.op in ("placeholder", "output")


def _leave_eager(program: Program) -> None:
    """Marks what runs as it is where all else is compiled: what no CUDA graph can hold, what it waits for, and sums of
    gradients.

    Code is compiled for sizes of inputs. Those that the routing decides are other ones in each step. A sum of gradients
    ends in another unit than it starts in, and Inductor would write over what is still being sent.
    """
    captured = ("", program.plan.cuda_graphs.outside)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        record = node.target if isinstance(node.target, Operator) else None
        is_sent = record is not None and record.traffic is not None and note(node).phase == PARAMETER
        starts = record is not None and bool(record.waits)
        if is_sent or (program.counted and (starts or note(node).uncaptured not in captured)):
            update(node, eager=True)


def _replace(node: fx.Node, record: Any, rank: OnRank, waits: Mapping[fx.Node, fx.Node | None]) -> None:
    """Puts what a rank runs in place of a graph operator.

    Args:
        waits: as of `move_between_layers`.
    """
    lowered = record.lower(node, rank)
    if isinstance(lowered, fx.Node):
        node.replace_all_uses_with(lowered)
        node.graph.erase_node(node)
        return
    node.target, node.args, node.kwargs = lowered.function, lowered.arguments, {}
    if lowered.finish is not None:
        noted = replace(note(node), uncaptured=record.waits or note(node).uncaptured)
        where = waits.get(node)
        last = _last_beside(node, noted) if where is None else where.prev if node.target is start_gather else where
        _finish(node, last, lowered.finish, lowered.rest, noted)


def _last_beside(start: fx.Node, finish_note: Note) -> fx.Node:
    """Returns the last node that stands beside what a node started: in front of its first reader, at the latest where
    its phase or its call ends.

    Args:
        finish_note: of the node that waits.
    """
    readers, last = set(start.users), start
    while last.next not in readers and last.next.op == "call_function" and _is_beside(last.next, finish_note):
        last = last.next
    # Outside of graphs it would cut views off the graph that they begin.
    while finish_note.uncaptured and last is not start and (_is_number(last) or is_view(last)):
        last = last.prev
    return last


def _finish(start: fx.Node, last: fx.Node, function: Any, rest: tuple[Any, ...], finish_note: Note) -> None:
    """Waits behind the node `last` for what a node started."""
    with start.graph.inserting_after(last):
        finish = start.graph.call_function(function, (start, *rest))
    start.replace_all_uses_with(finish, delete_user_cb=lambda reader: reader is not finish)
    set_note(finish, finish_note)
    name, start.name = start.name, f"{start.name}_start"
    finish.name = name


# What is sent once a step of many parameters goes in few calls, of which NCCL runs each as one kernel. Those of some
# layers travel while others are computed.


def _send_together(program: Program, of_layers: Container[fx.Node]) -> None:
    """Puts what sends parameters, or parts of their gradients, into calls: all of a layer, and of what is sent once a
    step more layers until a call is large enough.

    Args:
        of_layers: what is sent in each microbatch, between layers.
    """
    pending: dict[Hashable, dict[fx.Node, int]] = {}
    for node in list(program.graph.nodes):
        is_gradient = has_note(node) and phase_of(node) == PARAMETER
        for key, sends in list(pending.items()):
            is_full = not is_gradient and sum(sends.values()) >= BUCKET
            is_full |= node not in of_layers and next(iter(sends)) in of_layers
            if is_full or not sends.keys().isdisjoint(node.all_input_nodes):
                _merge(list(pending.pop(key)))
        is_sent = node.target is start_gather and phase_of(node) == ONCE
        is_sent |= node.target is start_scatter and is_gradient
        sent = _sent_bytes(program, node) if is_sent or node in of_layers else None
        if sent is not None:
            kind = tensor_type(node).dtype, node.args[-2:], note(node).stages
            pending.setdefault((node.target, *kind), {})[node] = sent
    for sends in pending.values():
        _merge(list(sends))


def _sent_bytes(program: Program, start: fx.Node) -> int | None:
    """Returns the bytes of what is gathered or scattered; None of what has no parameter's size."""
    kind, (layout,) = tensor_type(start), output_layouts(start)
    ranks: Any = start.args[-1] if start.target is start_scatter else 1
    elements = product(local_shape(kind.shape, layout, program.axes))
    return None if names([elements]) else int(elements) * kind.dtype.itemsize * int(ranks)


def _merge(sends: Sequence[fx.Node]) -> None:
    """Puts one call in place of the last of several that send, and takes of it what each sends."""
    if len(sends) == 1:
        return
    *_, last = sends
    values, where = [node.args[0] for node in sends], last.args[-2:]
    with last.graph.inserting_after(last):
        if last.target is start_gather:
            call = last.graph.call_function(start_gathers, (values, *where))
        else:
            call = last.graph.call_function(start_scatters, (values, [node.args[1:3] for node in sends], *where))
    types, layouts = (tuple(getattr(note(node), field) for node in sends) for field in ("type", "layout"))
    set_note(call, replace(note(last), type=types, layout=layouts))
    for index, node in reversed(list(enumerate(sends))):
        with last.graph.inserting_after(call):
            item = last.graph.call_function(operator.getitem, (call, index))
        set_note(item, note(node))
        node.replace_all_uses_with(item)
        last.graph.erase_node(node)


def _is_number(node: fx.Node) -> bool:
    return not has_note(node) or isinstance(note(node).type, ScalarType)


def _is_beside(node: fx.Node, anchor: Note) -> bool:
    """Returns whether a node is a number, or of the phase and the call of that note; in its graph, if it is in one."""
    if _is_number(node):
        return True
    current = note(node)
    # What waits outside of graphs may do so after graphs, whose kernels run meanwhile. What is compiled sends and waits
    # in one unit.
    is_reached = bool(anchor.uncaptured) or not (current.uncaptured or (current.eager and not anchor.eager))
    # The sum of gradients is waited for where those of all layers are, behind the backward.
    is_within = current.phase != anchor.phase and anchor.phase == PARAMETER
    return is_within or (is_reached and (current.phase, current.region) == (anchor.phase, anchor.region))


def _place(node: fx.Node, device: torch.device) -> None:
    """Tells operators that make tensors from nothing the device; the text names none.

    Views become reshapes: the strides of the trace are those of one kernel on one device.
    """
    if node.target is torch.ops.aten.view.default:
        node.target = torch.ops.aten.reshape.default
    if node.target in _UNDERIVED:
        with node.graph.inserting_before(node):
            node.args = (node.graph.call_function(torch.ops.aten.detach.default, node.args[:1]), *node.args[1:])
    if node.target in _DENSE:
        with node.graph.inserting_before(node):
            dense = node.graph.call_function(torch.ops.aten.contiguous.default, (node.args[1],))
        node.args = (node.args[0], dense, *node.args[2:])
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    if any(a.name == "device" for a in schema) and not operands(node):
        node.kwargs = {**node.kwargs, "device": device}


aten = torch.ops.aten

# A buffer of static size has as many places as tokens may ever need, several times what they do need. Zeros in the rest
# would cost as much as rows. What takes rows by their order or by counts passes over it; what computes each row by
# itself carries on what is there, which may be NaN. So operators on experts' rows have `fill=False` where nothing
# reads the rows that are nobody's.
#
# Which rows are somebody's an order says, -1 standing after all of them, and so do the counts of the experts that it
# was made with: such an order and such counts are of one *buffer*. Where a buffer's rows are not all in front, or an
# order has rows that are not counted, nothing is left out.

_SAME = (aten._to_copy.default, aten.clone.default, aten.view.default, aten.reshape.default)


def leave_unread(graph: fx.Graph) -> None:
    """Leaves rows unwritten that nobody reads."""
    buffers = _buffers(graph)
    for node in graph.nodes:
        padding = _padding(node)
        if padding is None or not padding.writes or not _lacks_fill(node):
            continue
        buffer = buffers.get(node.args[padding.key])
        if buffer is not None and _is_unread(node, buffer, buffers):
            node.args = (*node.args, False)


def _padding(node: fx.Node) -> PaddingRows | None:
    record = TORCH_OPERATORS.get(node.target)
    return None if record is None else record.padding


def _lacks_fill(node: fx.Node) -> bool:
    """Returns whether a call leaves its argument `fill` to the default."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return any(argument.name == "fill" for argument in arguments[len(node.args) :])


def _buffers(graph: fx.Graph) -> dict[object, fx.Node]:
    """Maps each order and each count that says which rows of a buffer are somebody's to the node that stands for it."""
    buffers: dict[object, fx.Node] = {}
    for node in graph.nodes:
        record = TORCH_OPERATORS.get(node.target)
        if record is not None and record.buffer is not None:
            buffers.update(dict.fromkeys(record.buffer(node), node))
    return buffers


def _is_unread(value: fx.Node, buffer: fx.Node, buffers: Mapping[object, fx.Node]) -> bool:
    """Returns whether all that reads a value passes over the rows of a buffer that are nobody's."""
    for user in value.users:
        padding = _padding(user)
        if padding is not None and any(user.args[i] is value for i in padding.ignores):
            others = [arg for i, arg in enumerate(user.args) if i not in padding.ignores]
            if value in others or buffers.get(user.args[padding.key]) is not buffer:
                return False
        elif not _is_by_element(user) or not _is_unread(user, buffer, buffers):
            return False
    return True


def _is_by_element(node: fx.Node) -> bool:
    """Returns whether a node gives each element of its operand or what it computes of it alone."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target in _SAME
