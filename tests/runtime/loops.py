"""What training scripts do to a model: on the parallel module it is as on the plain one, or refused by name.

Each row is a function of a model and a batch. It runs on a plain copy and on the parallel module; what it returns, and
the weights, modes and frozen parameters behind it, must be alike, or the row says that it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import FxparError
from fxpar.runtime.parameters import Elsewhere
from fxpar.runtime.sharded import whole_of
from tests.runtime.jobs import kept

Action = Callable[[Any, Any], Any]
PLANS = {
    "tp": fxpar.Plan(tp=2),
    "dp": fxpar.Plan(dp=2),
    "pp": fxpar.Plan(pp=2, microbatches=2),
}
VOCABULARY, WIDTH = 16, 8


class Block(nn.Module):
    """A layer whose parts are in a `Sequential`."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Dropout(0.0), nn.Linear(12, WIDTH))
        self.checkpointing = False

    def extra_repr(self) -> str:
        return f"gain={self.gain}"

    def forward(self, x: Tensor) -> Tensor:
        residual = (
            checkpoint(self.mlp, self.norm(x), use_reentrant=False) if self.checkpointing else self.mlp(self.norm(x))
        )
        return residual + x * self.gain * getattr(self, "damping", 1.0)  # type: ignore[no-any-return]


class Registry(nn.Module):
    """A base whose subclasses are entered by name, and which wants an argument of them."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Registry.known[kind] = cls


class Model(Registry, kind="language model"):
    """A language model with all of torch's containers, tied words, and methods as authors write them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=WIDTH, layers=3, use_cache=False)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"words": nn.Linear(WIDTH, VOCABULARY, bias=False)})
        self.heads["words"].weight = self.embed.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.rand(WIDTH))])
        self.biases = nn.ParameterDict({"last": nn.Parameter(torch.rand(WIDTH))})
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.decayed = [p for p in self.parameters() if p.dim() > 1]
        self.history: list[float] = []

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) * self.scales[0] + self.shift
        for block in self.blocks:
            x = block(x)
        x = self.norm(x * self.scales[1] + self.biases["last"])
        logits = self.heads["words"](x)
        return {"logits": logits, "loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)

    def encode(self, ids: Tensor) -> Tensor:
        return self.norm(self.embed(ids))  # type: ignore[no-any-return]

    def gradient_checkpointing_enable(self) -> None:
        for block in self.blocks:
            block.checkpointing = True  # type: ignore[assignment]


@dataclass(frozen=True)
class Row:
    """Something that a script does.

    Attributes:
        refused: a part of the error's text; empty where it is as on the plain model.
        joined: whether ranks of a pipeline give a part each, of a set.
        places: the plans under which it is looked at.
    """

    action: Action
    refused: str = ""
    joined: bool = False
    places: tuple[str, ...] = ("tp", "dp", "pp")


ROWS: dict[str, Row] = {}


def row(
    refused: str = "", joined: bool = False, places: tuple[str, ...] = ("tp", "dp", "pp")
) -> Callable[[Action], Action]:
    """Enters a function into the table, under its name."""

    def enter(action: Action) -> Action:
        ROWS[action.__name__] = Row(action, refused, joined, places)
        return action

    return enter


def step(model: nn.Module, batch: Any) -> float:
    """The loss of forward and backward of a batch, the rows of which data ranks share."""
    if isinstance(model, ParallelModule):
        return float(model.train_step(fxpar.shard_batch(batch, model)))
    loss = model(**batch)["loss"]
    loss.backward()
    return float(loss.detach())


def build() -> Model:
    torch.manual_seed(3)
    return Model().train()


def batch() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (4, 7), generator=made)
    return {"ids": ids[:, :-1], "targets": ids[:, 1:]}


# ---------------------------------------------------------------------- the job


def run(kind: str) -> dict[str, tuple[str, Any]]:
    """What became of each row: "same", "refused" with the error's text, "parts" of a rank, or what differs."""
    model = kept(("loops", kind), lambda: fxpar.parallelize(build(), PLANS[kind], batch()))
    return {name: _outcome(each, model) for name, each in ROWS.items() if kind in each.places}


def _outcome(each: Row, model: ParallelModule) -> tuple[str, Any]:
    plain, before = build(), model.full_state_dict()
    expected = None if each.refused else _plain(each.action(plain, batch()))
    try:
        value = _plain(each.action(model, batch()))
        differing = _differing(model, plain)
    except FxparError as error:
        return "refused", str(error)
    finally:
        _again(model, before)
    if each.joined:
        return "parts", (value, expected)
    if value != expected:
        return "other value", (value, expected)
    return ("same", None) if not differing else ("other model", differing)


def _again(model: ParallelModule, state: dict[str, Tensor]) -> None:
    model.train()
    model.requires_grad_(True)
    model.zero_grad()
    model.step = 0
    with torch.no_grad():
        model.load_full_state_dict(state)


def _differing(model: ParallelModule, plain: nn.Module) -> list[str]:
    """Names of what an action left otherwise on the two."""
    state = model.full_state_dict()
    odd = [n for n, value in plain.state_dict().items() if not torch.allclose(state[n], value, rtol=1e-5, atol=1e-6)]
    frozen = {n for n, p in plain.named_parameters() if not p.requires_grad}
    odd += [n for n, p in model.named_parameters() if p.requires_grad == (n in frozen)]
    odd += [
        n
        for (n, m), (_, o) in zip(model.named_modules(), plain.named_modules(), strict=True)
        if m.training != o.training
    ]
    return odd


def _plain(value: Any) -> Any:
    """A value that can be compared: tensors whole and rounded."""
    if isinstance(value, Elsewhere):
        return "elsewhere"
    if isinstance(value, Tensor):
        return [round(x, 4) for x in whole_of(value).detach().flatten().tolist()]
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
