"""Parameters of which this rank holds a part.

Enters: a rank's part and its `ShardSpec`. Leaves: a parameter of the whole shape beside its leaf.

A training step touches none of it: programs run on *leaves*, plain tensors that share the parts' memory, and autograd
adds to the leaves' gradients. `.grad` of a parameter is the leaf's, wrapped when it is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.state.operand import part_of
from fxpar.state.place import ShardSpec
from fxpar.state.routing import IS_DISPATCHED, routed
from fxpar.state.sharded import Sharded


class ShardedParameter(Sharded):
    """A parameter of which this rank holds a part, and the leaf that programs run on.

    To autograd it is the leaf alone that requires a gradient. A use in other computations under enabled gradients (a
    penalty on weights) reaches the leaf through a copy of this tensor that does.

    Args:
        part: what the rank holds, padding included; the memory that optimizers change.
        place: where that lies in the whole.
        requires_grad: whether autograd computes its gradient.
    """

    _is_param = True
    leaf: Tensor
    _gradient: Sharded | None

    @staticmethod
    def __new__(cls, part: Tensor, place: ShardSpec, requires_grad: bool = True) -> ShardedParameter:
        """A parameter with a leaf that shares the part's memory."""
        parameter: Any = Sharded.__new__(cls, part, place)
        parameter.leaf = part.detach().requires_grad_(requires_grad)
        parameter._gradient = None
        return parameter  # type: ignore[no-any-return]

    def __init__(self, part: Tensor, place: ShardSpec, requires_grad: bool = True) -> None:
        """Nothing is left to do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        computes = getattr(func, "__name__", "") not in _QUERIES and getattr(func, "__module__", "") != nn.init.__name__
        if computes and torch.is_grad_enabled():
            args, kwargs = _in_graph(args), {key: _in_graph(value) for key, value in kwargs.items()}
        with routed(Sharded):
            return func(*args, **kwargs)

    # ------------------------------------------------------------------ autograd

    @property
    def requires_grad(self) -> bool:
        """Whether the leaf does."""
        return self.leaf.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.leaf.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Freezes the parameter or makes it trainable."""
        self.leaf.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Sharded | None:
        """This rank's part of the gradient; shares memory with what autograd adds to."""
        gradient = self.leaf.grad
        if gradient is None:
            self._gradient = None
        elif self._gradient is None or self._gradient._local_tensor is not gradient:
            self._gradient = Sharded(gradient, self.place)
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.leaf.grad = self._gradient = None
            return
        part = part_of(value, self.place)
        self.leaf.grad = part
        self._gradient = value if isinstance(value, Sharded) and value._local_tensor is part else None

    @grad.deleter
    def grad(self) -> None:
        self.leaf.grad = self._gradient = None

    @property
    def data(self) -> Sharded:
        """The values, detached; shares memory."""
        return Sharded(self._local_tensor.detach(), self.place)

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, Sharded) and value.data_ptr() == self.data_ptr() and value.place.is_like(self.place):
            return  # what `p.data -= …` ends with
        raise InputError(
            "its memory cannot be exchanged: programs run on it",
            where=f"{self.place.name}.data",
            remedy="copy the values: p.data.copy_(…), or p.copy_(…) under torch.no_grad()",
        )

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Calls the hook with each gradient that autograd computes, as a part of the whole; it may return another."""

        def call(gradient: Tensor) -> Tensor | None:
            replacement = hook(Sharded(gradient, self.place))
            return None if replacement is None else part_of(replacement, self.place)

        return self.leaf.register_hook(call)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Calls the hook with this parameter when its gradient is there."""
        return self.leaf.register_post_accumulate_grad_hook(lambda leaf: hook(self))

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a parameter is no loss."""
        raise InputError("is a parameter and no loss", where=self.place.name, remedy="call backward() on the loss")

    # ------------------------------------------------------------------ whole and part

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """As of other tensors; with gradients enabled, a view of the leaf."""
        if torch.is_grad_enabled() and self.leaf.requires_grad:
            return self.leaf.view_as(self.leaf)
        return super().to_local()

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """As of other tensors; what is computed from it has gradients, if all ranks compute the same."""
        if torch.is_grad_enabled() and self.leaf.requires_grad:
            return _Whole.apply(self.leaf, self.place)  # type: ignore[no-any-return, no-untyped-call]
        return super().full_tensor()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        part = copy.deepcopy(self._local_tensor.detach(), memo)
        clone = ShardedParameter(part, self.place, self.leaf.requires_grad)
        memo[id(self)] = clone
        clone.grad = copy.deepcopy(self.grad, memo)
        return clone


class _Used(torch.autograd.Function):
    """A parameter in a graph: gradients of it are the leaf's."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, parameter: ShardedParameter) -> Sharded:
        ctx.place = parameter.place
        alias = Sharded(parameter._local_tensor.detach(), parameter.place)
        alias.is_in_graph = True
        return alias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return part_of(gradients[0], ctx.place), None


class _Whole(torch.autograd.Function):
    """A whole parameter; its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, place: ShardSpec) -> Tensor:
        ctx.place = place
        return place.gather(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.place.cut(gradients[0]), None


# What no gradient flows through: the getters and setters of attributes, and these.
_QUERIES = frozenset(
    (
        *("full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_full", "new_zeros", "new_ones", "new_empty", "equal", "eq", "ne", "lt", "le", "gt", "ge"),
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "isnan", "isinf", "isfinite", "isclose"),
        *("allclose", "count_nonzero", "argmax", "argmin", "signbit"),
        *("__get__", "__set__", "__delete__", "__len__", "__format__", "size", "dim", "ndimension", "stride", "type"),
        *("numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous"),
        *("storage_offset", "detach", "is_same_size", "is_shared", "is_pinned"),
    )
)


def _in_graph(value: Any) -> Any:
    if isinstance(value, ShardedParameter) and value.leaf.requires_grad:
        if not IS_DISPATCHED:  # what autograd's engine calls cannot be routed
            raise InputError(
                f"is used in a computation outside of the model, whose gradient torch {torch.__version__} would lose",
                where=value.place.name,
                remedy="compute with p.full_tensor() or under torch.no_grad(), or take torch 2.13",
            )
        return _Used.apply(value.leaf, value)  # type: ignore[no-untyped-call]
    return type(value)(map(_in_graph, value)) if type(value) in (list, tuple) else value


def _grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None, *rest: Any, **options: Any
) -> Any:
    """`torch.autograd.grad` by parameters: by their leaves."""
    leaves = pytree.tree_map_only(ShardedParameter, leaf_of, inputs)
    gradients = torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph, *rest, **options)
    tree = (inputs,) if isinstance(inputs, Tensor) else inputs if isinstance(inputs, dict) else tuple(inputs)
    flat, spec = pytree.tree_flatten(tree)
    parts = gradients.values() if isinstance(gradients, dict) else gradients
    wrapped = [
        Sharded(part, value.place) if part is not None and isinstance(value, ShardedParameter) else part
        for value, part in zip(flat, parts, strict=True)
    ]
    return pytree.tree_unflatten(wrapped, spec)


def leaf_of(parameter: Tensor) -> Tensor:
    """The tensor that programs run on and that autograd computes gradients of; a plain parameter itself."""
    return parameter.leaf if isinstance(parameter, ShardedParameter) else parameter
