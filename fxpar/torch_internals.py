"""What fxpar reads of torch that torch keeps private: its dispatcher, fake tensors, process groups and modules.

Rooms import it from here: a version of torch that moves one of these changes this file alone. What one file needs of
Dynamo or Inductor it imports itself: these take seconds to load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch._C._distributed_c10d import Store, Work
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch._C._dynamo.guards import TensorGuards
from torch._decomp import decomposition_table, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    is_fake,
)
from torch.autograd.graph import _engine_run_backward as engine_run_backward
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer as ModuleStackTracer
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "IncompatibleKeys",
    "LazyGraphModule",
    "ModuleStackTracer",
    "Store",
    "TensorGuards",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "Work",
    "custom_function_call",
    "decomposition_table",
    "disable_current_modes",
    "dispatch_mode_stack",
    "enable_python_dispatcher",
    "engine_run_backward",
    "function_mode_stack",
    "get_decompositions",
    "in_kernel_invocation_manager",
    "is_fake",
    "no_dispatch",
    "resolve_process_group",
    "without_modules",
]

# Tracers replace these methods of all modules and put them back: Python then forgets every method that it had looked up
# in each of hundreds of classes. A method with this attribute they leave alone.
_REPLACED, _LEFT_ALONE = ("__getattr__", "__call__"), "__fx_already_patched"


@contextlib.contextmanager
def without_modules() -> Iterator[None]:
    """Lets tracers leave modules alone: for functions that call none."""
    methods = [getattr(nn.Module, name) for name in _REPLACED]
    before = [getattr(method, _LEFT_ALONE, False) for method in methods]
    for method in methods:
        setattr(method, _LEFT_ALONE, True)
    try:
        yield
    finally:
        for method, value in zip(methods, before, strict=True):
            setattr(method, _LEFT_ALONE, value)
