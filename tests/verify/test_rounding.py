"""What rounding explains of a difference between a model and its graph, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.compile import compile_model
from fxpar.errors import CheckFailed
from fxpar.ir.program import Program, note, set_note
from fxpar.plan.plan import Plan
from fxpar.verify import values
from fxpar.verify.reference_program import OtherOrder
from fxpar.verify.values import TOLERANCE, call_inputs, check_capture, program_state, verify_values

aten = torch.ops.aten
TERMS = 4099


class Cancelling(nn.Module):
    """A sum of which little is left: of terms near 1, so many digits go as `left` is smaller than 1."""

    def __init__(self, left: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(TERMS, dtype=dtype))
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        """The loss of x: [b, TERMS]."""
        terms = x * self.weight
        rest = terms - terms.roll(1, 1).detach()
        return (rest + self.left / TERMS).sum()


def edited(
    left: float, edit: Callable[[torch.fx.Node], None], dtype: torch.dtype = torch.float64
) -> Callable[[], None]:
    """Checks a capture of it with another sum."""
    torch.manual_seed(0)
    model, batch = Cancelling(left, dtype), {"x": torch.randn(3, TERMS, dtype=dtype)}
    captured = capture(model, batch)
    check_capture(captured, model, batch)
    program: Program = captured.program.copy()
    (total,) = program.graph.find_nodes(op="call_function", target=aten.sum.default)
    edit(total)
    program.graph_module.recompile()
    return lambda: check_capture(replace(captured, program=program), model, batch, canonical=False)


def in_other_order(total: torch.fx.Node) -> None:
    """The last term first."""
    terms = total.args[0]
    assert isinstance(terms, torch.fx.Node)
    with total.graph.inserting_before(total):
        flipped = total.graph.call_function(aten.flip.default, (terms, [1]))
    total.args = (set_note(flipped, note(terms)),)


def without_a_little(total: torch.fx.Node, part: float = 1e-7) -> None:
    """A factor that the model has not."""
    (user,) = total.users
    with total.graph.inserting_after(total):
        less = total.graph.call_function(aten.mul.Tensor, (total, 1 - part))
    user.replace_input_with(total, set_note(less, note(total)))


def test_a_sum_in_another_order_is_the_same_sum() -> None:
    check = edited(1e-2, in_other_order)
    check()


def test_what_rounding_does_not_explain_is_another_model() -> None:
    check = edited(1e-2, without_a_little)
    with pytest.raises(CheckFailed, match=r"deviates from the module by 1e-07, and rounding explains \d.*e-1[0123];"):
        check()


def test_where_all_is_rounding_nothing_can_be_said() -> None:
    check = edited(1e-9, in_other_order)
    with pytest.raises(CheckFailed, match=r"from itself by .*cannot be seen; take other inputs"):
        check()


def test_where_float32_shows_nothing_float64_does() -> None:
    edited(1e-5, in_other_order, torch.float32)()

    def otherwise(total: torch.fx.Node) -> None:
        in_other_order(total)
        without_a_little(total, 1e-4)

    check = edited(1e-5, otherwise, torch.float32)
    # How much rounding explains depends on the order of the processor's sums.
    with pytest.raises(
        CheckFailed, match=r"from itself by .*cannot be seen; take other inputs|deviates from the module"
    ):
        check()


def test_a_model_is_put_back_after_float64() -> None:
    model = Cancelling(1e-5, torch.float32)
    model.register_buffer("table", torch.ones(2))
    before = {name: (id(t), t.dtype, t.data_ptr()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    gradient = model.weight.grad = torch.ones(TERMS)
    with values._widened(model):
        assert model.weight.grad is None
        assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float64}
    after = {name: (id(t), t.dtype, t.data_ptr()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert after == before
    assert model.weight.grad is gradient


def test_sums_of_whole_numbers_and_what_moves_values_are_exact() -> None:
    torch.manual_seed(0)
    x, table = torch.randn(4, 300), torch.randn(9, 5)
    whole, places = torch.randint(0, 9, (4, 300)).float(), torch.tensor([1, 8, 3, 3])

    def results() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return {
            "whole": whole.sum(),
            "rows": functional.embedding(places, table),
            "joined": torch.cat([x[places % 4], x]),
            "largest": x.amax(1),
            "element-wise": x.exp() * x,
            "drawn": functional.dropout(x, 0.3),
            "sum": x.sum(),
            "product": x @ x.T,
            "half": x.bfloat16() @ x.T.bfloat16(),
        }

    expected = results()
    with OtherOrder(0):
        found = results()
    moved = {name for name, value in expected.items() if not torch.equal(value, found[name])}
    assert moved == {"sum", "product", "half"}
    for name in moved:
        gap = (found[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert 0 < gap < (2e-2 if name == "half" else 1e-5)


class Amplifying(nn.Module):
    """Divides what is left of two nearly equal products by itself: what rounding made of it comes out large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 64), nn.Linear(64, 6)
        with torch.no_grad():
            self.up.weight[32:] = self.up.weight[:32]
            self.up.bias[32:] = self.up.bias[:32]
            self.down.weight[:, 32:] = -self.down.weight[:, :32] * (1 + 3e-7)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of x: [b, 6]."""
        rest = self.down(functional.gelu(self.up(x))) - self.down.bias
        return functional.layer_norm(rest, (6,), eps=1e-30).pow(3).mean()


def split_amplifying(added: float) -> tuple[Program, Program, dict[str, Tensor], dict[str, Tensor]]:
    """It as it was captured and split over two ranks, one of whose nodes adds something; values."""
    torch.manual_seed(0)
    model, batch = Amplifying().double(), {"x": torch.randn(5, 6, dtype=torch.float64)}
    compiled = compile_model(model, batch, Plan(tp=2, split={"up": "column", "down": "row"}))
    program = compiled.program.copy()
    product = next(n for n in program.graph.nodes if n.target is aten.gelu.default)
    users = list(product.users)
    with program.graph.inserting_after(product):
        changed = program.graph.call_function(aten.add.Tensor, (product, added))
    for user in users:
        user.replace_input_with(product, set_note(changed, note(product)))
    program.graph_module.recompile()
    captured = compiled.captured
    return captured.program, program, program_state(captured.program, model), call_inputs(captured, model, batch)


def test_ranks_deviate_by_what_the_model_makes_of_rounding() -> None:
    captured, program, state, inputs = split_amplifying(0.0)
    report = verify_values(captured, program, state, inputs)
    assert report.max_grad_error > TOLERANCE, "else nothing is shown"
    assert report.ok


@pytest.mark.parametrize("added", [3e-8, 1e-3])
def test_ranks_that_compute_something_else_do_not(added: float) -> None:
    captured, program, state, inputs = split_amplifying(added)
    assert not verify_values(captured, program, state, inputs).ok
