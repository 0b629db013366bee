"""Polynomials in the sizes, from counts at a few of them."""

from __future__ import annotations

from fxpar.compile import compile_step
from fxpar.cost.build_report import fit_polynomials, occurring_powers, sample_sizes
from fxpar.cost.measure import measure
from fxpar.layout.symbolic_sizes import evaluate, parse_size
from fxpar.plan.plan import Plan
from tests.cost.test_counting import CPU, Two, compiled, lowering


def test_closed_forms_hold_at_other_sizes() -> None:
    program = compiled(Two(lambda x: x @ x.transpose(1, 2) @ x), Plan())
    step = compile_step(program, program.outputs, program.outputs, [p.fqn for p in program.parameters])
    lowered = lowering(step)
    powers = occurring_powers(program)
    assert powers == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]

    def count(sizes: dict[str, int]) -> dict[str, int]:
        return {"all": sum(k.bytes for k in measure(step, lowered, sizes, CPU).saved)}

    where = sample_sizes(powers, {s.name: s.example for s in program.symbols})
    formula = fit_polynomials(powers, where, [count(point) for point in where])["all"]
    assert formula is not None
    names = [s.name for s in program.symbols]
    assert formula == parse_size("4*{0}*{1}**2 + 208*{0}*{1}".format(*names))
    for sizes in ((2, 2), (7, 31)):
        point = dict(zip(names, sizes, strict=True))
        assert evaluate(formula, point) == count(point)["all"]


def test_what_is_no_polynomial_of_these_powers_has_no_closed_form() -> None:
    powers = [(0,), (1,)]
    where = sample_sizes(powers, {"s": 10})
    assert where == [{"s": 10}, {"s": 9}, {"s": 8}]
    polynomials = fit_polynomials(powers, where, [{"a": 3 * p["s"] + 1, "b": p["s"] ** 2} for p in where])
    assert str(polynomials["a"]) == "3*s + 1"
    assert polynomials["b"] is None


def test_points_have_two_of_everything_at_least() -> None:
    assert sample_sizes([(0, 0), (1, 1)], {"b": 1, "s": 1}) == [
        {"b": 2, "s": 2},
        {"b": 3, "s": 3},
        {"b": 4, "s": 4},
    ]
