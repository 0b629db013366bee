"""Runs of one operator by itself, for what is declared of its rows (`fxpar.capture.rowwise`).

Enters: a call of an operator in a captured program, and what is known of parameters and inputs. Leaves: operands with
which it runs, for any number of rows, and its results and gradients on them.

Floating operands are random. Integers and booleans are what the program computes of the example, where that can be
computed, else zeros and ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.capture.trace import FAILURES
from fxpar.layout.symbolic_sizes import Size, divide, evaluate
from fxpar.ops.functions import function
from fxpar.program.program import Program, ScalarType, has_note, note, operands, output_types, tensor_type
from fxpar.signatures.autograd_functions import resolve_function
from fxpar.signatures.batchwise_rule import has_rows

RAISED = (*FAILURES, IndexError, ArithmeticError)


@dataclass(frozen=True)
class Results:
    """What a run gives.

    Attributes:
        outputs: all tensors that the operator returns.
        gradients: of each floating operand.
    """

    outputs: tuple[Tensor, ...]
    gradients: Mapping[fx.Node, Tensor]


@dataclass(frozen=True)
class RowTrial:
    """A call of a declared operator.

    Attributes:
        node: the call.
        rows: the number of rows.
        batch: name of the symbol in it.
        sizes: the symbols' values.
        axes: those whose ranks share out the rows.
    """

    node: fx.Node
    rows: Size
    batch: str
    sizes: Mapping[str, int]
    axes: Sequence[str]

    @property
    def sources(self) -> list[fx.Node]:
        """The operands, each once."""
        return list(dict.fromkeys(operands(self.node)))

    @property
    def has_rows(self) -> bool:
        """Whether operands have rows, and all outputs too: other calls stay whole, or are refused for their types."""
        kinds = output_types(self.node)
        return any(self.times(source) for source in self.sources) and all(has_rows(kind, self.rows) for kind in kinds)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return evaluate(self.rows, self.sizes)

    def of_rows(self, count: int) -> RowTrial | None:
        """The same call of another number of rows; None where the symbol cannot give it."""
        sizes = {**self.sizes, self.batch: self.sizes[self.batch] * count // self.count}
        resized = replace(self, sizes=sizes)
        return resized if resized.count == count else None

    def times(self, source: fx.Node) -> int:
        """Elements of dimension 0 for each row; 0 where an operand has none."""
        kind = tensor_type(source)
        size = divide(kind.shape[0], self.rows) if has_rows(kind, self.rows) else None
        return 0 if size is None else evaluate(size, self.sizes)

    def run(self, tensors: Sequence[Tensor], upstream: Sequence[Tensor] | None = None) -> Results:
        """The operator's results, and gradients from `upstream`, by default from random ones."""
        leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
        by_source = dict(zip(self.sources, leaves, strict=True))
        with torch.enable_grad():
            results = pytree.tree_leaves(_called(self.node, lambda node: self._value(node, by_source)))
        outputs = tuple(t for t in results if isinstance(t, Tensor))
        roots = [i for i, output in enumerate(outputs) if output.requires_grad]
        floating = {source: leaf for source, leaf in by_source.items() if leaf.requires_grad}
        upstream = upstream or [random_like(output, 7 + i) for i, output in enumerate(outputs)]
        grads: Sequence[Tensor | None] = [None] * len(floating)
        if roots and floating:
            arriving = [upstream[i] for i in roots]
            grads = torch.autograd.grad([outputs[i] for i in roots], [*floating.values()], arriving, allow_unused=True)
        gradients = {
            source: torch.zeros_like(leaf) if gradient is None else gradient
            for (source, leaf), gradient in zip(floating.items(), grads, strict=True)
        }
        return Results(tuple(o.detach() for o in outputs), gradients)

    def _value(self, node: fx.Node, by_source: Mapping[fx.Node, Tensor]) -> Any:
        kind = note(node).type if has_note(node) else None
        # A size of the batch is that of the whole on every rank (`fxpar.size`), so it is on parts too.
        return evaluate(kind.value, self.sizes) if isinstance(kind, ScalarType) else by_source[node]


def _called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """What a node computes of the values of others."""
    args: Any = map_arg(node.args, value)
    kwargs: Any = dict(map_arg(node.kwargs, value))
    target: Any = resolve_function(kwargs.pop("path")).apply if node.target is function else node.target
    return target(*args, **kwargs)


def random_like(like: Tensor, seed: int, *, positive: bool = False) -> Tensor:
    """Normal numbers of a tensor's shape and type; positive ones are near 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if like.is_complex() else torch.float64
    numbers = torch.randn(like.shape, dtype=dtype, generator=generator)
    if positive:
        numbers = 1 + 0.1 * numbers.abs()
    return numbers.to(like.device, like.dtype)


def from_example(
    trial: RowTrial, program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> dict[fx.Node, Tensor]:
    """Operands that are no floating numbers, from the example."""
    example = {}
    for source in trial.sources:
        kind = tensor_type(source)
        if kind.is_float or kind.dtype.is_complex:
            continue
        value = _computed(program, source, state, inputs)
        shape = [evaluate(size, trial.sizes) for size in kind.shape]
        if value is None or list(value.shape) != shape:
            value = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(kind.dtype)
        example[source] = value
    return example


def _computed(
    program: Program, target: fx.Node, state: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> Tensor | None:
    """The value of a node on the example; None where weights or inputs without values go into it, or it fails."""
    needed, pending = set[fx.Node](), [target]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    names = {p.node: state.get(p.fqn) for p in program.parameters} | {i.node: inputs[i.path] for i in program.inputs}
    values: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad():
            for node in (node for node in program.graph.nodes if node in needed):
                if node.op == "placeholder":
                    values[node] = names[node.name]
                    if values[node] is None or values[node].is_meta:
                        return None
                    continue
                values[node] = _called(node, values.__getitem__)
    except RAISED:
        return None
    return values[target] if isinstance(values[target], Tensor) else None


def attempts(trial: RowTrial, example: Mapping[fx.Node, Tensor]) -> Iterator[list[Tensor]]:
    """Operands to try, the best first: in float64, else in the program's types; on the CPU, else on a GPU."""
    devices = {value.device for value in example.values()} | {torch.device("cpu")}
    devices |= {torch.device("cuda")} if torch.cuda.is_available() else set()
    for device in sorted(devices, key=str):
        for widened, positive in ((True, False), (True, True), (False, False), (False, True)):
            tensors = []
            for index, source in enumerate(trial.sources):
                kind = tensor_type(source)
                wide = widened and kind.dtype.is_floating_point
                shape = [evaluate(size, trial.sizes) for size in kind.shape]
                like = torch.empty(shape, dtype=torch.float64 if wide else kind.dtype, device=device)
                value = example[source].to(device) if source in example else random_like(like, index, positive=positive)
                tensors.append(value)
            yield tensors
