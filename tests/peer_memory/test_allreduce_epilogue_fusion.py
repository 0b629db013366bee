"""Sums in one shot take residual connections and norms into their call, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxpar.compile import compile_model, lower_program
from fxpar.ir.program import TensorType, note
from fxpar.layout.layout import Placement
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops import peer_copies
from fxpar.ops.process_group import Group
from fxpar.peer_memory.compiler.allreduce_epilogue_fusion import sums_in_rows
from fxpar.peer_memory.compiler.row_programs import Extent, RowProgram, RowStep, read
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Communication
from fxpar.runtime import inductor
from fxpar.runtime.compiled import CompiledUnits
from fxpar.runtime.inductor import Inductor
from tests import zoo
from tests.products import alternate, product
from tests.runtime.test_sent import NAME, Pair, pair
from tests.zoo import step_of

__all__ = ["pair"]  # a fixture

Step = Callable[..., list[Tensor]]
WIDTH = 24


def total(x: Tensor) -> Tensor:
    return peer_copies.sum_in_one_shot(x, NAME, 1)


def residual(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [(total(x) + b).view(r.shape) + r]


def layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    kept = (total(x) + b).view(r.shape) + r
    return [kept, F.layer_norm(kept, (WIDTH,), w, b, 1e-3) @ torch.outer(w, b)]


def native(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [*torch.native_layer_norm(total(x), (WIDTH,), w, b, 1e-3)]  # with what a backward takes


def rms_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """As Llama has it."""
    kept = r + total(x).view(r.shape)
    wide = kept.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)
    return [kept, w * wide.to(kept.dtype)]


def centred(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Unbiased, and a sum of the row."""
    held = total(x)
    return [held, (held - held.mean(-1, keepdim=True)) / held.std(-1, keepdim=True), held.sum(-1, keepdim=True)]


def functional_rms_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [F.rms_norm(total(x) + r.view(x.shape), (WIDTH,), w, 1e-3)]


def of_a_row(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Also takes a number of each row that was there before."""
    scale = r.view(x.shape).amax(-1, keepdim=True)
    return [total(x) * scale - r.view(x.shape)]


def gemma(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Its weight is one more; and what follows is a product."""
    kept = r + total(x).view(r.shape)
    wide = kept.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * (1.0 + w.to(torch.float32))
    return [kept, wide.to(kept.dtype) @ torch.outer(w, b)]


def trimmed(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Much can be computed with the sum that is better computed with what reads it."""
    kept = total(x) + r.view(x.shape)
    return [kept, (kept * 2).relu() + (kept * 3).relu() + (kept * 4).relu()]


def bias(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [(total(x) + b) * 3]


def bias_alone(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """What reads it reads as much as it would of the sum."""
    return [(total(x) + b).relu()]


def across(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Its strides are those of the residual, which no row has."""
    return [r.view(x.shape).t().contiguous().t() + total(x)]


def endless(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [(total(x) * float("inf")).relu()]


def of_another_type(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [total(x).sum(-1, keepdim=True, dtype=torch.float64)]


def twice(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Two sums, of which the second one takes what the first one's group gives."""
    first = total(x) + r.view(x.shape)
    second = peer_copies.sum_in_one_shot(F.layer_norm(first, (WIDTH,)) @ torch.outer(w, b), NAME, 2)
    return [F.layer_norm(second + first, (WIDTH,), w)]


def relu(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [total(x).relu() + r.view(x.shape)]


def over_columns(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [F.layer_norm(total(x).t(), (x.shape[0],))]


def later(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """What it is added to comes behind another sum."""
    held = total(x)
    other = peer_copies.sum_in_one_shot(r.view(x.shape), NAME, 2)
    return [held + other.relu()]


def positions(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """What is added is the same for each batch."""
    return [total(x).view(r.shape) + r[0]]


# How many results as large as the sum each call has.
TAKEN: list[tuple[Step, list[int]]] = [
    (residual, [1]),
    (layer_norm, [2]),
    (native, [1]),
    (rms_norm, [2]),
    (centred, [2]),
    (functional_rms_norm, [1]),
    (of_a_row, [1]),
    (gemma, [2]),
    (trimmed, [1]),
    (bias, [1]),
    (twice, [2, 1]),
    (relu, []),
    (bias_alone, []),
    (across, []),
    (endless, []),
    (of_another_type, []),
    (over_columns, []),
    (later, []),
    (positions, []),
]


def compiled(
    step: Step, values: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[Sequence[Tensor], list[int]]:
    """What the compiled step gives, and of each call that takes something how many results are as large as the sum."""
    taken: list[int] = []

    def counted(graph: Any) -> int:
        count = before(graph)
        for node in graph.nodes:
            if node.target in (torch.ops.fxpar.one_shot_rows.default, torch.ops.fxpar.taken_rows.default):
                program = read(node.args[-3])
                taken.append(sum(program.extent(i) is Extent.FULL for i in program.results))
        assert len(taken) == count
        return count

    before = sums_in_rows
    monkeypatch.setattr(inductor, "sums_in_rows", counted)
    with FakeTensorMode() as mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in values]
    with fresh_cache():
        run = Inductor(Plan()).alone(step, fakes, mode, backward=False)
    return run([*values]), taken


@product(step__count=TAKEN, dtype=[torch.float64, torch.bfloat16])
def test_what_is_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: Step, count: list[int], dtype: torch.dtype
) -> None:
    shapes = [(10, WIDTH), (2, 5, WIDTH), (WIDTH,), (WIDTH,)]
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    found, taken = compiled(step, values, monkeypatch)
    assert taken == count
    for own, other in zip(found, step(*values), strict=True):
        assert own.shape == other.shape
        assert own.dtype == other.dtype
        near = {torch.float64: 1e-12, torch.float32: 1e-2, torch.bfloat16: 6e-2}[own.dtype]
        torch.testing.assert_close(own, other, rtol=near, atol=near, equal_nan=True)


# The rest are of the matrix: what is taken is found by the same code.
BEGUN = [
    pytest.param(step, count, id=step.__name__, marks=() if step in (native, rms_norm, later) else pytest.mark.matrix)
    for step, count in TAKEN
]


@pytest.mark.parametrize(("step", "count"), BEGUN)
def test_what_is_taken_of_sums_that_copies_began(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: Step, count: list[int]
) -> None:
    def copies(x: Tensor) -> Tensor:
        return peer_copies.summed(peer_copies.start_sum(x, NAME, 1), NAME, 1)

    pair.size = 4
    monkeypatch.setitem(globals(), "total", copies)
    test_what_is_taken(pair, monkeypatch, step, count, torch.float64)
    assert len(pair.same) >= 2
    assert all(pair.same)


def test_nothing_behind_a_change(pair: Pair) -> None:
    """What is read there may not be what it was."""

    def step(x: Tensor, r: Tensor) -> Tensor:
        other = r * 1
        view = other.view(x.shape)
        held = total(x)
        other.mul_(2)
        return held + view

    values = torch.randn(10, WIDTH), torch.randn(2, 5, WIDTH)
    graph = make_fx(step)(*values)
    assert sums_in_rows(graph.graph) == 0


def test_one_that_lies_across(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.randn(WIDTH, 10).t(), torch.randn(5, 2, WIDTH).transpose(0, 1), torch.randn(WIDTH)]

    def step(x: Tensor, r: Tensor, b: Tensor) -> list[Tensor]:
        return [F.layer_norm(total(x).view(r.shape) + r, (WIDTH,), b)]

    found, taken = compiled(step, values, monkeypatch)
    assert taken == [1]
    torch.testing.assert_close(list(found), step(*values))


def test_a_program_is_read_as_it_was_written() -> None:
    kind, row = torch.bfloat16, Extent.ROW
    steps = (RowStep("add", (0, 1), kind, Extent.FULL), RowStep("var", (4, 1.0), torch.float32, row))
    program = RowProgram(24, (Extent.FULL, row, Extent.COLUMN), steps, (0, 5))
    assert read(program.text) == program
    assert (program.extent(3), program.extent(5)) == (Extent.COLUMN, row)
    assert program.dtype(5, kind, (kind, kind, kind)) == torch.float32


SIZES = {"b": 2, "s": 8}


class Sizes:
    """Of one call, all of them numbers."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    @property
    def integers(self) -> list[int]:
        """None is a symbol."""
        return []

    def fake(self, name: str, value: Tensor) -> Tensor:
        """Of static shape."""
        return self.mode.from_tensor(value, static_shapes=True)


def steps_of_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[list[str], int]]]:
    """Of a training step of two ranks, of each compiled graph: what each sum takes, and how many results are as large.

    Nothing is compiled: values have no elements.
    """
    batch, plan = (
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64)},
        Plan(tp=2, communication=Communication("copy")),
    )
    program = compile_model(model.train(), {**batch, "labels": batch["input_ids"]}, plan).program
    step = step_of(program)
    graph = lower_program(step, {"tp": Group(NAME, 2, symmetric_buffer=NAME)}).module.graph
    known = {node.name: node for node in step.graph.nodes if node.op == "placeholder"}

    def held(node: fx.Node) -> Tensor:
        if node.name not in known:
            return torch.zeros((), dtype=torch.int64)  # the rank's index
        kind, layout = note(known[node.name]).type, note(known[node.name]).layout
        assert isinstance(kind, TensorType)
        shape = [evaluate(size, SIZES) for size in kind.shape]
        for _, placement in layout or ():
            if isinstance(placement, Placement) and placement.is_shard:
                shape[placement.dim] //= 2
        return torch.empty(shape, dtype=kind.dtype)

    values = {node.name: held(node) for node in graph.nodes if node.op == "placeholder"}
    found: list[list[tuple[list[str], int]]] = []

    def noted(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        calls = [node for node in module.graph.nodes if node.target is torch.ops.fxpar.one_shot_rows.default]
        programs = [read(str(node.args[2])) for node in calls]
        full = [sum(each.extent(i) is Extent.FULL for i in each.results) for each in programs]
        found.append([([s.name for s in each.steps], n) for each, n in zip(programs, full, strict=True)])
        return list

    monkeypatch.setattr(inductor, "compile_fx_inner", noted)
    sizes: Any = Sizes()
    units = CompiledUnits(Inductor(plan), torch.device("cpu"), lambda *_: None, sizes)
    (tangent,) = (name for name in values if "tangent" in name)
    outputs = {name: node.name for name, node in step.output_nodes().items()}
    early = {name: value for name, value in values.items() if name != tangent}
    units.calls(graph, ("backward", "parameter"), early, {tangent: outputs["loss"]}, outputs.values(), paired=True)
    return found


def gpt2(layers: int) -> Any:
    config = transformers.GPT2Config(n_layer=layers, n_embd=96, n_head=8, vocab_size=64, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> Any:
    sizes: dict[str, Any] = {**zoo.SIZES, "num_hidden_layers": layers, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("model", alternate([gpt2, llama], 1))
def test_both_sums_of_a_layer_take_the_norm_behind_them(
    model: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second one, whose norm is the next layer's; what is kept is the sum and what the norm gives."""
    few, many = (steps_of_rows(model(layers).bfloat16(), monkeypatch) for layers in (2, 3))
    assert few == many  # as many graphs, of a layer one forward and one backward
    with_norms = [[count for names, count in graph if "rsqrt" in names] for graph in few]
    assert sorted(filter(None, with_norms)) == [[2], [2, 2]]  # behind the embedding, and in a layer
