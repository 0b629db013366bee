"""Derivatives that are emitted as those of equal calls are what the rules give for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from torch import fx

from fxpar.passes.differentiate import differentiate
from fxpar.rewrite.forms import DerivativeCache
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program

_LAYER = """%a{i} = aten.linear.default(%x{i}, %up{i}) : f32[b, 16] tp:S(1)
%t{i} = aten.tanh.default(%a{i}) : f32[b, 16] tp:S(1)
%v{i} = aten.view.default(%t{i}, [%b, 2, 4]) : f32[b, 4, 4] tp:S(1)
%e{i} = aten.exp.default(%v{i}) : f32[b, 4, 4] tp:S(1)
%w{i} = aten.view.default(%e{i}, [%b, 8]) : f32[b, 16] tp:S(1)
%y{i} = aten.linear.default(%w{i}, %down{i}) : f32[b, 8] tp:P
%r{i} = fxpar.reduce_from[tp](%y{i}) : f32[b, 8] tp:P→I
%z{i} = aten.add.Tensor(%x{i}, %r{i}) : f32[b, 8] tp:I
%x{j} = {end}
"""


def _stack(ends: Mapping[int, str], frozen: Collection[str] = ()) -> str:
    """Layers, the ends of which may be other ones, and some parameters of which are not trained."""
    lines = ["fxpar 2", 'plan {"tp": 2}', "properties canonical collectives layouts local rng vocabulary"]
    lines += ["symbol b = x.0 like 3", "loss loss"]
    for i in range(3):
        up, down = ("(frozen)" if f"{name}{i}" in frozen else "" for name in ("up", "down"))
        lines.append(f'%up{i} = parameter["up{i}"]{up} : f32[16, 8] tp:S(0)')
        lines.append(f'%down{i} = parameter["down{i}"]{down} : f32[8, 16] tp:S(1)')
    lines += ['%x = input["x"] : f32[b, 8] tp:I', "%b = aten.sym_size.int(%x, 0) : b"]
    lines.append("%x0 = aten.neg.default(%x) : f32[b, 8] tp:I")
    for i in range(3):
        layer = _LAYER.format(i=i, j=i + 1, end=ends.get(i, "aten.relu.default(%z{i}) : f32[b, 8] tp:I").format(i=i))
        copied = f"%c{i} = fxpar.copy_to[tp](%x{i}) : f32[b, 8] tp:I→R\n"
        lines += (copied + layer.replace(f"linear.default(%x{i}", f"linear.default(%c{i}")).splitlines()
    lines += ["%loss = aten.sum.default(%x3) : f32[] tp:I", "return loss=%loss", ""]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "ends",
    [
        {},
        {1: "aten.mul.Tensor(%z{i}, 2.0) : f32[b, 8] tp:I"},
        {1: "aten.mul.Tensor(%z{i}, %z{i}) : f32[b, 8] tp:I", 2: "aten.mul.Tensor(%z{i}, %r{i}) : f32[b, 8] tp:I"},
        {0: "aten.mul.Scalar(%z{i}, 2) : f32[b, 8] tp:I", 1: "aten.mul.Scalar(%z{i}, 3) : f32[b, 8] tp:I"},
    ],
)
def test_what_is_repeated_is_what_is_emitted(ends: Mapping[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(_stack(ends), monkeypatch)


# The last layer is differentiated first: others would repeat a gradient that is not wanted, or lack one that is.
@pytest.mark.parametrize("frozen", [["down2"], ["up2"], ["up1", "down1"], ["up0", "down0", "up2"], ["down0", "down1"]])
def test_layers_some_of_whose_parameters_are_frozen(frozen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = _stack({}, frozen)
    _compare(text, monkeypatch)
    outputs = set(differentiate(parse_program(text)).outputs)
    weights = {f"{name}{i}" for name in ("up", "down") for i in range(3)}
    assert outputs == {"loss", *(f"fxpar.gradient.{name}" for name in weights.difference(frozen))}


def _compare(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differentiates a program with repeated derivatives and without, and compares the texts."""
    again, repeated = DerivativeCache.again, list[bool]()

    def counted(self: DerivativeCache, *given: Any) -> dict[fx.Node, fx.Node] | None:
        found = again(self, *given)
        repeated.append(found is not None)
        return found

    monkeypatch.setattr(DerivativeCache, "again", counted)
    found = print_program(differentiate(parse_program(text)))
    monkeypatch.setattr(DerivativeCache, "again", lambda *given: None)
    assert found == print_program(differentiate(parse_program(text)))
    assert sum(repeated) >= len(repeated) // 3
