"""Forward hooks of the author's modules: those that change values are in the trace, others would never be called.

Enters: a model that runs on fakes. Leaves: nothing, or an error that names a hook that takes tensors out of the model.

What a hook returns, or writes in place, becomes a part of the program. A hook that returns nothing and keeps what it
saw, an activation or a number made of one, works in the trace alone. It is known by what it keeps: tensors that it was
given, or has made, and that live on when the step is over.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.errors import CaptureError

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
        """The hook, watched."""

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
        """Called when nothing else holds the tensors of the step.

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
