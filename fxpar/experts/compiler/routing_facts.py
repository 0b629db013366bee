"""What values of a program are in terms of a router's choice, found by one walk with a transfer for each operator.

Enters: a graph in one spelling. Leaves: for each value of which something is known, what that is (`Routing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx

from fxpar.experts.compiler.choices import (
    SHAPED,
    argument,
    aten,
    chosen_of,
    fxp,
    is_choice,
    is_known,
    is_zero,
    plain,
    untransposed,
)
from fxpar.ir.program import is_tensor, tensor_type
from fxpar.layout.symbolic_sizes import Size
from fxpar.rules import bind_arguments

# What a dimension of a mask stands for, apart from numbers of the tokens' dimensions.
_K, _E, _PAIRS = -1, -2, -3
# Types that hold numbers of experts and pairs as they are.
_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
# What may exchange the two dimensions of matrices.
TURNS = (aten.t.default, aten.mT.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Routing:
    """Something that is known of a value.

    Attributes:
        choice: the indices of the top-k that it depends on.
    """

    choice: fx.Node


class IndexKind(Enum):
    """What integers say of a choice.

    Attributes:
        CHOICE: the experts of pairs, in order of tokens.
        SORT: both results of a sort of those.
        ORDER: places of the pairs, expert after expert.
        KEYS: the experts of rows in that order.
        TOKENS: the tokens of rows in that order.
        INVERSE: where each pair stands in that order.
        COUNTS: how many pairs each expert has.
        ENDS: where each expert's pairs end in that order.
        SIZES: counts, as differences of ends.
    """

    CHOICE = auto()
    SORT = auto()
    ORDER = auto()
    KEYS = auto()
    TOKENS = auto()
    INVERSE = auto()
    COUNTS = auto()
    ENDS = auto()
    SIZES = auto()


@dataclass(frozen=True)
class RoutingIndex(Routing):
    """Integers that say something of a choice.

    Attributes:
        kind: what they say.
    """

    kind: IndexKind


@dataclass(frozen=True)
class PairWeights(Routing):
    """Weights of pairs, or ones, by expert: zeros stand where a pair or a token has not chosen the expert.

    Attributes:
        dims: what the dimensions are: of tokens by number, of K, of all pairs, of E; unknown for a column.
        expert: the one that it is of; None where it has a dimension for all.
        weights: those of all pairs, in the shape of the choice; None for ones.
        where: what has found the rows of the expert, if it is of these alone.
    """

    dims: tuple[int, ...]
    expert: int | None
    weights: fx.Node | None = None
    where: fx.Node | None = None

    @property
    def is_column(self) -> bool:
        """Returns whether it has one weight for each row of an expert."""
        return self.weights is not None and self.expert is not None and _K not in self.dims


@dataclass(frozen=True)
class Picked(Routing):
    """The pairs that a `where` finds for one expert.

    Attributes:
        expert: the one.
        where: the operation.
        part: `pairs` for all its results, `tokens` and `places` for the one with that.
    """

    expert: int
    where: fx.Node
    part: str


@dataclass(frozen=True)
class Term:
    """What one expert adds: its results times its weights.

    Attributes:
        expert: the one.
        unweighed: its results.
        weights: those of all pairs, in the shape of the choice.
        where: what has found its rows; None where all tokens are.
    """

    expert: int
    unweighed: fx.Node
    weights: fx.Node
    where: fx.Node | None


@dataclass(frozen=True)
class LoopSum(Routing):
    """A term, or a sum of terms of different experts with one set of weights.

    Attributes:
        terms: in the order in which they are added.
        base: what they are added to; None for nothing.
    """

    terms: tuple[Term, ...]
    base: fx.Node | None = None

    @property
    def is_complete(self) -> bool:
        """Returns whether each expert has its term."""
        return len(self.terms) == chosen_of(self.choice)

    def plus(self, other: LoopSum) -> LoopSum | None:
        """Returns the sum with a term more; None where that is of another loop, or of an expert that has one."""
        first, (term,) = self.terms[0], other.terms
        is_alike = (self.choice, first.weights) == (other.choice, term.weights)
        is_new = all(term.expert != known.expert for known in self.terms)
        if not is_alike or not is_new or (first.where is None) != (term.where is None):
            return None
        return replace(self, terms=(*self.terms, term))


@dataclass(frozen=True)
class ByExpert(Routing):
    """What each pair, or one expert, takes of a tensor with a slice for each expert.

    Attributes:
        source: of all experts, [E, …] with at most two dimensions more.
        lead: how many dimensions the pairs have; 0 where it is one expert's.
        dtype: of what is taken.
        turned: whether the matrices that are taken are transposes of those in the source.
    """

    source: fx.Node
    lead: int
    dtype: torch.dtype
    turned: bool = False

    @property
    def is_matrix(self) -> bool:
        """Returns whether each expert has a matrix."""
        return len(tensor_type(self.source).shape) == 3


Facts: TypeAlias = Mapping[Any, Routing]
_Arguments: TypeAlias = Mapping[str, Any]
_Transfer: TypeAlias = Callable[[fx.Node, _Arguments, Facts], Routing | None]


def routing_facts(graph: fx.Graph) -> dict[fx.Node, Routing]:
    """Returns what is known of values; what an operator without a transfer makes is unknown."""
    facts: dict[fx.Node, Routing] = {}
    for node in graph.nodes:
        transfers = _TRANSFERS.get(node.target, ()) if node.op == "call_function" else ()
        args = bind_arguments(node) if transfers else {}
        fact = next((fact for transfer in transfers if (fact := transfer(node, args, facts)) is not None), None)
        if fact is not None:
            facts[node] = fact
    return facts


def kind_of(fact: Routing | None) -> IndexKind | None:
    """Returns what a value says of a choice, None where it is no index."""
    return fact.kind if isinstance(fact, RoutingIndex) else None


# ---------------------------------------------------------------------- indices


def _step(
    before: IndexKind, after: IndexKind, holds: Callable[[_Arguments, fx.Node], bool] = lambda args, choice: True
) -> _Transfer:
    """Returns the transfer of what makes one index of another one.

    Args:
        holds: whether a call of these arguments does.
    """

    def transfer(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
        fact = facts.get(next(iter(args.values())))
        is_step = isinstance(fact, RoutingIndex) and fact.kind is before and holds(args, fact.choice)
        return RoutingIndex(fact.choice, after) if fact is not None and is_step else None

    return transfer


def _sorts(args: _Arguments, choice: fx.Node) -> bool:
    return len(tensor_type(args["self"]).shape) == 1 and not args.get("descending", False)


def _clamps_nothing(args: _Arguments, choice: fx.Node) -> bool:
    """Returns whether bounds of a choice are what it is within anyway, as transformers 5.17 gives them."""
    least, most = args.get("min"), args.get("max")
    is_least = least is None or (isinstance(least, int) and least <= 0)
    return is_least and (most is None or (isinstance(most, int) and most >= int(chosen_of(choice)) - 1))


def _counts_each(args: _Arguments, choice: fx.Node) -> bool:
    count = args.get("bins", 100)
    return args.get("min", 0) == 0 and args.get("max", 0) in (count, count - 1)


def _item(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    if is_choice(node):
        return RoutingIndex(node, IndexKind.CHOICE)
    fact = facts.get(args["0"])
    if not isinstance(fact, Picked):
        return None
    mask = facts[argument(fact.where, 0)]
    assert isinstance(mask, PairWeights)
    return replace(fact, part="tokens" if args["1"] == mask.dims.index(0) else "places")


def _indexed(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    if len(args["indices"]) == 1:
        return _placed(args["self"], args["indices"][0], facts)
    tokens, places = map(facts.get, args["indices"]) if len(args["indices"]) == 2 else (None, None)
    if not isinstance(tokens, Picked) or tokens.part != "tokens" or places != replace(tokens, part="places"):
        return None
    weights, shape = plain(args["self"]), tensor_type(tokens.choice).shape
    is_of_pairs = tensor_type(weights).shape == shape == tensor_type(args["self"]).shape[:2]
    return PairWeights(tokens.choice, (), tokens.expert, weights, tokens.where) if is_of_pairs else None


def _selected_places(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    return _placed(args["self"], args["index"], facts) if args["dim"] == 0 else None


def _placed(source: fx.Node, places: Any, facts: Facts) -> Routing | None:
    """Returns what is known of slices along the first dimension at places."""
    fact, kind = facts.get(places), tensor_type(source)
    if not isinstance(fact, RoutingIndex):
        return None
    if fact.kind is IndexKind.ORDER and len(kind.shape) == 1:
        is_sorted = facts.get(source) == RoutingIndex(fact.choice, IndexKind.CHOICE)
        return RoutingIndex(fact.choice, IndexKind.KEYS) if is_sorted else None
    is_of_experts = kind.shape[:1] == (chosen_of(fact.choice),) and len(kind.shape) < 4 and is_known(kind.shape)
    if fact.kind is not IndexKind.CHOICE or not is_of_experts or not kind.dtype.is_floating_point:
        return None
    matrices, turned = untransposed(source)
    return ByExpert(fact.choice, matrices, len(tensor_type(places).shape), kind.dtype, turned)


# ---------------------------------------------------------------------- casts and shapes


def _cast(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    fact, dtype = facts.get(args["self"]), tensor_type(node).dtype if is_tensor(node) else None
    match fact:
        case RoutingIndex() if dtype in _EXACT:
            return fact
        case PairWeights(weights=None):
            return fact
        case LoopSum(terms=(_,), base=None) if tensor_type(node).is_float:  # integers are cut off
            return fact
        case ByExpert():
            return slices_of(fact, node)
    return None


def _shaped(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    """Keeps what another shape does not change."""
    fact = facts.get(args["self"])
    match fact:
        case PairWeights() if fact.is_column:
            return fact
        case ByExpert() if fact.lead and (not fact.is_matrix or node.target is aten.clone.default):
            return fact
    return None


def _turned(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    fact = facts.get(args["self"])
    if isinstance(fact, PairWeights) and not fact.is_column and node.target is aten.permute.default:
        return replace(fact, dims=tuple(fact.dims[dim] for dim in args["dims"]))
    return slices_of(fact, node) if isinstance(fact, ByExpert) else None


def slices_of(taken: ByExpert, node: fx.Node) -> ByExpert | None:
    """Returns what a cast or an exchange of dimensions makes of slices; None where they are no such any more."""
    args, lead, rank = bind_arguments(node), taken.lead, taken.lead + 2
    if node.target is aten._to_copy.default:
        dtype = tensor_type(node).dtype
        return replace(taken, dtype=dtype) if dtype.is_floating_point else None
    if node.target not in TURNS or not taken.is_matrix:
        return None
    is_turn = True
    if node.target is aten.transpose.int:
        is_turn = {args["dim0"] % rank, args["dim1"] % rank} == {lead, lead + 1}
    elif node.target is aten.permute.default:
        is_turn = [dim % rank for dim in args["dims"]] == [*range(lead), lead + 1, lead]
    return replace(taken, turned=not taken.turned) if is_turn else None


# ---------------------------------------------------------------------- masks and weights


def _marked(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    """Knows comparisons of a choice with an expert's number, or with the numbers of all."""
    fact = facts.get(args["self"])
    if fact is None or kind_of(fact) is not IndexKind.CHOICE:
        return None
    choice, count, shape = fact.choice, int(chosen_of(fact.choice)), tensor_type(args["self"]).shape
    if node.target is aten.eq.Scalar:
        number = args["other"]
        is_expert = type(number) is int and 0 <= number < count
        return PairWeights(choice, _pair_dims(shape, choice), number) if is_expert else None
    is_each = args.get("num_classes", -1) == count
    if node.target is aten.eq.Tensor:
        is_each = shape[-1] == 1 and tensor_type(node).shape[-1] == count and _counts_up(args["other"])
        shape = shape[:-1]
    return PairWeights(choice, (*_pair_dims(shape, choice), _E), None) if is_each else None


def _pair_dims(shape: tuple[Size, ...], choice: fx.Node) -> tuple[int, ...]:
    is_by_token = shape == tensor_type(choice).shape
    return (*range(len(shape) - 1), _K) if is_by_token else (_PAIRS,) * len(shape)


def _counts_up(numbers: Any) -> bool:
    """Returns whether these are 0, 1, … along the last dimension."""
    while isinstance(numbers, fx.Node) and numbers.target in SHAPED and tensor_type(numbers).shape[-1] != 1:
        numbers = argument(numbers, 0)
    if not isinstance(numbers, fx.Node):
        return False
    is_first = numbers.target is aten.arange.start and argument(numbers, 0) == 0
    return (is_first or numbers.target is aten.arange.default) and len(tensor_type(numbers).shape) == 1


def _where(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    mask = facts.get(args["condition"])
    if not isinstance(mask, PairWeights):
        return None
    if node.target is not aten.where.default:
        is_rest_zero = is_zero(args["other"]) or args["other"] in (0, False)
        return _masked(node, mask, args["self"]) if is_rest_zero else None
    is_of_one = mask.expert is not None and sorted(mask.dims) == [_K, 0]
    return Picked(mask.choice, mask.expert, node, "pairs") if is_of_one else None  # type: ignore[arg-type]


def _masked(node: fx.Node, mask: PairWeights, weights: Any) -> Routing | None:
    """Returns what a mask leaves of weights."""
    shape = tensor_type(mask.choice).shape
    is_whole = mask.expert is not None and mask.dims == _pair_dims(shape, mask.choice) and isinstance(weights, fx.Node)
    is_by_pair = is_whole and tensor_type(weights).shape == shape == tensor_type(node).shape
    return replace(mask, weights=weights) if is_by_pair else None


def _multiplied(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    factors = args["self"], args["other"]
    if not all(isinstance(factor, fx.Node) and is_tensor(factor) for factor in factors):
        return None  # a size is a node too
    for factor, other in (factors, factors[::-1]):
        fact, shape = facts.get(other), tensor_type(factor).shape
        is_by_row = tensor_type(other).shape == (*shape[:-1], 1) and tensor_type(node).shape == shape
        match fact:
            case PairWeights(weights=None):
                return _masked(node, fact, factor)
            case PairWeights(expert=int(expert), weights=fx.Node() as weights) if fact.is_column and is_by_row:
                return LoopSum(fact.choice, (Term(expert, factor, weights, fact.where),))
    return None


def _scattered(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    """Knows the weights of pairs that are scattered into zeros, [T, E]."""
    fact, weights, last = facts.get(args["index"]), args["src"], len(tensor_type(node).shape) - 1
    if fact is None or kind_of(fact) is not IndexKind.CHOICE or args["dim"] % (last + 1) != last:
        return None
    shape = tensor_type(fact.choice).shape
    is_by_pair = tensor_type(args["index"]).shape == shape == tensor_type(weights).shape
    is_by_expert = tensor_type(node).shape == (*shape[:-1], chosen_of(fact.choice)) and is_zero(args["self"])
    return PairWeights(fact.choice, (*range(last), _E), None, weights) if is_by_pair and is_by_expert else None


def _selected(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    """Knows one expert's part of what there is for all."""
    fact, number = facts.get(args["self"]), args.get("index", args.get("start"))
    if not isinstance(fact, PairWeights) or fact.expert is not None or type(number) is not int:
        return None
    if node.target is aten.slice.Tensor and (args.get("step", 1) != 1 or args["end"] != number + 1):
        return None
    dim = args.get("dim", 0) % len(fact.dims)
    dims = (*fact.dims[:dim], *fact.dims[dim + 1 :])
    is_mask_slice = fact.weights is None and node.target is aten.slice.Tensor
    if fact.dims[dim] != _E or is_mask_slice:
        return None
    return replace(fact, dims=dims, expert=number % int(chosen_of(fact.choice)))


# ---------------------------------------------------------------------- sums


def _summed(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    """Knows counts of pairs, columns of one expert's weights, and terms that stand side by side."""
    source = args["self"]
    fact, kind = facts.get(source), tensor_type(source)
    dims = sorted(int(dim) % len(kind.shape) for dim in args["dim"] or ())
    if source.target is aten.stack.default:
        is_sum = dims == [0] and not args.get("keepdim", False) and tensor_type(node).dtype == kind.dtype
        return _of_stack(source, facts) if is_sum and bind_arguments(source).get("dim", 0) == 0 else None
    if not isinstance(fact, PairWeights) or fact.is_column:
        return None
    left = tuple(of for dim, of in enumerate(fact.dims) if dim not in dims)
    if fact.weights is not None:
        is_column = (*left, _K) == fact.dims and tensor_type(fact.weights).dtype == tensor_type(node).dtype
        return replace(fact, dims=left) if is_column else None
    is_count = left == (_E,) and not args.get("keepdim", False) and kind.dtype in (torch.bool, *_EXACT)
    return RoutingIndex(fact.choice, IndexKind.COUNTS) if is_count else None


def _of_stack(stack: fx.Node, facts: Facts) -> Routing | None:
    """Returns the sum of terms that stand side by side."""
    first, *others = (facts.get(part) for part in argument(stack, 0))
    total = first if _is_term(first) else None
    for other in others:
        total = total.plus(other) if isinstance(total, LoopSum) and _is_term(other) else None
    return total


def _is_term(fact: Routing | None) -> TypeGuard[LoopSum]:
    return isinstance(fact, LoopSum) and len(fact.terms) == 1 and fact.base is None


def _added(node: fx.Node, args: _Arguments, facts: Facts) -> Routing | None:
    """Knows a term that is added to others, or to anything else."""
    addends = args["self"], args.get("source", args.get("other"))
    if args.get("alpha", 1) != 1 or not all(isinstance(addend, fx.Node) and is_tensor(addend) for addend in addends):
        return None
    is_at_rows, where = node.target is aten.index_add.default, None
    if is_at_rows:
        places = facts.get(args["index"])
        if not isinstance(places, Picked) or places.part != "tokens" or args["dim"] != 0:
            return None
        where = places.where
    elif any(tensor_type(addend).shape != tensor_type(node).shape for addend in addends):
        return None
    for total, addend in (addends,) if is_at_rows else (addends, addends[::-1]):
        fact, term = facts.get(total), facts.get(addend)
        if _is_term(term) and term.terms[0].where is where:
            more = fact.plus(term) if isinstance(fact, LoopSum) else None
            return replace(term, base=total) if more is None else more
    return None


_Kind = IndexKind
_ARGSORT = _step(_Kind.CHOICE, _Kind.ORDER, _sorts), _step(_Kind.ORDER, _Kind.INVERSE, _sorts)
_TOKENS_OF_PAIRS = _step(_Kind.ORDER, _Kind.TOKENS, lambda args, choice: args["other"] == tensor_type(choice).shape[-1])
_RESULTS_OF_SORT = (
    _step(_Kind.SORT, _Kind.KEYS, lambda args, choice: args["1"] == 0),
    _step(_Kind.SORT, _Kind.ORDER, lambda args, choice: args["1"] == 1),
)
_TRANSFERS: Mapping[Any, tuple[_Transfer, ...]] = {
    **dict.fromkeys((*SHAPED, aten.clone.default), (_step(_Kind.CHOICE, _Kind.CHOICE), _shaped)),
    aten.clamp.default: (_step(_Kind.CHOICE, _Kind.CHOICE, _clamps_nothing),),
    aten._to_copy.default: (_cast,),
    **dict.fromkeys(TURNS, (_turned,)),
    operator.getitem: (*_RESULTS_OF_SORT, _item),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), (_step(_Kind.CHOICE, _Kind.SORT, _sorts),)),
    **dict.fromkeys((aten.argsort.default, aten.argsort.stable), _ARGSORT),
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode), (_TOKENS_OF_PAIRS,)),
    aten.histc.default: (_step(_Kind.CHOICE, _Kind.COUNTS, _counts_each),),
    aten.cumsum.default: (_step(_Kind.COUNTS, _Kind.ENDS),),
    fxp.group_sizes.default: (_step(_Kind.ENDS, _Kind.SIZES),),
    aten.index.Tensor: (_indexed,),
    aten.index_select.default: (_selected_places,),
    **dict.fromkeys((aten.one_hot.default, aten.eq.Scalar, aten.eq.Tensor), (_marked,)),
    **dict.fromkeys((aten.where.default, aten.where.self, aten.where.ScalarOther), (_where,)),
    aten.mul.Tensor: (_multiplied,),
    aten.scatter.src: (_scattered,),
    **dict.fromkeys((aten.select.int, aten.slice.Tensor), (_selected,)),
    aten.sum.dim_IntList: (_summed,),
    **dict.fromkeys((aten.add.Tensor, aten.index_add.default), (_added,)),
}
