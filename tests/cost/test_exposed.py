"""What travels beside products, and what stays exposed: by hand on small steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fxpar.cost.seconds import Travel, estimates, step_times, travels
from fxpar.ir.program import Program, note, set_note
from fxpar.passes.overlap import overlap
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program

# A product of two whole matrices takes 2 ms, and an all-reduce of one 2 (1 µs + 2 ms), of which all can be hidden.
_COST = '"cost": {"bandwidth": 1e9, "latency": 1e-06, "flops": 1e12, "multiprocessors": 1, "hidden": 1.0}'
_SQUARE = "f32[1000, 1000]"
_PRODUCT, _SUM = 1e-3, 2 * (1e-6 + 2e-3)  # a product of which a rank computes half


def backward(*layers: str) -> Program:
    """The backward of linear layers, as differentiation leaves it: of each the gradient of its weight goes first.

    Args:
        layers: in turns `column`, whose input's gradient is summed over the ranks, and `row`, whose is not.
    """
    lines = [
        "fxpar 2",
        f'plan {{"tp": 2, {_COST}}}',
        "properties canonical collectives layouts local step",
        f'%g = input["g"] : {_SQUARE} tp:{"S(1)" if layers[0] == "column" else "R"}',
        f'%x = input["x"] : {_SQUARE} tp:R',
        f'%h = input["h"] : {_SQUARE} tp:S(0)',
        f'%a = input["a"] : {_SQUARE} tp:S(0)',
        f'%c = input["c"] : {_SQUARE} tp:S(1)',
    ]
    given, end = "g", " {phase=backward}"
    for i, layer in enumerate(layers):
        if layer == "column":
            lines += [
                f"%dw{i} = aten.mm.default(%x, %{given}) : {_SQUARE} tp:S(1){end}",
                f"%dx{i} = aten.mm.default(%{given}, %a) : {_SQUARE} tp:P{end}",
                f"%sum{i} = fxpar.all_reduce[tp](%dx{i}) : {_SQUARE} tp:P→R{end}",
                f"%act{i} = aten.relu.default(%sum{i}) : {_SQUARE} tp:R{end}",
            ]
        else:
            lines += [
                f"%dw{i} = aten.mm.default(%h, %{given}) : {_SQUARE} tp:S(0){end}",
                f"%dx{i} = aten.mm.default(%{given}, %c) : {_SQUARE} tp:S(1){end}",
                f"%act{i} = aten.relu.default(%dx{i}) : {_SQUARE} tp:S(1){end}",
            ]
        given = f"act{i}"
    results = ", ".join(f"dw{i}=%dw{i}" for i in range(len(layers)))
    return parse_program("\n".join([*lines, f"return {results}, end=%{given}", ""]))


def times(found: list[Travel]) -> list[Any]:
    return [(each.collective.node, tuple(name for name, _ in each.beside), each.exposed) for each in found]


def test_a_weight_gradient_hides_part_of_a_sum() -> None:
    (found,) = travels(overlap(backward("column")))
    assert found.seconds == pytest.approx(_SUM)
    assert found.exposed == pytest.approx(_SUM - _PRODUCT)
    assert found.to_json()["beside"] == [{"node": "dw0", "seconds": pytest.approx(_PRODUCT)}]


def test_what_needs_the_sum_hides_nothing() -> None:
    """The second layer's products read what the first one's sum gives."""
    found = travels(overlap(backward("column", "row")))
    assert times(found) == [("sum0", ("dw0",), pytest.approx(_SUM - _PRODUCT))]


def test_postponed_products_of_earlier_layers_come_beside() -> None:
    found = travels(overlap(backward("row", "column")))
    assert times(found) == [("sum1", ("dw0", "dw1"), pytest.approx(_SUM - 2 * _PRODUCT))]


def test_a_sum_is_waited_for_where_its_run_ends() -> None:
    """What stands in another call is not beside."""
    program = overlap(backward("row", "column"))
    for node in program.graph.nodes:
        if node.name in ("dw1", "act1"):
            set_note(node, replace(note(node), region="second"))
    assert times(travels(program)) == [("sum1", ("dw0",), pytest.approx(_SUM - _PRODUCT))]


def test_what_is_postponed_for_too_long_is_not_beside() -> None:
    """Of more than two milliseconds of products the oldest do not wait for a collective."""
    text = print_program(backward("row", "column"))
    slow = parse_program(text.replace('"flops": 1000000000000.0', '"flops": 700000000000.0'))
    assert times(travels(overlap(slow))) == [("sum1", ("dw1",), pytest.approx(_SUM - 1e9 / 7e11))]


@pytest.mark.parametrize(("ranks", "half"), [(2, False), (4, True)])
def test_of_sums_over_more_than_two_ranks_copies_carry_the_first_half(ranks: int, half: bool) -> None:
    text = f"""\
fxpar 2
plan {{"tp": {ranks}, "communication": {{"collective_transport": "copy"}}, {_COST}}}
properties canonical collectives layouts local step
%x = input["x"] : {_SQUARE} tp:P
%sum = fxpar.all_reduce[tp](%x) : {_SQUARE} tp:P→R {{buffer=1, phase=backward}}
return y=%sum
"""
    (sent,) = estimates(parse_program(text)).sends["sum"]
    wire = 2 * 4e6 * (ranks - 1) / ranks / 1e9
    assert sent.seconds == pytest.approx(wire + 3e-5)
    assert sent.hideable == pytest.approx(sent.seconds - (wire / 2 if half else 0))


def test_gradients_that_are_sent_once_a_step_travel_up_to_its_end() -> None:
    """Beside another call's product; one axis carries one after the other, and nothing hides the last."""
    text = f"""\
fxpar 2
plan {{"tp": 2, {_COST}}}
properties canonical collectives layouts local step
%h = input["h"] : {_SQUARE} tp:S(0)
%c = input["c"] : {_SQUARE} tp:S(1)
%p1 = aten.mm.default(%c, %h) : {_SQUARE} tp:P {{phase=backward}}
%p2 = aten.mm.default(%c, %h) : {_SQUARE} tp:P {{phase=backward}}
%w1 = fxpar.reduce_scatter[tp](%p1) : {_SQUARE} tp:P→S(0) {{phase=parameter}}
%w2 = fxpar.reduce_scatter[tp](%p2) : {_SQUARE} tp:P→S(0) {{phase=parameter}}
return w1=%w1, w2=%w2
"""
    program = parse_program(text)
    for name in ("p1", "p2"):
        set_note(program.node(name), replace(note(program.node(name)), region=name))
    last = ("w2", (), pytest.approx(_SUM / 2))
    assert times(travels(program)) == [("w1", (), pytest.approx(_SUM / 2)), last]
    program.node("p1").append(program.node("w1"))
    assert times(travels(program)) == [("w1", ("p2",), pytest.approx(_SUM / 2 - _PRODUCT)), last]


def test_what_passes_once_a_step_is_apart_wherever_it_stands() -> None:
    """Kernels that nothing hides, one behind its product and one at the end: both are of no microbatch."""
    text = f"""\
fxpar 2
plan {{"tp": 2, {_COST.replace('"hidden": 1.0', '"hidden": 0.0')}}}
properties canonical collectives layouts local step
%h = input["h"] : {_SQUARE} tp:S(0)
%c = input["c"] : {_SQUARE} tp:S(1)
%p0 = aten.mm.default(%c, %h) : {_SQUARE} tp:P
%p1 = aten.mm.default(%c, %h) : {_SQUARE} tp:P {{phase=backward}}
%w1 = fxpar.reduce_scatter[tp](%p1) : {_SQUARE} tp:P→S(0) {{phase=parameter}}
%p2 = aten.mm.default(%c, %h) : {_SQUARE} tp:P {{phase=backward}}
%w2 = fxpar.reduce_scatter[tp](%p2) : {_SQUARE} tp:P→S(0) {{phase=parameter}}
return p0=%p0, w1=%w1, w2=%w2
"""
    step = step_times(parse_program(text))
    assert step.before == 0
    assert step.forward == pytest.approx(_PRODUCT)
    assert step.after == pytest.approx(_SUM)
    assert list(step.of_microbatch) == pytest.approx([_PRODUCT, 2 * _PRODUCT])
    assert step.seconds == pytest.approx(3 * _PRODUCT + _SUM)
    starts = {name: start for name, (start, _) in step.products.items()}
    assert starts == {"p0": 0, "p1": pytest.approx(_PRODUCT), "p2": pytest.approx(2 * _PRODUCT + _SUM / 2)}
    assert [travel.start for travel in step.travels] == pytest.approx([2 * _PRODUCT, 3 * _PRODUCT + _SUM / 2])
