"""Trainings through a pipeline, with graphs of its stages and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.cudagraphs import graph_cache
from fxpar.cudagraphs.partial import StageStep
from fxpar.cudagraphs.pool import StandInPool, Tape
from fxpar.errors import FxparError, InputError
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.pipeline.compiler.builtin_schedules import schedule_of
from tests.cudagraphs.graphed import VOCABULARY, Trained, train
from tests.runtime.jobs import refusal

SIZE = 7


class Deep(nn.Module):
    """Words, layers with dropout, and a head: what may be cut between any two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(5))
        self.drop = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Reading(Deep):
    """Reads a value on the host in its first layer, which no graph holds."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for i, layer in enumerate(self.layers):
            y = self.drop(torch.tanh(layer(x)))
            x = x + (y / y.detach().abs().max().item() if i == 0 else y)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def tied() -> Deep:
    """A model whose first and last stage have the same words."""
    model = Deep()
    model.head.weight = model.words.weight
    return model


def frozen() -> Deep:
    """A model of which the head alone is trained: no gradient travels between stages."""
    model = Deep()
    model.words.requires_grad_(False)
    model.layers.requires_grad_(False)
    return model


def microbatches(counts: Sequence[int], lengths: tuple[int, ...] = (5,)) -> list[Any]:
    """Steps of so many microbatches of three rows, of these lengths in turn."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for count in counts:
        ids = [torch.randint(0, VOCABULARY, (3, lengths[i % len(lengths)]), generator=generator) for i in range(count)]
        steps.append([{"input_ids": part, "labels": part} for part in ids])
    return steps


@dataclass(frozen=True)
class Compared:
    """A training with graphs beside the one without.

    Attributes:
        is_equal: whether losses and weights are, to the bit.
        graphs: of the rank after each step, then at the end.
        slots: of the rank's stages, by the schedule of each step.
        figures: of the graphs at the end.
    """

    is_equal: bool
    graphs: list[int]
    slots: list[int]
    figures: Any


def compare(
    counts: Sequence[int],
    plan: dict[str, Any],
    lengths: tuple[int, ...] = (5,),
    build: Callable[[], nn.Module] = Deep,
    alike: bool = False,
    impl: str = "partial",
    **more: Any,
) -> Compared:
    """Trains on each rank.

    Args:
        counts: of microbatches, of each step.
        lengths: of microbatches, in turn.
        build: makes the model.
        alike: puts the memory of all slots into one pool, as a wrong allocation would.
        impl: of the graphs.
        more: options of `train`.
    """
    graphs: list[int] = []

    def count(model: fxpar.ParallelModule, step: int) -> None:
        for line in symmetric_buffer._OPEN.values():
            line.poisons = True  # what came is overwritten when it was read
        if model.graph_figures is not None and step:
            graphs.append(model.graph_figures.graphs)

    def trained(impl: str) -> Trained:
        options = {"evaluate": 0, **plan, **more}
        return train(build, microbatches(counts, lengths), impl, touch=count, **options)

    plain = trained("none")
    assert len(set(plain.losses)) == len(plain.losses)  # masks differ from step to step
    with pytest.MonkeyPatch.context() as patch:
        if alike:
            patch.setattr(graph_cache, "new_pool", partial(_SharedMemory, []))
        graphed = trained(impl)
    place = fxpar.Plan(**plan).mesh.coordinates(dist.get_rank())["pp"]
    proofs = [schedule_of(fxpar.Plan(**plan), count) for count in counts]
    slots = [sum(proof.slots[place]) for proof in proofs]
    return Compared(plain == graphed, [*graphs, graphed.figures.graphs], slots, graphed.figures)


class _SharedMemory(StandInPool):
    """A pool with the memory of others, which knows of its own flight alone."""

    def __init__(self, tapes: list[Tape], device: torch.device) -> None:
        super().__init__()
        self.tapes = tapes


def refused(count: int) -> tuple[str, bool]:
    """What is said of a second set of shapes where one is admitted; whether all other steps are as without graphs."""
    losses: list[list[float]] = []
    text = ""
    for graphs in (fxpar.CudaGraphs(), fxpar.CudaGraphs("partial", variants=1)):
        torch.manual_seed(0)
        steps = microbatches([count] * 4)
        model = fxpar.parallelize(Deep().train(), fxpar.Plan(pp=2, cuda_graphs=graphs), steps[0][0])
        losses.append([])
        for batch in steps:
            losses[-1].append(float(model.train_step(batch)))
            if graphs.is_on:
                with pytest.raises(InputError) as caught:
                    model.train_step([*batch[:-1], {name: value[:, :3] for name, value in batch[-1].items()}])
                text = caught.value.reason
        model.close()
    return text, losses[0] == losses[1]


def refused_by_one() -> tuple[str, bool]:
    """What is said of a step that has one variant too many on the last rank alone; as `refused` else.

    There the step has variants without an optimizer's state and with it. The first rank trains nothing.
    """
    losses: list[list[float]] = []
    text = ""
    for graphs in (fxpar.CudaGraphs(), fxpar.CudaGraphs("full_iteration", variants=2)):
        torch.manual_seed(0)
        steps = microbatches([2] * 5)
        model = fxpar.parallelize(frozen().train(), fxpar.Plan(pp=2, cuda_graphs=graphs), steps[0][0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses.append([])
        for i, batch in enumerate(steps):
            losses[-1].append(float(model.train_step(batch, optimizer=optimizer, max_norm=1.0)))
            if graphs.is_on and i:
                with pytest.raises(InputError) as caught:
                    model.train_step(batch[:1], optimizer=optimizer, max_norm=1.0)
                text = str(caught.value)
        model.close()
    return text, losses[0] == losses[1]


def uncaptured() -> list[tuple[str, str, str, str]]:
    """What two steps and then two forwards say of a value that the first stage reads on the host."""
    (batch,) = microbatches([2])
    plan = fxpar.Plan(pp=2, cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    model = fxpar.parallelize(Reading().train(), plan, batch[0], timeout=60)
    said = [refusal(lambda: model.train_step(batch)) for _ in range(2)]
    with torch.no_grad():
        said += [refusal(lambda: model(**batch[0])) for _ in range(2)]
    model.close()
    return said


def broken_recording(odd: int) -> list[str]:
    """What three steps say, of which one rank alone cannot record its stages at the end of the first."""
    (batch,) = microbatches([2])
    plan = fxpar.Plan(pp=2, cuda_graphs=fxpar.CudaGraphs("partial"))
    model = fxpar.parallelize(Deep().train(), plan, batch[0], timeout=60)

    def refuse(step: StageStep) -> None:
        raise InputError("a graph cannot hold what the step does", where="cuda_graphs", remedy="none")

    texts = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == odd:
            patch.setattr(StageStep, "record", refuse)
        for _ in range(3):
            try:
                texts.append(f"loss {float(model.train_step(batch)):.2f}")
            except FxparError as error:
                texts.append(f"{type(error).__name__}: {error}")
    model.close()
    return texts


def uneven(impl: str) -> list[list[float]]:
    """The gradients of each step, in which two data ranks bring other numbers of rows, and what evaluations give."""
    torch.manual_seed(0)
    steps = microbatches([2] * 5)
    model = fxpar.parallelize(
        Deep().train(), fxpar.Plan(pp=2, dp=2, cuda_graphs=fxpar.CudaGraphs(impl)), steps[0][0], timeout=60
    )
    found = []
    # Two numbers of rows in turn: a graph of one must not read what is there of the other.
    for i, batch in enumerate(steps):
        rows = (3, 1 + i % 2)[model.world.coordinates["dp"]]
        part = [{name: value[:rows] for name, value in microbatch.items()} for microbatch in batch]
        model.train_step(part)
        found.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        with torch.no_grad():
            found.append([float(model(**part[0])["loss"])])
    figures = model.graph_figures
    found.append([] if figures is None else [figures.graphs])
    model.close()
    return found


def crowded() -> str:
    """What is said where a channel has one place and several messages under way."""
    plan = fxpar.Plan(pp=2, schedule="gpipe", communication=fxpar.Communication("copy"))
    (batch,) = microbatches([4])
    model = fxpar.parallelize(Deep().train(), plan, batch[0], timeout=60)
    order = schedule_of(plan, len(batch))
    vars(order)["receipts"] = replace(order.receipts, depths=dict.fromkeys(order.receipts.depths, 1))
    executor: Any = model._runner.pipeline
    executor._orders[len(batch)] = order
    with pytest.raises(FxparError) as caught:
        model.train_step(batch)
    return caught.value.reason
