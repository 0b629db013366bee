"""Models with experts: recognised at capture, equal to the author's loop, and split as other matrices are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch import Tensor

from fxpar.capture.capture import capture
from fxpar.cli.models import Built, build
from fxpar.experts.compiler.module_forms import routed_experts
from fxpar.ir.program import output_layouts
from fxpar.plan.plan import Plan
from fxpar.verification import verify
from fxpar.verify.values import TOLERANCE

# Of deepseek_v3 the first layers have no experts.
_MODELS = (
    *("mixtral", "gpt_oss", "qwen2_moe,moe_intermediate_size=40", "qwen3_moe,moe_intermediate_size=40", "olmoe"),
    *(
        "deepseek_v3,first_k_dense_replace=1,moe_intermediate_size=40,n_routed_experts=8,n_group=4,topk_group=2",
        "granitemoe",
    ),
    "ernie4_5_moe,moe_intermediate_size=40",
)
_EVERY_TIME = "mixtral,num_hidden_layers=1"
_PARAMETERS = [_EVERY_TIME, *(pytest.param(m, marks=pytest.mark.matrix) for m in _MODELS)]


def model(spec: str) -> Built:
    built = build(spec, None, None, 0)
    config = built.model.config
    # transformers 5.17 notes no router's logits for granitemoe, and fails to balance them.
    balances = spec != "granitemoe" or not transformers.__version__.startswith("5.17.")
    if balances and hasattr(config, "output_router_logits"):
        config.output_router_logits, config.router_aux_loss_coef = True, 0.3  # type: ignore[union-attr]
    built.model.train()
    return built


def gradients(built: Built) -> tuple[Tensor, dict[str, Tensor]]:
    built.model.zero_grad()
    torch.manual_seed(5)
    outputs = built.model(**built.batch)
    loss = outputs.loss if built.loss is None else built.loss(outputs, built.batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in built.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("spec", _MODELS)
def test_recognised_experts_are_the_authors_loop(spec: str) -> None:
    built = model(spec)
    built.model.double()
    built.model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    wanted, expected = gradients(built)
    with routed_experts():
        loss, found = gradients(built)
    assert abs(loss - wanted) <= TOLERANCE * abs(wanted)
    assert found.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    assert max((found[n] - g).abs().max() for n, g in expected.items()) <= TOLERANCE * largest


@pytest.mark.parametrize(
    "implementation",
    ["eager", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("grouped_mm", "batched_mm"))],
)
def test_each_layers_experts_are_the_same_nodes_whatever_the_model_runs(implementation: str) -> None:
    built = model("mixtral")
    config = built.model.config
    config._experts_implementation = implementation  # type: ignore[union-attr]
    program = capture(built.model, built.batch).program
    assert config._experts_implementation == implementation  # type: ignore[union-attr]
    names = Counter(str(node.target) for node in program.graph.nodes if str(node.target).startswith("fxpar."))
    names.pop("fxpar.bin_counts.default", None)  # by which transformers 5.17 balances
    assert names == {
        "fxpar.sort_by_expert.default": 2,
        "fxpar.moe_permute.default": 2,
        "fxpar.grouped_linear.default": 4,
        "fxpar.swiglu_rows.default": 2,
        "fxpar.moe_combine.default": 2,
    }


@pytest.mark.parametrize("spec", _PARAMETERS)
def test_experts_are_split_by_columns_and_rows(spec: str) -> None:
    built = model(spec)
    found = verify(built.model, built.batch, Plan(tp=2), loss=built.loss)
    assert found.ok, found.values
    assert found.split_flops > 0.9
    owned = [p for p in found.program.parameters if p.fqn.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert owned
    assert all(output_layouts(found.program.node(p.node))[0].on("tp").is_shard for p in owned)
