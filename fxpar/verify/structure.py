"""Structure: the program is one functional graph whose tables, notes and random identities agree with it.

Enters: a program. Leaves: nothing, or `CheckFailed` that names the node.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpar.errors import CheckFailed, PlanError
from fxpar.experts.operators.sent_rows import send_rows
from fxpar.ir.grad_flow import owner_of, weights_of
from fxpar.ir.operators import axes_of, misnamed
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    ValueType,
    describe,
    has_note,
    note,
    operands,
    output_layouts,
    output_node,
    output_types,
)
from fxpar.ir.properties import Property
from fxpar.ir.stages import is_transfer
from fxpar.ir.step import RECOMPUTE, RNG_PATH, buffer_of, is_buffer, is_forward
from fxpar.ir.symbols import Condition
from fxpar.layout.layout import Layout
from fxpar.layout.nesting import pieces_of, spelled
from fxpar.layout.symbolic_sizes import names
from fxpar.ops.collectives import COERCION_OF, all_gather, sum_gradients
from fxpar.ops.operator import Operator
from fxpar.ops.random import axis_index
from fxpar.passes import DEFAULT_PASSES
from fxpar.passes.mark_regions import reason_of
from fxpar.rules import bind_arguments
from fxpar.signatures.check_cache import Facts, facts_of
from fxpar.signatures.pointwise import draws_bits
from fxpar.verify.phases import check_phases

# Header: what a program says of itself holds of its graph.

_RESTS_ON: Mapping[str, frozenset[str]] = {name: item.requires for item in DEFAULT_PASSES for name in item.provides}


def check_header(program: Program, facts: Facts | None = None) -> None:
    """Checks that properties rest on each other and are those of the nodes; each symbol is the size of an input.

    The example satisfies each condition.

    Args:
        facts: of the program, where they are known.

    Raises:
        CheckFailed: names the first fault.
    """
    for name, needed in _RESTS_ON.items():
        missing = sorted(needed - program.properties)
        if name in program.properties and missing:
            raise CheckFailed(
                f"holds without {', '.join(missing)}, on which it rests",
                where=f"property {name}",
                remedy=f"take {name} from the properties, or run the passes before the one that provides it",
            )
    facts = facts or facts_of(program)
    sound = facts.known("header", program.properties)
    for node, number in facts.numbers.items():
        if number not in sound:
            _check_node(program, node)
            sound[number] = True
    for entry in program.symbols:
        _check_symbol(program, entry.name)
    for condition in program.conditions:
        _check_condition(program, condition)
    if program.counted or any(node.target is send_rows for node in program.graph.nodes):
        check_counted(program)


def _check_node(program: Program, node: fx.Node) -> None:
    shown = node.target.stage if isinstance(node.target, Operator) else None
    if shown is None and program.axes and output_layouts(node):
        shown = Property.LAYOUTS
    if shown is not None and shown not in program.properties:
        raise CheckFailed(
            f"is there, but the program does not have the property {shown}",
            where=describe(node),
            remedy=f"add {shown} to its properties, or run the pass that provides it",
        )


def _check_symbol(program: Program, name: str) -> None:
    symbols = [entry for entry in program.symbols if entry.name == name]
    if len(symbols) > 1:
        raise CheckFailed("is defined twice", where=f"symbol {name}")
    place = f"{symbols[0].path}.{symbols[0].dim}"
    inputs = [entry for entry in program.inputs if entry.path == symbols[0].path]
    if not inputs or not 0 <= symbols[0].dim < len(inputs[0].type.shape):
        raise CheckFailed(f"no input has the size {place}", where=f"symbol {name}", remedy="name an input's dimension")
    size = inputs[0].type.shape[symbols[0].dim]
    if size != symbols[0].size:
        raise CheckFailed(f"the size {place} is {size}", where=f"symbol {name}", remedy="name a dimension of that size")
    if symbols[0].multiple < 1:
        raise CheckFailed(f"{symbols[0].multiple} ranks share out {place}", where=f"symbol {name}")
    if symbols[0].example < 1:
        raise CheckFailed(f"the example has the size {symbols[0].example}", where=f"symbol {name}")


def _check_condition(program: Program, condition: Condition) -> None:
    examples = {entry.name: entry.example for entry in program.symbols}
    unknown = condition.names - examples.keys()
    if unknown:
        raise CheckFailed(f"names {min(unknown)}, which is no size of an input", where=f"condition {condition}")
    if not condition.holds(examples):
        example = ", ".join(f"{name}={examples[name]}" for name in sorted(condition.names))
        raise CheckFailed(f"does not hold of the example ({example})", where=f"condition {condition}")


_WHERE = torch.ops.aten.where.default


def check_counted(program: Program) -> None:
    """Checks the symbols of counted rows.

    Raises:
        CheckFailed: a symbol without an exchange or of two, an exchange without one, or a collective over axes whose
            ranks have other numbers of rows.
    """
    known = {symbol.name for symbol in program.counted}
    sizes: dict[str, fx.Node] = {}
    cut: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.target is send_rows and is_forward(node):
            name = _symbol_of(node, known)
            if sizes.setdefault(name, operands(node)[1]) is not operands(node)[1]:
                raise CheckFailed(
                    f"brings {name} rows, as another exchange does: their numbers differ",
                    where=describe(node),
                    remedy="give each exchange a symbol of its own",
                )
            if any(other != name and split_sizes is operands(node)[1] for other, split_sizes in sizes.items()):
                raise CheckFailed(
                    f"brings {name} rows by the split sizes of another exchange",
                    where=describe(node),
                    remedy="give each exchange its own split sizes",
                )
            cut[name] = {axis for layout in output_layouts(node) for axis, p in layout if p.is_shard}
        if node.target is _WHERE and Property.LAYOUTS not in program.properties:
            _check_picked(node, known, sizes)
            cut |= {name: set() for name in sizes if sizes[name] is node}
        counted = known & names(size for kind in output_types(node) for size in kind.shape) if known else set()
        if counted - sizes.keys():
            raise CheckFailed(
                f"has {min(counted)} rows, which no exchange before it brings",
                where=describe(node),
                remedy="send rows first (fxpar.send_rows)",
            )
        if node.target in COERCION_OF and any(not cut[name].isdisjoint(axes_of(node)) for name in counted):
            raise CheckFailed(
                f"its ranks have other numbers of rows ({', '.join(sorted(counted))})",
                where=describe(node),
                remedy="send rows with fxpar.send_rows and fxpar.return_rows",
            )


def _check_picked(node: fx.Node, known: set[str], sizes: dict[str, fx.Node]) -> None:
    """Checks that a loop over experts picks its own number of rows for each, until they are sorted rows."""
    picked = names(size for kind in output_types(node) for size in kind.shape) & known
    if len(picked) != 1 or any(sizes.setdefault(name, node) is not node for name in picked):
        raise CheckFailed(
            f"picks {', '.join(sorted(picked)) or 'no'} rows, of one number that no other operation picks",
            where=describe(node),
            remedy="give each a symbol of its own",
        )


def _symbol_of(node: fx.Node, known: set[str]) -> str:
    (kind,) = output_types(node)
    symbols = names((kind.shape[-2],))
    if len(symbols) != 1 or not symbols <= known or str(kind.shape[-2]) not in symbols:
        raise CheckFailed(
            f"brings {kind.shape[-2]} rows, but values decide how many",
            where=describe(node),
            remedy="declare a symbol: counted r = … like …",
        )
    return symbols.pop()


aten = torch.ops.aten


def check_structure(program: Program, facts: Facts | None = None) -> None:
    """Checks placeholders (first, in the tables), complete notes, axes, conversions (none twice), random bits, outputs.

    Args:
        facts: of the program, where they are known.

    Raises:
        CheckFailed: names the first fault.
    """
    for node in program.graph.nodes:
        if node.op != "output" and not has_note(node):
            raise CheckFailed("the node has no note", where=f"%{node.name}", remedy="call set_note on nodes you create")
    facts = facts or facts_of(program)
    _check_placeholders(program)
    known, sound = _Known(), facts.known("structure", program.properties & {Property.STAGES, Property.LAYOUTS})
    for node, number in facts.numbers.items():
        if number in sound:
            continue
        _check_note(program, node, known)
        _check_axis(program, node)
        if note(node).type is not None and node.target is not sum_gradients:  # else others than the node are asked
            sound[number] = True
    check_phases(program, facts)
    _check_items(program)
    _check_marks(program)
    _check_conversions(program)
    _check_random(program, facts)
    _check_outputs(program)


@dataclass
class _Known:
    """What this check has found sound: equal layers repeat types and layouts."""

    types: set[ValueType] = field(default_factory=set)
    layouts: set[Layout] = field(default_factory=set)


def _check_placeholders(program: Program) -> None:
    holders = Counter([*(p.node for p in program.parameters), *(i.node for i in program.inputs)])
    missing = set(holders) - {node.name for node in program.graph.nodes if node.op == "placeholder"}
    if missing:
        raise CheckFailed("a table names a placeholder that is missing", where=f"%{min(missing)}")
    body = False
    for node in program.graph.nodes:
        body |= node.op != "placeholder"
        if node.op != "placeholder":
            continue
        if body:
            raise CheckFailed("a placeholder stands behind an operation", where=describe(node))
        if holders[node.name] != 1:
            raise CheckFailed(f"the placeholder is in {holders[node.name]} tables", where=describe(node))
        if not isinstance(note(node).type, TensorType):
            raise CheckFailed(f"the placeholder is {note(node).type} and no tensor", where=describe(node))
    _check_tables(program)


def _check_tables(program: Program) -> None:
    """Checks that a name stands for one tensor, and what is trained has a gradient."""
    seen: set[str] = set()
    for parameter in program.parameters:
        for name in (parameter.fqn, *parameter.tied):
            if name in seen:
                raise CheckFailed("two tensors, or one twice, have the name", where=name, remedy="tie each name once")
            seen.add(name)
        if parameter.trainable and not parameter.type.is_float:
            raise CheckFailed(
                f"is {parameter.type}, which has no gradient", where=parameter.fqn, remedy="freeze it: (frozen)"
            )


def _check_note(program: Program, node: fx.Node, known: _Known) -> None:
    """Checks that what is used has a type of declared symbols, and each output one canonical layout."""
    if Property.STAGES not in program.properties and (note(node).stages or is_transfer(node)):
        raise CheckFailed(
            "is on a stage of a pipeline, and the program has none", where=describe(node), remedy="add: stages"
        )
    kind = note(node).type
    if kind is None and node.users:
        user = next(iter(node.users))
        raise CheckFailed(f"has no type, but %{user.name} uses it", where=describe(node), remedy="note its type")
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        parts = output_types(source) if isinstance(source, fx.Node) else ()
        if not isinstance(index, int) or not 0 <= index < len(parts):
            raise CheckFailed(f"takes item {index} of {len(parts)} tensors", where=describe(node))
    if kind not in known.types:
        unknown = names(_sizes(kind)) - {symbol.name for symbol in program.all_symbols}
        if unknown:
            raise CheckFailed(f"{kind} names the symbol {min(unknown)}, which no input has", where=describe(node))
        known.types.add(kind)
    layouts, count = output_layouts(node), len(output_types(node))
    if len(layouts) != count and (layouts or Property.LAYOUTS in program.properties):
        raise CheckFailed(f"has {len(layouts)} layouts for {count} tensors", where=describe(node))
    for layout in layouts:
        if layout not in known.layouts:
            _check_layout(program, node, layout)
            known.layouts.add(layout)
    if node.op == "call_function" and node.target in COERCION_OF:
        operand_types = [kind for operand in operands(node) for kind in output_types(operand)]
        if len(operand_types) != 1 or count != 1:
            raise CheckFailed(f"a coercion converts one tensor and not {len(operand_types)}", where=describe(node))
    if node.target is sum_gradients:
        _check_bucket(program, node)


def _check_bucket(program: Program, node: fx.Node) -> None:
    """Checks that it gives its operands again, and that these are parameters, maybe summed on other axes.

    Its reduction runs once a step, not in each microbatch.
    """
    sources, kinds = operands(node), output_types(node)
    if [kind for operand in sources for kind in output_types(operand)] != list(kinds):
        raise CheckFailed(f"gives {len(kinds)} tensors that are not its {len(sources)} operands", where=describe(node))
    for operand in sources:
        parameter = program.parameter(owner_of(operand))
        if parameter is None or not parameter.trainable:
            raise CheckFailed(
                f"sums gradients of %{operand.name}, which is no trainable parameter",
                where=describe(node),
                remedy="leave it out of the bucket and convert it apart",
            )


def _sizes(kind: ValueType) -> Iterator[object]:
    if isinstance(kind, ScalarType):
        yield kind.value
    elif isinstance(kind, tuple):
        for item in kind:
            yield from item.shape
    elif isinstance(kind, TensorType):
        yield from kind.shape


def _check_layout(program: Program, node: fx.Node, layout: Layout) -> None:
    names = [axis for axis, _ in layout]
    if set(names) != set(program.axes):
        _check_atoms(program, node, names)
        known = " ".join(program.axes) or "none"
        raise CheckFailed(f"the layout '{layout}' does not name the axes ({known})", where=describe(node))
    for axis, placement in layout:
        pieces = [part for piece in placement.pieces for part in (piece, *piece.segments)]
        sizes = [size for piece in pieces for size in (piece.outer, piece.size)]
        if any(isinstance(size, int) and size < 0 for size in sizes) or pieces_of(placement.pieces) != placement.pieces:
            raise CheckFailed(f"on axis {axis}: {placement} is not in its shortest form", where=describe(node))
    one = spelled(layout, program.axes)
    if one != layout:
        raise CheckFailed(
            f"the layout '{layout}' is not in its one spelling", where=describe(node), remedy=f"write {one}"
        )


def _check_atoms(program: Program, node: fx.Node, names: list[str]) -> None:
    """Checks that no two axes of a layout stand for the same ranks: it is of the dense or of the expert part."""
    try:
        pair = program.mesh.sharing(names)
    except PlanError as error:
        raise CheckFailed(error.reason, where=describe(node), remedy=error.remedy) from None
    if pair is not None:
        raise CheckFailed(
            f"the axes {pair[0]} and {pair[1]} of one layout share ranks",
            where=describe(node),
            remedy="name each rank by one of them; to change the part is a conversion",
        )


def _check_axis(program: Program, node: fx.Node) -> None:
    if not isinstance(node.target, Operator):
        return
    for axis in axes_of(node):
        if axis not in program.axes:
            known = ", ".join(program.axes) or "none"
            raise CheckFailed(f"the axis {axis} is not in the mesh ({known})", where=describe(node))
    right = misnamed(node, program.axes)
    if right:
        reason = f"is over {'-'.join(axes_of(node))}"
        raise CheckFailed(reason, where=describe(node), remedy=f"name the axes as the mesh does: {right}")
    if node.target is axis_index and len(axes_of(node)) != 1:
        reason = f"is the index of a rank on {len(axes_of(node))} axes at once"
        raise CheckFailed(reason, where=describe(node), remedy="make one index for each axis")


def _check_items(program: Program) -> None:
    """Checks that in a step each part of a tuple is taken once, and that nothing else reads tuples.

    An operation that is differentiated may be replaced by another one, part by part.
    """
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in program.graph.nodes if Property.STEP in program.properties else ():
        if node.target is not operator.getitem:
            read = next((read for read in node.all_input_nodes if isinstance(note(read).type, tuple)), None)
            if read is not None and node.op == "call_function":
                raise CheckFailed(f"reads the tuple %{read.name}", where=describe(node), remedy="take its parts apart")
        elif note(node).origin != RECOMPUTE:
            first = seen.setdefault(node.args, node)
            if first is not node:
                reason = f"takes item {node.args[1]} of %{node.args[0]} a second time"
                raise CheckFailed(reason, where=describe(node), remedy=f"use %{first.name}, or take another item")


def _check_marks(program: Program) -> None:
    """Checks what a note says of how a node runs: its buffer, recomputation, and where CUDA graphs end."""
    is_step = Property.STEP in program.properties
    counted = {symbol.name for symbol in program.counted}
    gathers = _gathers(program)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        noted = note(node)
        if (noted.buffer or noted.one_shot) and not is_step:
            raise CheckFailed("has a buffer, and the program is no step", where=describe(node), remedy="leave it out")
        if noted.shard and (node not in gathers or noted.shard != program.plan.shard):
            raise CheckFailed(
                f"is marked shard={noted.shard}, and gathers no parameter that data ranks share out so",
                where=describe(node),
                remedy="leave the mark out, or run the pass coalesce again",
            )
        if node in gathers and not noted.shard and Property.COALESCED in program.properties:
            raise CheckFailed(
                "gathers a parameter that data ranks share out, and does not say how long the whole lives",
                where=describe(node),
                remedy=f"write shard={program.plan.shard}, or run the pass coalesce again",
            )
        if noted.origin == RECOMPUTE and is_forward(node):
            raise CheckFailed(
                "computes again what the forward has, and is of the forward",
                where=describe(node),
                remedy="write phase=backward",
            )
        if Property.REGIONS in program.properties and not noted.uncaptured and not isinstance(noted.type, ScalarType):
            reason = reason_of(node, counted)
            if reason:
                raise CheckFailed(
                    f"{reason}, and no mark says that CUDA graphs end there",
                    where=describe(node),
                    remedy='write uncaptured="…", or run the pass mark_regions before outline_layers',
                )


def _gathers(program: Program) -> set[fx.Node]:
    """Returns what gathers parameters that data ranks share out."""
    owned = [program.node(p.node) for p in program.sharded_parameters]
    return {
        node
        for node in weights_of(program.graph, owned)
        if node.target is all_gather and set(axes_of(node)) <= {*program.plan.sharding_axes}
    }


def _check_conversions(program: Program) -> None:
    """Checks that no value is converted to one placement twice, which would double the communication.

    Each stage of a pipeline converts for itself.
    """
    seen: dict[tuple[fx.Node, Layout, tuple[int, ...]], fx.Node] = {}
    for node in program.graph.nodes:
        is_one = node.op == "call_function" and (node.target in COERCION_OF or node.target is sum_gradients)
        is_one = is_one and note(node).origin != RECOMPUTE
        pairs = zip(operands(node), output_layouts(node), strict=True) if is_one and output_layouts(node) else ()
        for source, layout in pairs:
            key = source, layout, note(node).stages
            if key in seen:
                axes = ", ".join(axes_of(node))
                target = " ".join(str(layout.on(axis)) for axis in axes_of(node))
                raise CheckFailed(
                    f"converts %{source.name} to {target} on axis {axes} a second time",
                    where=describe(node),
                    remedy=f"use %{seen[key].name}",
                )
            seen[key] = node


def _check_random(program: Program, facts: Facts) -> None:
    """Checks that random nodes have identities that differ, and with property `rng` draw from the counter."""
    seen: dict[int, fx.Node] = {}
    states = [entry.node for entry in program.inputs if entry.path == RNG_PATH]
    if states and Property.RNG not in program.properties:
        raise CheckFailed(
            "is there, but the program does not have the property rng",
            where=f"input {RNG_PATH}",
            remedy="rename it: assign_rng adds the generator's state",
        )
    quiet = facts.known("quiet")
    for node in program.graph.nodes:
        if node.op == "output" or (facts.numbers[node] in quiet and not note(node).random):
            continue
        counted = isinstance(node.target, Operator) and node.target.draws and bind_arguments(node)["rng"] is not None
        identity, draws = note(node).random, draws_bits(node)
        if not counted and not draws:
            quiet[facts.numbers[node]] = True
        if draws and Property.RNG in program.properties:
            raise CheckFailed("draws bits that depend on the rank's generator", where=describe(node))
        if (counted or draws) and not 0 < identity < 2**32:
            raise CheckFailed(
                f"draws random bits and has the identity {identity}",
                where=describe(node),
                remedy="give it one of its own in [1, 2^32): random=…",
            )
        if counted and not is_forward(node):
            _check_drawn_again(node, seen.get(identity))
        elif identity and seen.setdefault(identity, node) is not node:
            first = seen[identity]
            raise CheckFailed(
                f"draws the same random bits as {describe(first)}: both have the identity {identity}",
                where=describe(node),
                remedy="give each random node an identity of its own",
            )
        if counted:
            _check_counter(node, states)


def _check_drawn_again(node: fx.Node, first: fx.Node | None) -> None:
    """Checks that what draws in the backward draws what the forward drew."""
    if first is None:
        raise CheckFailed(
            f"draws bits of the identity {note(node).random} that no node of the forward draws",
            where=describe(node),
            remedy="give it the identity of the node whose gradient it is",
        )


def _check_counter(node: fx.Node, states: list[str]) -> None:
    arguments = bind_arguments(node)
    if getattr(arguments["rng"], "name", "") not in states:
        raise CheckFailed(f"takes its state from {arguments['rng']}", where=describe(node), remedy=f"pass {RNG_PATH}")
    indices = arguments.get("indices") or ()
    if not isinstance(indices, (list, tuple)):
        raise CheckFailed(f"takes the indices {indices}", where=describe(node), remedy="pass a list, one for each axis")
    targets = [getattr(item, "target", None) for item in indices]
    index_keys = [(item.kwargs.get("axis"), item.args[2:]) for item in indices if isinstance(item, fx.Node)]
    if not {*targets} <= {axis_index} or len(set(index_keys)) != len(indices):
        shown = ", ".join(f"%{item}" for item in indices)
        raise CheckFailed(f"takes the indices {shown}", where=describe(node), remedy="pass one index for each axis")


def _check_buffer(program: Program, name: str, value: fx.Node) -> None:
    """Checks that the new value of a buffer is the forward's, of the buffer's type, and nothing differentiates it."""
    owner = next((p for p in program.parameters if p.fqn == buffer_of(name)), None)
    if owner is None or owner.kind != "buffer":
        what = "nothing" if owner is None else f"a {owner.kind}"
        raise CheckFailed(f"is the new value of {what}", where=f"output {name}", remedy="name a buffer of the program")
    if note(value).type != owner.type:
        raise CheckFailed(f"is {note(value).type}, and the buffer is {owner.type}", where=f"output {name}")
    if not is_forward(value):
        raise CheckFailed("is computed in the backward", where=f"output {name} = {describe(value)}")
    if program.outputs.count(name) > 1:
        raise CheckFailed("is returned twice", where=f"output {name}")


def _check_outputs(program: Program) -> None:
    values = output_node(program.graph).args[0]
    if not isinstance(values, (tuple, list)) or len(values) != len(program.outputs):
        raise CheckFailed(f"returns other values than {', '.join(program.outputs)}", where="return")
    for name, value in zip(program.outputs, values, strict=True):
        if not isinstance(value, fx.Node) or not isinstance(note(value).type, TensorType):
            raise CheckFailed(f"returns {value}, which is no tensor", where=f"output {name}")
        if is_buffer(name):
            _check_buffer(program, name, value)
    if program.loss:
        if program.loss not in program.outputs:
            raise CheckFailed("the loss is not returned", where=program.loss)
        kind = note(program.output_nodes()[program.loss]).type
        if not isinstance(kind, TensorType) or kind.shape or not kind.is_float:
            raise CheckFailed(f"the loss is {kind} and no floating scalar", where=program.loss)
