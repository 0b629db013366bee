"""Shared-out parameters by value: whatever data ranks share out, gradients are those of one device, with dropout on."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest

from fxpar.cost.communication import collectives
from fxpar.ir.program import Program, output_layouts
from fxpar.ir.regions import inlined
from fxpar.plan.plan import SHARDS, Plan
from fxpar.plan.plan_options import Recompute
from fxpar.verify.values import verify_values
from tests.models.test_data_parallel import compiled, loaded, reference
from tests.products import few
from tests.zoo import step_of

ONE_LAYER = "mixtral,num_hidden_layers=1"
EXPERTS = (
    *("mixtral", ONE_LAYER, "gpt_oss", "qwen3_moe,moe_intermediate_size=40"),
    "deepseek_v3,first_k_dense_replace=1,moe_intermediate_size=40,n_routed_experts=8,n_group=4,topk_group=2",
)
DENSE = ("gpt2", "gpt2,tie_word_embeddings=false", "llama", "llama,tie_word_embeddings=true", "bert", "t5")
MESHES: dict[str, dict[str, int]] = {
    "dp4-shard2": {"dp": 4, "dp_shard": 2},
    "dp2": {"dp": 2},
    "tp2-dp2": {"tp": 2, "dp": 2},
    "dp4": {"dp": 4},
    "dp2-pp2": {"dp": 2, "pp": 2},
    "dp2-ep2": {"dp": 2, "ep": 2},
    "dp4-ep2": {"dp": 4, "ep": 2},
}
CASES = [
    (name, mesh, shard, recompute)
    for name, mesh, shard, recompute in product((*DENSE, *EXPERTS), MESHES, SHARDS[1:], ("none", "selective", "full"))
    if (name in EXPERTS or "ep" not in MESHES[mesh])
    and not (recompute != "none" and "pp" in MESHES[mesh])  # of stages just the forward is verified by value
    and not (recompute == "full" and (name in ("t5", ONE_LAYER) or name.startswith("deepseek")))  # one layer of a kind
]
# Each shard with each recomputation, each mesh with each shard that it changes.
EVERY_TIME = [
    ("gpt2", "dp2", "optimizer", "full"),
    ("gpt2", "tp2-dp2", "parameters", "none"),
    ("gpt2", "dp2-pp2", "gradients", "none"),
    ("llama", "dp4", "gradients", "selective"),
    ("llama", "dp4-shard2", "parameters", "none"),
    ("llama", "tp2-dp2", "parameters", "full"),
    ("bert", "dp2", "parameters", "selective"),
    (ONE_LAYER, "dp2-ep2", "optimizer", "none"),
    (ONE_LAYER, "dp4-ep2", "parameters", "selective"),
]


def step(name: str, plan: Plan) -> Program:
    """Returns what trains: with what is computed and gathered again; of a pipeline its stages."""
    program = compiled(name, plan)
    if plan.pp > 1:
        return program
    return inlined(step_of(program, program.outputs))


@pytest.mark.parametrize(("name", "mesh", "shard", "recompute"), few(CASES, EVERY_TIME))
def test_loss_outputs_and_gradients_are_those_of_one_device(name: str, mesh: str, shard: str, recompute: str) -> None:
    sizes: Any = MESHES[mesh]
    program = step(name, Plan(shard=shard, recompute=Recompute(recompute), **sizes))
    state, inputs, wanted = reference(name)
    report = verify_values(loaded(name)[2].program, program, state, inputs, reference=wanted)
    assert report.ok, report
    assert report.gradients == len(wanted.gradients)


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_all_of_a_model_is_shared_out(shard: str) -> None:
    """Of sizes that two ranks divide."""
    program = step("gpt2", Plan(dp=2, shard=shard))
    layouts = [output_layouts(program.node(p.node))[0].on("dp") for p in program.parameters if p.kind != "buffer"]
    assert layouts
    assert all(layout.is_shard for layout in layouts)


@pytest.mark.parametrize(
    ("shard", "gathered", "reduced"),
    [
        ("optimizer", ["once"], ["parameter"]),
        ("gradients", ["once"], ["backward"]),
        ("parameters", ["forward", "recompute"], ["backward"]),
    ],
)
def test_bytes_are_those_of_weights_and_of_gradients(shard: str, gathered: list[str], reduced: list[str]) -> None:
    """Embeddings and biases are gathered once, as the backward reads none of them."""
    program = step("gpt2,tie_word_embeddings=false", Plan(dp=2, shard=shard))
    size = sum(4 * prod(map(int, p.type.shape)) for p in program.parameters if p.trainable)
    listed = collectives(program)
    for op, phases in (("all_gather", gathered), ("reduce_scatter", reduced)):
        assert sorted({c.phase for c in listed if c.op == op}) == phases
        assert sum(c.bytes for c in listed if c.op == op and c.phase == phases[0]) == size
    assert 0 < sum(c.bytes for c in listed if c.phase == "recompute") < size or shard != "parameters"
