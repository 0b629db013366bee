"""Models whose tensors have shapes and no memory.

Enters: a model, and its example. Leaves, for as long as it is traced or walked: a model whose tensors are fakes on the
CPU, those on the meta device or all of them. On the meta device a constant made in `forward`
(`torch.tensor([…], device=x.device)`) would lose its values; on a fake CPU it has them, and the trace is the one of the
model with memory.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpar.capture.python_state import untouched
from fxpar.errors import InputError
from fxpar.ir.program import PRECISION_DTYPES
from fxpar.plan.plan import Plan
from fxpar.torch_internals import FakeTensor, FakeTensorMode, disable_current_modes

# The plan's precision, which a model has before it is captured.


def cast_parameters(model: nn.Module, plan: Plan) -> None:
    """Casts the model's floating parameters in place."""
    dtype = PRECISION_DTYPES[plan.precision]
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def input_dtype(plan: Plan) -> torch.dtype | None:
    """Returns the type of floating tensors that a forward takes; None where they keep theirs."""
    return PRECISION_DTYPES[plan.precision] if plan.cast_inputs else None


def cast_inputs(arguments: Any, dtype: torch.dtype | None) -> Any:
    """Casts the floating tensors in any nest of arguments, as FSDP2's `cast_forward_inputs` does."""
    if dtype is None:
        return arguments
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, arguments)


@contextlib.contextmanager
def in_precision(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Casts the model's floating parameters for a while; afterwards they hold the very tensors that they held."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        cast_parameters(model, plan)
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


@contextlib.contextmanager
def with_memory(model: nn.Module, batch: Any) -> Iterator[tuple[Any, Mapping[int, Tensor]]]:
    """Swaps the model's meta tensors for fakes, and back at the end.

    Yields:
        The batch, fakes in place of meta tensors (of all tensors where the model has no memory), and for the id of
        each fake of the model the tensor that it stands for.
    """
    values = [value for store in _stores(model) for value in store.values()]
    meta = [value for value in values if value is not None and value.is_meta]
    if not meta and not any(isinstance(v, Tensor) and v.is_meta for v in pytree.tree_leaves(batch)):
        yield batch, {}
        return
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    fakes = _fakes(mode, meta)
    with mode:
        batch = pytree.tree_map_only(Tensor, _fake, batch)
    with swapped(model, fakes):
        yield batch, {id(fakes[id(value)]): value for value in meta}


@contextlib.contextmanager
def without_values(model: nn.Module, batch: Any) -> Iterator[Any]:
    """Turns the model and its batch into fakes on the CPU, of fixed sizes: it runs, and nothing is computed.

    Yields:
        The batch, inside the mode that makes fakes.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = _fakes(mode, [v for store in _stores(model) for v in store.values() if v is not None])
        with swapped(model, fakes):
            yield pytree.tree_map_only(Tensor, _fake, batch)


@contextlib.contextmanager
def plain_surrounding() -> Iterator[None]:
    """Switches gradients on, and has a forward make values, whatever the caller has around the call."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_saved_hooks())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def trial_run(model: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Runs a model on other tensors, by the identities of its own; neither it nor random state has changed after."""
    with plain_surrounding(), torch.random.fork_rng(devices=[]), untouched(model), swapped(model, values):
        yield


@contextlib.contextmanager
def _without_saved_hooks() -> Iterator[None]:
    """Puts aside for a while the caller's hooks on saved tensors around the call, no part of the model."""
    autograd, popped = torch._C._autograd, []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        popped.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(popped):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _stores(model: nn.Module) -> list[dict[str, Any]]:
    return [store for module in model.modules() for store in (module._parameters, module._buffers)]


@contextlib.contextmanager
def swapped(model: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Puts other tensors for those of the model, by their identities; at the end its own are back."""
    originals = [(store, name, value) for store in _stores(model) for name, value in store.items()]
    try:
        for store, name, value in originals:
            store[name] = others.get(id(value), value)
        yield
    finally:
        for store, name, value in originals:
            store[name] = value


def _fake(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _fakes(mode: FakeTensorMode, values: list[Tensor]) -> dict[int, Tensor]:
    """Returns the tensors of a model as fakes, by the identities of those.

    They are what the mode makes for `_fake` and `nn.Parameter`, without the operators that these are to it: a call and
    a `detach`, for each parameter of each layer.
    """
    fakes: dict[int, Tensor] = {}
    cpu = torch.device("cpu")
    with disable_current_modes():
        for value in values:
            if id(value) not in fakes:
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                fakes[id(value)] = fake = FakeTensor(mode, empty, cpu)
                if isinstance(value, nn.Parameter):
                    fake._is_param = True
                    fake.requires_grad_(value.requires_grad)
    return fakes


def skeleton_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Returns a copy of the model, in its modes, whose tensors have shapes and no memory.

    Args:
        model: is left as it is.
        dtype: element type of the copy's floating parameters; None for their own. Buffers keep theirs: rotary
            frequencies in half precision are wrong.

    Raises:
        InputError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        shape = torch.empty_like(parameter, dtype=kind, device="meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"the model cannot be copied: {str(error).splitlines()[0]}",
            where=type(model).__name__,
            remedy="keep locks, files and tensors with a history out of its attributes",
        ) from error
