"""Which operations draw random bits, and what they do to layouts.

Enters: a node, captured or canonical; a call. Leaves: whether its result depends on a random generator; its rule, until
`assign_rng` puts the counter generator in its place (SPEC section 2.4): a shard draws the bits of its own elements, and
all ranks draw the same for the summands of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxpar.layout.layout import Placement
from fxpar.signatures.engine import seed_signature
from fxpar.signatures.op_call import OpCall, bind_arguments
from fxpar.signatures.pointwise import pointwise_labels, same_values
from fxpar.signatures.rule import Refusal, Rule, Signature

aten = torch.ops.aten

# Bits of the shape of the first operand, whose values do not matter.
SHAPED = """
bernoulli.p cauchy exponential geometric log_normal normal_functional rand_like randint_like randint_like.low_dtype
randn_like uniform
""".split()
# Bits for the values of the operands, element by element.
VALUED = "bernoulli bernoulli.Tensor normal.Tensor_float rrelu".split()
_RECURRENT = frozenset({"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"})


def draws_bits(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch that PyTorch tags as seeded; not one that is told to drop nothing."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = bind_arguments(node)
    if target._schema.name in _RECURRENT:  # which drop between their layers
        return bool(arguments["train"] and arguments["dropout"] and arguments["num_layers"] > 1)
    is_dropout = "dropout" in target._schema.name or "attention" in target._schema.name
    probability = arguments.get("p", arguments.get("dropout_p")) if is_dropout else None
    idle = arguments.get("train", arguments.get("training")) is False
    return not idle and not (isinstance(probability, (int, float)) and probability == 0)


def _seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    if placement.is_shard and len(placement.pieces) > 1:
        return Refusal("random bits for a dimension of several segments: split the segments first")
    return seed_signature(Rule(pointwise_labels), call, index, placement)


def random_rules() -> Mapping[str, Rule]:
    """Rules by `aten` overload name."""
    rules = {name: Rule(pointwise_labels, seed=_seed, check=same_values) for name in SHAPED}
    rules |= {name: Rule(pointwise_labels, seed=_seed) for name in VALUED}
    # With the same bits on all ranks a dropped sum is the sum of what is dropped of the summands.
    rules["dropout"] = Rule(pointwise_labels, partial=(("input",),), seed=_seed)
    return {f"aten.{name if '.' in name else f'{name}.default'}": rule for name, rule in rules.items()}
