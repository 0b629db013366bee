"""What a graph that is being lowered knows of the rank that will run it.

Enters: a program, process groups by axis, a device. Leaves: the groups, coordinates, sizes and cuts of which the
operators' lowering (`fxpar.ops.operator`) makes arguments. The graph is the same on every rank: ranks differ by the
index tensors they pass.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.ir.operators import axes_of, inner_view
from fxpar.ir.program import Program, note, operands, output_layouts
from fxpar.ir.step import batch_symbol
from fxpar.ir.symbols import SIZE_FUNCTIONS
from fxpar.layout.layout import Placement, share_of
from fxpar.layout.symbolic_sizes import Size, last_operation
from fxpar.mesh.axes import Cuts
from fxpar.ops.counter import IndexCut
from fxpar.ops.process_group import Group


@dataclass(frozen=True)
class CollectiveGroup:
    """The ranks among which a node communicates.

    Attributes:
        group: name of their process group.
        size: how many they are.
        index: node of the rank's number among them, i64 scalar.
        copies: the symmetric buffer and the number in it by which they copy into each other's memory, if they do.
    """

    group: str
    size: int
    index: fx.Node
    copies: tuple[str, int] | None = None


class Identity(int):
    """The identity of a draw, told from other numbers: equal layers take theirs as operands when they are compiled."""


class OnRank:
    """A rank's part of a program that is being lowered.

    Attributes:
        program: with property `local`, or without mesh axes.
        device: where factory operators put their tensors.
        indices: by axis, the placeholder of the rank's index, i64 scalar.
        rows: where ranks may bring other numbers of rows, the placeholders of how many all bring and of how many those
            before this one do, i64 scalars.
    """

    def __init__(
        self, program: Program, groups: Mapping[str, Group], device: torch.device, *, uneven_rows: bool = False
    ) -> None:
        """Adds the placeholders of indices and rows after those of the program."""
        self.program, self.device = program, device
        self._groups, self._graph = groups, program.graph
        self._made: set[fx.Node] = set()
        self._sizes: dict[str, fx.Node] = {}
        self.indices: dict[str, fx.Node] = {}
        for axis in (axis for axis in program.axes if axis in groups):
            with self._graph.inserting_before(self._first):
                self.indices[axis] = self._graph.placeholder(f"{axis}_rank")
        self.rows: tuple[fx.Node, fx.Node] | None = None
        if uneven_rows:
            with self._graph.inserting_before(self._first):
                self.rows = self._graph.placeholder("rows_total"), self._graph.placeholder("rows_before")

    @property
    def _first(self) -> fx.Node:
        """Returns the first node that is neither a placeholder nor made here; lowering may erase the one that was."""
        nodes = (node for node in self._graph.nodes if node.op != "placeholder" and node not in self._made)
        first: fx.Node = next(nodes)
        return first

    def _call(self, function: Any, args: tuple[Any, ...]) -> fx.Node:
        """Adds a number in front of all operations, after those that are there."""
        with self._graph.inserting_before(self._first):
            node = self._graph.call_function(function, args)
        self._made.add(node)
        return node

    def ranks(self, node: fx.Node) -> CollectiveGroup:
        """Returns the ranks of the axis that a node names.

        Raises:
            KeyError: the axis has no group.
        """
        group, buffer = self._groups[str(node.kwargs["axis"])], note(node).buffer
        # Ranks that are simulated or only counted have no symmetric buffers: their groups send the same values.
        copies = (group.symmetric_buffer, buffer) if buffer and group.symmetric_buffer else None
        return CollectiveGroup(group.name, group.size, self._index(axes_of(node)), copies)

    @staticmethod
    def identity(node: fx.Node) -> Identity:
        """Returns the identity of what a node draws."""
        return Identity(note(node).random)

    def _index(self, names: Sequence[str]) -> fx.Node:
        """Returns the rank's number in the joined group of some axes, neighbours being on the last."""
        index = self.indices[names[0]]
        for axis in names[1:]:
            scaled = self._call(operator.mul, (index, self.program.axes[axis]))
            index = self._call(operator.add, (scaled, self.indices[axis]))
        return index

    def placed(self, value: fx.Node, node: fx.Node) -> Placement:
        """Returns how `value` is held on the axes that `node` names, as these see it innermost."""
        return inner_view(value, self.program.axes, axes_of(node))[1]

    def size(self, size: Size) -> Any:
        """Returns a size as a number, or a symbolic one as a node."""
        if isinstance(size, int):
            return size
        if isinstance(size, sympy.Integer):
            return int(size)
        if isinstance(size, sympy.Symbol):
            return self._symbol(str(size))
        operation = last_operation(size)
        if operation is None:
            raise PassError(f"the size {size} is no arithmetic in sizes of inputs", where="lowering")
        name, *sizes = operation
        return self._call(SIZE_FUNCTIONS[name], tuple(map(self.size, sizes)))

    def _symbol(self, name: str) -> fx.Node:
        if name not in self._sizes:
            known = next((s for s in self.program.symbols if s.name == name), None)
            if known is None:
                raise PassError(
                    f"a rank cuts what has {name} rows, a number that its values decide",
                    where="lowering",
                    remedy="give experts.dispatch='static'",
                )
            path = next(i for i in self.program.inputs if i.path == known.path)
            source = self.program.node(path.node)
            size = self._call(torch.ops.aten.sym_size.int, (source, known.dim))
            shared = known.multiple // self._ranks_of(source, known.dim)
            if shared > 1:
                size = self._call(operator.floordiv, (size, shared))
            self._sizes[name] = size
        return self._sizes[name]

    def _ranks_of(self, value: fx.Node, dim: int) -> int:
        """Returns how many ranks cut a dimension of an input."""
        cuts = [axis for layout in output_layouts(value) for axis, p in layout if p.is_shard and p.dim == dim]
        return prod(self.program.axes[axis] for axis in cuts)

    def cut(self, placement: Placement) -> tuple[int, list[tuple[Any, Any]]]:
        """Returns the dimension and pieces of a shard, as `fxpar.ops.process_group` takes them."""
        assert not placement.is_shared, "segments that ranks share have no coercion"
        pieces = []
        for piece in placement.pieces:
            run = self.size(piece.size) if len(placement.pieces) > 1 else None
            pieces.append((self.size(piece.outer), (int(piece.size), piece.padded) if piece.padded else run))
        return placement.dim, pieces

    def shared(self, source: Placement, target: Placement, n: int) -> list[tuple[Any, ...]]:
        """Returns the pieces of a rank's tensor held as `source`, and in how many parts `target` has their blocks.

        What is whole has those of the target, each as it is. They are as `fxpar.ops.process_group` takes them.
        """
        blocks = []
        pieces = source.pieces if source.is_shard else [replace(piece, sharded=False) for piece in target.pieces]
        for piece, target_piece in zip(pieces, target.pieces, strict=True):
            copies, target_copies = (p.copies if p.sharded else n for p in (piece, target_piece))
            share = share_of(piece, n) if len(source.pieces) > 1 else None
            length = None if share is None else self.size(share)
            blocks.append((length, self.size(target_piece.outer), copies, copies // target_copies))
        return blocks

    def element_cuts(self, node: fx.Node) -> list[Any]:
        """Returns the cuts of a node's first operand, and of what it is a part of, as `fxpar.ops.counter.IndexCut`."""
        cuts = []
        for axis, placement in output_layouts(operands(node)[0])[0]:
            if placement.is_shard:
                piece = placement.piece
                assert piece is not None
                units: tuple[Any, ...] = self._units(axis, piece.copies)
                cuts.append(IndexCut(placement.dim, self.size(piece.outer), *units))
        return cuts

    def _units(self, axis: str, copies: int) -> tuple[Any, Any, Any]:
        """Returns how many units of a block this rank holds, how many all hold, and how many those before it."""
        if self.rows is not None and axis in self.program.plan.axes_for(Cuts.BATCH):
            return self._symbol(batch_symbol(self.program)), *self.rows
        return 1, self.program.axes[axis] // copies, self._block(self.indices[axis], copies)

    def _block(self, index: fx.Node, copies: int) -> fx.Node:
        """Returns which of the blocks that neighbours share a rank holds."""
        if copies == 1:
            return index
        return self._call(operator.floordiv, (index, copies))
