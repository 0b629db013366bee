"""What tracing forgets, recorded while it happens: hand-written gradients and checkpointed regions.

Enters: nothing; `recording` is active around a trace. Leaves: a trace in which each call of the user's autograd
functions is one operator and each node of a checkpointed region carries the region's number, and the `Recorder`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from fxpar.capture import branches, patches
from fxpar.capture.branches import Decided
from fxpar.capture.places import is_foreign_file
from fxpar.capture.size_expressions import SizeChecker
from fxpar.errors import CaptureError, InputError
from fxpar.signatures.autograd_functions import resolve_function
from fxpar.torch_internals import TorchDispatchMode, custom_function_call, is_fake

NAMESPACE = "fxpar_capture"
RECOMPUTE_KEY = "fxpar_recompute"
_serial = itertools.count()


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


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Makes `autograd.Function.apply` and activation checkpointing leave marks in the trace, while active.

    A trace runs a function's forward and differentiates what it saw, so that a hand-written backward would be lost.
    Each call is therefore kept as one operator with the function's own name, whether `apply` is looked up now or was
    bound long before (`gelu = Gelu.apply` in a module). Checkpointed regions would be inlined
    and forgotten: their nodes are annotated with the region's number. `inference_mode`, which a trace does not see,
    is traced as the `no_grad` that it includes.
    """
    recorder = Recorder()
    library = torch.library.Library(NAMESPACE, "FRAGMENT")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:  # (run_function, preserve_rng_state, *args)
            return _reentrant(recorder, args[0], args[2:])
        if not is_recorded(cls):
            return patches.apply_of(cls, *args, **kwargs)
        return _apply_as_operator(cls, library, recorder, args, kwargs)

    def is_recorded(cls: type) -> bool:
        is_torch = is_internal(cls) or cls is torch.utils.checkpoint.CheckpointFunction
        return not is_torch and torch.compiler.is_exporting()

    def transformed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if is_internal(cls):
            return custom_function_call(cls, *args, **kwargs)
        raise CaptureError(
            "an autograd function under a transform (vmap, grad, jvp) cannot be kept whole",
            where=f"{cls.__module__}.{cls.__qualname__}",
            remedy="write out the batch dimension, or use the function outside of the transform",
        )

    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        # The original saves tensors by hooks that a trace cannot hold (nested regions would lose their gradient).
        with region(recorder):
            yield

    def without_gradient(mode: Any) -> None:
        mode._inference_mode_context = _GradMode(not mode.mode)

    try:
        with (
            patches.inference_mode(without_gradient),
            patches.autograd_functions(apply, is_recorded, transformed),
            patches.checkpoints(marked),
            patches.saved_tensors_hooks(_refuse_saved_hooks),
            patches.module_hooks(_refuse_module_hooks),
            preserve_node_meta(),
        ):
            yield recorder
    finally:
        library._destroy()


def is_internal(cls: type) -> bool:
    """Returns whether an autograd function is a part of torch that a trace differentiates rightly."""
    return cls.__module__.startswith("torch._")


def _refuse_saved_hooks(*hooks: Any) -> NoReturn:
    _refuse_gradient("a hook on saved tensors")


def _refuse_module_hooks(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse_gradient("a hook on a module's gradient")


@contextlib.contextmanager
def region(recorder: Recorder) -> Iterator[None]:
    """Numbers the nodes that are traced inside."""
    recorder.regions += 1
    with annotate({RECOMPUTE_KEY: recorder.regions}):
        yield


def _reentrant(recorder: Recorder, run: Any, args: tuple[Any, ...]) -> Any:
    """Runs a reentrant region: it gives a gradient only where one of its arguments asks for one."""
    needs_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with region(recorder), contextlib.nullcontext() if needs_gradient else torch.no_grad():
        return run(*args)


class _GradMode:
    """What `inference_mode` leaves by its `__exit__`; entered when made."""

    def __init__(self, enabled: bool) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(enabled)

    def __exit__(self, *args: object) -> None:
        torch._C._set_grad_enabled(self._before)


# Each look-up of these makes a new object, and each call of a function is compared with them.
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
# Questions about a tensor that neither a value nor a size answers: making fakes of parameters asks all of each.
_GETTERS = "layout dtype device requires_grad is_leaf is_sparse is_quantized is_nested is_mkldnn".split()
_ABOUT = {*(getattr(Tensor, n).__get__ for n in _GETTERS), Tensor._is_view, Tensor.is_inference, Tensor.is_conj}
# Arguments that are no containers.
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.SymInt)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among arguments, those in containers included."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif not isinstance(value, _PLAIN):
            tensors += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


class UntracedEffectMode(TorchFunctionMode):
    """While active, refuses what the author's code asks of tensors and a trace of the forward would drop in silence.

    Hooks on gradients, gradients taken inside the forward, and values of parameters that the model does not own: a
    trace takes them for constants. `x.data` is traced as `x.detach()`.

    Attributes:
        read: identities of the tensors that functions were called with.
    """

    _REFUSED: Mapping[Any, str] = {
        Tensor.register_hook: "a hook on a tensor's gradient",
        Tensor.register_post_accumulate_grad_hook: "a hook on a tensor's gradient",
        Tensor.backward: "a backward inside the forward",
        torch.autograd.grad: "a gradient inside the forward",
    }

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self._decided = Decided()
        self._sizes = SizeChecker()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ABOUT:
            self.read.update(map(id, args))
            return func(*args, **(kwargs or {}))
        if func in self._REFUSED:
            _refuse_gradient(self._REFUSED[func])
        if func == _GRAD:
            if _is_own_call():
                raise CaptureError(
                    "reads a gradient of the step before, which a trace makes a constant",
                    remedy="look at gradients after the backward, outside of the forward",
                )
            return func(*args, **(kwargs or {}))  # torch's own way to make fakes of parameters
        if func == _SET_DATA and _is_own_call():
            raise CaptureError(
                "assigns `.data`, behind the back of whoever holds the tensor", remedy="compute a new value"
            )
        if func in (Tensor.detach_, torch.detach_):
            return _detach_in_place(*args, **(kwargs or {}))
        if func == Tensor.random_:
            raise CaptureError("random_ is an operator that no graph can name", remedy="use torch.randint_like")
        if (kwargs or {}).get("generator") is not None:
            raise CaptureError(
                "draws from a generator of its own, whose state no plan could repeat",
                remedy="leave generator= out: numbers are drawn from Plan(seed=…)",
            )
        if func == torch.div and all(isinstance(v, (int, torch.SymInt)) for v in args):
            return _divided(*args, **(kwargs or {}))
        decided = self._decided.branch(func, args)
        decided = branches.branch(func, args) if decided is None else decided
        if decided is not None:
            return decided
        tensors = _tensors((*args, *(kwargs or {}).values()))
        with same_nodes(tensors):
            result = args[0].detach() if func == _DATA else func(*args, **(kwargs or {}))
        self._decided.see(func, args, result)
        self._sizes.check(result)
        self.read.update(map(id, tensors))
        # Shapes and types of such a parameter are constants indeed.
        if any(_is_foreign(v) for v in tensors) and _has_values(result):
            refuse_foreign()
        return result


@contextlib.contextmanager
def same_nodes(operands: Sequence[Tensor]) -> Iterator[None]:
    """Keeps the node of tensors that an operator returns as they came, while active, unless it changes them.

    `x.to(x.dtype)` is `x`. A trace makes the call's node that of every later use; where the call is under `no_grad`,
    what the author computes from `x` after it would then lose its gradient.
    """
    mode = get_proxy_mode()
    nodes: Any = mode.tracer.tensor_tracker if mode is not None else {}
    before = [(t, nodes[t], t._version) for t in operands if t in nodes] if nodes else []
    yield
    for tensor, node, version in before:
        if tensor._version == version:
            nodes[tensor] = node


def _detach_in_place(value: Tensor) -> Tensor:
    """Computes `detach_`: the same tensor has the node of a detached one from now on."""
    mode = get_proxy_mode()
    nodes: Any = mode.tracer.tensor_tracker if mode is not None else {}
    detached = value.detach()
    with disable_proxy_modes_tracing():
        value.detach_()
    if detached in nodes:
        nodes[value] = nodes[detached]
    return value


def _divided(number: Any, by: Any, *, rounding_mode: str | None = None) -> Any:
    """Returns a quotient of sizes, which torch would make a tensor whose value no trace knows."""
    if rounding_mode in ("trunc", "floor") and number >= 0 and by > 0:
        return number // by
    return torch.div(number, by, rounding_mode=rounding_mode)


def _is_own_call() -> bool:
    """Returns whether the author's code called the function that a mode was asked for, and not torch's own."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name in ("_is_own_call", "__torch_function__"):  # modes in modes
        frame = frame.f_back
    return frame is not None and is_foreign_file(frame.f_code.co_filename)


def _is_foreign(value: Tensor) -> bool:
    """Returns whether it is a tensor to differentiate that the trace was not given: the model's are fakes."""
    return value.requires_grad and not is_fake(value)


def _has_values(result: Any) -> bool:
    return any(isinstance(v, (Tensor, float, complex)) for v in pytree.tree_leaves(result))


def refuse_foreign(name: str = "") -> NoReturn:
    """Refuses a parameter that the trace would take for a constant.

    Raises:
        CaptureError: always; without a name `trace` adds the author's line.
    """
    raise CaptureError(
        "the model uses a parameter that it does not own, so that nothing would train it",
        where=name,
        remedy="register it (nn.ModuleList for a list); in a loss use the outputs, or put the term into the model",
    )


def _refuse_gradient(what: str) -> NoReturn:
    raise CaptureError(
        f"{what} is lost when the forward is traced",
        remedy="write a torch.autograd.Function, or change the gradients after backward",
    )


class _Random(TorchDispatchMode):
    """Notes operators that draw random bits."""

    drawn = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = str(func)
        return func(*args, **(kwargs or {}))


def _path_of(function: type) -> str:
    path = f"{function.__module__}.{function.__qualname__}"
    try:
        resolved = None if "." in function.__qualname__ else resolve_function(path)
    except InputError:
        resolved = None
    if resolved is not function:
        raise CaptureError(
            "an autograd function defined inside another scope cannot be named",
            where=path,
            remedy="define the class at the top level of a module",
        )
    return path


def _apply_as_operator(
    cls: Any,
    library: torch.library.Library,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    path = _path_of(cls)
    bases = cls.__mro__[: cls.__mro__.index(torch.autograd.Function)]
    if any("apply" in vars(base) for base in bases):
        raise CaptureError(
            "the autograd function has an `apply` of its own, whose work the trace would do twice",
            where=path,
            remedy="do it in a plain function around `apply`",
        )
    if kwargs:
        raise CaptureError("keyword arguments of an autograd function are lost", where=path, remedy="pass by position")
    positions = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
    constants = tuple(None if i in positions else a for i, a in enumerate(args))
    for value in constants:
        if not isinstance(value, (int, float, bool, str, type(None), torch.dtype)):
            raise CaptureError(
                f"an argument of type {type(value).__name__} cannot be recorded",
                where=path,
                remedy="pass tensors, numbers or strings, and make other things out of them inside the function",
            )

    def run(*tensors: Tensor) -> Any:
        full = list(constants)
        for position, tensor in zip(positions, tensors, strict=True):
            full[position] = tensor
        return patches.apply_of(cls, *full)

    outputs = _try(run, path, [args[i].detach() for i in positions])
    # Constants are part of the operator, and two calls may have other ones: each call has a name of its own.
    name = f"f{next(_serial)}"
    returns = f"({', '.join(['Tensor'] * len(outputs))})" if isinstance(outputs, tuple) else "Tensor"
    library.define(f"{name}({', '.join(f'Tensor t{i}' for i in range(len(positions)))}) -> {returns}")
    # Implicit would let the trace look inside, and the author's backward would be lost again.
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=library)

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise CaptureError(
            "the gradient was asked for while tracing", where=path, remedy="compute gradients after the forward"
        )

    torch.library.register_autograd(f"{NAMESPACE}::{name}", refuse, lib=library)
    recorder.functions[f"{NAMESPACE}.{name}.default"] = (path, constants, positions)
    return getattr(getattr(torch.ops, NAMESPACE), name)(*[args[i] for i in positions])


def _try(run: Any, path: str, tensors: list[Tensor]) -> Any:
    """Runs the function once, which shows what it returns and does besides."""
    versions = [t._version for t in tensors]
    with torch.no_grad(), _Random() as random:  # type: ignore[no-untyped-call]
        outputs = run(*tensors)
    if any(t._version != version for t, version in zip(tensors, versions, strict=True)):
        raise CaptureError("the function changes its argument in place", where=path, remedy="work on a copy")
    if random.drawn:
        raise CaptureError(
            f"the function draws random numbers ({random.drawn}), which no plan could repeat",
            where=path,
            remedy="draw them outside and pass them in",
        )
    if not pytree.tree_all(lambda o: isinstance(o, Tensor), outputs) or not isinstance(outputs, (tuple, Tensor)):
        raise CaptureError("the function returns something else than tensors", where=path, remedy="return tensors only")
    if isinstance(outputs, tuple) and len(outputs) == 1:
        raise CaptureError("the function returns a tuple of one tensor", where=path, remedy="return the tensor itself")
    return outputs
