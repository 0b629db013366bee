"""Trails that end as others did are what they are by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from fxpar.ir.grad_flow import weights_of
from fxpar.ir.program import Program
from fxpar.layout.layout import Placement, shard
from fxpar.sharding import shard_propagation as module
from fxpar.sharding.shard_propagation import Trail, Weights, follow
from fxpar.text.parsing import parse_program

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


def _stack(layers: int) -> Program:
    lines = ["fxpar 2", 'plan {"tp": 2}', "properties canonical", "symbol b = x.0 like 3", "loss -"]
    for i in range(layers):
        lines.append(f'%scale{i} = parameter["scale{i}"] : f32[8]')
        lines.append(f'%up{i} = parameter["up{i}"] : f32[16, 8]')
        lines.append(f'%down{i} = parameter["down{i}"] : f32[8, 16]')
    lines += ['%x = input["x"] : f32[b, 8]', "%b = aten.sym_size.int(%x, 0) : b"]
    lines.append("%x0 = aten.neg.default(%x) : f32[b, 8]")
    lines += [line for i in range(layers) for line in _LAYER.format(i=i, j=i + 1).splitlines()]
    lines += [f"%p = aten.view.default(%x{layers}, [%b, 4, 2]) : f32[b, 4, 2]"]
    return parse_program("\n".join([*lines, "%out = aten.softmax.int(%p, 1) : f32[b, 4, 2]", "return out=%out", ""]))


def _weights(program: Program) -> Weights:
    held = program.placeholders()
    return Weights(weights_of(program.graph, [held[p.node] for p in program.parameters]))


def _fields(trail: Trail) -> tuple[object, ...]:
    refused = [(node, refusal.reason, refusal.structural) for node, refusal in trail.refused]
    flags = trail.role, trail.factored, trail.inner
    return flags, trail.product, trail.products, refused, trail.vocabulary, list(trail.seen.items()), trail.weights


def _asked(program: Program) -> list[tuple[fx.Node, Placement]]:
    held = [(program.node(p.node), p.type.shape) for p in program.parameters]
    return [(node, shard(dim, size)) for node, shape in held for dim, size in enumerate(shape)]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_end_of_a_trail_is_that_of_another(n: int, backwards: bool) -> None:
    program = _stack(4)
    shared, asked = _weights(program), _asked(program)
    for node, cut in reversed(asked) if backwards else asked:
        alone = follow(node, cut, n, _weights(program))
        assert _fields(follow(node, cut, n, shared)) == _fields(alone)


def test_steps_are_as_many_as_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    advance, steps = module.advance, list[fx.Node]()

    def counted(trail: Trail, current: fx.Node, user: fx.Node, *more: Any) -> tuple[Placement, ...]:
        steps.append(user)
        return advance(trail, current, user, *more)

    def count(layers: int) -> int:
        steps.clear()
        program = _stack(layers)
        weights = _weights(program)
        for node, cut in _asked(program):
            follow(node, cut, 2, weights)
        return len(steps)

    monkeypatch.setattr(module, "advance", counted)
    assert count(6) - count(4) == count(4) - count(2)
