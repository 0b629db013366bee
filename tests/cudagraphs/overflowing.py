"""Trainings in which more rows of experts come than buffers have places for, with and without graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.cli.models import build as build_model
from fxpar.errors import InputError
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.runtime.sharded import local_of
from tests.cudagraphs.graphed import mixtral, words
from tests.passes.experts import Routed
from tests.runtime.jobs import refusal

# Half of all rows are an even load of two ranks, so that all rows on one of them are twice as many as that.
LIMIT = fxpar.Experts(recv_capacity_factor=1.75)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, capturable=torch.cuda.is_available()),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
}


def leaning_mixtral() -> nn.Module:
    """Sends the token 0 to the experts of the first of two ranks, and other tokens anywhere."""
    model: Any = mixtral()
    with torch.no_grad():
        embedded = model.model.embed_tokens.weight
        embedded[0] = embedded[0].sign()
        gate = model.model.layers[0].mlp.gate.weight
        gate[:2] += embedded[0]
    return model  # type: ignore[no-any-return]


class Biased(Routed):
    """Corrects the scores by a bias that each step moves against the load, and counts the rows of each expert.

    Args:
        chosen: numbers of the experts to which token 0 goes; 0 and 1 are on one rank.
    """

    def __init__(self, chosen: Sequence[int] = (0, 1)) -> None:
        super().__init__()
        with torch.no_grad():
            self.words.weight[0] = 1.0
            self.router.weight[list(chosen)] += 2.0
        self.preferred: Tensor
        self.rows: Tensor
        self.numbers: Tensor
        self.register_buffer("rows", torch.zeros(self.experts, dtype=torch.int64))
        self.register_buffer("numbers", torch.arange(self.experts))

    def shares(self, tokens: Tensor) -> Any:
        """Implements `Routed.shares`."""
        shares = super().shares(tokens)
        chosen = (shares.detach().topk(self.choices).indices.unsqueeze(-1) == self.numbers).sum((0, 1))
        self.rows.add_(chosen)
        self.preferred.add_(chosen.float() / chosen.sum() - 1 / self.experts, alpha=-0.1)
        return shares


class Stacked(nn.Module):
    """Two layers of experts, one of which gets more rows of token 0 than its buffers have places for.

    Args:
        crowded: number of that layer.
    """

    def __init__(self, crowded: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased((0, 1) if i == crowded else (0, 2)) for i in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        first: Any
        last: Any
        first, last = self.layers
        x = first.words(ids)
        for layer in (first, last):
            x = layer.mixed(x, layer.shares(x.flatten(0, 1)).topk(layer.choices))
        logits = last.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass
class Outcome:
    """What a training leaves.

    Attributes:
        losses: of each step, and the norms of those of an optimizer in the graph.
        tensors: weights, buffers, gradients, the optimizer's state and what the experts of each step were sent.
        notes: how many steps were repeated, and the number of the next step.
        graphs: how many there are.
    """

    losses: list[float]
    tensors: list[Tensor]
    notes: tuple[str, int]
    graphs: int

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        return self.is_alike(other) and self.notes == other.notes

    def is_alike(self, other: Outcome) -> bool:
        """Returns whether losses and tensors are the same to the bit."""
        same = all(torch.equal(a, b) for a, b in zip(self.tensors, other.tensors, strict=True))
        return same and self.losses == other.losses


def train(
    build: Callable[[], nn.Module],
    batches: list[Any],
    impl: str,
    *,
    optimizer: str = "adamw",
    inside: bool = True,
    every: int = 1,
    evaluate: bool = False,
    **plan: Any,
) -> Outcome:
    """Trains a model of experts on the ranks of `dp`.

    Args:
        build: makes the model.
        batches: of all steps; each rank has the same rows.
        optimizer: of `OPTIMIZERS`.
        inside: passes the optimizer to `train_step`, in the last of `every` steps.
        every: steps of which gradients are added up; after the last of all steps there are some.
        evaluate: calls the model on the first batch at the end.
    """
    torch.manual_seed(0)
    options = {"dp": 2, "ep": 2, "experts": LIMIT, **plan}
    first = batches[0][0] if isinstance(batches[0], list) else batches[0]
    model = fxpar.parallelize(build().train(), fxpar.Plan(cuda_graphs=fxpar.CudaGraphs(impl), **options), first)
    for line in symmetric_buffer._OPEN.values():
        line.poisons = model.world.device.type == "cpu"  # what came is overwritten when it was read
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses, loads = list[Any](), list[Tensor]()
    for i, batch in enumerate(batches):
        if (i + 1) % every:
            losses.append(model.train_step(batch))
        elif inside:
            losses += [model.train_step(batch, optimizer=stepper, max_norm=0.5), model.step_flags.norm]
        else:
            losses.append(model.train_step(batch))
            losses.append(model.clip_grad_norm_(0.5))
            stepper.step()
            model.zero_grad()
        load = model._training.load
        assert (load is None) == (model.plan.pp > 1)
        loads += [] if load is None else [load.counts.clone()]
    losses.append(model.train_step(batches[-1]))
    if evaluate:
        model.eval()
        with torch.no_grad():
            losses.append(model(**batches[0][0]))
    state = [v for p in stepper.state.values() for v in p.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    tensors = [local_of(v).detach().cpu().clone() for v in (*model.parameters(), *model.buffers(), *gradients, *state)]
    figures = model.graph_figures
    notes = str(model._training.budget), model.step
    model.close()
    return Outcome(
        [float(local_of(x)) for x in losses], tensors + loads, notes, 0 if figures is None else figures.graphs
    )


def with_overflows(batches: list[Any], overflowing: Collection[int], name: str = "input_ids") -> list[Any]:
    """Returns batches of which some have no token but 0."""
    for i in overflowing:
        for part in batches[i] if isinstance(batches[i], list) else [batches[i]]:
            part[name] = torch.zeros_like(part[name])
    return batches


def mixtral_batches(count: int, overflowing: Collection[int], micro: int = 1) -> list[Any]:
    """Batches of words for `leaning_mixtral`, some of which overflow."""
    return with_overflows(words(count, micro), overflowing)


def biased_batches(count: int, overflowing: Collection[int], micro: int = 1) -> list[Any]:
    """Batches for `Biased`, some of which overflow."""
    generator = torch.Generator().manual_seed(1)
    parts = [
        {key: torch.randint(1, 16, (3, 7), generator=generator) for key in ("ids", "labels")}
        for _ in range(count * micro)
    ]
    batches = parts if micro == 1 else [parts[i : i + micro] for i in range(0, len(parts), micro)]
    return with_overflows(list(batches), overflowing, "ids")


def deepseek() -> nn.Module:
    """Has a bias of each expert that corrects scores, and a layer without experts."""
    name = "deepseek_v3,first_k_dense_replace=1,moe_intermediate_size=40,n_routed_experts=8,n_group=4,topk_group=2"
    return build_model(name, None, None, 0).model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Any]]]] = {
    "first": (partial(Stacked, 0), biased_batches),
    "last": (partial(Stacked, 1), biased_batches),
    "deepseek": (deepseek, mixtral_batches),
    "mixtral": (leaning_mixtral, mixtral_batches),
    "biased": (Biased, biased_batches),
}


def compared(
    model: str, count: int, overflowing: Collection[int], micro: int, options: dict[str, Any]
) -> tuple[bool, tuple[str, int], int]:
    """On each rank: whether a training with graphs is the one without, its notes, and how many graphs there are."""
    build, batches = MODELS[model]
    plain, graphed = (
        train(build, batches(count, overflowing, micro), impl, **options) for impl in ("none", "full_iteration")
    )
    return plain == graphed, graphed.notes, graphed.graphs


def compared_with_places(
    model: str, count: int, overflowing: Collection[int], impls: Sequence[str], options: dict[str, Any]
) -> list[tuple[bool, tuple[str, int], int]]:
    """On each rank of a pipeline and by mode of graphs: whether a training is the one with places for all rows, its
    notes, and how many graphs there are.
    """
    build, batches = MODELS[model]

    def trained(impl: str, **more: Any) -> Outcome:
        return train(build, batches(count, overflowing, 4), impl, **{**options, **more})

    full = trained("none", experts=fxpar.Experts())
    outcomes = [trained(impl) for impl in impls]
    return [(outcome.is_alike(full), outcome.notes, outcome.graphs) for outcome in outcomes]


def refused_variant() -> tuple[str, bool]:
    """What a step says that cannot be repeated, and whether all other steps are as if it had not come."""
    losses: list[list[float]] = []
    text = ""
    for graphs in (fxpar.CudaGraphs(), fxpar.CudaGraphs("partial", variants=1)):
        torch.manual_seed(0)
        first, crowded, last = biased_batches(3, (1,), 2)
        plan = fxpar.Plan(pp=2, dp=2, ep=2, experts=LIMIT, cuda_graphs=graphs)
        model = fxpar.parallelize(Stacked(1).train(), plan, first[0])
        losses.append([float(model.train_step(first))])
        if graphs.is_on:
            with pytest.raises(InputError) as caught:
                model.train_step(crowded)
            text = caught.value.reason
        losses[-1].append(float(model.train_step(last)))
        model.close()
    return text, losses[0] == losses[1]


def refused(optimizer: str) -> tuple[str, str, str, str]:
    """What a step with an optimizer of torch in the graph says that cannot be skipped on the device."""
    (batch,) = biased_batches(1, ())
    plan = fxpar.Plan(dp=2, ep=2, experts=LIMIT, cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    model = fxpar.parallelize(Biased().train(), plan, batch)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), capturable=True)
    return refusal(lambda: model.train_step(batch, optimizer=stepper))
