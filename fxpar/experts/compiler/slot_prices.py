"""What spare slots for replicas of hot experts save and cost in a training step, by the cost model.

Enters: a program whose experts are not dispatched yet, and the share of its pairs that each expert of a layer has.
Leaves: for each number of slots the load of the fullest rank, and the seconds of all layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from fxpar.cost.communication import symbol_sizes
from fxpar.cost.seconds import collective_seconds
from fxpar.errors import InputError
from fxpar.experts.compiler.expert_replicas import expert_weights, least_gain, pair_seconds
from fxpar.experts.compiler.routed_rows import Routed, routed
from fxpar.experts.operators.replicas import simulate_replicas
from fxpar.ir.program import Program, operands, tensor_type
from fxpar.layout.symbolic_sizes import evaluate, product
from fxpar.mesh.axes import Cuts

# To the slots in the forward, again in the backward, and gradients home.
_TRIPS = ("reduce_scatter", "reduce_scatter", "all_gather")
MOST_SLOTS = 4


@dataclass(frozen=True)
class SlotPrice:
    """A number of spare slots of each rank.

    Attributes:
        slots: how many.
        fullest: rows of the fullest rank over the mean, the most of all layers.
        replicas: how many experts the slots of all layers have.
        computing: seconds in which the fullest ranks of all layers compute their rows, forward and backward.
        sending: seconds in which weights and gradients of all slots travel, if nothing hides them.
        bytes: of the slots of a rank in one layer, the most of all layers.
    """

    slots: int
    fullest: float
    replicas: int
    computing: float
    sending: float
    bytes: int

    @property
    def seconds(self) -> float:
        """Returns what a microbatch takes of both."""
        return self.computing + self.sending


def skewed(experts: int, skew: float) -> list[float]:
    """Returns shares of experts of which the first eighth has `skew` times the weight of others."""
    weights = [skew if expert < max(experts // 8, 1) else 1.0 for expert in range(experts)]
    return [weight / sum(weights) for weight in weights]


def shares_of(path: Path, experts: Sequence[int]) -> list[list[float]]:
    """Returns the shares of each layer's experts of a file of loads, which is a report as JSON.

    Args:
        experts: how many each layer of the model has.

    Raises:
        InputError: there is no such file, it has no loads, or those of other layers.
    """
    remedy = "write json.dumps(model.report().to_dict()) of a trained step of this model there"
    try:
        loads = [load["experts"] for load in json.loads(path.read_text(encoding="utf-8"))["loads"]]
        shares = [[count / sum(load) for count in load] for load in loads]
    except OSError as error:
        raise InputError(str(error.strerror), where=str(path), remedy=remedy) from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise InputError("has no loads of experts", where=str(path), remedy=remedy) from None
    sizes = [len(load) for load in shares]
    if sizes != list(experts):
        reason = f"has loads of layers of {sizes} experts, and the model has {list(experts)}"
        raise InputError(reason, where=str(path), remedy=remedy)
    return shares


def slot_prices(program: Program, load: float | Path) -> list[SlotPrice]:
    """Returns the price of no slots and of each number that ranks can have, up to `MOST_SLOTS`.

    Args:
        program: before its experts are dispatched.
        load: a file of loads, or by how many times the first eighth of a layer's experts has the load of others.

    Raises:
        InputError: the program has no experts, or the file none of theirs.
        PlanError: ranks do not divide the experts.
    """
    layers, ranks = routed(program), prod(program.mesh.holders.values())
    if not layers:
        remedy = "call fxpar.ops.experts in the model"
        raise InputError(
            "no operation of the model is recognised as that of experts", where="spare slots", remedy=remedy
        )
    if isinstance(load, Path):
        shares = shares_of(load, [layer.experts for layer in layers])
    else:
        shares = [skewed(layer.experts, load) for layer in layers]
    most = min(MOST_SLOTS, *(layer.experts_of_each(ranks) for layer in layers))
    return [_price(program, layers, shares, slots) for slots in range(most + 1)]


def cheapest(prices: Sequence[SlotPrice]) -> SlotPrice:
    """Returns the price that takes least time, of equal ones that of the fewest slots."""
    return min(prices, key=lambda price: price.seconds)


def choose_slots(program: Program) -> Program:
    """Returns the program with the cheapest number of spare slots in its plan, where that leaves it to loads.

    Raises:
        InputError, PlanError: as `slot_prices`.
    """
    experts = program.plan.experts
    if experts.spare_experts != "auto":
        return program
    slots = cheapest(slot_prices(program, Path(experts.expert_loads))).slots
    least = experts.min_gain if slots else None
    experts = replace(experts, spare_experts=slots, min_gain=least, expert_loads="")
    return program.with_(plan=replace(program.plan, experts=experts))


def _price(program: Program, layers: Sequence[Routed], shares: Sequence[Sequence[float]], slots: int) -> SlotPrice:
    plan, holders = program.plan, program.mesh.holders
    cost, ranks, sizes = plan.cost.on(holders), prod(holders.values()), symbol_sizes(program, None)
    sources = ranks * prod(n for axis, n in plan.axes_for(Cuts.BATCH).items() if axis not in holders)
    part = 1 / (plan.etp or plan.tp)
    fullest, replicas, computing, sending, size = 1.0, 0, 0.0, 0.0, 0
    for layer, of_experts in zip(layers, shares, strict=True):
        pairs = evaluate(product(tensor_type(operands(layer.sort)[0]).shape), sizes) // sources
        counts = torch.tensor([round(share * pairs) for share in of_experts]).expand(ranks, -1)
        weights = [prod(kind.shape[1:]) * kind.dtype.itemsize for kind in expert_weights(layer)]
        loads: Sequence[int] = counts.sum(0).view(ranks, -1).sum(-1).tolist()
        if slots:
            gain = least_gain(program, layer, pairs) if plan.experts.min_gain is None else plan.experts.min_gain
            figures = simulate_replicas(counts, slots, gain, sum(weights))
            loads, replicas = figures.after, replicas + figures.slots
            whole = [ranks * slots * count * part for count in weights]
            sending += sum(collective_seconds(op, ranks, of, cost, cost.latency) for op in _TRIPS for of in whole)
        fullest = max(fullest, max(loads) * ranks / max(sum(loads), 1))  # of few pairs each share may be none
        computing += max(loads) * part * pair_seconds(program, layer)
        size = max(size, round(slots * sum(weights) * part))
    return SlotPrice(slots, fullest, replicas, computing, sending, size)
