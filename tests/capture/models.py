"""Models of a few weights, each with one thing that tracing could get wrong, and the comparison with eager.

All are in float64: the captured graph must agree to the last digits, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxpar.capture.capture import Captured, capture
from fxpar.ir.program import Program
from fxpar.manager import PassManager
from fxpar.passes.canonicalize import canonicalize
from fxpar.verify.simulate_ranks import cotangents, run_single, symbol_values
from fxpar.verify.values import call_inputs, program_state


class Net(nn.Module):
    """Two layers, `up` [4 → 6] and `down` [6 → 4], and a forward given by a function."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Any:
        assert self.function is not None
        return self.function(self, x)


def net(function: Callable[..., Any]) -> Net:
    """The model with that forward, the same weights at every call."""
    torch.manual_seed(1)
    return Net(function)


def written(function: Any) -> Net:
    """Returns the model whose forward is written as that function.

    Of the stack of a node torch keeps frames that are named `forward`, which gives a node its line.
    """
    forward = FunctionType(function.__code__.replace(co_name="forward"), function.__globals__)
    return seeded(type("Net", (Net,), {"forward": forward}))  # type: ignore[no-any-return]


def seeded(kind: type[nn.Module], *args: Any) -> Any:
    """A model in float64, the same weights at every call."""
    torch.manual_seed(1)
    return kind(*args).double()


def example(*shape: int) -> Tensor:
    """Random numbers [3, 5, 4], the same at every call."""
    return torch.randn(*(shape or (3, 5, 4)), dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Result:
    """Outputs by name, and gradients by parameter name; parameters that the loss does not reach are left out."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def eager(captured: Captured, model: nn.Module, batch: Any) -> Result:
    """The model as PyTorch runs and differentiates it."""
    from fxpar.capture.capture import arguments

    args, kwargs = arguments(model, batch, captured.loss is not None)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    result = model(*args, **kwargs)
    if captured.loss is not None:
        result = {"loss": captured.loss(result, batch), "outputs": result}
    leaves = pytree.tree_leaves(result, is_leaf=lambda v: v is None)
    pairs = zip(captured.spec.out_leaves, leaves, strict=True)
    outputs = {str(name): value for (kind, name), value in pairs if kind == "output"}
    sizes = symbol_values(captured.program, call_inputs(captured, model, batch))
    upstream = cotangents(captured.program, sizes)
    roots = [name for name in upstream if outputs[name].requires_grad]
    torch.autograd.backward([outputs[name] for name in roots], [upstream[name] for name in roots])
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Result({name: value.detach() for name, value in outputs.items()}, gradients)


def run(captured: Captured, model: nn.Module, batch: Any, program: Program | None = None) -> Result:
    """The captured program on one device with the model's weights."""
    chosen = captured.program if program is None else program
    torch.manual_seed(7)
    found = run_single(chosen, program_state(chosen, model), call_inputs(captured, model, batch))
    return Result(found.outputs, found.gradients)


def close(wanted: Result, found: Result) -> None:
    """Asserts that two results agree to 1e-12 and have the same gradients."""
    torch.testing.assert_close(dict(found.outputs), dict(wanted.outputs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(found.gradients), dict(wanted.gradients), rtol=1e-12, atol=1e-12)


def faithful(model: nn.Module, batch: Any, loss: Callable[..., Any] | str | None = None, *others: Any) -> Captured:
    """Captures a model and asserts that the captured and the canonical program are the model.

    Args:
        others: further batches, on which they must agree too.
    """
    captured = capture(model, batch, loss=loss)
    agree(captured, model, batch, *others)
    return captured


def agree(captured: Captured, model: nn.Module, *batches: Any) -> None:
    """Asserts that the captured and the canonical program are the model on these batches."""
    canonical = PassManager([canonicalize]).run(captured.program)
    for batch in batches:
        wanted = eager(captured, model, batch)
        close(wanted, run(captured, model, batch))
        close(wanted, run(captured, model, batch, canonical))


def operator_name(node: fx.Node) -> str:
    """`linear` for `aten.linear.default`; a plain function's own name."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    return str(getattr(node.target, "__name__", node.target))


def calls(captured: Captured) -> list[str]:
    """Names of the operators in order."""
    return [operator_name(n) for n in captured.program.graph.nodes if n.op == "call_function"]
