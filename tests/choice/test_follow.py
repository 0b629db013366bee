"""Trails that end as others did are what they are by themselves."""

from __future__ import annotations

import pytest

from fxpar.choice import follow as module
from fxpar.choice.follow import Trail, Weights, follow
from fxpar.layout.layout import shard
from fxpar.program.program import Program, tensor_type
from fxpar.program.weights import weights_of
from fxpar.text.parsing import parse_program

_LAYERS = 4
_LAYER = """%n{i} = aten.mul.Tensor(%x{i}, %scale{i}) : f32[b, 8]
%a{i} = aten.linear.default(%n{i}, %up{i}) : f32[b, 16]
%t{i} = aten.tanh.default(%a{i}) : f32[b, 16]
%v{i} = aten.view.default(%t{i}, [%b, 4, 4]) : f32[b, 4, 4]
%m{i} = aten.sum.dim_IntList(%v{i}, [2], True) : f32[b, 4, 1]
%d{i} = aten.div.Tensor(%v{i}, %m{i}) : f32[b, 4, 4]
%w{i} = aten.view.default(%d{i}, [%b, 16]) : f32[b, 16]
%y{i} = aten.linear.default(%w{i}, %down{i}) : f32[b, 8]
%x{j} = aten.add.Tensor(%x{i}, %y{i}) : f32[b, 8]
"""


def _stack() -> Program:
    lines = ["fxpar 1", 'plan {"tp": 2}', "properties canonical", "symbol b = x.0 like 3", "loss -"]
    for i in range(_LAYERS):
        lines.append(f'%scale{i} = parameter["scale{i}"] : f32[8]')
        lines.append(f'%up{i} = parameter["up{i}"] : f32[16, 8]')
        lines.append(f'%down{i} = parameter["down{i}"] : f32[8, 16]')
    lines += ['%x = input["x"] : f32[b, 8]', "%b = aten.sym_size.int(%x, 0) : b"]
    lines.append("%x0 = aten.neg.default(%x) : f32[b, 8]")
    lines += [line for i in range(_LAYERS) for line in _LAYER.format(i=i, j=i + 1).splitlines()]
    lines += [f"%p = aten.view.default(%x{_LAYERS}, [%b, 4, 2]) : f32[b, 4, 2]"]
    return parse_program("\n".join([*lines, "%out = aten.softmax.int(%p, 1) : f32[b, 4, 2]", "return out=%out", ""]))


def _weights(program: Program) -> Weights:
    held = program.placeholders()
    return Weights(weights_of(program.graph, [held[p.node] for p in program.parameters]))


def _fields(trail: Trail) -> tuple[object, ...]:
    refused = [(node, refusal.reason, refusal.structural) for node, refusal in trail.refused]
    flags = trail.role, trail.factored, trail.inner
    return flags, trail.product, trail.products, refused, trail.vocabulary, list(trail.seen.items()), trail.weights


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_end_of_a_trail_is_that_of_another(n: int, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _stack()
    shared, advance, steps = _weights(program), module.advance, list[int]()
    monkeypatch.setattr(module, "advance", lambda *given: steps.append(1) or advance(*given))
    asked = [(program.node(p.node), dim) for p in program.parameters for dim in range(len(p.type.shape))]
    total = 0
    for node, dim in reversed(asked) if backwards else asked:
        cut = shard(dim, tensor_type(node).shape[dim])
        steps.clear()
        found = follow(node, cut, n, shared)
        total += len(steps)
        assert _fields(found) == _fields(follow(node, cut, n, _weights(program)))
    # Each layer is gone through once by the trails in the stream, and not once by that of each layer before it.
    assert total <= 40 * _LAYERS
