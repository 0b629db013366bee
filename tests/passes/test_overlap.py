"""overlap: collectives start early, gradients of weights run behind them; nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.compile import compile_model
from fxpar.cost.seconds import travels
from fxpar.ir.regions import inlined, region_of, regions
from fxpar.manager import PassManager
from fxpar.passes import step_passes
from fxpar.passes.overlap import overlap
from fxpar.plan.cost import Cost
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC
from tests.products import few
from tests.zoo import CASES

# A product, of which a rank computes half, takes 1 ms, and an all-reduce 4 ms.
_COST = '"bandwidth": 1e9, "latency": 1e-06, "flops": 1e12, "multiprocessors": 1, "hidden": 1.0'
_SQUARE = "f32[1000, 1000]"
_HEAD = f"""\
fxpar 2
plan {{"tp": 2, "cost": {{{_COST}}}}}
properties canonical collectives layouts local step
%g = input["g"] : {_SQUARE} tp:S(1)
%x = input["x"] : {_SQUARE} tp:R
%h = input["h"] : {_SQUARE} tp:S(0)
%a = input["a"] : {_SQUARE} tp:S(0)
%c = input["c"] : {_SQUARE} tp:S(1)
"""
_END = "{phase=backward}"


def column(i: int, gradient: str) -> str:
    """The backward of a column-cut linear layer: the gradient of its input is summed over the ranks."""
    return f"""\
%dw{i} = aten.mm.default(%x, %{gradient}) : {_SQUARE} tp:S(1) {_END}
%dx{i} = aten.mm.default(%{gradient}, %a) : {_SQUARE} tp:P {_END}
%sum{i} = fxpar.all_reduce[tp](%dx{i}) : {_SQUARE} tp:P→R {_END}
%act{i} = aten.relu.default(%sum{i}) : {_SQUARE} tp:R {_END}
"""


def row(i: int, gradient: str) -> str:
    """That of a row-cut one."""
    return f"""\
%dw{i} = aten.mm.default(%h, %{gradient}) : {_SQUARE} tp:S(0) {_END}
%dx{i} = aten.mm.default(%{gradient}, %c) : {_SQUARE} tp:S(1) {_END}
%act{i} = aten.relu.default(%dx{i}) : {_SQUARE} tp:S(1) {_END}
"""


def order(text: str, cost: str = _COST) -> list[str]:
    """Names of the operations after the pass, which the manager checks."""
    program = parse_program(text.replace(_COST, cost))
    found = PassManager([overlap], ()).run(program)
    return [node.name for node in found.graph.nodes if node.op == "call_function"]


def test_a_weight_s_gradient_runs_behind_the_sum_of_its_layer() -> None:
    text = _HEAD + column(0, "g") + "return w=%dw0, x=%act0\n"
    found = overlap(parse_program(text))
    assert print_program(found).splitlines()[8:] == [
        f"%dx0 = aten.mm.default(%g, %a) : {_SQUARE} tp:P {_END}",
        f"%sum0 = fxpar.all_reduce[tp](%dx0) : {_SQUARE} tp:P→R {_END}",
        f"%dw0 = aten.mm.default(%x, %g) : {_SQUARE} tp:S(1) {_END}",
        f"%act0 = aten.relu.default(%sum0) : {_SQUARE} tp:R {_END}",
        "return w=%dw0, x=%act0",
    ]


def test_a_row_weight_s_gradient_waits_for_the_next_sum() -> None:
    text = _HEAD.replace('%g = input["g"] : f32[1000, 1000] tp:S(1)', '%g = input["g"] : f32[1000, 1000] tp:R')
    text += row(0, "g") + column(1, "act0") + "return w=%dw0, v=%dw1, x=%act1\n"
    assert order(text) == ["dx0", "act0", "dx1", "sum1", "dw0", "dw1", "act1"]
    # Here one product takes as long as the sum: the other would only keep what it reads.
    fast = _COST.replace("1e9,", "5e9,")
    assert order(text, fast) == ["dx0", "act0", "dx1", "sum1", "dw0", "act1", "dw1"]


def test_products_of_chunks_stay_with_their_sum() -> None:
    """One of the two would hide the collective, and they are computed where the sum is."""
    text = _HEAD + column(0, "g").replace("%dw0 =", "%one =")
    more = f"%two = aten.mm.default(%x, %g) : {_SQUARE} tp:S(1) {_END}\n"
    more += f"%dw0 = fxpar.add_chunks([%one, %two]) : {_SQUARE} tp:S(1) {_END}\n"
    text = text.replace("%dx0 =", f"{more}%dx0 =") + "return w=%dw0, x=%act0\n"
    program = overlap(parse_program(text.replace("1e9,", "5e9,")))
    names = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert names == ["dx0", "sum0", "two", "one", "dw0", "act0"]


def test_products_beside_a_sum_stay_until_it_is_hidden() -> None:
    """Nobody waits for any of them. The sum takes 4 ms and its latency, a product 1 ms: the sixth is one too many."""
    products = "".join(f"%p{i} = aten.mm.default(%x, %g) : {_SQUARE} tp:S(1)\n" for i in range(6))
    text = (
        f"{_HEAD}%h0 = aten.mm.default(%g, %a) : {_SQUARE} tp:P\n%sum0 = fxpar.all_reduce[tp](%h0) : {_SQUARE} tp:P→R\n"
        f"{products}%act0 = aten.relu.default(%sum0) : {_SQUARE} tp:R\n"
        "return x=%act0, " + ", ".join(f"p{i}=%p{i}" for i in range(6)) + "\n"
    )
    assert order(text) == ["h0", "sum0", "p0", "p1", "p2", "p3", "p4", "act0", "p5"]


def test_an_axis_has_links_of_its_own() -> None:
    """The plan's constants of the axis decide how much follows a sum, and not those of the slowest one."""
    text = _HEAD.replace('%g = input["g"] : f32[1000, 1000] tp:S(1)', '%g = input["g"] : f32[1000, 1000] tp:R')
    text += row(0, "g") + column(1, "act0") + "return w=%dw0, v=%dw1, x=%act1\n"
    own = _COST + ', "axes": {"tp": {"bandwidth": 5000000000.0}}'
    assert order(text, own) == ["dx0", "act0", "dx1", "sum1", "dw0", "act1", "dw1"]


def test_what_is_postponed_is_bounded() -> None:
    """Of more than two milliseconds of products the oldest do not wait for a sum."""
    layers = "".join(row(i, f"act{i - 1}" if i else "h") for i in range(6))
    results = ", ".join(f"w{i}=%dw{i}" for i in range(6))
    text = _HEAD + layers + column(6, "act5") + f"return {results}, w6=%dw6, x=%act6\n"
    found = order(text)
    for i in range(3):
        assert found.index(f"dx{i + 1}") < found.index(f"dw{i}") < found.index(f"dx{i + 3}")


def test_without_collectives_the_order_stays() -> None:
    text = _HEAD + row(0, "h") + "return w=%dw0, x=%act0\n"
    assert order(text) == ["dw0", "dx0", "act0"]


def test_what_reads_a_postponed_product_waits_with_it_unless_a_collective_needs_it() -> None:
    more = f"%twice = aten.mul.Tensor(%dw0, 2.0) : {_SQUARE} tp:S(1) {_END}\n"
    text = _HEAD + column(0, "g").replace("%dx0 =", more + "%dx0 =") + "return w=%twice, x=%act0\n"
    assert order(text) == ["dx0", "sum0", "dw0", "twice", "act0"]
    listened = f"%norm = fxpar.all_gather[tp](%dw0) : {_SQUARE} tp:S(1)→R {_END}\n"
    text = _HEAD + column(0, "g") + listened + "return w=%norm, x=%act0\n"
    assert order(text) == ["dw0", "dx0", "sum0", "act0", "norm"]


def test_phases_stay_apart() -> None:
    """The parameter phase comes once behind all microbatches: its sums take no product of the backward."""
    text = _HEAD + row(0, "h")
    text += f"%total = fxpar.all_reduce[tp](%later) : {_SQUARE} tp:P→R {{phase=parameter}}\n"
    text = text.replace('%h = input["h"]', f'%later = input["later"] : {_SQUARE} tp:P\n%h = input["h"]')
    assert order(text + "return w=%dw0, x=%act0, y=%total\n") == ["dw0", "dx0", "act0", "total"]


_REGION = f"""\
region layer_backward
%x = operand : {_SQUARE} tp:R
%g = operand : {_SQUARE} tp:R
%a = operand : {_SQUARE} tp:S(0)
%gs = fxpar.r_to_s[tp](%g) : {_SQUARE} tp:R→S(1) {_END}
%dw = aten.mm.default(%x, %gs) : {_SQUARE} tp:S(1) {_END}
%dx = aten.mm.default(%gs, %a) : {_SQUARE} tp:P {_END}
%sum = fxpar.all_reduce[tp](%dx) : {_SQUARE} tp:P→R {_END}
%act = aten.relu.default(%sum) : {_SQUARE} tp:R {_END}
result %dw, %act
"""


def test_a_region_is_ordered_once_for_all_of_its_calls() -> None:
    head = _HEAD.replace("step\n", f"step\n{_REGION}")
    calls = """\
%l1 = region.layer_backward(%x, %x, %a) gives %dw1, %act1 {phase=backward}
%l2 = region.layer_backward(%x, %act1, %a) gives %dw2, %act2 {phase=backward}
return w=%dw1, v=%dw2, x=%act2
"""
    program = parse_program(head + calls)
    found = overlap(program.copy())
    (region,) = regions(found)
    assert [node.name for node in region.body] == ["gs", "dx", "sum", "dw", "act"]
    assert [region_of(node) for node in found.graph.nodes if region_of(node)] == [region, region]
    assert [node.name for node in regions(program)[0].body] == ["gs", "dw", "dx", "sum", "act"]
    assert print_program(parse_program(print_program(found))) == print_program(found)


_SENT = f"""\
%t1 = fxpar.all_reduce[tp](%dw1) : {_SQUARE} tp:P→R {{phase=parameter}}
%t2 = fxpar.all_reduce[tp](%dw2) : {_SQUARE} tp:P→R {{phase=parameter}}
%t3 = fxpar.all_reduce[tp](%dw3) : {_SQUARE} tp:P→R {{phase=parameter}}
%again = fxpar.reduce_scatter[tp](%half) : {_SQUARE} tp:P→S(0) {{phase=parameter}}
"""
_LAYERS = f"""\
region layer_backward
%h = operand : {_SQUARE} tp:S(0)
%c = operand : {_SQUARE} tp:S(1)
%dw = aten.mm.default(%c, %h) : {_SQUARE} tp:P {_END}
%dx = aten.relu.default(%h) : {_SQUARE} tp:S(0) {_END}
result %dw, %dx
"""
_BACKWARD = f"""\
%l1 = region.layer_backward(%h, %c) gives %dw1, %dx1 {{phase=backward}}
%l2 = region.layer_backward(%dx1, %c) gives %dw2, %dx2 {{phase=backward}}
%dw3 = aten.mm.default(%c, %dx2) : {_SQUARE} tp:P {_END}
%act = aten.relu.default(%dx2) : {_SQUARE} tp:S(0) {_END}
"""
_HALF = f"%half = fxpar.i_to_p[tp](%t1) : {_SQUARE} tp:R→P {{phase=parameter}}\n"


def sent(cuda_graphs: str = "", mark: str = "") -> list[str]:
    """Names after the pass, where gradients are sent once a step."""
    head = _HEAD.replace('"tp": 2', f'"tp": 2{cuda_graphs}').replace("step\n", f"step\n{_LAYERS}")
    first, *others = _SENT.splitlines(keepends=True)
    late = first + _HALF.replace("i_to_p", "r_to_p") + "".join(others)
    text = head + _BACKWARD.replace(f"S(0) {_END}\n", f"S(0) {{{mark}phase=backward}}\n") + late
    program = parse_program(text + "return a=%t1, b=%t2, c=%t3, d=%again, x=%act\n")
    found = PassManager([overlap], ()).run(program)
    return [n.name for n in found.graph.nodes if n.op == "call_function" and not n.name.startswith("dx")]


def test_gradients_are_sent_behind_the_call_or_the_run_that_computes_them() -> None:
    """And not in the middle of a run, which is compiled at once; what needs another sum stays behind all."""
    assert sent() == ["l1", "dw1", "t1", "l2", "dw2", "t2", "dw3", "act", "t3", "half", "again"]


def test_gradients_stay_in_the_graph_in_which_they_are_waited_for() -> None:
    """Partial graphs end where the host reads a value. Without graphs nothing ends there."""
    graphs, mark = ', "cuda_graphs": {"impl": "partial"}', 'uncaptured="reads a value", '
    late = ["l1", "dw1", "l2", "dw2", "dw3", "act", "t1", "half", "t2", "t3", "again"]
    assert sent(graphs, mark) == late
    assert sent(graphs) == sent(mark=mark) == sent()


@pytest.mark.parametrize("name", few(("gpt2", "llama", "nanogpt"), ["gpt2"]))
def test_of_a_model_s_step_less_stays_exposed(name: str) -> None:
    """With products that take about as long as sums; both runs are checked by the manager."""
    case = CASES[name]
    plan = replace(case.plan(2), cost=Cost(bandwidth=1e9, latency=1e-6, flops=1e9, multiprocessors=1, hidden=1.0))
    program = compile_model(case.model(), case.example(), plan, case.loss).program
    trained = [p.fqn for p in program.parameters if p.trainable]
    passes = step_passes((program.loss,), (program.loss,), trained)
    others = passes[: passes.index(overlap)]
    before = PassManager(others, STATIC, checked=True).run(program)
    after = PassManager([overlap], STATIC, checked=True).run(before)
    first, second = (sum(each.exposed for each in travels(inlined(step))) for step in (before, after))
    assert second < 0.9 * first
