"""Whatever is wrong with an input, the answer is one error of fxpar that says where, why and what to do.

A table of bad plans, split lines, models, batches, program texts, checkpoints, worlds, passes and rules. No other
exception may come through, and none of the texts may be empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxpar
from fxpar.capture.capture import capture
from fxpar.errors import FxparError
from fxpar.ir.program import Program
from fxpar.manager import PassManager, register_pass
from fxpar.passes import DEFAULT_PASSES, canonicalize, insert_collectives
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import verify
from fxpar.verify.static import STATIC, verify_static

X = torch.randn(4, 6)
IDS = torch.arange(15).reshape(3, 5)
SPLIT = {"up": "column", "down": "row"}


class Mlp(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        y = self.down(self.up(self.norm(x)).relu())
        return y if scale is None else y * scale


class Bare(Mlp):
    """A parameter that no initialiser fills."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))


class Heads(nn.Module):
    """Projects to three heads of four."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(x.shape[0], 3, 4).softmax(-1)
        return self.out(heads.flatten(1))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """15 hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 15), nn.Linear(15, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Branches(Mlp):
    """Looks at a value."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.up(x) if x.sum() > 0 else self.up(-x)


class Bags(nn.Module):
    """An operator whose results differ in shape from kernel to kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(31, 8, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s]."""
        result: Tensor = self.words(ids)
        return result.square().mean()


class Counts(Mlp):
    """Changes an attribute in its forward."""

    calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        self.calls = self.calls + 1
        return super().forward(x, scale) * self.calls


class Noisy(Mlp):
    """Draws counts in the middle of a split layer."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        y = self.up(x)
        return self.down(y + counts(y))


class Losses(Mlp):
    """Returns two scalars."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        y = self.up(x)
        return {"first": y.mean(), "second": y.square().mean()}


class Sampled(Mlp):
    """Adds what a function makes of its output, which draws random numbers."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        """[b, 6]."""
        y = super().forward(x)
        return {"loss": (y + self.noise(y)).mean()}


def counts(x: Tensor) -> Tensor:
    """Poisson numbers of the shape of x."""
    return torch.poisson(x.detach().abs())


def chosen(x: Tensor) -> Tensor:
    """A column for each row, each time from all of them."""
    return torch.multinomial(x.detach().softmax(-1), x.shape[-1], replacement=True).to(x.dtype)


class Broken(Mlp):
    """Changes what its backward needs."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        """[b, 6]."""
        y = self.up(x).exp()
        z = y * 2.0
        y.add_(1.0)
        return z.mean() + y.mean()


def cached() -> nn.Module:
    """A language model that returns its cache."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, use_cache=True)
    )


def hooked() -> nn.Module:
    """A model with a backward hook."""
    model = Mlp()
    model.up.register_full_backward_hook(lambda *_: None)
    return model


@functools.cache
def compiled() -> Program:
    """The program of the MLP on two ranks."""
    captured = capture(Mlp(), (X,), Plan(tp=2, split=SPLIT))
    return PassManager(DEFAULT_PASSES, STATIC).run(captured.program)


def check(model: nn.Module, split: dict[str, str] | None = None, example: Any = (X,), **options: Any) -> Any:
    """Compiles for two ranks and checks statically."""
    return verify(model, example, Plan(tp=2, split=split or {}), level="static", **options)


def text_with(old: str, new: str) -> Program:
    """The program's text with one thing changed, parsed and checked."""
    text = print_program(compiled())
    assert old in text
    program = parse_program(text.replace(old, new, 1), where="edited.txt")
    verify_static(program)
    return program


@functools.cache
def trained() -> Any:
    """The MLP on one process."""
    return fxpar.parallelize(Mlp(), Plan(), {"x": X})


def state(**changes: Any) -> dict[str, Any]:
    """The MLP's state dict with entries changed, or left out where they are None."""
    found = {**Mlp().state_dict(), **{key.replace("_", "."): value for key, value in changes.items()}}
    return {key: value for key, value in found.items() if value is not None}


def run_pass(function: Callable[[Program], Any], **contract: Any) -> Program:
    """Runs one pass on a captured program."""
    captured = capture(Mlp(), (X,))
    return PassManager([register_pass("mine", **contract)(function)], STATIC).run(captured.program)


def returns_nothing(program: Program) -> None:
    """Returns no program."""


def adds_a_node(program: Program) -> Program:
    """Adds a node and no note."""
    with program.graph.inserting_before(program.node("relu")):
        program.graph.call_function(torch.ops.aten.relu.default, (program.node("relu").args[0],))
    return program


def calls_a_method(program: Program) -> Program:
    """Adds a node that calls a method."""
    relu = program.node("relu")
    with program.graph.inserting_after(relu):
        new = program.graph.call_method("abs", (relu,))
    new.meta = dict(relu.meta)
    return program


def reverses(program: Program) -> Program:
    """Moves a node in front of what it uses."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    nodes[0].prepend(nodes[-1])
    return program


def lies_about_a_shape(program: Program) -> Program:
    """Makes a result twice as wide and keeps its note."""
    relu = program.node("relu")
    relu.target, relu.args = torch.ops.aten.cat.default, ([relu.args[0], relu.args[0]], 1)
    return program


def no_docstring(program: Program) -> Program:
    return program


@dataclass(frozen=True)
class Bad:
    """A bad input, the type of its error and a part of the text."""

    name: str
    action: Callable[[], Any]
    kind: str
    text: str


silu = torch.ops.aten.silu.default
UNREDUCED = (
    "fxpar.reduce_from[tp](%linear_1) : f32[b, 6] tp:P→I",
    "aten.mul.Tensor(%linear_1, 1) : f32[b, 6] tp:P",
)
TABLE = [
    # plans
    Bad("tp of zero", lambda: Plan(tp=0), "PlanError", "tp must be an integer from 1 to 4096, got 0"),
    Bad("axis of a later version", lambda: Plan(cp=2), "PlanError", "cp=2 is not supported yet"),
    Bad("unknown role", lambda: Plan(split={"up": "diagonal"}), "PlanError", "'diagonal' is unknown"),
    Bad(
        "several faults at once",
        lambda: Plan(tp=-1, seed=-1),
        "PlanError",
        "seed must be an integer",
    ),
    Bad("unknown precision", lambda: Plan(precision="fp12"), "PlanError", "precision='fp12' is unknown"),
    Bad("unknown option in a file", lambda: Plan.from_yaml("tpp: 2"), "PlanError", "unknown option tpp"),
    Bad("a file that is a list", lambda: Plan.from_yaml("- tp"), "PlanError", "holds no mapping"),
    Bad("a file that is no YAML", lambda: Plan.from_yaml("tp: ["), "PlanError", "not YAML"),
    Bad("a file that is not there", lambda: Plan.load("no/such/plan.yaml"), "PlanError", "No such file"),
    # split lines
    Bad("glob without a match", lambda: check(Mlp(), {"gate": "column"}), "PlanError", "matches no module"),
    Bad(
        "lines that disagree",
        lambda: check(Mlp(), {"u?": "column", "?p": "row"}),
        "PlanError",
        "split['?p']",
    ),
    Bad("three heads on two ranks", lambda: check(Heads(), {"query": "head"}), "PlanError", "cannot be split by head"),
    Bad("norm weight by column", lambda: check(Mlp(), {"norm": "column"}), "PlanError", "norm.weight"),
    Bad("15 features on two ranks", lambda: check(Odd(), SPLIT), "PlanError", "weight cannot be split"),
    Bad("words where there are none", lambda: check(Mlp(), {"up": "vocab"}), "PlanError", "in no lookup or loss"),
    Bad("heads where there are none", lambda: check(Mlp(), {"up": "head"}), "PlanError", "no view makes heads"),
    # models
    Bad("branch on a value", lambda: check(Branches()), "CaptureError", "branches on values of tensors"),
    Bad("attribute that changes", lambda: check(Counts()), "CaptureError", "calls"),
    Bad("one sample", lambda: check(Mlp(), {}, (X[:1],)), "CaptureError", "holds one sample"),
    Bad("counts", lambda: check(Sampled(counts), SPLIT), "PassError", "draws random numbers"),
    Bad("choice with replacement", lambda: check(Sampled(chosen), SPLIT), "PassError", "draws random numbers"),
    Bad("model that cannot train", lambda: verify(Broken(), (X,), Plan()), "InputError", "the model itself, not split"),
    Bad("cache", lambda: check(cached(), {}, {"input_ids": X.long()}), "CaptureError", "returns a cache"),
    Bad("two losses", lambda: check(Losses()), "CaptureError", "several scalars (first, second)"),
    Bad("loss that is not there", lambda: check(Losses(), loss="third"), "CaptureError", "loss='third'"),
    Bad("backward hook", lambda: check(hooked()), "CaptureError", "backward hooks"),
    Bad("data parallel", lambda: check(nn.DataParallel(Mlp())), "CaptureError", "communicates by itself"),
    Bad("counts in a split layer", lambda: check(Noisy(), SPLIT), "PassError", "draws random numbers"),
    Bad("no module", lambda: fxpar.parallelize(torch.relu, Plan(), (X,)), "InputError", "must be an nn.Module"),  # type: ignore[arg-type]
    Bad("no plan", lambda: fxpar.parallelize(Mlp(), {"tp": 2}, (X,)), "InputError", "must be a Plan"),  # type: ignore[arg-type]
    Bad("class for a model", lambda: verify(Mlp, (X,), Plan()), "InputError", "must be an nn.Module, got a type"),  # type: ignore[arg-type]
    Bad("number for a plan", lambda: verify(Mlp(), (X,), 2), "InputError", "must be a Plan, got a int"),  # type: ignore[arg-type]
    Bad("no passes", lambda: verify(Mlp(), (X,), Plan(), passes=[]), "InputError", "must be a list of passes, got []"),
    Bad("unhandled operation", lambda: verify(Bags(), (IDS,), Plan()), "CheckFailed", "fxpar does not handle this"),
    Bad(
        "no loss",
        lambda: fxpar.parallelize(Mlp(), Plan(), (X,), loss=3),  # type: ignore[arg-type]
        "InputError",
        "must be a callable or the name of an output, got 3",
    ),
    Bad(
        "no initialiser",
        lambda: fxpar.parallelize(Bare().to("meta"), Plan(), (X,)),
        "InputError",
        "gain: is a parameter of a Bare, which has no initialiser",
    ),
    # batches
    Bad("example without tensors", lambda: check(Mlp(), {}, {"x": None}), "CaptureError", "holds no tensor"),
    Bad("empty example", lambda: check(Mlp(), {}, (X[:0],)), "CaptureError", "has the empty shape"),
    Bad("example with a gradient", lambda: check(Mlp(), {}, (X.clone().requires_grad_(),)), "CaptureError", "gradient"),
    Bad("missing entry", lambda: trained()(scale=X), "InputError", "add x"),
    Bad("unknown entry", lambda: trained()(x=X, mask=X), "InputError", "mask"),
    Bad("wrong size", lambda: trained()(x=torch.ones(2, 7)), "CaptureError", "cannot be traced"),
    Bad("step without a loss", lambda: trained().train_step({"x": X}), "InputError", "returns no loss"),
    Bad("array", lambda: trained()(x=X.numpy()), "InputError", "a ndarray cannot be part of a program"),
    # program texts
    Bad("unknown header", lambda: text_with("fxpar 2", "fxpar 0"), "TextError", "edited.txt:1"),
    Bad("unknown operator", lambda: text_with("aten.relu", "aten.rely"), "TextError", "aten.rely"),
    Bad("undefined node", lambda: text_with("relu.default(%", "relu.default(%no_"), "TextError", "%no_"),
    Bad("unknown axis", lambda: text_with("reduce_from[tp]", "reduce_from[xp]"), "TextError", "xp"),
    Bad("code for a size", lambda: text_with("f32[6]", "f32[__import__('os')]"), "TextError", "is not a size"),
    Bad("other width", lambda: text_with('weight"] : f32[10, 6]', 'weight"] : f32[12, 6]'), "CheckFailed", "%"),
    Bad("collective left out", lambda: text_with(*UNREDUCED), "LayoutError", "tp"),
    Bad("wrong cut", lambda: text_with("f32[10, 6] tp:S(0)", "f32[10, 6] tp:S(1)"), "LayoutError", "linear"),
    # checkpoints
    Bad(
        "name left out", lambda: trained().load_full_state_dict(state(up_bias=None)), "CheckpointError", "lacks up.bias"
    ),
    Bad("name too many", lambda: trained().load_full_state_dict(state(gate=X)), "CheckpointError", "unknown gate"),
    Bad("other shape", lambda: trained().load_full_state_dict(state(up_bias=X)), "CheckpointError", "shape [4, 6]"),
    Bad(
        "no checkpoint",
        lambda: fxpar.parallelize(Mlp(), Plan(), (X,), checkpoint="/nowhere"),
        "CheckpointError",
        "/nowhere: there is no such file or folder",
    ),
    Bad("file left out", lambda: trained().load_checkpoint("a.safetensors"), "CheckpointError", "no such file"),
    # worlds
    Bad(
        "two ranks in one process", lambda: fxpar.parallelize(Mlp(), Plan(tp=2), (X,)), "PlanError", "needs 2 processes"
    ),
    # passes
    Bad("function that is no pass", lambda: PassManager([no_docstring]), "PassError", "must be a registered pass"),  # type: ignore[list-item]
    Bad("pass without docstring", lambda: register_pass("mine")(no_docstring), "PassError", "has no docstring"),
    Bad("unknown contract", lambda: run_pass(reverses, preserves="most"), "PassError", "preserves='most'"),
    Bad(
        "requirement that does not hold",
        lambda: check(Mlp(), passes=[insert_collectives]),
        "PassError",
        "requires layouts",
    ),
    Bad(
        "pass that is not there",
        lambda: PassManager([canonicalize]).run(compiled(), until="x"),
        "PassError",
        "no such pass",
    ),
    Bad("pass that returns nothing", lambda: run_pass(returns_nothing), "PassError", "returned a NoneType"),
    Bad("node without a note", lambda: run_pass(adds_a_node), "PassError", "without a note"),
    Bad("node that calls a method", lambda: run_pass(calls_a_method), "PassError", "call_method node"),
    Bad("node before its operands", lambda: run_pass(reverses), "PassError", "unsound graph"),
    Bad("note that is wrong", lambda: run_pass(lies_about_a_shape), "CheckFailed", "relu"),
    # rules
    Bad("second rule", lambda: fxpar.register_rule(silu), "InputError", "has a rule already"),
    Bad(
        "labels that do not fit",
        lambda: fxpar.register_rule(torch.ops.aten.orgqr.default, "a, b"),
        "InputError",
        "->",
    ),
]


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_bad_input_gives_one_error_that_says_where_why_and_what_to_do(bad: Bad) -> None:
    with pytest.raises(FxparError) as caught:
        bad.action()
    error = caught.value
    assert type(error).__name__ == bad.kind
    assert bad.text in str(error)
    assert error.where
    assert error.reason
    assert error.remedy
