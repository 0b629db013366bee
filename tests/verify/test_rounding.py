"""What rounding explains of a difference between a model and its graph, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture import capture
from fxpar.errors import CheckFailed
from fxpar.program.program import Program, note, set_note
from fxpar.verify.rounding import OtherOrder
from fxpar.verify.values import check_capture

aten = torch.ops.aten
TERMS = 4099


class Cancelling(nn.Module):
    """A sum of which little is left: of terms near 1, so many digits go as `left` is smaller than 1."""

    def __init__(self, left: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(TERMS, dtype=torch.float64))
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        """The loss of x: [b, TERMS]."""
        terms = x * self.weight
        rest = terms - terms.roll(1, 1).detach()
        return (rest + self.left / TERMS).sum()


def edited(left: float, edit: Callable[[torch.fx.Node], None]) -> Callable[[], None]:
    """Checks a capture of it with another sum."""
    torch.manual_seed(0)
    model, batch = Cancelling(left), {"x": torch.randn(3, TERMS, dtype=torch.float64)}
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


def without_a_little(total: torch.fx.Node) -> None:
    """A factor that the model has not."""
    (user,) = total.users
    with total.graph.inserting_after(total):
        less = total.graph.call_function(aten.mul.Tensor, (total, 1 - 1e-7))
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
