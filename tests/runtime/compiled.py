"""What the ranks of a test world do with compiled programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import fxpar
from fxpar.cost.seconds import travels
from fxpar.experts.operators import sent_rows
from fxpar.ir.regions import inlined
from fxpar.ops.collectives import sum_gradients
from fxpar.torch_internals import is_fake
from tests.cudagraphs import graphed
from tests.runtime import models
from tests.runtime.jobs import Found, gradients, tp
from tests.zoo import CASES, step_of


class Seen(CustomGraphPass):
    """Counts the operations of each graph that Inductor compiles."""

    def __init__(self) -> None:
        self.graphs: list[Counter[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs.append(Counter(str(node.target) for node in graph.nodes))

    def uuid(self) -> None:
        """Nothing is taken from a cache."""
        return


def watched(seen: Seen, vectorized: bool = True) -> AbstractContextManager[Any]:
    """Inductor in this process, its graphs counted.

    Args:
        vectorized: makes vector code too, which is most of what Inductor takes its time for.
    """
    patched: AbstractContextManager[Any] = config.patch(
        {"post_grad_custom_pre_pass": seen, "compile_threads": 1, "cpp.simdlen": None if vectorized else 1}
    )
    return patched


def batch_of(name: str) -> Any:
    """What a model is called with."""
    return models.batch() if name == "tiny" else CASES[name].example()


def module(name: str, **options: Any) -> fxpar.ParallelModule:
    """The tiny model, or a case of the zoo under a plan that names no weight."""
    if name == "tiny":
        return fxpar.parallelize(models.tiny(), models.plan(tp(), **options), models.batch())
    case = CASES[name]
    model: Any = case.model()
    if options.pop("checkpointed", False):
        model.gradient_checkpointing_enable()
    return fxpar.parallelize(model, fxpar.Plan(tp=tp(), **options), case.example(), case.loss)


def train(name: str, options: dict[str, Any]) -> Found:
    """Losses and gradients of two steps, eager and compiled, and the compiled graphs."""
    found: Found = {}
    for kind in ("eager", "compiled"):
        model = module(name, compile=kind == "compiled", **options)
        seen, batch = Seen(), batch_of(name)
        with watched(seen):
            losses = [float(model.train_step(batch)) for _ in range(2)]
        found[kind] = {"losses": losses, "gradients": gradients(model)}
    found["graphs"] = [dict(graph) for graph in seen.graphs]
    return found


def shapes(sizes: tuple[int, ...]) -> Found:
    """Evaluation at several sizes: outputs, eager and compiled, and how many graphs were compiled by then."""
    found: Found = {"eager": [], "compiled": [], "graphs": []}
    for kind in ("eager", "compiled"):
        model, seen = module("tiny", compile=kind == "compiled").eval(), Seen()
        with watched(seen, vectorized=False), torch.no_grad():
            for rows in sizes:
                ids = torch.arange(rows * 8).reshape(rows, 8) % models.VOCABULARY
                found[kind].append(model(ids=ids)["logits"])
                found["graphs"].append(len(seen.graphs))
    return found


class Deep(nn.Module):
    """Equal layers of some blocks with dropout, and a head."""

    def __init__(self, layers: int, blocks: int = 3) -> None:
        super().__init__()
        sizes = [(8, 16), (16, 8)] * blocks * layers
        self.linears = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(blocks * layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for i, norm in enumerate(self.norms):
            hidden = nn.functional.gelu(self.linears[2 * i](norm(x)))
            x = x + nn.functional.dropout(self.linears[2 * i + 1](hidden), 0.25, self.training)
        logits = self.head(x)
        return {"loss": logits.square().mean(), "logits": logits}


def lengths(sizes: list[tuple[int, int]], options: dict[str, Any] | None) -> Found:
    """Steps on batches of many sizes: losses and gradients, eager and compiled, and how many graphs there were.

    Args:
        options: of the plan, with layers of dropout, in vector code; without any the tiny model, in scalar code.
    """

    def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(rows * length).reshape(rows, length) * 7 % models.VOCABULARY
        if options is None:
            return {"ids": ids, "targets": ids.roll(1, 1)}
        return {"x": (ids[..., None] + torch.arange(8)).float().sin()}

    found: Found = {}
    for kind in ("eager", "compiled"):
        torch.manual_seed(0)
        if options is None:
            model = module("tiny", compile=kind == "compiled")
        else:
            model = fxpar.parallelize(Deep(2), fxpar.Plan(tp=tp(), compile=kind == "compiled", **options), batch(2, 4))
        seen = Seen()
        found[kind] = []
        found["graphs"] = []
        for rows, length in sizes:
            for parameter in model.parameters():
                parameter.grad = None
            with watched(seen, vectorized=options is not None):
                loss = float(model.train_step(batch(rows, length)))
            found[kind].append({"losses": [loss], "gradients": gradients(model)})
            found["graphs"].append(len(seen.graphs))
    return found


def beside(code: str) -> list[int]:
    """Of emitted code, for each collective in order how many products run between its start and its wait."""
    found: list[int] = []
    under_way: dict[str, int] = {}
    for line in code.splitlines():
        if "_c10d_functional.wait_tensor" in line:
            under_way = {name: index for name, index in under_way.items() if name not in line}
        elif "_c10d_functional." in line and "assert_" not in line:
            # In place, or into a buffer of its own.
            sent = re.search(r"^\s*(buf\d+) = ", line) or re.search(r"(buf\d+)", line)
            assert sent is not None, line
            under_way[sent[1]] = len(found)
            found.append(0)
        elif re.search(r"extern_kernels\.\w*mm\(|= torch\.ops\.fxpar\.placed_product", line):
            for index in under_way.values():
                found[index] += 1
    assert not under_way
    return found


def deep(sequence_parallel: bool) -> Found:
    """Losses and gradients of two equal layers, eager and compiled, how many graphs were compiled, and their order.

    The order is how many products are beside collectives, in the code that Inductor emits and in the program. The
    code is scalar: vectors change nothing of it.
    """
    found: Found = {}
    batch = {"x": torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))}
    codes: list[str] = []
    for kind in ("eager", "compiled"):
        torch.manual_seed(0)
        plan = fxpar.Plan(tp=tp(), sequence_parallel=sequence_parallel, compile=kind == "compiled")
        model, seen = fxpar.parallelize(Deep(2, 1), plan, batch), Seen()
        with watched(seen, vectorized=False):
            first, codes = run_and_get_code(model.train_step, batch)
            losses = [float(first), float(model.train_step(batch))]
        found[kind] = {"losses": losses, "gradients": gradients(model)}
    step = inlined(step_of(model.program))
    found["code"] = sorted({count for code in codes for count in beside(code)})
    found["program"] = sorted({len(each.beside) for each in travels(step)})
    return {**found, "graphs": len(seen.graphs)}


class Aside(nn.Module):
    """A norm that the loss does not reach, beside two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.aside = (nn.LayerNorm(8) for _ in range(3))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.second(x + self.down(torch.relu(self.up(self.first(x)))))
        return {"loss": h.square().mean(), "aside": self.aside(x)}


def without_gradient() -> Found:
    """The parameters that a step under sequence parallelism leaves without a gradient, eager and compiled."""
    found: Found = {}
    batch = {"x": torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))}
    for kind in ("eager", "compiled"):
        torch.manual_seed(0)
        plan = fxpar.Plan(tp=tp(), sequence_parallel=True, compile=kind == "compiled")
        model = fxpar.parallelize(Aside(), plan, batch)
        (bucket,) = (n for n in model.program.graph.nodes if n.target is sum_gradients)
        found["bucket"] = sorted(
            str(parameter.fqn) for parameter in map(model.program.parameter, bucket.args) if parameter
        )
        with config.patch(compile_threads=1):
            model.train_step(batch)
        found[kind] = sorted(name for name, p in model.named_parameters() if p.grad is None)
    return found


def variants() -> Found:
    """Steps on batches of one shape in many memory layouts, and the graphs they took."""
    model, losses, seen = module("tiny", compile=True), [], Seen()
    batch = models.batch()
    with watched(seen):
        for width in range(6, 16):
            wide = torch.zeros(batch["ids"].shape[0], width, dtype=torch.long)
            wide[:, : batch["ids"].shape[1]] = batch["ids"]
            losses.append(float(model.train_step({**batch, "ids": wide[:, : batch["ids"].shape[1]]})))
    return {"losses": losses, "graphs": len(seen.graphs)}


def dropless(build: Callable[[], nn.Module], options: dict[str, Any], lengths: tuple[int, ...]) -> Found:
    """A training of experts without drops, eager and compiled, on tokens of this rank alone.

    Returns:
        By kind losses and weights; how many graphs were compiled before each step and at the end; and how many rows
        came in each exchange.
    """
    rank = dist.get_rank()
    batches = [graphed.words(1, 1, 2, length, 10 * step + rank)[0] for step, length in enumerate(lengths)]
    plan = {"dp": 2, "ep": 2, "experts": fxpar.Experts("dropless"), **options}
    numbers, rows = sent_rows._numbers, set[tuple[int, ...]]()

    def counted(sizes: torch.Tensor, ranks: int, balanced: int) -> Any:
        sent, came, source = numbers(sizes, ranks, balanced)
        if not is_fake(sizes):
            rows.add(tuple(came))
        return sent, came, source

    seen, graphs = Seen(), list[int]()

    def count(model: fxpar.ParallelModule, step: int) -> None:
        graphs.append(len(seen.graphs))

    with watched(seen, vectorized=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent_rows, "_numbers", counted)
        eager = graphed.train(build, batches, **plan)
        compiled = graphed.train(build, batches, compile=True, touch=count, **plan)
    return {"eager": eager, "compiled": compiled, "graphs": [*graphs, len(seen.graphs)], "rows": rows}
