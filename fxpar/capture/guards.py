"""Guards against what tracing loses in silence (DESIGN section 9).

Enters: a model and its example inputs. Leaves: inputs that share no tensor, a trace in which the user's autograd
functions are single nodes and checkpointed regions are marked, and errors for what cannot be kept.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import nn
from torch.fx.traceback import annotate

from fxpar.errors import CaptureError

NAMESPACE = "fxpar_capture"
RECOMPUTE_KEY = "fxpar_recompute"
_serial = itertools.count()


def separate(values: Any) -> Any:
    """The same nest with every tensor cloned: two arguments that are one tensor would become one placeholder."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), values)


def check_model(model: nn.Module) -> None:
    """Refuses models whose training step is more than their forward and its gradient.

    Raises:
        CaptureError: backward hooks, or a wrapper that communicates by itself.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                "has backward hooks, which a trace of the forward does not see",
                where=name or type(model).__name__,
                remedy="remove them; use tensor hooks on the gradients after backward",
            )
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise CaptureError(
                f"{type(module).__name__} communicates by itself",
                where=name or "model",
                remedy="pass the model inside it (model.module)",
            )


def check_example(values: Any) -> None:
    """Refuses example inputs that a trace would misread.

    Raises:
        CaptureError: no tensor at all, a tensor that requires a gradient, or an empty dimension.
    """
    tensors = [(pytree.keystr(path), t) for path, t in pytree.tree_flatten_with_path(values)[0] if _is_tensor(t)]
    if not tensors:
        raise CaptureError("the example holds no tensor", where="example", remedy="pass a batch as training sees it")
    for path, tensor in tensors:
        if tensor.requires_grad:
            raise CaptureError(
                "requires a gradient; only parameters do",
                where=f"example{path}",
                remedy="detach it, or make it a parameter of a module",
            )
        if 0 in tensor.shape:
            raise CaptureError(
                f"has the empty shape {list(tensor.shape)}", where=f"example{path}", remedy="use at least two samples"
            )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@dataclass
class Recorder:
    """What was seen while tracing.

    Attributes:
        functions: for each recorded call of a user's autograd function, by the name of the operator that stands in for
            it: the path of the class and its arguments, tensors replaced by `None` markers at `tensor_positions`.
        regions: how many checkpointed regions were entered.
    """

    functions: dict[str, tuple[str, tuple[Any, ...], tuple[int, ...]]] = field(default_factory=dict)
    regions: int = 0


def _path_of(function: type) -> str:
    if "<locals>" in function.__qualname__ or "." in function.__qualname__:
        raise CaptureError(
            "an autograd function defined inside another scope cannot be named",
            where=f"{function.__module__}.{function.__qualname__}",
            remedy="define the class at the top level of a module",
        )
    return f"{function.__module__}.{function.__qualname__}"


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """While active, `autograd.Function.apply` and activation checkpointing leave marks in the trace.

    A trace runs a function's forward and differentiates what it saw, so that a hand-written backward would be lost.
    Each call is therefore kept as one operator with the function's own name. Checkpointed regions would be inlined
    and forgotten: their nodes are annotated with the region's number.
    """
    recorder = Recorder()
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:  # (run_function, preserve_rng_state, *args)
            with _region(recorder):
                return args[0](*args[2:])
        if cls.__module__.startswith("torch.") or not torch.compiler.is_exporting():
            return original(cls, *args, **kwargs)
        return _apply_as_operator(cls, original, library, recorder, args, kwargs)

    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def marked(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _region(recorder):
            yield from generator(*args, **kwargs)

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", marked),
    ):
        yield recorder
    library._destroy()


@contextlib.contextmanager
def _region(recorder: Recorder) -> Iterator[None]:
    recorder.regions += 1
    with annotate({RECOMPUTE_KEY: recorder.regions}):
        yield


def _apply_as_operator(
    cls: Any,
    original: Any,
    library: torch.library.Library,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    path = _path_of(cls)
    if kwargs:
        raise CaptureError("keyword arguments of an autograd function are lost", where=path, remedy="pass by position")
    positions = tuple(i for i, a in enumerate(args) if _is_tensor(a))
    constants = tuple(None if i in positions else a for i, a in enumerate(args))
    for value in constants:
        if not isinstance(value, (int, float, bool, str, type(None), torch.dtype)):
            raise CaptureError(
                f"an argument of type {type(value).__name__} cannot be recorded",
                where=path,
                remedy="pass tensors, numbers or strings to the function",
            )

    def run(*tensors: torch.Tensor) -> Any:
        full = list(constants)
        for position, tensor in zip(positions, tensors, strict=True):
            full[position] = tensor
        return original(cls, *full)

    with torch.no_grad():
        outputs = run(*[args[i].detach() for i in positions])
    several = isinstance(outputs, tuple)
    if not all(_is_tensor(o) for o in (outputs if several else (outputs,))):
        raise CaptureError("returns something else than tensors", where=path, remedy="return tensors only")
    name = f"f{next(_serial)}"
    returns = f"({', '.join(['Tensor'] * len(outputs))})" if several else "Tensor"
    library.define(f"{name}({', '.join(f'Tensor t{i}' for i in range(len(positions)))}) -> {returns}")
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=library)

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise CaptureError("the gradient was asked for while tracing", where=path)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", refuse, lib=library)
    recorder.functions[f"{NAMESPACE}.{name}.default"] = (path, constants, positions)
    return getattr(getattr(torch.ops, NAMESPACE), name)(*[args[i] for i in positions])
