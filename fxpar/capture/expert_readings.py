"""How the weights of a module of experts may be read.

Enters: a module that holds the weights of several experts, stacked or one module each. Leaves: *readings* of it, by the
names that such weights usually have; which one is the module's own, `expert_modules` finds out by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.ops.expert_layer import experts, swiglu

# The first matrices of an expert, and its second one; a gate before what it weighs.
_NAMES = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
)
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
_GATE = "_apply_gate"


@dataclass(frozen=True)
class Reading:
    """One way to read a module.

    Attributes:
        first: names of the first matrices, [E, n, h].
        down: that of the second ones, [E, h, m].
        transposed: whether they stand [E, h, n] and [E, m, h].
        gated: whether a gate weighs what is made by the first matrices.
        listed: path of the list of experts, each a module with linear layers of these names, "" for the module itself;
            None where weights are stacked.
        experts: E.
        width: h.
    """

    first: tuple[str, ...]
    down: str
    transposed: bool
    gated: bool
    listed: str | None
    experts: int
    width: int

    def compute(self, module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """What the experts make of tokens, in operators on routed rows: [T, h], [T, K], [T, K] → [T, h]."""
        biases = [self._whole(module, name, "bias") for name in (*self.first, self.down)]
        first = [self._whole(module, name) for name in self.first]
        return experts(
            hidden,
            indices,
            weights,
            [matrix for matrix in first if matrix is not None],
            self._needed(module, self.down),
            gate_up_bias=[bias for bias in biases[:-1] if bias is not None] or None,
            down_bias=biases[-1],
            activation=self._activation(module),
            transposed=self.transposed,
            norm=_norm(module),
        )

    def loop(self, module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The same expert by expert, which needs no memory for more than one."""
        total, activation, norm = torch.zeros_like(hidden), self._activation(module), _norm(module)
        for number in range(self.experts):
            tokens, places = torch.where(indices == number)
            inner = [self._one(module, name, number, hidden[tokens]) for name in self.first]
            outputs = self._one(module, self.down, number, activation(*inner))
            outputs = outputs if norm is None else norm(outputs)
            total = total.index_add(0, tokens, outputs * weights[tokens, places, None])
        return total

    def without_rows(self, module: nn.Module, indices: Tensor) -> set[int]:
        """Identities of the parameters that belong to experts alone which none of the indices chooses."""
        if self.listed is None:
            return set()
        by_expert = [{id(p) for p in expert.parameters()} for expert in _list_of(module, self.listed)]
        chosen = set(indices.unique().tolist())
        with_rows = set[int]().union(*(by_expert[number] for number in chosen))
        return set[int]().union(*by_expert) - with_rows

    def _one(self, module: nn.Module, name: str, number: int, rows: Tensor) -> Tensor:
        if self.listed is not None:
            layer: nn.Linear = getattr(_list_of(module, self.listed)[number], name)
            return functional.linear(rows, layer.weight, layer.bias)
        matrix, bias = self._needed(module, name)[number], self._whole(module, name, "bias")
        product = rows @ (matrix if self.transposed else matrix.mT)
        return product if bias is None else product + bias[number]

    def _needed(self, module: nn.Module, name: str) -> Tensor:
        matrices = self._whole(module, name)
        assert matrices is not None, "a reading is made of matrices that are there"
        return matrices

    def _whole(self, module: nn.Module, name: str, kind: str = "weight") -> Tensor | None:
        """The matrices or biases of all experts; None where there are none."""
        if self.listed is None:
            return getattr(module, name if kind == "weight" else f"{name}_bias", None)
        tensors = [getattr(getattr(expert, name), kind) for expert in _list_of(module, self.listed)]
        return None if tensors[0] is None else torch.stack(tensors)

    def _activation(self, module: nn.Module) -> Callable[..., Tensor]:
        owner = module if self.listed is None else _list_of(module, self.listed)[0]
        own_gate = getattr(owner, _GATE, None)
        if self.gated and own_gate is not None and len(self.first) == 1:
            return own_gate  # type: ignore[no-any-return]
        named = (getattr(owner, name, None) for name in _ACTIVATIONS)
        function: Any = next((candidate for candidate in named if callable(candidate)), functional.silu)
        if not self.gated:
            return function  # type: ignore[no-any-return]
        if function is functional.silu or isinstance(function, nn.SiLU):
            return swiglu

        def gated(*inner: Tensor) -> Tensor:
            gate, up = inner if len(inner) > 1 else inner[0].chunk(2, dim=-1)
            return function(gate) * up  # type: ignore[no-any-return]

        return gated


def readings(module: nn.Module) -> Iterator[Reading]:
    """Those by whose names and shapes a module's weights are those of experts; none where it has no such weights."""
    transposed = getattr(module, "is_transposed", None)
    ways = (False, True) if transposed is None else (bool(transposed),)
    for first, down in _NAMES:
        matrices = [getattr(module, name, None) for name in (*first, down)]
        if all(isinstance(matrix, Tensor) and matrix.dim() == 3 for matrix in matrices):
            for way in ways:
                yield from _of_shapes(first, down, way, [tuple(matrix.shape) for matrix in matrices], None)  # type: ignore[union-attr]
    for path, listed in _lists(module):
        for first, down in _NAMES:
            layers = [[getattr(expert, name, None) for name in (*first, down)] for expert in listed]
            if all(type(layer) is nn.Linear for of_expert in layers for layer in of_expert) and _alike(layers):
                shapes = [(len(listed), *layer.weight.shape) for layer in layers[0]]  # type: ignore[union-attr]
                yield from _of_shapes(first, down, False, shapes, path)


def _of_shapes(
    first: tuple[str, ...], down: str, transposed: bool, shapes: list[tuple[int, ...]], listed: str | None
) -> Iterator[Reading]:
    turned = [(e, i, o) if transposed else (e, o, i) for e, o, i in shapes]
    count, width, inner = turned[-1]
    if any(shape[::2] != (count, width) for shape in turned[:-1]):
        return
    outs = [shape[1] for shape in turned[:-1]]
    if outs in ([2 * inner], [inner, inner]):
        yield Reading(first, down, transposed, True, listed, count, width)
    elif outs == [inner]:
        yield Reading(first, down, transposed, False, listed, count, width)


def _lists(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The module where it is a list, and the lists that it has."""
    for path, child in (("", module), *module.named_children()):
        if isinstance(child, nn.ModuleList) and len(child) > 0:
            yield path, child


def _list_of(module: nn.Module, path: str) -> Any:
    return module.get_submodule(path) if path else module


def _alike(layers: list[list[Any]]) -> bool:
    """Whether all experts' layers have the first one's shapes, and biases where it has."""
    facts = [[(layer.weight.shape, layer.bias is None) for layer in of_expert] for of_expert in layers]
    return all(fact == facts[0] for fact in facts)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What transformers calls the norm of what experts have made."""
    return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None  # type: ignore[return-value]
