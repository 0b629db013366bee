"""Axes with links of their own: what is solved on an axis is priced by its bandwidth and latency."""

from __future__ import annotations

import torch
from torch import nn

from fxpar.capture.capture import capture
from fxpar.passes import canonicalize, divide_batch
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.sharding.choose import Choice, place


class Block(nn.Module):
    """A pair of linear layers whose split costs an all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return loss


def chosen(cost: Cost) -> Choice:
    program = capture(Block(), (torch.randn(4, 8),), Plan(tp=2, dp=2, cost=cost)).program
    return place(divide_batch(canonicalize(program)), {}).choices["tp"]


def kinds(choice: Choice) -> set[str]:
    return {str(choice.chosen[node].outputs[0]) for node in choice.chosen if "weight" in node.name}


def test_an_axis_with_its_own_link_is_priced_as_a_machine_with_that_link() -> None:
    own, machine = (
        chosen(Cost(axes={"tp": {"bandwidth": 2e8, "latency": 3e-6}})),
        chosen(Cost(bandwidth=2e8, latency=3e-6)),
    )
    assert own.solution.cost == machine.solution.cost
    assert kinds(own) == kinds(machine) == {"I"}
    usual = chosen(Cost())
    assert usual.solution.cost < own.solution.cost
    assert kinds(usual) == {"S(0)", "S(1)"}


def test_the_links_of_another_axis_say_nothing() -> None:
    assert chosen(Cost(axes={"dp": {"bandwidth": 1e6, "latency": 1.0}})).solution.cost == chosen(Cost()).solution.cost
