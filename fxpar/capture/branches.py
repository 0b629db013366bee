"""Branches on random numbers that have only one way: layer dropping that is switched off.

Enters: calls of torch functions, and of the host's generators, while a forward is traced. Leaves: what a comparison of
a number in [0, 1) with a constant is known to give. `torch.rand([]) < 0.0` is False, and the branch folds.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxpar.capture import patches
from fxpar.capture.places import is_foreign_file
from fxpar.elements.aten_elements import elements
from fxpar.elements.numbers import FALSE, TRUE, Element
from fxpar.errors import CaptureError
from fxpar.ir.program import Note, ScalarType, TensorType, set_note
from fxpar.layout.symbolic_sizes import Size, simplify, symbol

# Values that a trace knows although it computes none: those that follow from sizes alone.

# Operands of which more is asked for nothing: positions are made in a few steps.
_MOST = 200


def branch(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Returns what a branch on a tensor does, where that is known."""
    if func not in (Tensor.__bool__, Tensor.item) or args[0].dtype != torch.bool or args[0].numel() != 1:
        return None
    element = known(args[0])
    return True if element == TRUE else False if element == FALSE else None


def known(value: Tensor) -> Element | None:
    """Returns the elements of a tensor of the trace that is under way; None where they depend on more than sizes."""
    mode = get_proxy_mode()
    if mode is None or value not in mode.tracer.tensor_tracker:
        return None
    node = mode.tracer.tensor_tracker[value].proxy.node
    above = _above(node)
    if above is None or _is_written(node.graph, above):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in above:
        copies[source] = set_note(_copied(graph, source, copies), Note(_kind(source)))
    return elements(None, copies.values()).get(copies[node])


def _above(node: fx.Node) -> list[fx.Node] | None:
    """Returns a node and all that it is computed from, in the order of the graph; None where that is much."""
    above, waiting = {node}, [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in above:
                above.add(operand)
                if isinstance(operand.meta.get("val"), Tensor):
                    waiting.append(operand)
        if len(above) > _MOST:
            return None
    return sorted(above)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    is_operator = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    if is_operator and all(operand in copies for operand in node.all_input_nodes):
        return graph.node_copy(node, copies.__getitem__)
    return graph.placeholder(node.name)


def _kind(node: fx.Node) -> TensorType | ScalarType | None:
    value: Any = node.meta.get("val")
    if isinstance(value, Tensor):
        return TensorType(value.dtype, tuple(_size(size) for size in value.shape))
    return ScalarType(_size(value)) if type(value) in (int, torch.SymInt) else None


def _size(size: int | torch.SymInt) -> Size:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return simplify(expression.subs({variable: symbol(variable.name) for variable in expression.free_symbols}))


def _is_written(graph: fx.Graph, above: list[fx.Node]) -> bool:
    """Returns whether an operator writes into the memory of one of them, be it through a view."""
    memories = {_memory(node) for node in above} - {None}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and any(_memory(x) in memories for x in node.all_input_nodes):
            return True
    return False


def _memory(node: fx.Node) -> int | None:
    """Returns what tensors have in common that share memory; None of what is no single tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


# What the author's code asks torch about itself: whether it is compiled or exported, whether a tensor has values.

_GENERATED = "<eval_with_key>"


class Questions(contextlib.ExitStack):
    """While active, notes questions of the author's code; torch's own get torch's own answers.

    Attributes:
        asked: whether there was one.

    Args:
        as_eager: the answer is no.
    """

    def __init__(self, as_eager: bool) -> None:
        super().__init__()
        self.asked, self._as_eager = False, as_eager

    def __enter__(self) -> Questions:
        super().__enter__()
        self.enter_context(patches.questions(self._answering))
        self.enter_context(patches.question_of_fakes(self._is_fake))
        return self

    def _is_fake(self, value: Any, is_fake: bool) -> bool:
        """Answers no for what depends on sizes alone, which is known: a branch on it is the eager one."""
        if is_fake and self._as_eager and _asks(2) and known(value) is not None:
            self.asked = True
            return False
        return is_fake

    def _answering(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def answer() -> Any:
            if not _asks(2):
                return original()
            self.asked = True
            return not self._as_eager and original()

        return answer


def _asks(depth: int) -> bool:
    """Returns whether the author's code is so many frames above the caller; generated code has torch's questions."""
    file = sys._getframe(depth + 1).f_code.co_filename
    return is_foreign_file(file) and not file.startswith(_GENERATED)


_Known = Callable[[float], "bool | None"]
_COMPARISONS: Mapping[str, _Known] = {
    "lt": lambda c: False if c <= 0 else True if c >= 1 else None,
    "le": lambda c: False if c < 0 else True if c >= 1 else None,
    "gt": lambda c: True if c < 0 else False if c >= 1 else None,
    "ge": lambda c: True if c <= 0 else False if c >= 1 else None,
}
_FUNCTIONS: Mapping[Any, _Known] = {
    function: known
    for name, known in _COMPARISONS.items()
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"__{name}__"))
}


class Decided:
    """Which tensors of a trace are numbers in [0, 1), and which comparisons of them are known."""

    def __init__(self) -> None:
        self._drawn: dict[int, Tensor] = {}  # kept, so that identities stay theirs
        self._known: dict[int, tuple[Tensor, bool]] = {}
        self._open: dict[int, tuple[Tensor, float]] = {}

    def branch(self, func: Any, args: tuple[Any, ...]) -> bool | None:
        """Returns what a branch on a tensor does, where that is known.

        Raises:
            CaptureError: it goes either way, by chance.
        """
        if func != Tensor.__bool__:
            return None
        if id(args[0]) in self._open:
            raise CaptureError(
                f"a random number decides what runs (compared with {self._open[id(args[0])][1]:g}), and a trace would "
                "decide once for all calls",
                remedy="set the rate of layer dropping to 0, or multiply by a factor that is drawn (stochastic depth)",
            )
        return self._known[id(args[0])][1] if id(args[0]) in self._known else None

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Notes a draw, or the comparison of one with a number; what else is done with one may change it."""
        known = _FUNCTIONS.get(func)
        if known is None:
            for value in args:
                self._drawn.pop(id(value), None)
                self._known.pop(id(value), None)
                self._open.pop(id(value), None)
        if func == torch.rand and isinstance(result, Tensor):
            self._drawn[id(result)] = result
        if known is not None and len(args) == 2 and id(args[0]) in self._drawn and isinstance(args[1], (int, float)):
            answer = known(args[1])
            if answer is None:
                self._open[id(result)] = (result, args[1])
            else:
                self._known[id(result)] = (result, answer)


def _refuse(*args: Any) -> NoReturn:
    raise CaptureError(
        "the forward draws random numbers on the host, which a trace would make constants",
        remedy="switch that augmentation or layer dropping off, or draw in the data loader and pass the result",
    )


def _compared(known: _Known) -> Callable[[Any, Any], bool]:
    def compare(number: Any, other: Any) -> bool:
        answer = known(other) if isinstance(other, (int, float)) else None
        return _refuse() if answer is None else answer

    return compare


class _HostNumber:
    """A number in [0, 1) of the host's generator, which a trace would make a constant: only its comparisons may be."""

    __lt__, __le__ = _compared(_COMPARISONS["lt"]), _compared(_COMPARISONS["le"])
    __gt__, __ge__ = _compared(_COMPARISONS["gt"]), _compared(_COMPARISONS["ge"])
    __eq__ = __ne__ = __hash__ = __bool__ = __int__ = __float__ = __round__ = __abs__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __repr__ = __format__ = _refuse


@contextlib.contextmanager
def host_numbers() -> Iterator[None]:
    """Makes `random.random()` and `random.uniform(0, 1)` give numbers that can only be compared, while active."""
    uniform = random.uniform

    def between(a: float, b: float) -> float:
        return _HostNumber() if (a, b) == (0, 1) else uniform(a, b)  # type: ignore[return-value]

    with patches.host_random(_HostNumber, between):
        yield
