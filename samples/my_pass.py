"""A compiler pass, an operator and its layout rule of your own, registered from outside of fxpar.

    python samples/my_pass.py
    fxpar verify hf:llama --passes samples/my_pass.py:PASSES --tp 2 --split '*.[gu]*_proj=column' --split '*.down*=row'

A gated MLP computes silu(gate) * up. The operator `samples::gated` does both at once, as a fused kernel would, and the
pass `fuse_gated` puts it in their place. fxpar is told how the operator treats layouts, checks that by brute force,
and then proves that the split model with the pass still computes what the model does on one device.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

import fxpar
from fxpar.ir.program import note, set_note
from fxpar.passes import DEFAULT_PASSES, canonicalize
from fxpar.testing.check import check_operation, sample
from fxpar.verification import verify

aten = torch.ops.aten

# ---- The operator: what it computes, the shape of its result, its derivative.


@torch.library.custom_op("samples::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for two tensors of one shape."""
    return functional.silu(gate) * up


@gated.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(up)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return aten.silu_backward(grad * up, gate), grad * functional.silu(gate)


gated.register_autograd(_backward, setup_context=_save)

# ---- Its rule: element-wise, and linear in `up` alone: partial sums of `up` give partial sums of the result.
fxpar.register_rule(torch.ops.samples.gated.default, partial=(("up",),))

# ---- The pass.


@fxpar.register_pass("fuse_gated", requires={"canonical"})
def fuse_gated(program: fxpar.Program) -> fxpar.Program:
    """Fuses an activation and the product with it.

    Before::

        %silu = aten.silu.default(%gate) : f32[b, s, 160]
        %mul = aten.mul.Tensor(%silu, %up) : f32[b, s, 160]

    After::

        %mul = samples.gated.default(%gate, %up) : f32[b, s, 160]

    The activation must have no other user. Values and gradients stay equal.
    """
    for node in list(program.graph.nodes):
        if node.target is not aten.mul.Tensor:
            continue
        silu, up = node.args
        if not isinstance(silu, torch.fx.Node) or silu.target is not aten.silu.default or len(silu.users) > 1:
            continue
        with program.graph.inserting_before(node):
            fused = program.graph.call_function(torch.ops.samples.gated.default, (silu.args[0], up))
        set_note(fused, note(node))  # type and place in the author's code are those of the product
        node.replace_all_uses_with(fused)
        program.graph.erase_node(node)
        program.graph.erase_node(silu)
    return program


# ---- The order: behind `canonicalize`, which gives the graph one spelling, and before layouts are chosen.

_AFTER = DEFAULT_PASSES.index(canonicalize) + 1
PASSES = (*DEFAULT_PASSES[:_AFTER], fuse_gated, *DEFAULT_PASSES[_AFTER:])


def main() -> None:
    x, y = torch.randn(2, 6, 12, dtype=torch.float64).unbind()
    print(check_operation(torch.ops.samples.gated.default, [sample(x, y)]))

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = transformers.LlamaConfig(vocab_size=259, hidden_size=96, intermediate_size=160, num_attention_heads=8)
    config.num_hidden_layers, config.use_cache = 2, False
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (3, 16))
    split = {"*.[qkv]_proj": "head", "*.o_proj": "row", "*.[gu]*_proj": "column", "*.down_proj": "row"}
    plan = fxpar.Plan(tp=2, split=split)
    proof = verify(model, {"input_ids": ids, "labels": ids}, plan, passes=PASSES)

    for record in proof.program.history:
        print(f"{record.name:20} {len(record.added):4} nodes added, {len(record.erased):4} erased")
    fused = [node for node in proof.program.graph.nodes if node.target is torch.ops.samples.gated.default]
    print("\n".join(f"%{node.name} of {note(node).fqn}: {note(node).layout}" for node in fused))
    print(f"{len(fused)} layers fused; gradients on 2 ranks deviate by {proof.to_json()['max_grad_error']:.1e} at most")
    raise SystemExit(not (proof.ok and len(fused) == config.num_hidden_layers))


if __name__ == "__main__":
    main()
