"""Sums take what is computed of their rows into their kernel.

Enters: the graph of a forward or of a backward, as Inductor gets it, of static shapes. Leaves: it; where a sum in one
shot, or over more than two ranks, is followed by a residual connection or a norm, one call stands for all of it
(`fxpar.peer_memory.compiler.row_programs`).

What belongs to a sum: in order, each operation on rows that reads one of the group, if all else that it reads was there
before the sum. So no sum is moved, and nothing of the group waits for what waits for the group; views and small values
after the sum are made in front of it. Of these as many are taken as save most: a sum that nobody else reads is neither
written nor read again, and what is only read by what could be computed with it is written for nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.peer_memory.compiler.row_programs import TYPES, Extent, RowProgram, RowStep, fits

aten, prims = torch.ops.aten, torch.ops.prims
# `fxpar.ops.peer_copies` defines them, above this floor: whoever imports this file has imported that.
_ops = torch.ops.fxpar

# Values as large as the sum that a kernel reads besides, and that it writes.
_MOST = 3

_POINTWISE: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.add_.Scalar: "add",  # as decompositions of norms have it
    aten.mul.Scalar: "mul",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.neg.default: "neg",
    aten.rsqrt.default: "rsqrt",
    aten.sqrt.default: "sqrt",
    aten.reciprocal.default: "reciprocal",
    prims.convert_element_type.default: "to",
}
# Sums, and the calls that compute of their rows.
_SUMS: dict[Any, Any] = {
    _ops.one_shot_sum.default: _ops.one_shot_rows.default,
    _ops.taken_sum.default: _ops.taken_rows.default,
}
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# After the sum they may stand in front of it: of no cost, or small.
_EARLIER = (*_VIEWS, aten.unsqueeze.default, aten.expand.default)
# What Inductor may compute in one kernel with what is pointwise.
_FUSIBLE: tuple[Any, ...] = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_FUSIBLE += (aten.var.correction, aten.var_mean.correction, aten.amax.default, aten.amin.default, operator.getitem)


def sums_in_rows(graph: fx.Graph) -> int:
    """Puts what belongs to sums into their calls; gives how many sums have taken something."""
    taken = 0
    for node in list(graph.nodes):
        if node.target in _SUMS and _is_taken(node):
            taken += _Group(node).replace()
    if taken:
        graph.lint()
    return taken


def _is_taken(total: fx.Node) -> bool:
    fake = _static(total)
    return fake is not None and fake.dim() > 0 and fake.numel() > 0 and fits(fake.shape[-1], fake.dtype)


def _static(node: Any) -> Tensor | None:
    """Returns the value of a node whose shape is known; nothing is asked of symbolic sizes, which would be a guard."""
    fake = node.meta.get("val")
    is_known = isinstance(fake, Tensor) and all(isinstance(size, int) for size in fake.shape)
    return fake if is_known else None


def _changes(node: fx.Node) -> bool:
    """Returns whether it writes into what it reads."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_fusible(node: fx.Node) -> bool:
    """Returns whether Inductor may compute it in the kernel that makes what it reads."""
    target = node.target
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return is_pointwise or target in _POINTWISE or target in _EARLIER or target in _FUSIBLE


@dataclass
class _Group:
    """A sum and what belongs to it; values are numbered as in `RowProgram`, but operands from -1 down."""

    total: fx.Node
    values: dict[fx.Node, int] = field(default_factory=dict)
    moments: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    operands: list[tuple[fx.Node, Extent]] = field(default_factory=list)
    steps: list[RowStep] = field(default_factory=list)
    moved: list[fx.Node] = field(default_factory=list)
    # In order, with how many steps and operands there were then.
    taken: list[tuple[fx.Node, int, int]] = field(default_factory=list)
    every: frozenset[fx.Node] = frozenset()  # of these, also those that are not kept

    def __post_init__(self) -> None:
        shape = self.total.meta["val"].shape
        self.width, self.rows = shape[-1], prod(shape[:-1])
        self.values[self.total] = 0
        # What is there before the sum, or can be; and after it what needs nothing else than that and the group.
        self.early, self.fusible = set[fx.Node](), set[fx.Node]()
        is_behind = False
        for node in list(self.total.graph.nodes):
            if node is self.total:
                is_behind = True
            elif not is_behind:
                self.early.add(node)
            elif node.op == "call_function":
                self._look(node)
                # The group is computed where the sum stands, that is in front of this write.
                if _changes(node) and node not in self.values:
                    break  # what is read after it may not be what it was

    def _look(self, node: fx.Node) -> None:
        reads = node.all_input_nodes
        if all(read in self.early for read in reads):
            if (node.target in _EARLIER or node.target in _POINTWISE) and self._is_light(node):
                self.early.add(node)
                self.moved.append(node)
        elif all(read in self.early or read in self._members for read in reads):
            self._take(node)
        if node not in self._members and _is_fusible(node):
            near = (self.early, self._members, self.fusible)
            if all(any(read in nodes for nodes in near) for read in reads):
                self.fusible.add(node)

    def _is_light(self, node: fx.Node) -> bool:
        fake = _static(node)
        return fake is not None and not _changes(node) and (node.target in _VIEWS or fake.numel() <= self.width)

    def _take(self, node: fx.Node) -> None:
        """Makes a node one of the group, if it can be."""
        before = len(self.values) + len(self.moments)
        self._try(node)
        if len(self.values) + len(self.moments) > before:
            self.taken.append((node, len(self.steps), len(self.operands)))

    def _try(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            if node.args[0] in self.moments:
                self.values[node] = self.moments[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        if node.target in _VIEWS:
            if self._extent(node) is self._extent(node.args[0]) is not None:
                self.values[node] = self.values[node.args[0]]  # type: ignore[index]
            return
        if node.target in (aten.var_mean.correction, aten.var.correction):
            self._take_moments(node)
        elif node.target in (aten.mean.dim, aten.sum.dim_IntList):
            if self._is_along_rows(node) and not node.kwargs:
                name = "mean" if node.target is aten.mean.dim else "sum"
                self._reduce(node, name)
        elif node.target is aten.pow.Tensor_Scalar:
            if node.args[1] == 2:
                self._compute(node, "square", node.args[:1])
        elif node.target in _POINTWISE and not node.kwargs and not (_changes(node) and self._is_read(node.args[0])):
            is_cast = node.target is prims.convert_element_type.default
            self._compute(node, _POINTWISE[node.target], node.args[:1] if is_cast else node.args)

    def _is_read(self, value: Any) -> bool:
        """Returns whether what a node changes is read by others too, or is somebody else's."""
        return value not in self.values or value is self.total or len(value.users) > 1 or value.target in _VIEWS

    def _compute(self, node: fx.Node, name: str, args: tuple[Any, ...]) -> None:
        extent, fake = self._extent(node), node.meta["val"]
        if extent is None or not fake.is_contiguous():  # a result is: what reads it is compiled for its strides
            return
        before = len(self.operands)
        operands: list[int | float] = []
        for arg in args:
            value = self._operand(arg, fake)
            if value is None:
                del self.operands[before:]
                return
            operands.append(value)
        if sum(kind is Extent.FULL for _, kind in self.operands) > _MOST:
            del self.operands[before:]
            return
        self.values[node] = self._step(name, operands, fake.dtype, extent)

    def _operand(self, arg: Any, result: Tensor) -> int | float | None:
        """Returns the value that an argument is, a number as such; None where a program of rows cannot read it."""
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg) if isfinite(arg) else None
        if not isinstance(arg, fx.Node):
            return None
        if arg in self.values:
            return self.values[arg]
        known = next((i for i, (node, _) in enumerate(self.operands) if node is arg), None)
        if known is not None:
            return -1 - known
        fake = _static(arg)
        if fake is None or fake.dtype not in TYPES or fake.device != result.device:
            return None
        shape = tuple(fake.shape)
        if shape == tuple(result.shape) and self._extent(arg) is Extent.FULL:
            extent = Extent.FULL
        elif fake.numel() == self.width and shape[-1:] == (self.width,):
            extent = Extent.COLUMN
        elif shape == (*result.shape[:-1], 1) and fake.numel() == self.rows:
            extent = Extent.ROW
        else:
            return None
        self.operands.append((arg, extent))
        return -len(self.operands)

    def _extent(self, node: Any) -> Extent | None:
        """Returns the extent of what has the sum's rows; None of other shapes and types."""
        fake = _static(node)
        if fake is None or fake.dtype not in TYPES or fake.dim() < 1:
            return None
        if fake.shape[-1] == self.width and fake.numel() == self.width * self.rows:
            return Extent.FULL
        return Extent.ROW if fake.shape[-1] == 1 and fake.numel() == self.rows else None

    def _is_along_rows(self, node: fx.Node) -> bool:
        dims, fake = node.args[1], node.args[0].meta["val"]  # type: ignore[union-attr]
        keepdim = len(node.args) > 2 and node.args[2] is True
        return keepdim and isinstance(dims, (list, tuple)) and [d % fake.dim() for d in dims] == [fake.dim() - 1]

    def _reduce(self, node: fx.Node, name: str) -> None:
        if node.args[0] in self.values and self._extent(node.args[0]) is Extent.FULL:
            fake = node.meta["val"]
            self.values[node] = self._step(name, [self.values[node.args[0]]], fake.dtype, Extent.ROW)  # type: ignore[index]

    def _take_moments(self, node: fx.Node) -> None:
        """Takes variance and mean, or the variance alone."""
        x, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
        correction = node.kwargs.get("correction", 1)
        keepdim, fake = node.kwargs.get("keepdim") is True, x.meta["val"]  # type: ignore[union-attr]
        if not keepdim or not isinstance(dims, (list, tuple)) or [d % fake.dim() for d in dims] != [fake.dim() - 1]:
            return
        if x not in self.values or self._extent(x) is not Extent.FULL or not isinstance(correction, (int, float)):
            return
        # The divisor would be zero or less: torch gives inf or NaN there, which the row kernel need not imitate.
        if correction >= self.width:
            return
        value, kind = self.values[x], fake.dtype  # type: ignore[index]
        var = self._step("var", [value, float(correction)], kind, Extent.ROW)
        if node.target is aten.var.correction:
            self.values[node] = var
        else:
            self.moments[node] = var, self._step("mean", [value], kind, Extent.ROW)

    def _step(self, name: str, operands: list[int | float], dtype: torch.dtype, extent: Extent) -> int:
        self.steps.append(RowStep(name, tuple(operands), dtype, extent))
        return len(self.steps)

    def replace(self) -> bool:
        """Puts one call in place of the group, if it saves reading and writing."""
        if not self._keep_best():
            return False
        outside = self._wanted()
        results = sorted({self.values[node] for node in outside})
        graph, (*sent, name, buffer) = self.total.graph, self.total.args
        for node in self.moved:
            self.total.prepend(node)
        program = self._program(results)
        args = (*sent, [node for node, _ in self.operands], program.text, name, buffer)
        with graph.inserting_before(self.total):
            call = _made(graph, _SUMS[self.total.target], args)
            parts = {value: _made(graph, operator.getitem, (call, i)) for i, value in enumerate(results)}
            seen: dict[tuple[int, tuple[int, ...]], fx.Node] = {}
            for node in outside:
                key = self.values[node], tuple(node.meta["val"].shape)
                if key not in seen:
                    seen[key] = _made(graph, aten.view.default, (parts[key[0]], list(key[1])))
                node.replace_all_uses_with(seen[key], delete_user_cb=lambda user: user not in self._members)
        for node in reversed(list(graph.nodes)):
            if node in self._members and not node.users:
                graph.erase_node(node)
        return True

    def _keep_best(self) -> bool:
        """Keeps the first ones that were taken, so many that most is saved; gives whether anything is."""
        best, count = 0, 0
        everything = dict(self.values), dict(self.moments), list(self.taken)
        self.every = frozenset(node for node, _, _ in self.taken)
        for number in range(1, len(self.taken) + 1):
            self._restrict(everything, number)
            saved = self._saved()
            if saved > 0 and saved >= best and self.taken[-1][1]:  # views alone are nothing
                best, count = saved, number
        self._restrict(everything, count)
        if count:
            _, steps, operands = self.taken[-1]
            del self.steps[steps:], self.operands[operands:]
        return count > 0

    def _restrict(self, everything: tuple[Any, Any, Any], count: int) -> None:
        values, moments, taken = everything
        members = {node for node, _, _ in taken[:count]} | {self.total}
        self.values = {node: value for node, value in values.items() if node in members}
        self.moments = {node: pair for node, pair in moments.items() if node in members}
        self.taken = taken[:count]

    def _saved(self) -> int:
        """Returns bytes that are neither written nor read; less than none where the call would write too much."""
        late, full = dict[int, bool](), set[int]()
        members = self._members
        for node in self._wanted():
            value = self.values[node]
            outside = [user for user in node.users if user not in members]
            # Those that were taken and are left to others again can be computed with it, too.
            late[value] = late.get(value, False) or not self.every.union(self.fusible).issuperset(outside)
            if self._extent(node) is Extent.FULL:
                full.add(value)
        if not late or len(full) > _MOST or any(node in members and self._is_lost(node) for node in self.moments):
            return -1
        nbytes: int = self.total.meta["val"].nbytes
        saved = nbytes if 0 in late else 2 * nbytes
        return saved - sum(2 * self._size(value) for value in full if value and not late[value])

    def _is_lost(self, node: fx.Node) -> bool:
        """Returns whether somebody else reads variance and mean, of which only parts can be given."""
        return any(user not in self.values for user in node.users)

    def _size(self, value: int) -> int:
        return int(self.width * self.rows) * self.steps[value - 1].dtype.itemsize

    @property
    def _members(self) -> set[fx.Node]:
        return {*self.values, *self.moments}

    def _wanted(self) -> list[fx.Node]:
        """Returns those of the group that others read."""
        members = self._members
        return [node for node in self.values if any(user not in members for user in node.users)]

    def _program(self, results: list[int]) -> RowProgram:
        count = len(self.operands)

        def number(value: int | float) -> int | float:
            if isinstance(value, float) or value == 0:
                return value
            return -value if value < 0 else value + count

        steps = tuple(RowStep(s.name, tuple(map(number, s.operands)), s.dtype, s.extent) for s in self.steps)
        outputs = tuple(int(number(value)) for value in results)
        return RowProgram(self.width, tuple(extent for _, extent in self.operands), steps, outputs)


def _made(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """Returns a call, with the value that it gives of its operands' fakes."""
    node = graph.call_function(target, args)
    fakes = fx.map_arg(args, lambda arg: arg.meta["val"])
    node.meta["val"] = target(*fakes)
    return node
