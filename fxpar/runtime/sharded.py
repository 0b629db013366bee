"""Tensors of which this rank holds a part: parameters, gradients and optimizer state.

Optimizers, gradient clipping and `torch.distributed.checkpoint` treat them as shards of a tensor of the full shape.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.errors import InputError
from fxpar.layout.shards import Box
from fxpar.runtime.shard_spec import ShardSpec
from fxpar.runtime.sharded_ops import StageNorm, is_sharded, part_of, run, stage_norm_refusal

# Before torch 2.13 operations on a DTensor go to a fast path in C++, also of a subclass that defines them by itself.
IS_DISPATCHED = TorchVersion(torch.__version__) >= "2.13"


class _Route(TorchDispatchMode):
    """Runs operations on parts as they are defined here: modes come before that fast path."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_sharded(value) for value in pytree.tree_leaves((args, kwargs))):
            return run(func, args, kwargs or {}, Sharded)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """Calls functions of torch, while active, as if parts were no subclass with functions of its own."""
    mode: Any = contextlib.nullcontext() if IS_DISPATCHED else _Route()  # type: ignore[no-untyped-call]
    with torch._C.DisableTorchFunctionSubclass(), mode:
        yield


class Sharded(DTensor):
    """A tensor of the whole's shape of which this rank holds a part.

    It is a DTensor so that torch's state dicts gather and distribute it, and shares nothing else with one: every
    operation, and every conversion, is defined here.

    Args:
        part: what the rank holds, padding included.
        place: where that lies in the whole.
    """

    _local_tensor: Tensor
    place: ShardSpec
    is_in_graph = False  # a parameter's copy, whose gradient goes to the leaf

    @staticmethod
    def __new__(cls, part: Tensor, place: ShardSpec) -> Sharded:
        """Makes a tensor without memory of its own next to the part."""
        tensor: Sharded = Tensor._make_wrapper_subclass(
            cls, place.shape, strides=place.stride, dtype=part.dtype, device=part.device
        )
        tensor._local_tensor, tensor.place = part, place
        return tensor

    def __init__(self, part: Tensor, place: ShardSpec) -> None:
        """Does nothing; DTensor's own would be slow."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with routed():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {}, Sharded)

    # ------------------------------------------------------------------ whole and part

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Returns this rank's part, padding included; shares memory. `copy_` into it takes a full tensor too."""
        part: LocalShard = self._local_tensor.detach().as_subclass(LocalShard)
        part.place = self.place
        return part

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Returns the full tensor, on every rank. A collective call."""
        return self.place.gather(self._local_tensor.detach())

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """Returns the full tensor as a replicated DTensor, or this one where it is placed so. A collective call.

        Raises:
            InputError: other placements.
        """
        mesh, requested = self.place.device_mesh, placements and tuple(placements)
        if requested == self.placements:
            return self
        if requested is None or all(isinstance(p, Replicate) for p in requested):
            # A check would be a further collective, and the parts were gathered just now.
            return DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        raise InputError(
            f"cannot be placed as {list(requested)}", where=self.place.name, remedy="use full_tensor() and cut that"
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """Returns all axes of more than one rank."""
        return self.place.device_mesh

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """Returns `Shard` where the part is a plain even shard, else a placement that is fxpar's own."""
        return self.place.placements

    @property
    def _spec(self) -> DTensorSpec:  # type: ignore[override]
        meta = TensorMeta(self.place.shape, self.place.stride, self.dtype)
        return DTensorSpec(self.place.device_mesh, self.place.placements, tensor_meta=meta)

    # ------------------------------------------------------------------ checkpoints

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in self.place.boxes
            if box.stands
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.place.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk = next(box for box in self.place.boxes if torch.Size(box.offsets) == index.offset)
        return chunk.within(self._local_tensor.detach())

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        clone = Sharded(copy.deepcopy(self._local_tensor.detach(), memo), self.place)
        memo[id(self)] = clone
        return clone

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "one rank's part of a tensor cannot be pickled",
            where=self.place.name,
            remedy="save it with torch.distributed.checkpoint.save, or full_state_dict() with torch.save",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = type(self).__name__
        return f"{kind}({list(self.shape)}, {self.place.layout}, part={self._local_tensor.detach()!r})"

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuses: this rank has not all elements."""
        raise _needs_whole("numpy()", self.place)

    def tolist(self) -> NoReturn:
        """Refuses: this rank has not all elements."""
        raise _needs_whole("tolist()", self.place)

    def data_ptr(self) -> int:
        """Returns the address of this rank's part: scripts tell tensors apart by it."""
        return self._local_tensor.data_ptr()

    def share_memory_(self) -> NoReturn:
        """Refuses: programs run on this rank's memory."""
        raise InputError(
            "cannot be moved to shared memory: programs run on the memory that it has",
            where=f"{self.place.name}.share_memory_()",
            remedy="share p.to_local().clone()",
        )


class LocalShard(Tensor):
    """What `to_local` returns: a plain tensor, but that `copy_` takes the whole tensor too.

    That is how torch's state dicts hand over a whole tensor, as they can cut even shards alone.
    """

    place: ShardSpec

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.copy_ and isinstance(args[0], LocalShard):
                target, source, *rest = args
                if not isinstance(source, Sharded) and source.shape == target.place.shape:
                    args = (target, target.place.cut(source), *rest)
            return func(*args, **(kwargs or {}))


def local_of(value: Tensor) -> Tensor:
    """Returns this rank's part, detached: the memory that optimizers change. A plain tensor is all its part."""
    return value._local_tensor.detach() if isinstance(value, Sharded) else value.detach()


def whole_of(value: Tensor) -> Tensor:
    """Returns the full tensor on every rank, detached. A collective call where ranks hold parts."""
    return value.place.gather(local_of(value)) if isinstance(value, Sharded) else value.detach()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _needs_whole(what: str, place: ShardSpec) -> InputError:
    return InputError(
        "holds a part of the elements on this rank", where=f"{place.name}.{what}", remedy=f"use full_tensor().{what}"
    )


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
        """Makes a parameter with a leaf that shares the part's memory."""
        parameter: Any = Sharded.__new__(cls, part, place)
        parameter.leaf = part.detach().requires_grad_(requires_grad)
        parameter._gradient = None
        return parameter  # type: ignore[no-any-return]

    def __init__(self, part: Tensor, place: ShardSpec, requires_grad: bool = True) -> None:
        """Does nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        computes = getattr(func, "__name__", "") not in _QUERIES and getattr(func, "__module__", "") != nn.init.__name__
        if computes and torch.is_grad_enabled():
            args, kwargs = _in_graph(args), {key: _in_graph(value) for key, value in kwargs.items()}
        with routed():
            return func(*args, **kwargs)

    # ------------------------------------------------------------------ autograd

    @property
    def requires_grad(self) -> bool:
        """Returns whether the leaf requires a gradient."""
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
        """Returns this rank's part of the gradient; shares memory with what autograd adds to."""
        gradient = self.leaf.grad
        if gradient is None:
            self._gradient = None
        # The same object as long as the gradient is the same, as plain parameters have it.
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
        """Returns the values, detached; shares memory."""
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
        """Refuses: a parameter is no loss."""
        raise InputError("is a parameter and no loss", where=self.place.name, remedy="call backward() on the loss")

    # ------------------------------------------------------------------ whole and part

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Returns this rank's part; with gradients enabled, a view of the leaf."""
        if torch.is_grad_enabled() and self.leaf.requires_grad:
            return self.leaf.view_as(self.leaf)
        return super().to_local()

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Returns the full tensor; what is computed from it has gradients, if all ranks compute the same."""
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
    """Calls `torch.autograd.grad` by the leaves of parameters."""
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
    """Returns the tensor that programs run on and that has autograd's gradients; a plain parameter itself."""
    return parameter.leaf if isinstance(parameter, ShardedParameter) else parameter


_NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm))


class StageGradient(Tensor):
    """A gradient of which the norms are `StageNorm`s. What else is computed of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_norm:
            raise stage_norm_refusal()
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        with routed():
            computed = func(*args, **(kwargs or {}))
        return computed.as_subclass(StageNorm) if func in _NORMS and computed.dim() == 0 else computed
