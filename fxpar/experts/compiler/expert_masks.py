"""What a loop over experts knows of one: which pairs are its own, their rows, and its weights of all tokens.

Enters: nodes of a loop. Leaves: of which expert they speak, and of which choice. A helper of `looped_experts`.

Terms: see `choices`. A mask has a dimension for each of the tokens', for K, and for E where it speaks of all experts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxpar.experts.compiler.choices import argument, aten, chosen_of, plain
from fxpar.ir.program import is_tensor, tensor_type
from fxpar.rules import bind_arguments

_ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)
_K, _E = -1, -2


@dataclass(frozen=True)
class Mask:
    """Which pairs go to which expert, as ones or zeros.

    Attributes:
        choice: the experts of all pairs.
        dims: what the dimensions are: of tokens by number, of K, of E.
        expert: the one that it speaks of; None where it has a dimension for all.
    """

    choice: fx.Node
    dims: tuple[int, ...]
    expert: int | None


@dataclass(frozen=True)
class Column:
    """What weighs one expert's results for tokens.

    Attributes:
        choice: the experts of all pairs.
        weights: of all pairs, in their order.
        expert: the one.
        picks: the rows that it weighs; None where it is of all tokens, 0 where one has not chosen the expert.
    """

    choice: fx.Node
    weights: fx.Node
    expert: int
    picks: Picks | None


@dataclass(frozen=True)
class Picks:
    """The pairs of one expert.

    Attributes:
        where: what has found them.
        tokens: which of its results are their tokens.
        places: which are their places among a token's pairs.
    """

    where: fx.Node
    tokens: int
    places: int


class Loop:
    """What is known of the nodes of loops over experts.

    Args:
        chosen: values that are a choice, each with the top-k's own.
    """

    def __init__(self, chosen: Mapping[fx.Node, fx.Node]) -> None:
        self._chosen = chosen

    def mask(self, node: object) -> Mask | None:
        """A mask, of all experts or of one."""
        if not isinstance(node, fx.Node) or node.op != "call_function" or not is_tensor(node):
            return None
        if node.target in (aten.one_hot.default, aten.eq.Scalar):
            return self._marks(node)
        if node.target is aten._to_copy.default:
            return self.mask(argument(node, 0))
        mask = self.mask(argument(node, 0)) if node.target in (aten.permute.default, aten.select.int) else None
        if mask is None:
            return None
        if node.target is aten.permute.default:
            return replace(mask, dims=tuple(mask.dims[dim] for dim in argument(node, 1)))
        dim, index = argument(node, 1) % len(mask.dims), argument(node, 2)
        if mask.dims[dim] != _E or not isinstance(index, int):
            return None
        return Mask(mask.choice, (*mask.dims[:dim], *mask.dims[dim + 1 :]), index % int(chosen_of(mask.choice)))

    def _marks(self, node: fx.Node) -> Mask | None:
        args = bind_arguments(node)
        choice = self._chosen.get(args["self"])
        if choice is None or tensor_type(args["self"]).shape != tensor_type(choice).shape:
            return None
        dims, count = (*range(len(tensor_type(choice).shape) - 1), _K), int(chosen_of(choice))
        if node.target is aten.one_hot.default:
            return Mask(choice, (*dims, _E), None) if args.get("num_classes", -1) == count else None
        number = args["other"]
        return Mask(choice, dims, number) if type(number) is int and 0 <= number < count else None

    def column(self, node: fx.Node) -> Column | None:
        """The weights of one expert, [T, 1] or of the rows that it has."""
        node = plain(node)
        if node.op != "call_function" or not is_tensor(node):
            return None
        if node.target is aten.index.Tensor:
            return self._picked(node)
        if node.target is aten.sum.dim_IntList:
            return self._summed(node)
        return self._of_table(node)

    def picks(self, node: object) -> tuple[Mask, Picks] | None:
        """The pairs of one expert, where a node is what finds them."""
        if not isinstance(node, fx.Node) or node.target is not aten.where.default:
            return None
        mask = self.mask(argument(node, 0))
        if mask is None or mask.expert is None or sorted(mask.dims) != [_K, 0]:
            return None
        return mask, Picks(node, mask.dims.index(0), mask.dims.index(_K))

    def picked(self, places: object) -> tuple[Mask, Picks] | None:
        """The pairs of one expert, where a node says which tokens they are of."""
        if not isinstance(places, fx.Node) or places.target is not operator.getitem:
            return None
        pairs = self.picks(argument(places, 0))
        return pairs if pairs is not None and argument(places, 1) == pairs[1].tokens else None

    def _picked(self, node: fx.Node) -> Column | None:
        """`weights[tokens, places]`."""
        args = bind_arguments(node)
        pairs = self.picked(args["indices"][0]) if len(args["indices"]) == 2 else None
        weights = plain(args["self"])
        if pairs is None or tensor_type(weights).shape != tensor_type(pairs[0].choice).shape:
            return None
        if tensor_type(args["self"]).shape[:2] != tensor_type(weights).shape:
            return None
        mask, picks = pairs
        second = args["indices"][1]
        is_place = isinstance(second, fx.Node) and second.target is operator.getitem
        if not is_place or second.args != (picks.where, picks.places) or mask.expert is None:
            return None
        return Column(mask.choice, weights, mask.expert, picks)

    def _summed(self, node: fx.Node) -> Column | None:
        """`(weights * (choice == e)).sum(-1)`, or `where(choice == e, weights, 0)` in it."""
        args = bind_arguments(node)
        for mask, weights in _masked(args["self"]):
            marks = self.mask(mask)
            if marks is None or marks.expert is None or not isinstance(weights, fx.Node):
                continue
            rank = len(marks.dims)
            if marks.dims != (*range(rank - 1), _K) or [dim % rank for dim in args["dim"] or ()] != [rank - 1]:
                continue
            shape = tensor_type(marks.choice).shape
            same = tensor_type(weights).shape == shape == tensor_type(args["self"]).shape
            if same and tensor_type(weights).dtype == tensor_type(node).dtype:
                return Column(marks.choice, weights, marks.expert, None)
        return None

    def _of_table(self, node: fx.Node) -> Column | None:
        """One expert's of a table [T, E] of zeros, into which the weights of pairs were scattered."""
        args = bind_arguments(node)
        if node.target is aten.select.int:
            table, number = args["self"], args["index"]
        elif node.target is aten.slice.Tensor and args.get("step", 1) == 1:
            table, number = args["self"], args["start"]
            if type(number) is not int or args["end"] != number + 1:
                return None
        else:
            return None
        if table.target is not aten.scatter.src or type(number) is not int:
            return None
        last, filled = len(tensor_type(table).shape) - 1, bind_arguments(table)
        choice, weights = self._chosen.get(filled["index"]), filled["src"]
        if choice is None or args.get("dim", 0) % (last + 1) != last or filled["dim"] % (last + 1) != last:
            return None
        shape, zeros = tensor_type(choice).shape, filled["self"]
        if tensor_type(filled["index"]).shape != shape or tensor_type(weights).shape != shape or not is_zero(zeros):
            return None
        count = chosen_of(choice)
        if tensor_type(table).shape != (*shape[:-1], count):
            return None
        return Column(choice, weights, number % int(count), None)


def _masked(node: fx.Node) -> Sequence[tuple[object, object]]:
    """What may be a mask, and what it lets through."""
    if node.target is aten.mul.Tensor:
        return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
    if node.target is aten.where.self and is_zero(node.args[2]):
        return [(node.args[0], node.args[1])]
    if node.target is aten.where.ScalarOther and node.args[2] in (0, False):
        return [(node.args[0], node.args[1])]
    return []


def is_zero(value: object) -> bool:
    """Whether it is a tensor of zeros."""
    if not isinstance(value, fx.Node):
        return False
    return bool(value.target in _ZEROS or (value.target is aten.full.default and argument(value, 1) in (0, False)))
