"""What the ranks of a test world do with batches of other lengths and row counts, and one process with all of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.cli.models import load_model
from fxpar.errors import FxparError
from fxpar.ir.program import output_layouts
from fxpar.ir.step import output_of, parameter_gradients
from fxpar.layout.shards import local_block
from fxpar.mesh.axes import coordinates
from fxpar.ops.lower import lower
from fxpar.runtime.rank_consensus import connected
from fxpar.runtime.world import join
from fxpar.verify.reference_program import promote
from fxpar.verify.simulate_ranks import step_of
from fxpar.verify.values import rng_state
from tests.models.test_data_parallel import compiled, reference

Found = dict[str, Any]
ROWS = {2: (3, 1), 3: (1, 3, 2), 4: (1, 3, 2, 2)}
LENGTHS = {2: (11, 16), 3: (16, 12, 9), 4: (12, 16, 8, 16)}


def parts(name: str, dp: int, count: int = 1) -> list[list[Any]]:
    """Microbatches, and of each what every data rank brings."""
    example = load_model(f"hf:{name}", 3, None, 0, True).batch
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(count):
        rows, lengths = ROWS[dp][index % dp :] + ROWS[dp][: index % dp], LENGTHS[dp]
        order = torch.cat([torch.randperm(3, generator=generator) for _ in range(math.ceil(sum(rows) / 3))])
        whole = {key: value[order[: sum(rows)]].clone() for key, value in example.items()}
        whole["attention_mask"] = torch.ones_like(whole["input_ids"])
        whole["labels"][0, 3:] = -100
        split = [{key: value.split(rows)[r] for key, value in whole.items()} for r in range(dp)]
        found.append([{k: v[:, :n].clone() for k, v in part.items()} for part, n in zip(split, lengths, strict=True)])
    return found


def joined(part: list[Any]) -> Any:
    """The padded concatenation of what the data ranks bring."""
    length = max(value["input_ids"].shape[1] for value in part)
    fills = {"labels": -100}
    return {
        key: torch.cat(
            [nn.functional.pad(p[key], (0, length - p[key].shape[1]), value=fills.get(key, 0)) for p in part]
        )
        for key in part[0]
    }


def train(name: str, tp: int, dp: int, count: int, steps: int, options: dict[str, Any]) -> Found:
    """AdamW steps with dropout; on one process, of the concatenations."""
    loaded = load_model(f"hf:{name}", 3, None, 0, True)
    micro = parts(name, dp, count)
    is_alone = not dist.is_initialized()
    plan = fxpar.Plan(**{k: v for k, v in options.items() if k == "loss_reduction"})
    if not is_alone:
        plan = fxpar.Plan(tp=tp, dp=dp, **options)
    mine = 0 if is_alone else dist.get_rank() // tp
    own: Any = [joined(part) if is_alone else part[mine] for part in micro]
    example = joined(micro[0])
    example = {key: value[:2] for key, value in example.items()}
    model = fxpar.parallelize(loaded.model, plan, example, loaded.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model.train_step(own if count > 1 else own[0]).item())
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
    return {"losses": losses, "norms": norms, "state": model.full_state_dict()}


def deviation(name: str, tp: int, dp: int, sequence: bool, rows: tuple[int, ...]) -> tuple[float, float]:
    """Of the loss, and of the worst gradient over the largest, in float64, where data ranks bring other row counts."""
    plan = fxpar.Plan(tp=tp, dp=dp, sequence_parallel=sequence)
    world = join(plan, connected(60.0))
    program = promote(step_of(compiled(name, plan)))
    state, inputs, wanted = reference(name)
    lowered = lower(program, world.groups, uneven_rows=True)
    axes, place = program.axes, coordinates(program.axes, dist.get_rank())
    layouts = {node.name: output_layouts(node)[0] for node in program.graph.nodes if node.op == "placeholder"}
    before = sum(rows[: place["dp"]])
    values = dict[str, Tensor]()
    for parameter in program.parameters:
        value = {**program.constants, **state}[parameter.fqn]
        value = value.double() if value.is_floating_point() else value
        values[parameter.node] = local_block(value, layouts[parameter.node], axes, place).clone()
    for entry in program.inputs:
        value = torch.ones(()) if output_of(entry.path) else inputs.get(entry.path, rng_state())
        cut = layouts[entry.node].on("dp")
        if cut.is_shard:
            value = value.narrow(cut.dim, before, rows[place["dp"]])
        values[entry.node] = value.double() if value.is_floating_point() else value
    indices = [torch.tensor(place[axis]) for axis in lowered.indices]
    counts = [torch.tensor(sum(rows)), torch.tensor(before)]
    results = lowered.module(*[values[n] for n in lowered.inputs], *indices, *counts)
    found = dict(zip(program.outputs, results, strict=True))
    gradients = parameter_gradients(program)
    largest = max(float(g.abs().max()) for g in wanted.gradients.values())
    worst = 0.0
    for parameter in program.parameters:
        whole = wanted.gradients.get(parameter.fqn)
        mine = found.get(gradients.get(parameter.fqn, ""))
        if whole is not None and mine is not None:
            gap = mine - local_block(whole, layouts[parameter.node], axes, place)
            worst = max(worst, float(gap.abs().max()) / largest)
        elif (whole is None) != (mine is None):
            worst = float("inf")
    return abs(float(found[program.loss] - wanted.outputs[program.loss])), worst


class Pooled(nn.Module):
    """Scores of the mean over words, padding or not; by the number of rows, or with the numbers of rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.words, self.head = kind, nn.Embedding(9, 8), nn.Linear(8, 5)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        logits = self.head(self.words(ids).mean(1))
        if self.kind == "numbered":
            logits = logits + torch.arange(ids.shape[0]).unsqueeze(1)
        if self.kind == "ones":
            mean: Tensor = logits.square().sum() / torch.ones(ids.shape[0]).sum()
            return mean
        if self.kind == "filled":
            filled: Tensor = logits * torch.full((ids.shape[0], 1), ids.shape[0])
            return filled.square().mean()
        if self.kind == "branch" and ids.shape[0] > 5:
            logits = 100 * logits
        if self.kind == "zero":
            logits = logits * self.gate
        if self.kind == "divided":
            return nn.functional.cross_entropy(logits, y, reduction="sum") / (ids.shape[0] + 1)
        return nn.functional.cross_entropy(logits, y)


class Weighed(nn.Module):
    """A loss with a number and class weights that the batch brings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor, n: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.up(x), y, reduction="sum") / n


class Scaled(nn.Module):
    """A loss with floating numbers of the rows and of the length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        rows, length = x.shape[:2]
        hidden = self.down((self.up(x.to(self.up.weight)) * length**-0.5).relu()) + 1 / rows
        loss: Tensor = hidden.square().sum() * (1.0 / rows) + hidden.sum() / math.sqrt(rows * length) / (rows / 2)
        return loss


def scaled(tp: int, is_compiled: bool, precision: str) -> tuple[list[float], Found]:
    """Losses and weights of steps of which each brings other numbers of rows; on one process those of all."""
    is_alone = not dist.is_initialized()
    plan = (
        fxpar.Plan(precision=precision)
        if is_alone
        else fxpar.Plan(tp=tp, dp=2, sequence_parallel=tp > 1, compile=is_compiled, precision=precision)
    )
    generator = torch.Generator().manual_seed(3)
    model = fxpar.parallelize(Scaled(), plan, torch.randn(4, 6, 4, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for rows in ((2, 2), (3, 1), (2, 4)):
        parts = torch.randn(sum(rows), 6, 4, generator=generator).split(rows)
        optimizer.zero_grad()
        losses.append(model.train_step(torch.cat(parts) if is_alone else parts[dist.get_rank() // tp]).item())
        optimizer.step()
    return losses, model.full_state_dict()


def attempt(model: ParallelModule, own: Any) -> tuple[str, str]:
    """Where and why a step is refused; empty texts where it is not."""
    try:
        model.train_step(own)
    except FxparError as error:
        return error.where, error.reason
    return "", ""


def more_refusals() -> list[tuple[str, str]]:
    """Where and why batches are refused whose result would be none of the concatenation's."""
    rank, found = dist.get_rank(), []
    plan, rows = fxpar.Plan(dp=2), (3, 2)

    def batch(n: int, length: int = 6, targets: int = 0) -> dict[str, Tensor]:
        ids = torch.ones(n, length, dtype=torch.long)
        return {"ids": ids, "y": torch.zeros(targets or n, dtype=torch.long)}

    for kind in ("ones", "filled", "branch"):
        found.append(attempt(fxpar.parallelize(Pooled(kind), plan, batch(4)), batch(rows[rank])))
    found.append(attempt(fxpar.parallelize(Pooled("zero"), plan, batch(2)), batch(2, 5 + rank)))
    found.append(attempt(fxpar.parallelize(Pooled("pooled"), plan, batch(2)), batch(3 - rank, 6, 3)))
    weighed = fxpar.parallelize(
        Weighed(), plan, {"x": torch.ones(2, 4), "y": torch.zeros(2, dtype=torch.long), "n": torch.tensor(4.0)}
    )
    for n in (4.0, 4.0 + rank):
        found.append(
            attempt(weighed, {"x": torch.ones(2, 4), "y": torch.zeros(2, dtype=torch.long), "n": torch.tensor(n)})
        )
    return found


def refusals() -> list[tuple[str, str]]:
    """Where and why batches of other sizes are refused on two data ranks."""
    rank, found = dist.get_rank(), []
    rows, lengths = (3, 2), (7, 5)

    def batch(n: int, length: int) -> dict[str, Tensor]:
        return {"ids": torch.ones(n, length, dtype=torch.long), "y": torch.zeros(n, dtype=torch.long)}

    plan = fxpar.Plan(dp=2)
    pooled = fxpar.parallelize(Pooled("pooled"), plan, batch(2, 6))
    found.append(attempt(pooled, batch(2, lengths[rank])))
    found.append(attempt(pooled, batch(rows[rank], 6)))
    for kind in ("divided", "numbered"):
        model = fxpar.parallelize(Pooled(kind), plan, batch(2, 6))
        found.append(attempt(model, batch(2, 6)))
        found.append(attempt(model, batch(rows[rank], 6)))
    said = fxpar.parallelize(Pooled("pooled"), plan.replace(pad_values={"ids": 0}), batch(2, 6))
    found.append(attempt(said, batch(2, lengths[rank])))
    return found
