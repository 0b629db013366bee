"""What an author's function does is proved on its operations: element-wise, and linear in the gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar import Plan
from fxpar.capture.capture import capture
from fxpar.cost.reasons import without_rule
from fxpar.errors import LayoutError
from fxpar.ir.program import TensorType
from fxpar.layout.layout import I, R, shard
from fxpar.layout.symbolic_sizes import symbol
from fxpar.manager import PassManager
from fxpar.ops.small_operators import function, why_whole
from fxpar.passes import DEFAULT_PASSES
from fxpar.rules import OpCall, Refusal, inferred, rule_of
from fxpar.signatures.autograd_functions import nonlinearity
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.static import STATIC, verify_static
from tests.capture import bound, functions
from tests.products import few

b, s = symbol("b"), symbol("s")
ROWS = (b, s, 96)


def call(cls: type, *arguments: Any) -> OpCall:
    """A call of a function on float32 operands of the given shapes, and constants."""
    given = arguments or (ROWS,)
    shapes = {str(i): a for i, a in enumerate(given) if isinstance(a, tuple)}
    plain = {"path": f"{cls.__module__}.{cls.__name__}"}
    plain |= {str(i): a for i, a in enumerate(given) if not isinstance(a, tuple)}
    kinds = tuple(TensorType(torch.float32, shape) for shape in shapes.values())
    return OpCall(function, plain, kinds, tuple(shapes), kinds[:1], 2)


@pytest.mark.parametrize(
    "found",
    [
        call(functions.Seven),
        call(functions.Product, ROWS, ROWS),
        call(bound.Recomputed),
        call(bound.Clipped),
        call(bound.Signs),
        call(bound.SignsOfOne, ROWS, ROWS),
    ],
    ids=lambda found: str(found.get("path")).rpartition(".")[2],
)
def test_element_wise_functions_are_cut(found: OpCall) -> None:
    assert why_whole(found) == ""
    cut = tuple(shard(2, 96) for _ in found.operands)
    assert inferred(found, cut, [True] * len(cut), composite=False) == (shard(2, 96),)


SIZES: dict[type, str] = {
    bound.ByShape: "asks a tensor for its shape",
    bound.ByNumel: "asks a tensor for its numel",
    bound.ByLength: "asks a tensor for its __len__",
    bound.BySize: "asks a tensor for its size",
    bound.ByStride: "asks a tensor for its stride",
    bound.ByShapeOfSaved: "asks a tensor for its shape",
    bound.ByMean: "aten.mean.dim",
    bound.ByPosition: "aten.cumsum.default",
    bound.ByDevice: "asks a tensor for its is_cuda",
    bound.ByView: "aten.view.default",
    bound.Centred: "aten.mean.dim",
}


@pytest.mark.parametrize("cls", SIZES)
def test_what_a_size_decides_is_not_run_on_a_shard(cls: type) -> None:
    found = call(cls)
    assert SIZES[cls] in why_whole(found)
    answer = inferred(found, (shard(2, 96),), (True,), composite=False)
    assert isinstance(answer, Refusal)
    assert cls.__name__ in answer.reason
    assert inferred(found, (I,), (True,), composite=False) == (I,)


LINEAR = [
    call(functions.Seven),
    call(functions.Scaled, ROWS, 2.5, True, "scaled"),
    call(functions.Product, ROWS, ROWS),
    call(bound.Centred),
    call(bound.Recomputed),
    call(bound.Turned, (b, s, 96)),
    call(bound.ByMean),
]


@pytest.mark.parametrize("found", LINEAR, ids=lambda found: str(found.get("path")).rpartition(".")[2])
def test_a_backward_that_is_linear_takes_summands(found: OpCall) -> None:
    assert nonlinearity(found, rule_of) == ""
    count = len(found.operands)
    assert inferred(found, (R,) * count, [True] * count, composite=False) == (R,) * len(found.outputs)


NONLINEAR: dict[type, str] = {
    bound.Clipped: "aten.clamp.default",
    bound.Signs: "aten.sign.default",
    bound.Normalised: "aten.linalg_vector_norm.default",
    bound.Squared: "aten.abs.default",
    bound.Shifted: "aten.add.Tensor",
    bound.Unasked: "does not depend on it",
    bound.ByNumel: "asks a tensor for its numel",
    bound.BySize: "one size alone",
}


@pytest.mark.parametrize("cls", NONLINEAR)
def test_a_backward_that_is_not_linear_takes_no_summands(cls: type) -> None:
    found = call(cls)
    assert NONLINEAR[cls] in nonlinearity(found, rule_of)
    answer = inferred(found, (R,), (True,), composite=False)
    assert isinstance(answer, Refusal)
    assert "invariant (I)" in answer.reason
    assert inferred(found, (I,), (True,), composite=False) == (I,)
    assert inferred(found, (R,), (False,), composite=False) == (R,)


def test_every_set_of_operands_that_ask_for_a_gradient_is_looked_at() -> None:
    assert "aten.sign.default" in nonlinearity(call(bound.SignsOfOne, ROWS, ROWS), rule_of)


@torch.library.custom_op("fxpar_tests::doubled", mutates_args=())
def doubled(x: Tensor, scale: float) -> Tensor:
    return x * 2 * scale


@doubled.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxpar_tests::clipped", mutates_args=())
def clipped(x: Tensor) -> Tensor:
    return x.clone()


@clipped.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxpar_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep_scale(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale = inputs[1]


doubled.register_autograd(lambda ctx, g: (g * 2 * ctx.scale, None), setup_context=keep_scale)
clipped.register_autograd(lambda ctx, g: g.clamp(-1, 1))
opaque.register_autograd(lambda ctx, g: clipped(g))

KIND = TensorType(torch.float32, ROWS)


def operator_call(target: Any, **plain: Any) -> OpCall:
    return OpCall(target, plain, (KIND,), ("x",), (KIND,), 2)


def test_a_custom_operator_takes_summands_where_its_backward_is_linear() -> None:
    found = operator_call(torch.ops.fxpar_tests.doubled.default, scale=1.5)
    assert nonlinearity(found, rule_of) == ""
    assert inferred(found, (R,), (True,), composite=False) == (R,)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (torch.ops.fxpar_tests.clipped.default, "aten.clamp.default"),
        (torch.ops.fxpar_tests.opaque.default, "fxpar_tests.clipped.default"),
    ],
    ids=["clip", "an operator that nobody knows"],
)
def test_other_custom_operators_take_invariant_operands_alone(target: Any, reason: str) -> None:
    found = operator_call(target)
    assert reason in nonlinearity(found, rule_of)
    assert isinstance(inferred(found, (R,), (True,), composite=False), Refusal)
    assert inferred(found, (I,), (True,), composite=False) == (I,)


class Around(nn.Module):
    """up, a function, down, and a norm whose weight needs its gradient summed where tokens are cut."""

    def __init__(self, applied: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(96, 160), nn.Linear(160, 96), nn.LayerNorm(96)
        self.applied = applied

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.applied(self.up(self.applied(self.norm(x)))))
        return self.applied(h).square().sum()


SPLIT = (bound.Clipped, bound.Signs, bound.Centred, bound.ByNumel, bound.ByMean, functions.Seven)
EVERY_TIME = [*zip(SPLIT, (False, True) * 3, strict=True)]


@pytest.mark.parametrize(("cls", "sequence_parallel"), few(itertools.product(SPLIT, (False, True)), EVERY_TIME))
def test_a_split_model_has_the_functions_own_gradients(cls: Any, sequence_parallel: bool) -> None:
    x = torch.randn(2, 16, 96, generator=torch.Generator().manual_seed(3))
    found = expect(verify(Around(cls.apply), x, Plan(tp=2, sequence_parallel=sequence_parallel)))
    whole = [text for text in without_rule(found.program) if cls.__name__ in text]
    assert bool(whole) == (cls in SIZES)


def test_a_text_in_which_summands_meet_a_function_that_is_not_linear_is_refused() -> None:
    """The text of a linear function's program, with the name of another."""
    x = torch.randn(2, 16, 96)
    captured = capture(Around(bound.Centred.apply), x, Plan(tp=2))
    program = PassManager(DEFAULT_PASSES, STATIC).run(captured.program)
    text = print_program(program)
    assert "tp:R" in text
    lines = [line for line in text.splitlines() if "bound.Centred" in line and "tp:R" in line]
    for line in lines:
        wrong = text.replace(line, line.replace("bound.Centred", "bound.Normalised"))
        with pytest.raises(LayoutError, match="not known to be linear in the gradient"):
            verify_static(parse_program(wrong))


def test_operators_of_torch_are_differentiated_and_so_linear() -> None:
    assert nonlinearity(operator_call(torch.ops.aten.linalg_inv_ex.default), rule_of) == ""
