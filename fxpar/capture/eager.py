"""The author's model as PyTorch runs and differentiates it, walked on fakes and compared with what was recorded.

Enters: a model, its example, and the functions that its trace holds. Leaves: nothing, or an error that names what the
trace has lost: a hand-written backward, or a hook on gradients or saved tensors. Fakes have no values: the walk costs
no memory, and takes models of the meta device too.

A trace sees what the forward does to tensors. What a backward does besides is known to autograd alone: every Python
function and hook that it would call is one that it calls in a backward on fakes.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from fxpar.capture.branches import host_numbers
from fxpar.capture.input_checks import no_host_random, separate
from fxpar.capture.layer_trace_cache import Number, Observed
from fxpar.capture.places import is_foreign_file, place_of
from fxpar.capture.prepared_model import plain_surrounding, without_values
from fxpar.capture.python_state import OtherMemos, nothing_remembered, untouched
from fxpar.capture.recording import UntracedEffectMode, is_internal, recording
from fxpar.capture.trace import FAILURES, Substitutes, called, quiet
from fxpar.errors import CaptureError
from fxpar.torch_internals import FakeTensor, TorchDispatchMode, engine_run_backward

# Forward hooks of the author's modules: those that change values are in the trace, others would never be called.

_KINDS = ("_forward_pre_hooks", "_forward_hooks")


class HookObserver:
    """What hooks without a result have seen and made.

    Args:
        known: tensors that live on whatever a hook does.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._known = {id(value) for value in known}
        self._seen: list[tuple[str, str, weakref.ref[Tensor]]] = []

    def around(self, where: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the hook, watched."""

        def call(module: nn.Module, *args: Any) -> Any:
            with _Made() as mode:
                returned = hook(module, *args)
            if returned is None:
                tensors = [v for v in pytree.tree_leaves(args) if isinstance(v, Tensor)]
                name = getattr(hook, "__qualname__", type(hook).__name__)
                self._seen += [(where, name, weakref.ref(v)) for v in tensors if id(v) not in self._known]
                self._seen += [(where, name, reference) for reference in mode.made]
            return returned

        return call

    def check(self) -> None:
        """Refuses hooks that still hold tensors of the step; called when nothing else holds them.

        Raises:
            CaptureError: a hook does.
        """
        if any(seen() is not None for _, _, seen in self._seen):
            gc.collect()  # the step's own tensors may be in cycles
        for where, name, seen in self._seen:
            if seen() is not None:
                raise CaptureError(
                    f"its forward hook {name} keeps tensors, and the compiled program would never call it",
                    where=where,
                    remedy="remove it, and return what you want to see from the model's forward",
                )


class _Made(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(value) for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]
        return outputs


@contextlib.contextmanager
def hooks_watched(model: nn.Module, known: Any) -> Iterator[HookObserver]:
    """Watches the forward hooks of all modules; the hooks themselves are back at the end.

    Args:
        known: a nest of tensors that the caller holds on to.
    """
    tensors = [value for value in pytree.tree_leaves(known) if isinstance(value, Tensor)]
    watch = HookObserver([*tensors, *model.parameters(), *model.buffers()])
    originals = []
    try:
        for name, module in model.named_modules():
            for hooks in (getattr(module, kind) for kind in _KINDS):
                for key, hook in hooks.items():
                    if type(hook).__module__.startswith("torch.nn.utils."):
                        continue  # weight_norm's: it makes the weight that the module then takes
                    originals.append((hooks, key, hook))
                    hooks[key] = watch.around(name or type(model).__name__, hook)
        yield watch
    finally:
        for hooks, key, hook in originals:
            hooks[key] = hook


_ENGINE = engine_run_backward.__code__
_DEVICE = torch.ops.prim.device.default
# What registers hooks on nodes of autograd's graph, and what calls an autograd function.
_CALLED = frozenset({"register_hook", "register_prehook", "_register_hook_dict", "apply"})
# Code of torch that the engine calls for the author's hooks.
_HOOKS = tuple(
    f"{Path(torch.__file__).parent}/{part}"
    for part in ("utils/hooks.py", "utils/checkpoint.py", "autograd/graph.py", "nn/", "distributed/")
)
# What the engine calls for the backward of an autograd function, by its versions of the call.
_BACKWARDS = {vars(BackwardCFunction)[n].__code__ for n in ("apply", "apply_boxed") if n in vars(BackwardCFunction)}


@dataclass
class Eager:
    """What the eager model's autograd graph holds.

    Attributes:
        functions: how often the gradients go through each autograd function of the author's, by path.
        places: the line that called it first.
        hooks: lines of hooks on gradients and saved tensors.
        reason: why the model could not be walked; empty where it was.
        layers: what those did that the trace has copied.
    """

    functions: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)
    hooks: dict[str, None] = field(default_factory=dict)
    reason: str = ""
    layers: Observed = field(default_factory=Observed)


def walk(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    others: OtherMemos | None = None,
    copied: Mapping[Number, Number] | None = None,
    substitutes: Substitutes = contextlib.nullcontext,
    dtype: torch.dtype | None = None,
) -> Eager:
    """Runs the model on fakes, forward and backward; it is left as it was.

    Args:
        others: memoised functions, where they are known from the trace.
        copied: calls of layers that are observed, as of a `Trace`.
        substitutes: as for `trace`.
        dtype: in which the forward takes floating tensors; None for their own.

    Raises:
        CaptureError: a hook on gradients or saved tensors, or random numbers in a backward.
    """
    eager = Eager(layers=Observed(copied or {}))
    try:
        with contextlib.ExitStack() as stack:
            for context in (plain_surrounding(), quiet(), no_host_random(model), untouched(model)):
                stack.enter_context(context)
            stack.enter_context(substitutes())
            stack.enter_context(nothing_remembered(called(model, batch, loss).module, others or OtherMemos()))
            stack.enter_context(recording())
            stack.enter_context(host_numbers())
            batch = stack.enter_context(without_values(model, separate(batch)))
            hooks = stack.enter_context(hooks_watched(model, batch))
            call = called(model, batch, loss, dtype)
            with UntracedEffectMode(), _EngineCallMode(eager), eager.layers.watching(call.module):
                outputs = call.module(*call.args, **call.kwargs)
            _differentiate(eager, outputs)
            del outputs
            hooks.check()  # before what hooks have kept is put out of their containers
    except CaptureError as error:
        raise CaptureError(error.reason, where=error.where or place_of(error), remedy=error.remedy) from error
    except FAILURES as error:
        eager.reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    if eager.hooks:
        raise CaptureError(
            "a hook that a backward calls is lost when the forward is traced",
            where=next(iter(eager.hooks)),
            remedy="write a torch.autograd.Function, or change the gradients after backward",
        )
    return eager


def _differentiate(eager: Eager, outputs: Any) -> None:
    roots = [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.requires_grad and v.grad_fn]
    nodes = list(_nodes(roots))
    functions = [node._forward_cls for node in nodes if isinstance(node, BackwardCFunction)]  # type: ignore[attr-defined]
    for function in functions:
        path = f"{function.__module__}.{function.__qualname__}"
        if not is_internal(function) or function.__module__.startswith("torch._functorch"):
            eager.functions[path] += 1
    if not roots:
        return
    # What computes gradients in Python, or sees them when they are there, is to have some.
    if not functions and not any(_sees_gradients(node) for node in nodes) and _passed(eager, roots, nodes):
        return
    with _EngineCallMode(eager):
        torch.autograd.backward(roots, [torch.ones_like(v) for v in roots])


class _Undefined(torch.autograd.Function):
    """What gives tensors no gradients."""

    @staticmethod
    def forward(ctx: Any, *roots: Tensor) -> Tensor:
        ctx.count = len(roots)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * ctx.count


def _passed(eager: Eager, roots: list[Tensor], nodes: list[Any]) -> bool:
    """Has the engine pass all nodes with undefined gradients, and tells whether it could; the graph stays.

    It unpacks what was saved and calls hooks as it would, and torch's own nodes compute nothing, or once: attention
    gives gradients where it has got none. On fakes that takes a tenth of the time.
    """
    handles = [node.register_hook(_nothing) for node in nodes if node.next_functions]
    try:
        with _EngineCallMode(eager):
            torch.autograd.backward(_Undefined.apply(*roots), retain_graph=True)  # type: ignore[no-untyped-call]
    except FAILURES:  # a node that takes none, or a hook: the gradients themselves will show it
        return False
    finally:
        for handle in handles:
            handle.remove()
    return True


def _nothing(gradients: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[None, ...]:
    return (None,) * len(gradients)


def _sees_gradients(node: Any) -> bool:
    """Returns whether it is that of a leaf with hooks that are called where it has a gradient."""
    return bool(getattr(getattr(node, "variable", None), "_post_accumulate_grad_hooks", None))


def _nodes(roots: list[Tensor]) -> Iterator[Any]:
    """Yields the nodes that the gradients of some tensors go through."""
    pending: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)


class _SomePlaces:
    """In place of `nonzero`, of whose result values decide the size: how many rows a loop picks is of no interest."""

    namespace = "aten"

    def __call__(self, mask: Tensor) -> Tensor:
        return mask.new_empty((2, mask.dim()), dtype=torch.int64)


_NONZERO, _SOME_PLACES = torch.ops.aten.nonzero.default, _SomePlaces()


class _EngineCallMode(TorchDispatchMode):
    """While active, notes who registers hooks on nodes of autograd's graph, and what the engine calls besides.

    What runs below an operator is of no interest, and most of the calls: it is not looked at.
    """

    def __init__(self, eager: Eager) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._profiler, self._within, self._is_looking = eager, sys.getprofile(), "", False
        self._functions = _Functions(self)
        if not (self._profiler is None or callable(self._profiler) or hasattr(self._profiler, "enable")):
            raise CaptureError(
                f"a profiler runs ({type(self._profiler).__name__}) that Python cannot put back",
                where="capture",
                remedy="profile what comes after parallelize",
            )

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        self._look()
        return self

    def __exit__(self, *args: object) -> None:
        self._look_away()
        self._functions.__exit__(*args)  # type: ignore[no-untyped-call]
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def unseen(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function inside which nothing is looked at."""
        if not self._is_looking:
            return func(*args, **kwargs)
        self._look_away()
        try:
            return func(*args, **kwargs)
        finally:
            self._look()

    def _look(self) -> None:
        self._is_looking = True
        sys.setprofile(self._see)

    def _look_away(self) -> None:
        """Puts back the profiler of the user's process; cProfile's is no function, but an object that knows how."""
        self._is_looking = False
        if self._profiler is None or callable(self._profiler):
            sys.setprofile(self._profiler)
        else:
            self._profiler.enable()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Autograd asks each operand and result, more often than there are operators: the answer of torch's own handler.
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        return self.unseen(self._run, func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            _check_draw(func)
        return self._found.layers.operator(_SOME_PLACES if func is _NONZERO else func, args, kwargs)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            name = arg.__name__
            if name not in _CALLED:
                return
            owner = getattr(arg, "__self__", None)
            if name != "apply":
                if isinstance(owner, Node):
                    self._found.hooks.setdefault(_line(frame))
            elif isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                self._found.places.setdefault(f"{owner.__module__}.{owner.__qualname__}", _line(frame))
        elif event == "call":
            code = frame.f_code
            if frame.f_back is not None and frame.f_back.f_code is _ENGINE:
                self._within = _hook(code)
            if self._within and is_foreign_file(code.co_filename):
                self._found.hooks.setdefault(f"{Path(code.co_filename).name}:{code.co_firstlineno}")
                self._within = ""
        elif event == "return" and self._within and frame.f_back is not None and frame.f_back.f_code is _ENGINE:
            self._found.hooks.setdefault(self._within)
            self._within = ""


# Types of functions that are written in C.
_IN_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


class _Functions(TorchFunctionMode):
    """Has calls not look at what runs below a function that torch has in C, or `torch.nn.functional`.

    That is torch itself, and no code of the author's but kernels in the place of torch's own: what these hook on a node
    is called, and seen, in the backward. These are most calls of a forward, and the profiler would be asked about each.
    The author's own operators are no such functions.
    """

    def __init__(self, calls: _EngineCallMode) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, _IN_C) or getattr(func, "__module__", "") == "torch.nn.functional":
            return self._calls.unseen(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _check_draw(func: Any) -> None:
    """Refuses random bits in the backward of an author's function: it can be no operator of a program.

    Raises:
        CaptureError: names the line.
    """
    if any(frame.f_code in _BACKWARDS for frame, _ in traceback.walk_stack(None)):
        raise CaptureError(
            f"the backward of an autograd function draws random numbers ({func}), which no plan could repeat",
            where=_line(sys._getframe()),
            remedy="draw them in the forward outside of the function, and pass them in",
        )


def _hook(code: CodeType) -> str:
    """Returns the name of a function that the engine calls for a hook; empty where it differentiates or frees."""
    file = code.co_filename
    is_own = is_foreign_file(file) and not file.startswith("<eval_with_key>") and code.co_name != "__del__"
    return code.co_qualname if is_own or file.startswith(_HOOKS) else ""


def _line(frame: FrameType | None) -> str:
    """Returns the innermost line of the author's code."""
    while frame is not None and not is_foreign_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "forward"


def compare(eager: Eager, recorded: Mapping[str, int]) -> None:
    """Compares the functions that gradients go through with those that a trace holds, by path.

    Raises:
        CaptureError: a function is not recorded, so that its backward would be lost; names where it is called.
    """
    for path, count in eager.functions.items():
        if count > recorded.get(path, 0):
            raise CaptureError(
                f"the autograd function {path} is called where a trace does not see it, so that its backward is lost",
                where=eager.places.get(path, path),
                remedy="call it by `apply` of its class in the forward, outside of transforms and compiled regions",
            )
