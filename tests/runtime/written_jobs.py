"""What ranks of a test world do with models whose forward writes buffers, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.runtime.sharded import whole_of

Found = dict[str, Any]
STEPS, MICROBATCHES, ROWS = 2, 2, 6


class ConvNet(nn.Module):
    """Convolutions with norms of the batch, the second under the author's checkpoint, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body, self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        h = functional.relu(self.norm(self.stem(x)))
        h = self.again(checkpoint(self.body, h, use_reentrant=False))
        return self.head(h.mean((2, 3))).square().mean()


class Codebook(nn.Module):
    """Vector quantisation by a codebook that follows what it stands for."""

    embed: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("embed", torch.randn(5, 6))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.embed.clone())

    def forward(self, x: Tensor) -> Any:
        h = self.up(x).flatten(0, 1)
        distances = h.square().sum(1, keepdim=True) - 2 * h @ self.embed.t() + self.embed.square().sum(1)
        code = functional.one_hot(distances.argmin(1), 5).to(h.dtype)
        chosen = code @ self.embed
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.8).add_(code.sum(0), alpha=0.2)
                self.sums.mul_(0.8).add_(code.t() @ h, alpha=0.2)
                self.embed.copy_(self.sums / self.sizes.clamp(min=1e-3).unsqueeze(1))
        loss = (h - chosen.detach()).square().mean()
        return self.down(h + (chosen - h).detach()).square().mean() + loss


class Counted(nn.Module):
    """A router that counts the tokens of its experts, as torchtitan's does, and steps."""

    counts: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        scores = self.router(h).sigmoid()
        top = scores.topk(1, -1)
        counts = functional.one_hot(top.indices.flatten(), 3).to(h.dtype).sum(0)
        with torch.no_grad():
            self.counts.add_(counts)
        self.steps += 1
        return (h * top.values).square().mean() / self.steps


KINDS: dict[str, type[nn.Module]] = {"convnet": ConvNet, "codebook": Codebook, "counted": Counted}


def model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[kind]().double()


def batches(kind: str) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shape = (ROWS, 3, 4, 4) if kind == "convnet" else (ROWS, 5, 4)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(MICROBATCHES)]
        for _ in range(STEPS + 1)
    ]


def alone(kind: str) -> Found:
    """Steps of the plain module, then a call without gradients, in training and in evaluation."""
    own, (*steps, (last, _)) = model(kind), batches(kind)
    losses = []
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        for each in step:
            loss = own(each) / len(step)
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
    with torch.no_grad():
        losses += [float(own(last)), float(own.eval()(last))]
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return {"losses": losses, "buffers": dict(own.named_buffers()), "gradients": gradients}


def split(kind: str, plan: fxpar.Plan) -> Found:
    """The same on the ranks of a plan."""
    (first, *rest) = batches(kind)
    rows = ROWS // plan.dp
    own = fxpar.parallelize(model(kind), plan, first[0][:rows])
    *steps, (last, _) = [first, *rest]
    losses = [float(own.train_step([fxpar.shard_batch(each, own) for each in step])) for step in steps]
    with torch.no_grad():
        shared = fxpar.shard_batch(last, own)
        losses += [float(own(shared)), float(own.eval()(shared))]
    gradients = {name: whole_of(p.grad).clone() for name, p in own.named_parameters() if p.grad is not None}
    buffers = {name: value.clone() for name, value in own.named_buffers()}
    saved = own.full_state_dict()
    return {"losses": losses, "buffers": buffers, "gradients": gradients, "saved": saved}
