"""fold_masks: masks that every call has in common become options of the attention, or one window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from fxpar.elements.aten_elements import broadcast, elements
from fxpar.elements.numbers import TRUE, Element, Numbers, Predicate, index
from fxpar.errors import PassError
from fxpar.ir.program import (
    Note,
    Program,
    ScalarType,
    TensorType,
    ancestors,
    insert_call,
    note,
    remove_dead,
    tensor_type,
)
from fxpar.ir.properties import Property
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.manager import register_pass
from fxpar.rules import bind_arguments

aten = torch.ops.aten

# What a mask is: `none` allows all, `causal` what is not later, a number the last so many up to the row's own.
_Kind: TypeAlias = str | int
# What authors add where nothing may be seen: the smallest number of a type, here of that with the shortest mantissa.
_SMALLEST = torch.finfo(torch.bfloat16).min


@register_pass("fold_masks", requires={Property.CANONICAL}, provides={Property.MASKS})
def fold_masks(program: Program) -> Program:
    """Drops attention masks that equal `is_causal` or mask nothing, and writes windows in one way.

    Before::

        %le = aten.le.Tensor(%cols, %rows) : bool[1, 1, s, s]
        %mask = aten.expand.default(%le, [%b, 1, %s, %s]) : bool[b, 1, s, s]
        %o = aten.scaled_dot_product_attention.default(%q, %k, %v, %mask, 0.1) : f32[b, 8, s, 12]

    After::

        %o = aten.scaled_dot_product_attention.default(%q, %k, %v, None, 0.1, True) : f32[b, 8, s, 12]

    A mask is *constant* if its elements follow from sizes alone. Transformers build one in every trace; with it, no
    flash kernel can run. Of row i and column j a constant mask that allows all is dropped; one that allows j <= i,
    where queries and keys are equally many, becomes `is_causal`; one that allows i - w < j <= i, a *window*, becomes
    `%window`, made once for each w. Floating masks count if they add 0 or the smallest number of their type (or less):
    in none of these masks a row is all masked, so that values stay equal. Smaller penalties stay, and so does each
    mask with another alignment, and each that depends on an input, a parameter or a buffer: buffers are state.

    Elements are found as formulas in i, j and the sizes (`fxpar.elements`): an `arange` is its index, a comparison of
    indices a predicate. A mask is folded if its formula is proved equal for all sizes; samples prove nothing. What
    nothing uses any more goes. Refuses programs with layouts, in which new values would have none.
    """
    if Property.LAYOUTS in program.properties:
        raise PassError("layouts are chosen already", where="fold_masks", remedy="run it before annotate")
    masks = {node: mask for node in _attentions(program) if isinstance(mask := _mask(node), fx.Node)}
    # Formulas are worked out for what masks depend on, and not for the whole model.
    above = sorted(ancestors(masks.values()))
    known = elements(program, above)
    windows: dict[tuple[Size, int], fx.Node] = {}
    for node, mask in masks.items():
        kind = _kind(node, mask, known[mask]) if mask in known else None
        if kind == "none":
            _set_mask(node, None, False)
        elif kind == "causal":
            _set_mask(node, None, True)
        elif isinstance(kind, int):
            rows = tensor_type(node).shape[-2]
            window = windows.get((rows, kind)) or _window(program.graph, node, note(mask), kind)
            if window is not None:
                windows[rows, kind] = window
                _set_mask(node, window, False)
    remove_dead(above)
    return program


def _attentions(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.target is aten.scaled_dot_product_attention.default]


def _mask(node: fx.Node) -> Any:
    return bind_arguments(node).get("attn_mask")


def _kind(node: fx.Node, mask: fx.Node, element: Element) -> _Kind | None:
    """Returns what the mask is in this attention; None for another."""
    args, result = bind_arguments(node), tensor_type(node).shape
    rows, cols = tensor_type(args["query"]).shape[-2], tensor_type(args["key"]).shape[-2]
    if args["is_causal"] or tensor_type(args["query"]).shape[:-1] != result[:-1]:
        return None  # not both, and a mask with a larger batch than the query enlarges the result
    allowed = element if isinstance(element, Predicate) else _allowed(element, tensor_type(mask).dtype)
    scores = (*result[:-1], cols)
    predicate = broadcast(allowed, tensor_type(mask).shape, scores) if allowed is not None else None
    if predicate == TRUE:
        return "none"
    if not isinstance(predicate, Predicate) or len(predicate.clauses) != 1 or simplify(rows - cols) != 0:
        return None
    distance = index(len(scores) - 2) - index(len(scores) - 1)
    clause = next(iter(predicate.clauses))
    if clause == {distance}:
        return "causal"
    # A clause is a set of expressions that are all at least 0. A window of w has two: i - j, and w - 1 - (i - j).
    rest = [simplify(size + distance) for size in clause if size != distance]
    if distance in clause and len(rest) == 1 and isinstance(rest[0], int) and rest[0] >= 0:
        return rest[0] + 1
    return None


def _allowed(element: Numbers, dtype: torch.dtype) -> Predicate | None:
    """Returns where a floating mask adds 0; None if it adds anything else than that or what no score outweighs."""
    # bfloat16's minimum lies a little above float32's, and authors add either. float16 ends at -65504.
    smallest = max(_SMALLEST, torch.finfo(dtype).min) if dtype.is_floating_point else _SMALLEST
    clauses: frozenset[Any] = frozenset()
    for condition, leaf in element.cases:
        if leaf == 0:
            clauses |= condition.clauses
        elif not isinstance(leaf, float) or not leaf <= smallest:
            return None
    return Predicate(clauses)


def _set_mask(node: fx.Node, mask: fx.Node | None, is_causal: bool) -> None:
    args = bind_arguments(node)
    options = [mask, args["dropout_p"], is_causal]
    while options and options[-1] in (None, 0.0, False):
        options.pop()
    rest = {name: args[name] for name in ("scale", "enable_gqa") if node.kwargs.get(name)}
    node.args, node.kwargs = (args["query"], args["key"], args["value"], *options), rest


def _window(graph: fx.Graph, user: fx.Node, origin: Note, width: int) -> fx.Node | None:
    """Returns a new mask of the last `width` columns, after the size it needs; None where no node has that size."""
    size = tensor_type(user).shape[-2]
    count = size if isinstance(size, int) else _size_node(graph, user, size)
    if count is None:
        return None
    place = count.next if isinstance(count, fx.Node) else next(n for n in graph.nodes if n.op != "placeholder")
    like = replace(origin, recompute=0)  # what several regions use stands in none

    def add(name: str, target: Any, args: tuple[Any, ...], dtype: torch.dtype, *shape: Size) -> fx.Node:
        return insert_call(place, target, args, replace(like, type=TensorType(dtype, shape)), name)

    cols = add("window_cols", aten.arange.default, (count,), torch.int64, size)
    rows = add("window_rows", aten.unsqueeze.default, (cols, 1), torch.int64, size, 1)
    distance = add("window_distance", aten.sub.Tensor, (rows, cols), torch.int64, size, size)
    past = add("window_past", aten.ge.Scalar, (distance, 0), torch.bool, size, size)
    near = add("window_near", aten.lt.Scalar, (distance, width), torch.bool, size, size)
    return add("window", aten.logical_and.default, (past, near), torch.bool, size, size)


def _size_node(graph: fx.Graph, user: fx.Node, size: Size) -> fx.Node | None:
    """Returns the first node before `user` whose value is that size."""
    for node in graph.nodes:
        if node is user:
            return None
        kind = note(node).type
        if isinstance(kind, ScalarType) and simplify(kind.value - size) == 0:
            return node  # type: ignore[no-any-return]
    return None
