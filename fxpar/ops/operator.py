"""The record of a graph operator: all that fxpar knows of one, in one place.

Enters: the family's functions. Leaves: `Operator`, which is the target of nodes, so that whoever meets a node of it
reads what it needs there: the rules, the checks of shapes, lowering, reports and costs know no operator by its name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, fx

from fxpar.errors import InputError
from fxpar.ir.operators import GraphOperator
from fxpar.ir.program import Note, TensorType, note, operands, output_types, update
from fxpar.ir.properties import Property
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.symbolic_sizes import Size
from fxpar.ops.lowering_context import OnRank
from fxpar.signatures.engine import Refusal, Rule, Signature
from fxpar.signatures.op_call import OpCall, bind_arguments


@dataclass(frozen=True)
class LoweredCall:
    """What a rank runs in place of a node.

    Attributes:
        function: of tensors, numbers and names of groups. FX writes calls by name: each needs one of its own.
        arguments: nodes and literals.
        finish: of what communicates, a second function: it takes what the first one gives, and `rest`, and waits until
            that is there. It runs in front of the node's first reader.
        rest: nodes and literals.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    finish: Callable[..., Any] | None = None
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True)
class OnShapes:
    """A call on tensors of the meta device, of a rank's shapes or of the whole's.

    Attributes:
        node: the node that makes it.
        args: its arguments, tensors and numbers in place of nodes.
        kwargs: the same by name.
        outputs: what the note, with the layout where the shapes are a rank's, says of the results.
        axes: sizes of the mesh axes where the shapes are a rank's; none where they are the whole's.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    axes: Mapping[str, int]

    @property
    def by_name(self) -> dict[str, Any]:
        """Returns the arguments by name, with the defaults of those that were not passed."""
        # The node has nodes where this call has tensors, in the same order.
        bound = bind_arguments(self.node)
        return {**bound, **dict(zip(bound, self.args, strict=False)), **self.kwargs}


@dataclass(frozen=True)
class CollectiveSite:
    """A node of a training step, as it communicates on the axis that it names.

    Attributes:
        call: over global shapes.
        before: placements of the operands.
        after: placements of the outputs.
        stored: types of the outputs as modules hold parameters: of main values under mixed precision.
        of_parameters: whether parameters alone make it.
        shard: as of `Note.shard`.
        reached: for each output, whether the loss sends a gradient there.
    """

    call: OpCall
    before: tuple[Placement, ...]
    after: tuple[Placement, ...]
    stored: tuple[TensorType, ...]
    of_parameters: bool
    shard: str
    reached: tuple[bool, ...]


@dataclass(frozen=True)
class Sent:
    """One collective of a training step.

    Attributes:
        collective: all_reduce, all_gather, reduce_scatter or all_to_all.
        phase: forward, backward or parameter, as of `fxpar.cost.communication.Collective`.
        bytes: of the whole value: what an all-gather yields, a reduction takes in.
        part: of it what is expected to travel where the ranks copy into each other's memory.
    """

    collective: str
    phase: str
    bytes: Size
    part: Fraction = Fraction(1)


class Emits(Protocol):
    """Adds nodes of the backward to a program."""

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kind: Any,
        like: Note,
        *,
        layouts: Sequence[Layout] | None = None,
        name: str = "",
        random: int = 0,
    ) -> fx.Node:
        """Adds a call with its note.

        Args:
            kind: type of the result, a tuple of several.
            like: note of the forward node that it comes from, of the parameter phase where it is made once a step.
            layouts: of the results, where they do not follow by rules.
            random: identity of what draws.
        """
        ...

    def forward(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Any, at: fx.Node, random: int = 0
    ) -> fx.Node:
        """Adds a call in front of a node of the forward."""
        ...


@dataclass(frozen=True)
class Reverse:
    """A node whose derivative is computed.

    Attributes:
        node: of the forward.
        tangents: the gradient of each of its outputs, None where there is none.
        needs_grad: of each tensor operand, whether its gradient is needed.
        emit: adds nodes to the program.
    """

    node: fx.Node
    tangents: tuple[fx.Node | None, ...]
    needs_grad: tuple[bool, ...]
    emit: Emits

    def call(self, target: Any, *args: Any, kind: Any, random: int = 0) -> fx.Node:
        """Adds a node of the backward over the axes of the forward's."""
        axis = self.node.kwargs.get("axis")
        kwargs = {"axis": axis} if axis is not None else {}
        return self.emit.call(target, args, kwargs, kind, note(self.node), random=random)

    def result(self, index: int) -> fx.Node:
        """Returns one of the node's own results, which the forward need not have taken."""
        known = (user for user in self.node.users if user.target is operator.getitem and user.args[1] == index)
        kind = output_types(self.node)[index]
        item = next(known, None)
        if item is None:  # phases hand on no tuples: their parts are of the phase that made them
            item = self.emit.forward(operator.getitem, (self.node, index), {}, kind, self.node.next)
            like = note(self.node)
            update(item, fqn=like.fqn, source=like.source, recompute=like.recompute)
        return item

    def adjoint(self, target: Any) -> Gradients:
        """Returns the gradients of a node that is linear in its first operand: `target` makes it, others have none."""
        _, *rest = self.node.args
        (gradient, *_), (kind, *_) = self.tangents, output_types(operands(self.node)[0])
        assert gradient is not None
        kind = TensorType(output_types(gradient)[0].dtype, kind.shape)
        return self.of_first(self.call(target, gradient, *rest, kind=kind))

    def of_first(self, gradient: fx.Node) -> Gradients:
        """Returns a gradient of the first operand, and none of the others."""
        return (gradient, *[None] * (len(self.needs_grad) - 1))

    def items(self, source: fx.Node) -> list[fx.Node]:
        """Returns the results of a node of several, as nodes of their own."""
        kinds, place = output_types(source), note(self.node)
        return [self.emit.call(operator.getitem, (source, i), {}, kind, place) for i, kind in enumerate(kinds)]


Gradients = Sequence[fx.Node | None]


@dataclass(frozen=True)
class Saving:
    """A call that computes what another does, and more results after that, which its derivative reads.

    Attributes:
        target: the operator, which takes the other's keywords.
        args: its arguments.
        types: of its results.
    """

    target: Operator
    args: tuple[Any, ...]
    types: tuple[TensorType, ...]


Demand = Callable[[OpCall], Signature | Refusal]


@dataclass(frozen=True, eq=False, repr=False)
class Operator(GraphOperator):
    """A graph operator of fxpar.

    Attributes:
        lower: what a rank runs in place of a node: a call, or a node of the lowered graph.
        shape: the results of a call on shapes alone (`on_shapes`); by default those of `like` with its arguments.
        rule: its legal signatures; None for a coercion, and where the type check knows them (`fxpar.rules.inference`).
        kinds: of a coercion: the kinds of placement from and to which it converts.
        sends: of a coercion: its collectives forward and backward, "" where it is local.
        traffic: what it communicates; None for nothing.
        like: the operator of torch that gives the same shapes, and FLOPs, on one device; tensors that both take have
            the same names. What a composite operator is on axes that it does not name.
        stands_for: operators of torch that are taken for this one where their own rules refuse a cut, until the pass
            `vocab_parallel` has put it in place.
        flops: forward ones of matrix products (2 a multiply-add), over global shapes; by default those of `like`.
        uncounted: name of what may hold matrix products that `flops` does not know; empty where nothing does.
        whole: why it takes whole operands; empty where it can be split.
        demand: the one signature that its values have on the axis that it names; None where its rule has others.
        stage: property of programs that have it, which the pass provides that puts it there; None for any program.
        apart: whether each of its axes cuts a dimension of its own, where it names several.
        copies: whether copies between the ranks' memories can carry what it sends.
        one_shot: whether those are one call in any case, which sends and waits, however little it sends.
        resent: whether the backward has it sent again, and it is not kept, where no budget of the plan decides.
        draws: whether it draws bits of the counter generator: it has an identity and takes the generator's state.
        derivative: makes nodes of the backward and gives the gradient of each tensor operand; None where PyTorch's
            autograd is traced, or where there is no gradient.
        saving: the call that takes a node's place where a gradient is wanted.
        uncaptured: why no CUDA graph can hold it; empty where one can.
        waits: why none can hold its wait, where one can hold the call before that; empty where it holds both or none.
    """

    _: KW_ONLY
    lower: Callable[[fx.Node, OnRank], LoweredCall | fx.Node]
    shape: Callable[[OnShapes], Any] | None = None
    rule: Rule | None = None
    kinds: tuple[str, str] | None = None
    sends: tuple[str, str] = ("", "")
    traffic: Callable[[CollectiveSite], Iterable[Sent]] | None = None
    like: Any = None
    stands_for: tuple[torch._ops.OpOverload, ...] = ()
    flops: Callable[[OpCall], Size] | None = None
    uncounted: Callable[[OpCall], str] | None = None
    whole: Callable[[OpCall], str] | None = None
    demand: Demand | None = None
    stage: Property | None = None
    apart: bool = False
    copies: bool = False
    one_shot: bool = False
    resent: bool = False
    draws: bool = False
    derivative: Callable[[Reverse], Gradients] | None = None
    saving: Callable[[fx.Node], Saving] | None = None
    uncaptured: str = ""
    waits: str = ""

    def __post_init__(self) -> None:
        if self.shape is None and self.like is None:
            raise ValueError(f"{self} has neither a function of shapes nor an operator of torch that is like it")

    def on_shapes(self, call: OnShapes) -> Any:
        """Returns the results of a call on shapes alone.

        Raises:
            ValueError: the operands do not fit; TypeError, RuntimeError or IndexError where torch says so.
        """
        if self.shape is not None:
            return self.shape(call)
        assert self.like is not None
        return self.like(*call.args, **{name: value for name, value in call.kwargs.items() if name != "axis"})


def alike(target: Any) -> Any:
    """Returns the operator of torch that the target of a node is, or is like; None where there is none."""
    return target.like if isinstance(target, Operator) else target


def is_view(node: fx.Node) -> bool:
    """Returns whether a node computes nothing: a view of its operand, or one of several results."""
    target = alike(node.target)
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)


# ---------------------------------------------------------------------- operators of torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LIBRARY = torch.library.Library("fxpar", "FRAGMENT")


@dataclass(frozen=True)
class Autograd:
    """How autograd differentiates an operator of torch.

    Attributes:
        save: takes the context, the inputs and the outputs of a call.
        backward: takes the context and the gradients of the outputs; returns the gradient of each input.
    """

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class PaddingRows:
    """What an operator does with rows of a buffer that are nobody's (`fxpar.ops.lower`).

    Attributes:
        key: number of the argument that says which rows are somebody's: an order, or counts.
        ignores: numbers of the operands of which it does not read such rows.
        writes: whether it writes zeros in such rows, which its argument `fill` switches off.
    """

    key: int
    ignores: tuple[int, ...] = ()
    writes: bool = False


@dataclass(frozen=True, eq=False)
class TorchOperator(Generic[_P, _R]):
    """An operator of `torch.ops.fxpar`, which compilers leave whole and which changes none of its operands.

    It is called like the function that computes it.

    Attributes:
        overload: the target of nodes.
        rule: its legal signatures; None where programs have no such node.
        flops: as of `Operator`.
        padding: None where it does not know of rows that are nobody's.
        buffer: of a node that says which rows of a buffer are somebody's, the nodes that do: its orders and counts.
    """

    overload: Any
    rule: Rule | None = None
    flops: Callable[[OpCall], Size] | None = None
    padding: PaddingRows | None = None
    buffer: Callable[[fx.Node], Iterable[object]] | None = None

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Goes through the dispatcher, as a call of a graph does."""
        outputs: _R = self.overload(*args, **kwargs)
        return outputs


# All of them by overload; a file that declares one adds it when it is imported. `fxpar.experts.operators` imports those
# of experts.
TORCH_OPERATORS: dict[Any, TorchOperator[..., Any]] = {}


def torch_operator(
    name: str,
    *tags: torch.Tag,
    fake: Callable[..., Any],
    autograd: Autograd | None = None,
    direct: bool = False,
    rule: Rule | None = None,
    flops: Callable[[OpCall], Size] | None = None,
    padding: PaddingRows | None = None,
    buffer: Callable[[fx.Node], Iterable[object]] | None = None,
) -> Callable[[Callable[_P, _R]], TorchOperator[_P, _R]]:
    """Declares `torch.ops.fxpar.<name>`: the decorated function computes it, and its signature is the schema.

    Args:
        fake: returns tensors of the results' shapes for operands without values.
        autograd: None where there is no gradient.
        direct: leaves out what torch wraps around a function for gradients and for checks of aliasing: three calls
            more, of four times the time. It is for what a step calls hundreds of times. Operands that require a
            gradient are refused.
        rule: as of `TorchOperator`, and so `flops`, `padding` and `buffer`.
    """

    def declare(function: Callable[_P, _R]) -> TorchOperator[_P, _R]:
        if direct:
            schema = torch.library.infer_schema(function, mutates_args=())
            _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
            _LIBRARY.impl(name, _without_gradients(name, function), "CompositeExplicitAutograd")
            torch.library.register_fake(f"fxpar::{name}", fake, lib=_LIBRARY)
        else:
            definition = torch.library.custom_op(f"fxpar::{name}", function, mutates_args=(), tags=tags)
            definition.register_fake(fake)
            if autograd is not None:
                definition.register_autograd(autograd.backward, setup_context=autograd.save)
        record = TorchOperator[_P, _R](getattr(torch.ops.fxpar, name).default, rule, flops, padding, buffer)
        TORCH_OPERATORS[record.overload] = record
        return record

    return declare


def _without_gradients(name: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function; it refuses operands that ask for a gradient, which autograd would take of what it computes.

    That of a rank alone is not that of a sum over ranks, and torch only warns.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.is_grad_enabled() and any(map(_asks, (*args, *kwargs.values()))):
            raise InputError(
                "an operand asks for a gradient, and the operator has none",
                where=f"fxpar::{name}",
                remedy="call it under torch.no_grad(), as the steps of a module do",
            )
        return function(*args, **kwargs)

    return run


def _asks(x: object) -> bool:
    if isinstance(x, Tensor):
        return x.requires_grad
    return isinstance(x, (list, tuple)) and any(map(_asks, x))
