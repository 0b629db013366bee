"""What the ranks of a test world do with Muon, and the same on one process with a plain loop over whole matrices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.optim.muon import Muon
from fxpar.runtime import matrix_exchange
from fxpar.runtime.sharded import Sharded, local_of
from tests.cudagraphs import graphed
from tests.runtime import jobs
from tests.runtime.jobs import Found
from tests.zoo import CASES, VOCABULARY

ROWS, LENGTH = 8, 6
RATE = 0.02
Plan = Mapping[str, Any]

MODELS: dict[str, Callable[[], nn.Module]] = {
    # A padded table of words, Conv1D, and q, k and v in one weight.
    "gpt2": CASES["gpt2"].model,
    # Four heads of keys for eight of queries; and two for four, which four ranks share.
    "llama": CASES["llama"].model,
    "shared heads": graphed.llama,
    # Weights of experts in three dimensions.
    "mixtral": graphed.mixtral,
}


class LoopOverMatrices(Optimizer):
    """Muon as it is defined, in the type of the parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": RATE, "nesterov": True, "adjust_lr_fn": None, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.copy_(0.95 * momentum + 0.05 * p.grad)
                update = 0.05 * p.grad + 0.95 * momentum if group["nesterov"] else momentum
                p.mul_(1 - group["lr"] * 0.1)
                for weight, matrix in zip(p.view(-1, *p.shape[-2:]), update.view(-1, *p.shape[-2:]), strict=True):
                    weight -= group["lr"] * _ratio(matrix.shape, group["adjust_lr_fn"]) * orthogonal(matrix)


def _ratio(shape: torch.Size, how: str | None) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if how else max(1.0, rows / columns) ** 0.5


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of the polynomial. It is odd: a tall matrix need not be transposed."""
    x = matrix.double() / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x.to(matrix.dtype)


# ---------------------------------------------------------------------- models


def module(name: str, plan: Plan) -> ParallelModule:
    """A model under a plan as if it were new; on one process under a plan of one rank. In float64 where it can be."""

    def build() -> ParallelModule:
        torch.manual_seed(3)
        model = MODELS[name]().train()
        options = dict(plan) if dist.is_initialized() else {}
        rows = ROWS // options.get("dp", 1)
        example = {key: value[:rows] for key, value in batches()[0].items()}
        return fxpar.parallelize(model if name == "mixtral" else model.double(), fxpar.Plan(**options), example)

    return jobs.kept(("muon", name, *map(str, plan.items())), build)


def batches() -> list[dict[str, Tensor]]:
    """Two microbatches of all ranks, some of whose rows count few words."""
    ids = torch.randint(0, VOCABULARY - 3, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, :3, 2:] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(2)]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim > 1]


def muon(model: nn.Module, **options: Any) -> Optimizer:
    """Muon in float64; on one process the plain loop."""
    if not dist.is_initialized():
        return LoopOverMatrices(matrices(model), **options)
    optimizer = Muon(matrices(model), lr=RATE, **options)
    optimizer.ns_dtype = torch.float64
    return optimizer


def step_on_drawn(model: nn.Module, optimizer: Optimizer, first: int, last: int, only: str = "") -> None:
    """Steps on gradients that are drawn, the same for all ranks: what differs is Muon's alone.

    Args:
        only: the parameter that has a gradient; all matrices by default.
    """
    for step in range(first, last):
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = gradient if p.ndim > 1 and only in ("", name) else None
        optimizer.step()


# ---------------------------------------------------------------------- jobs


def stepped(name: str, plan: Plan, options: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The state after four steps with each of some options."""
    found = []
    for some in options:
        model = module(name, plan)
        step_on_drawn(model, muon(model, **some), 0, 4)
        assert not [name for name, p in model.named_parameters() if _has_padding(p)]
        found.append(model.full_state_dict())
    return found


def _has_padding(parameter: Tensor) -> bool:
    """Whether something was written to a rank's padding."""
    if not isinstance(parameter, Sharded):
        return False
    part = local_of(parameter).clone()
    for box in parameter.place.boxes:
        box.within(part).zero_()
    return bool(part.any())


def one_at_first(name: str, plan: Plan, parameter: str) -> dict[str, Tensor]:
    """The state after steps in which one parameter has a gradient, and then all have."""
    model = module(name, plan)
    optimizer = muon(model)
    step_on_drawn(model, optimizer, 0, 2, parameter)
    step_on_drawn(model, optimizer, 2, 4)
    return model.full_state_dict()


def train(name: str, plan: Plan) -> Found:
    """Steps of two microbatches with dropout, SGD for vectors, and a rate that is a tensor in the end."""
    model = module(name, plan)
    optimizer = muon(model)
    vectors = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=RATE)
    parts = fxpar.shard_batch(batches(), model)
    losses = []
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["lr"] = torch.tensor(RATE / 2)
        losses.append(float(model.train_step(parts)))
        optimizer.step()
        vectors.step()
        model.zero_grad()
    return {"losses": losses, "state": model.full_state_dict()}


def counted(name: str, plan: Plan) -> Found:
    """What a rank has of momenta, computes and sends in a step."""
    model = module(name, plan)
    optimizer: Any = muon(model)
    step_on_drawn(model, optimizer, 0, 1)
    exchange: matrix_exchange.MatrixExchange = optimizer._exchange[1]
    work = sum(exchange.matrices[n].parts.flops for stack in exchange.stacks for n in stack.matrices)
    rank = dist.get_rank()
    return {
        "momenta": sum(local_of(optimizer.state[p]["momentum_buffer"]).numel() for p in matrices(model)),
        "parts": sum(local_of(p).numel() for p in matrices(model)),
        "work": work,
        "sent": [
            sum(count for other, count in enumerate(route.sent) if other != rank)
            for route in (exchange.collect, exchange.distribute)
        ],
        "elements": sum(p.numel() for p in matrices(model)),
        "owners": exchange.owners,
    }


def replayed(name: str, plan: Plan) -> Found:
    """Losses and state of a training with Muon in its step, with graphs and without, as the rate falls."""
    found: Found = {}
    for graphs in ("none", "full_iteration"):
        model = module(name, {**plan, "cuda_graphs": fxpar.CudaGraphs(graphs)})
        optimizer: Any = Muon(matrices(model), lr=RATE)
        parts = fxpar.shard_batch(batches(), model)
        losses = []
        for step in range(5):
            optimizer.param_groups[0]["lr"] = RATE / (step + 1)
            losses.append(float(model.train_step(parts, optimizer=optimizer, max_norm=0.5)))
        figures = model.graph_figures
        found[graphs] = losses, model.full_state_dict(), 0 if figures is None else figures.graphs
    return found


def saved(folder: Path, name: str, plan: Plan) -> dict[str, Tensor]:
    """Saves a training after two steps; the state after two more."""
    model = module(name, plan)
    optimizer = muon(model)
    step_on_drawn(model, optimizer, 0, 2)
    model.save_training(folder, optimizer)
    step_on_drawn(model, optimizer, 2, 4)
    return model.full_state_dict()


def resumed(folder: Path, name: str, plan: Plan) -> dict[str, Tensor]:
    """The state after two steps that follow a save."""
    model = module(name, plan)
    optimizer = muon(model, momentum=0.5, weight_decay=0.3)  # the save has others
    model.resume_training(folder, optimizer)
    step_on_drawn(model, optimizer, 2, 4)
    return model.full_state_dict()


def refused(name: str, plan: Plan) -> Found:
    """What wrong uses are told."""
    model, other = module(name, plan), fxpar.parallelize(nn.Linear(4, 4), fxpar.Plan(**plan), torch.randn(4, 4))
    vector = next(p for p in model.parameters() if p.ndim == 1)
    several = Muon([*matrices(model), *matrices(other)])
    reversed_on_one = Muon(matrices(model)[:: -1 if dist.get_rank() else 1])
    for p in (*model.parameters(), *other.parameters()):
        p.grad = torch.zeros(p.shape, dtype=p.dtype)
    return {
        "vector": jobs.refusal(lambda: Muon([vector])),
        "several modules": jobs.refusal(several.step),
        "order": jobs.refusal(reversed_on_one.step),
        "torch's": jobs.refusal(torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]).step),
    }
