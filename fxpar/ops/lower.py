"""From a program to a module that runs: graph operators become implementations bound to process groups.

Enters: a program (a whole one, or a localised one) and the process groups of its axes. Leaves: a `GraphModule` whose
inputs are the program's placeholders, copies of main values under mixed precision, and one rank index for each axis,
and whose outputs are the program's. The module is the same on every rank: ranks differ by the index tensors they pass.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpar.errors import InputError
from fxpar.layout.layout import Placement, share_of
from fxpar.layout.symbols import Size
from fxpar.ops import bound, coalesced, factored, mixed, random, vocabulary
from fxpar.ops.collectives import Group
from fxpar.program import operators as ops
from fxpar.program.program import Program, note, operands, output_layouts
from fxpar.rules import bind_arguments
from fxpar.signatures.functions import resolve_function

# Operators without a derivative, which Python's functions of that name do not ask for.
_UNDERIVED = frozenset({torch.ops.aten.randint_like.default, torch.ops.aten.randint_like.low_dtype})
_VOCABULARY: Mapping[Any, Callable[..., Any]] = {
    getattr(ops, f.__name__): vocabulary.with_block(f)
    for f in (
        vocabulary.embedding,
        vocabulary.cross_entropy,
        vocabulary.nll_loss,
        vocabulary.log_softmax,
        vocabulary.logsumexp,
        vocabulary.argmax,
        vocabulary.topk,
    )
}


@dataclass(frozen=True)
class Lowered:
    """A runnable module.

    Attributes:
        module: called with `inputs` in order, then the copies, then the indices.
        inputs: names of the program's placeholders. Those that have copies are main values (`fxpar.program.mixed`).
        copies: names of the placeholders whose copies, in the program's type, follow.
        indices: axes whose rank index (i64 scalar) follows.
        outputs: names of the results.
        draws: whether fused kernels draw from the device's generator, which must be seeded apart for each rank.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    copies: tuple[str, ...]
    indices: tuple[str, ...]
    outputs: tuple[str, ...]
    draws: bool

    def only(self, wanted: tuple[str, ...]) -> Lowered:
        """A copy, with code of its own, that returns some of the outputs."""
        graph = fx.Graph()
        results: Any = graph.graph_copy(self.module.graph, {})
        by_name = dict(zip(self.outputs, results, strict=True))
        _prune_buckets(graph, [by_name[name] for name in wanted])
        graph.output(tuple(by_name[name] for name in wanted))
        return replace(self, module=fx.GraphModule(self.module, graph), outputs=wanted)


def _prune_buckets(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """Takes weights that no result needs out of what many share: reductions of gradients, and casts.

    A compiled backward would give them zeros in place of no gradient, and an optimizer would move them.
    """
    needed: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    for node in list(graph.nodes):
        if node.target not in (coalesced.sum_gradients, coalesced.enter):
            continue
        lists: list[Any] = [arg for arg in node.args if isinstance(arg, list) and arg]
        values = lists[-1] if isinstance(lists[-1][0], fx.Node) else lists[0]  # copies, or weights that have none
        items = {user.args[1]: user for user in node.users}
        kept = [index for index in range(len(values)) if items.get(index) in needed]
        for index, item in items.items():
            if index in kept:
                item.args = (node, kept.index(index))
            else:
                item.replace_all_uses_with(values[index])
                graph.erase_node(item)
        node.args = tuple([arg[i] for i in kept] if isinstance(arg, list) and arg else arg for arg in node.args)
        if not kept:
            graph.erase_node(node)


def lower(
    program: Program,
    groups: Mapping[str, Group],
    device: torch.device | str = "cpu",
    *,
    main_values: bool = False,
) -> Lowered:
    """Lowers a program.

    Args:
        program: a program with property `local`, or one without mesh axes.
        groups: process group of each axis of the program.
        device: where factory operators put their tensors.
        main_values: whether the plan's mixed precision is carried out: the module takes main values and copies. Else
            it takes parameters in the program's own types.

    Raises:
        KeyError: an axis has no group.
    """
    return _Lowering(program.copy(), groups, torch.device(device), main_values).run()


class _Lowering:
    def __init__(self, program: Program, groups: Mapping[str, Group], device: torch.device, main_values: bool) -> None:
        self.program, self.groups, self.device = program, groups, device
        self.graph = program.graph
        self.inputs = tuple(node.name for node in self.graph.nodes if node.op == "placeholder")
        self.first = next(node for node in self.graph.nodes if node.op != "placeholder")
        self.indices: dict[str, fx.Node] = {}
        self.sizes: dict[str, fx.Node] = {}
        self.draws = False
        self.mixed = mixed.Lowering(program, self.first) if main_values else None

    def run(self) -> Lowered:
        for axis in self.groups:
            with self.graph.inserting_before(self.first):
                self.indices[axis] = self.graph.placeholder(f"{axis}_rank")
        handlers: dict[Any, Callable[[fx.Node], None]] = {
            ops.axis_index: self._index,
            ops.dropout: self._dropout,
            ops.uniform: self._uniform,
            ops.uniform_like: self._uniform_like,
            ops.attention: self._attention,
            ops.function: self._function,
            ops.sum_gradients: self._gradients,
            **dict.fromkeys(_VOCABULARY, self._vocabulary),
        }
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in ops.COERCION_OF:
                self._coercion(node)
            elif node.target in handlers:
                handlers[node.target](node)
            elif isinstance(node.target, torch._ops.OpOverload):
                self._place(node)
        copies: tuple[str, ...] = ()
        if self.mixed is not None:
            self.mixed.enter()
            copies = tuple(self.mixed.copies)
        module = fx.GraphModule(nn.Module(), self.graph)
        return Lowered(module, self.inputs, copies, tuple(self.indices), tuple(self.program.outputs), self.draws)

    def _set(self, node: fx.Node, target: Callable[..., Any], *args: Any) -> None:
        node.target, node.args, node.kwargs = target, args, {}

    def _index(self, node: fx.Node) -> None:
        node.replace_all_uses_with(self.indices[str(node.kwargs["axis"])])
        self.graph.erase_node(node)

    def _place(self, node: fx.Node) -> None:
        """Operators that make tensors from nothing are told the device; the text names none.

        Views become reshapes: the strides of the trace are those of one kernel on one device.
        """
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        if node.target in _UNDERIVED:
            with self.graph.inserting_before(node):
                node.args = (self.graph.call_function(torch.ops.aten.detach.default, node.args[:1]), *node.args[1:])
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        if any(a.name == "device" for a in schema) and not operands(node):
            node.kwargs = {**node.kwargs, "device": self.device}

    def _function(self, node: fx.Node) -> None:
        path = str(node.kwargs["path"])
        apply = resolve_function(path).apply

        def call(*args: Any) -> Any:
            return apply(*args)

        # FX writes calls by name: each function needs one of its own.
        call.__name__ = call.__qualname__ = path.replace(".", "_")
        self._set(node, call, *node.args)

    def _gradients(self, node: fx.Node) -> None:
        axis = str(node.kwargs["axis"])
        group, held = self.groups[axis], []
        for source in operands(node):
            placement = output_layouts(source)[0].on(axis)
            pieces = self._shared(placement, placement, group.size) if placement.is_shard else []
            held.append((placement.dim, pieces) if placement.is_shard else None)
        copies = [] if self.mixed is None else self.mixed.copies_of(node)
        where = (group.name, group.size, self.indices[axis])
        self._set(node, coalesced.sum_gradients, list(node.args), held, *where, *([copies] if copies else []))

    def _vocabulary(self, node: fx.Node) -> None:
        """The composite operators: arguments as in the graph with defaults, then the vocabulary's block."""
        axis = str(node.kwargs["axis"])
        given = {name: value for name, value in bind_arguments(node).items() if name != "axis"}
        if node.target is ops.logsumexp and isinstance(given["dim"], (list, tuple)):
            given["dim"] = given["dim"][0]
        cut = next(p for o in operands(node) if (p := output_layouts(o)[0].on(axis)).is_shard)
        group = self.groups[axis]
        block = (int(cut.pieces[0].size), group.name, group.size, self.indices[axis])
        self._set(node, _VOCABULARY[node.target], *given.values(), *block)

    def _coercion(self, node: fx.Node) -> None:
        target: Any = node.target
        axis = str(node.kwargs["axis"])
        index, x = self.indices[axis], node.args[0]
        group = (self.groups[axis].name, self.groups[axis].size)
        source = output_layouts(operands(node)[0])[0].on(axis)
        result = output_layouts(node)[0].on(axis)
        if target in (ops.copy_to, ops.share) and self.mixed is not None and self.mixed.is_wide(node):
            held = (source.dim, self._shared(source, source, group[1])) if target is ops.share else None
            copies = self.mixed.copies_of(node)
            summed = coalesced.sum_gradient if copies else coalesced.sum_widely
            self._set(node, summed, x, held, *group, index, *copies)
        elif target in bound.WITH_GROUP:
            self._set(node, bound.WITH_GROUP[target], x, *group)
        elif target in bound.WITH_INDEX:
            self._set(node, bound.WITH_INDEX[target], x, index)
        elif target is ops.share:
            self._set(node, factored.share, x, source.dim, self._shared(source, source, group[1]), *group, index)
        elif target is ops.take_part:
            self._set(node, factored.take_part, x, source.dim, self._shared(source, result, group[1]), index)
        elif target is ops.all_to_all:
            self._set(node, bound.all_to_all, x, *self._cut(source), *self._cut(result), *group, index)
        elif target in bound.WITH_CUT:
            self._set(node, bound.WITH_CUT[target], x, *self._cut(source if source.is_shard else result), *group)
        else:
            cut = self._cut(source if source.is_shard else result)
            self._set(node, bound.WITH_CUT_AND_INDEX[target], x, *cut, *group, index)

    def _cut(self, placement: Placement) -> tuple[int, list[tuple[Any, Any]]]:
        assert not placement.is_shared, "segments that ranks share have no coercion"
        pieces = []
        for piece in placement.pieces:
            run = self._size(piece.size) if len(placement.pieces) > 1 else None
            pieces.append((self._size(piece.outer), (int(piece.size), piece.padded) if piece.padded else run))
        return placement.dim, pieces

    def _shared(self, source: Placement, target: Placement, n: int) -> list[tuple[Any, ...]]:
        """The pieces of a rank's tensor that is held as `source`, and in how many parts `target` has their blocks."""
        found = []
        for piece, wanted in zip(source.pieces, target.pieces, strict=True):
            copies, kept = (p.copies if p.sharded else n for p in (piece, wanted))
            share = share_of(piece, n) if len(source.pieces) > 1 else None
            length = None if share is None else self._size(share)
            found.append((length, self._size(wanted.outer), copies, copies // kept))
        return found

    def _size(self, size: Size) -> Any:
        """A symbolic size as a node."""
        if isinstance(size, int):
            return size
        if isinstance(size, sympy.Integer):
            return int(size)
        if isinstance(size, sympy.Symbol):
            return self._symbol(str(size))
        terms = [self._size(part) for part in size.args]
        combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}[size.func]
        result = terms[0]
        for term in terms[1:]:
            with self.graph.inserting_before(self.first):
                result = self.graph.call_function(combine, (result, term))
        return result

    def _symbol(self, name: str) -> fx.Node:
        if name not in self.sizes:
            known = next(s for s in self.program.symbols if s.name == name)
            path = next(i for i in self.program.inputs if i.path == known.path)
            with self.graph.inserting_before(self.first):
                source = self.program.node(path.node)
                size = self.graph.call_function(torch.ops.aten.sym_size.int, (source, known.dim))
                if known.multiple > 1:
                    size = self.graph.call_function(operator.floordiv, (size, known.multiple))
                self.sizes[name] = size
        return self.sizes[name]

    def _cuts(self, node: fx.Node, ranks: Any) -> list[Any]:
        """The cuts of a random node's values as (dim, outer, n, rank index)."""
        layout = output_layouts(operands(node)[0])[0]
        found = []
        for axis, placement in layout:
            if placement.is_shard:
                piece = placement.piece
                assert piece is not None
                blocks, index = self.program.axes[axis] // piece.copies, self.indices[axis]
                found.append((placement.dim, self._size(piece.outer), blocks, self._block(index, piece.copies)))
        assert len(found) == len(ranks)
        return found

    def _block(self, index: fx.Node, copies: int) -> fx.Node:
        """Which of the blocks that neighbours share a rank holds."""
        if copies == 1:
            return index
        with self.graph.inserting_before(self.first):
            return self.graph.call_function(operator.floordiv, (index, copies))

    def _dropout(self, node: fx.Node) -> None:
        x, rng, p, *ranks = node.args
        cuts = self._cuts(node, ranks[0] if ranks else [])
        self._set(node, self._dropout_form(), x, rng, p, note(node).random, cuts)

    def _dropout_form(self) -> Callable[..., Any]:
        """One kernel on NVIDIA GPUs; elsewhere PyTorch's operators, the same bits."""
        if self.device.type != "cuda":
            return random.dropout
        if importlib.util.find_spec("triton") is None:
            raise InputError(
                "dropout on a GPU is a Triton kernel, and Triton is not installed",
                where="dropout",
                remedy="pip install triton, or run on the CPU",
            )
        from fxpar.ops import kernels

        return kernels.dropout

    def _uniform(self, node: fx.Node) -> None:
        self._set(node, random.uniform, *node.args, note(node).random)

    def _uniform_like(self, node: fx.Node) -> None:
        x, rng, dtype, *ranks = node.args
        cuts = self._cuts(node, ranks[0] if ranks else [])
        self._set(node, random.uniform_like, x, rng, dtype, note(node).random, cuts)

    def _attention(self, node: fx.Node) -> None:
        query, key, value, mask, rng, p, causal, scale, gqa, *ranks = node.args
        cuts = self._cuts(node, ranks[0] if ranks else [])
        if self._may_fuse(node):
            self.draws = True
            self._set(node, random.fused_attention, query, key, value, mask, p, causal, scale, gqa)
            return
        self._set(node, random.attention, query, key, value, mask, rng, p, note(node).random, causal, scale, gqa, cuts)

    def _may_fuse(self, node: fx.Node) -> bool:
        """Whether a fused kernel may draw bits of its own.

        There are such kernels on GPUs. They cannot give ranks that hold the same heads the same bits, nor the same
        again to a region that is recomputed.
        """
        layout = output_layouts(node)[0]
        is_apart = all(layout.on(axis).is_shard and not layout.on(axis).is_shared for axis in self.program.axes)
        is_asked = self.program.plan.rng == "fused" and self.device.type == "cuda"
        return is_asked and is_apart and not note(node).recompute
