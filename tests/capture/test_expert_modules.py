"""Modules of experts that a plan names: their loop as rows on every rank, and what is no such module."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.capture.prepared_model import trial_run
from fxpar.compile import compile_program
from fxpar.errors import CaptureError, PlanError
from fxpar.experts.compiler import module_forms
from fxpar.ir.program import output_layouts
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.capture.named import EXPERTS, INNER, WIDTH, Gated, Listed, Looped, Named, Plain
from tests.cli.tool import fxpar
from tests.passes.experts import rolled
from tests.products import few

ALL = ("layers.*.experts",)
MODULES: list[tuple[Any, dict[str, Any]]] = [
    (Looped, {}),
    (Looped, {"turned": True, "biased": False}),
    (Listed, {}),
    (Gated, {"turned": True}),
    (Plain, {}),
    (Looped, {"turned": True, "inner": WIDTH}),
]
PLANS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts("dropless")},
    {"tp": 2},
    {"dp": 2, "tp": 2, "ep": 2, "experts": Experts(capacity_factor=0.8)},
    {"dp": 2},
]


def _experts(plan: dict[str, Any]) -> Experts:
    experts: Experts = plan.get("experts", Experts())
    return experts


CASES = [
    (*module, plan)
    for module, plan in itertools.product(MODULES, PLANS)
    if module[0] is not Listed or _experts(plan).dispatch == "static"
]
# What tensor ranks hold of a list is shown statically, and its values over ranks of experts.
EVERY_TIME = [(*MODULES[i], PLANS[i]) for i in range(2)]


@pytest.mark.parametrize(("made", "options", "plan"), few(CASES, EVERY_TIME))
def test_they_are_the_single_device_s(made: Any, options: dict[str, Any], plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Named(made(**options), made(**options)).double()
    experts = replace(_experts(plan), expert_modules=ALL)
    expect(verify(model, rolled(), Plan(**{**plan, "experts": experts})))
    assert made.forward.__code__.co_filename.endswith("named.py")


def test_tensor_ranks_split_each_expert() -> None:
    for module in (Looped(), Listed()):
        found = verify(Named(module), rolled(), Plan(tp=2, experts=Experts(expert_modules=ALL)), level="static")
        assert found.split_flops == 1


def test_stacked_weights_are_held_by_expert_and_those_of_a_list_whole() -> None:
    for module, name, layout in ((Looped(), "down_proj", "dp:S(0)"), (Listed(), "1.w2.weight", "dp:I")):
        program = compile_program(
            capture(Named(module), rolled(), Plan(dp=2, ep=2, experts=Experts(expert_modules=ALL))).program
        )
        layouts = {p.fqn: str(output_layouts(program.node(p.node))[0]) for p in program.parameters}
        assert layouts[f"layers.0.experts.{name}"] == layout
    with pytest.raises(PlanError, match=r"matrices are stacked from 4 parameters.*ranks of tp.*give etp=2"):
        compile_program(
            capture(
                Named(Listed()), rolled(), Plan(dp=2, tp=2, ep=4, etp=1, experts=Experts(expert_modules=ALL))
            ).program,
        )


@pytest.mark.parametrize("made", [Looped, Plain, Listed])
def test_models_without_memory_are_read_too(made: Any) -> None:
    with torch.device("meta"):
        model = Named(made())
    program = capture(model, rolled(), Plan(experts=Experts(expert_modules=ALL))).program
    assert parse_program(print_program(program)).plan.experts.expert_modules == ALL
    assert sum("grouped_linear" in str(node.target) for node in program.graph.nodes) == (3 if made is Listed else 2)


def test_large_weights_are_tried_on_values_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_forms, "_MOST", 8)
    model = Named(Gated(turned=True), Looped(turned=True, inner=WIDTH))
    named = module_forms.named_experts(model, ALL, trial_run)
    assert [(each.path, each.reading.transposed) for each in named] == [
        ("layers.0.experts", True),
        ("layers.1.experts", True),
    ]
    with pytest.raises(PlanError, match=r"its output differs"):
        module_forms.named_experts(Named(Limited()), ALL, trial_run)
    with pytest.raises(PlanError, match=r"other parameters get a gradient"):
        module_forms.named_experts(Named(Frozen()), ALL, trial_run)


def test_without_a_line_the_loop_is_refused() -> None:
    message = r"named.py:\d+ \(layers.0.experts\): its rows are picked.*fxpar.ops.experts.*Plan\(experts="
    with pytest.raises(CaptureError, match=message):
        capture(Named(Looped()), rolled(), Plan())


def test_one_that_is_recognised_needs_no_line() -> None:
    torch.manual_seed(0)
    expect(verify(Named(Listed()).double(), rolled(), Plan(dp=2, ep=2)))


# ---------------------------------------------------------------------- what is no such module


class Limited(Looped):
    """Limits beyond which values are rare."""

    def activated(self, inner: Tensor) -> Tensor:
        return super().activated(inner).clamp(-30.0, 30.0)


class Squared(Looped):
    """Other weights than the given ones."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights.square())


class Next(Looped):
    """Other experts than the given ones."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, (top_k_index + 1) % EXPERTS, top_k_weights)


class Detached(Looped):
    """The router gets no gradient."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights.detach())


class Frozen(Looped):
    """One matrix gets none."""

    def product(self, name: str, e: Any, x: Tensor) -> Tensor:
        if name == "gate_up_proj":
            return super().product(name, e, x)
        return x @ self.get_parameter(name)[e].detach().T + self.get_parameter(f"{name}_bias")[e]


class Halved(Looped):
    """One matrix gets half of its gradient."""

    def product(self, name: str, e: Any, x: Tensor) -> Tensor:
        matrix = getattr(self, name)[e]
        return x @ (matrix / 2 + matrix.detach() / 2).T + getattr(self, f"{name}_bias")[e]  # type: ignore[no-any-return]


class Dropping(Looped):
    """Dropout inside of experts."""

    def activated(self, inner: Tensor) -> Tensor:
        return functional.dropout(super().activated(inner), 0.5)


class Wide(Looped):
    """Tokens of another width than its matrices."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states[:, WIDTH:], top_k_index, top_k_weights)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Limited, "its output differs by"),
        (Squared, "its output differs by"),
        (Next, "its output differs by"),
        (Detached, "other parameters get a gradient"),
        (Dropping, "its output differs by"),
        (Wide, r"it raises RuntimeError on torch.float32 tokens \[11, 8\]"),
    ],
)
def test_a_module_that_computes_anything_else_is_refused(module: Any, message: str) -> None:
    with pytest.raises(PlanError, match=rf"names layers.0.experts: .*{message}.*call fxpar.ops.experts"):
        capture(Named(module()), rolled(), Plan(experts=Experts(expert_modules=ALL)))


def test_a_gradient_that_a_matrix_does_not_get_is_noticed() -> None:
    capture(Named(Looped()), rolled(), Plan(experts=Experts(expert_modules=ALL)))
    with pytest.raises(PlanError, match=r"other parameters get a gradient"):
        capture(Named(Frozen()), rolled(), Plan(experts=Experts(expert_modules=ALL)))
    with pytest.raises(PlanError, match=r"the gradient of a parameter differs by"):
        capture(Named(Halved()), rolled(), Plan(experts=Experts(expert_modules=ALL)))


def test_globs_name_modules_of_experts() -> None:
    model = Named(Looped())
    with pytest.raises(
        PlanError, match=r"experts.expert_modules: '\*.mlp': matches no module; modules of experts are layers.0.experts"
    ):
        capture(model, rolled(), Plan(experts=Experts(expert_modules=("*.mlp",))))
    with pytest.raises(
        PlanError, match=r"'\*.router' names layers.0.router: its forward takes input, not hidden_states"
    ):
        capture(model, rolled(), Plan(experts=Experts(expert_modules=("*.router",))))
    with pytest.raises(PlanError, match=r"names layers.0.experts: it has no weights of experts: gate_up_proj and down"):
        capture(Named(Unnamed()), rolled(), Plan(experts=Experts(expert_modules=ALL)))
    experts = model.get_submodule("layers.0.experts")
    experts.forward = MethodType(Looped.forward, experts)
    with pytest.raises(PlanError, match=r"its forward was put in the place of that of its class"):
        capture(model, rolled(), Plan(experts=Experts(expert_modules=ALL)))


class Unnamed(Looped):
    """Weights of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("first", self.get_parameter("gate_up_proj"))
        self.register_parameter("gate_up_proj", None)


class Called(nn.Module):
    """Experts are called with rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Looped()

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h]."""
        top = self.router(x).topk(2)
        return self.experts(x, top.indices, top.values).square().mean()  # type: ignore[no-any-return]


def test_a_call_with_other_shapes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"experts: it is called with torch.float32\[.*not with hidden_states"):
        capture(Called(), torch.randn(4, 5, WIDTH), Plan(experts=Experts(expert_modules=("experts",))))


def test_a_plan_keeps_its_globs() -> None:
    plan = Plan(experts=Experts(expert_modules=("*.b", "*.a", "*.b")))
    assert plan.experts.expert_modules == ("*.a", "*.b")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    for given in ("*.a", [""], [3], None):
        with pytest.raises(PlanError, match=r"experts.expert_modules must be a list of globs on names of modules"):
            Plan.from_dict({"experts": {"expert_modules": given}})


MODEL = """
from tests.capture.named import Looped, Named
from tests.passes.experts import rolled

def build():
    return Named(Looped()), rolled()
"""


def test_a_flag_names_them(tmp_path: Path) -> None:
    (tmp_path / "fxpar_named.py").write_text(MODEL)
    model = f"{tmp_path / 'fxpar_named.py'}:build"
    refused = fxpar("verify", model, "--dp", "2", "--ep", "2")
    assert refused.status == 2
    assert "fxpar.ops.experts" in refused.err
    found = fxpar("verify", model, "--dp", "2", "--ep", "2", "--expert-modules", "layers.*", "--level", "values")
    assert found.status == 2, found.out  # a dictionary of experts is none
    found = fxpar(
        "verify", model, "--dp", "2", "--ep", "2", "--expert-modules", "layers.*.experts", "--level", "values"
    )
    assert found.status == 0, found.err


class Narrow(Looped):
    """A kernel that takes float32 alone."""

    def product(self, name: str, e: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("takes float32")
        return super().product(name, e, x)


def test_what_does_not_run_in_float64_is_tried_in_float32() -> None:
    (named,) = module_forms.named_experts(Named(Narrow()), ALL, trial_run)
    assert named.path == "layers.0.experts"


def test_the_inner_features_are_those_of_the_module() -> None:
    (named,) = module_forms.named_experts(Named(Looped()), ALL, trial_run)
    assert (named.reading.first, named.reading.down, named.reading.width) == (("gate_up_proj",), "down_proj", WIDTH)
    assert named.module.get_parameter("down_proj").shape[-1] == INNER
