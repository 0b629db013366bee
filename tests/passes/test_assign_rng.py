"""assign_rng: every random node draws the bits of its own global elements."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import LayoutError, PassError
from fxpar.ir.program import Program, note
from fxpar.ir.step import RNG_PATH
from fxpar.ops.random import attention, axis_index, dropout
from fxpar.passes import assign_rng
from fxpar.passes.localize import localize
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.verify.reference_program import promote, reference_program
from fxpar.verify.simulate_ranks import run_ranks, run_single, step_of
from fxpar.verify.static import verify_static
from fxpar.verify.values import call_inputs, program_state, rng_state
from tests.passes.modules import (
    MLP,
    WIDTH,
    InterleavedAttention,
    batch_of,
    build,
    changed_by,
    flat,
    heads,
    run,
    shown,
    squares,
    values,
)
from tests.products import alternate, product

MLP_SPLIT = {"up": "column", "down": "row"}
ATTENTION = {"qkv": "head", "out": "row"}

MLP_WITH_GENERATOR = """\
… 7
%rng = input["fxpar.rng"] : i64[3] tp:R
… 10
%dropout = fxpar.dropout(%linear_1_bias, %rng, 0.1) : f32[b, s, 96] tp:I {random=325815778}
… 3
"""

INTERLEAVED_WITH_GENERATOR = """\
… 6
%rng = input["fxpar.rng"] : i64[3] tp:R
%tp_index = fxpar.axis_index[tp]() : i64[] tp:V
… 16
%dropout = fxpar.dropout(%softmax, %rng, 0.1, [%tp_index]) : f32[b, 8, s, s] tp:S(1) {random=325815778}
… 10
"""


def test_golden_mlp() -> None:
    """The values are invariant: all ranks draw the same bits, without an index."""
    assert changed_by("assign_rng", build(MLP)[1].program, split=MLP_SPLIT) == MLP_WITH_GENERATOR


def test_golden_interleaved_attention() -> None:
    """The probabilities are cut by head: each rank passes its index and draws the bits of its own heads."""
    program = build(InterleavedAttention)[1].program
    assert changed_by("assign_rng", program, split=ATTENTION) == INTERLEAVED_WITH_GENERATOR


class Fused(nn.Module):
    """Dropout inside the attention operator, and two more of other layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, 8) for part in self.qkv(functional.dropout(x, 0.2)).split(WIDTH, -1))
        attended = functional.dropout(flat(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)), 0.1)
        return squares(functional.dropout(self.out(attended), 0.1))


@product(kind__split=[(MLP, MLP_SPLIT), (InterleavedAttention, ATTENTION), (Fused, ATTENTION), (Fused, {})], tp=[2, 4])
def test_the_masks_are_those_of_one_device(kind: Callable[..., nn.Module], split: dict[str, str], tp: int) -> None:
    """Loss and gradients would differ by far if a single mask bit did."""
    assert values(kind, split=split, tp=tp).ok


def test_the_layout_of_each_node_decides() -> None:
    result = run(build(Fused)[1], ATTENTION)
    found = [(n.target, indices(n.args)) for n in result.graph.nodes if n.target in (dropout, attention)]
    assert found == [(dropout, 0), (attention, 1), (dropout, 1), (dropout, 0)]


def indices(args: tuple[object, ...]) -> int:
    """How many axis indices a random node is given."""
    return len(args[-1]) if isinstance(args[-1], list) else 0


def test_one_index_and_one_generator_serve_all() -> None:
    result = run(build(Fused)[1], ATTENTION)
    assert [n.target for n in result.graph.nodes].count(axis_index) == 1
    assert [entry.path for entry in result.inputs] == ["x", RNG_PATH]


def test_identities_are_kept_and_differ() -> None:
    captured = build(Fused)[1]
    before = [note(n).random for n in captured.program.graph.nodes if n.op != "output" and note(n).random]
    result = run(captured, ATTENTION)
    assert [note(n).random for n in result.graph.nodes if n.target in (dropout, attention)] == before
    assert len(set(before)) == 4


def test_a_program_without_random_nodes_gets_no_generator() -> None:
    module = MLP().eval()
    captured = capture(module, batch_of(module), Plan(tp=2))
    assert [entry.path for entry in run(captured, MLP_SPLIT).inputs] == ["x"]


def test_step_microbatch_and_seed_choose_the_masks() -> None:
    module, captured = build(MLP)
    program, state = reference_program(captured.program), program_state(captured.program, module)

    def loss(*choice: int) -> float:
        inputs = call_inputs(captured, module, batch_of(module)) | {RNG_PATH: rng_state(*choice)}
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        return float(run_single(program, {n: v.double() for n, v in state.items()}, wide).outputs["output"])

    first = loss(0, 0, 0)
    assert loss(0, 0, 0) == first
    assert len({first, loss(1, 0, 0), loss(0, 1, 0), loss(0, 0, 1)}) == 4


# ------------------------------------------------------------------ refusals

HEAD = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts
symbol b = x.0 like 4
%w = parameter["w"] : f32[4, 6] tp:S(1)
%x = input["x"] : f32[b, 6] tp:R
"""


def by_hand(*lines: str) -> Program:
    return parse_program(HEAD + "\n".join([*lines, ""]))


@pytest.mark.parametrize(
    "line",
    [
        "aten.poisson.default(%x) : f32[b, 6]",
        "aten.binomial.default(%x, %x) : f32[b, 6]",
        "aten.multinomial.default(%x, 3, True) : i64[b, 3]",
        "aten.geometric.default(%x, 1.0) : f32[b, 6]",
    ],
)
def test_other_random_operators_are_refused(line: str) -> None:
    program = by_hand(f"%y = {line} tp:R {{random=5}}  # net.noise model.py:3", "return y=%y")
    reason = r"%y \(net\.noise, model\.py:3\): .* draws random numbers that no rule can split; use dropout, uniform,"
    with pytest.raises(PassError, match=reason):
        assign_rng(program)


SUMMANDS = [
    "%x_r_to_s = fxpar.r_to_s[tp](%x) : f32[b, 6] tp:R→S(1)",
    "%p = aten.linear.default(%x_r_to_s, %w) : f32[b, 4] tp:P",
    "%d = aten.dropout.default(%p, 0.5, True) : f32[b, 4] tp:P {random=5}",
    "%y = fxpar.reduce_from[tp](%d) : f32[b, 4] tp:P→I",
    "return y=%y",
]


def test_all_ranks_drop_the_same_elements_of_the_summands_of_a_partial_value() -> None:
    result = localize(assign_rng(by_hand(*SUMMANDS)))
    result = result.with_(properties=result.properties | {"rng", "vocabulary", "local"})
    verify_static(result)
    assert "%d = fxpar.dropout(%p, %rng, 0.5) : f32[b, 4] tp:P {random=5}" in shown(result)
    state, inputs = {"w": torch.randn(4, 6).double()}, {"x": torch.randn(4, 6).double(), RNG_PATH: rng_state()}
    whole = functional.linear(inputs["x"], state["w"])
    for rank in run_ranks(promote(step_of(result)), state, inputs, {"b": 4}):
        is_kept = rank.outputs["y"] != 0
        assert 0 < is_kept.sum() < is_kept.numel()
        torch.testing.assert_close(rank.outputs["y"], 2 * whole * is_kept)


def test_an_index_for_a_partial_value_is_refused() -> None:
    """Each rank would drop other elements of its summand."""
    result = assign_rng(by_hand("%tp_index = fxpar.axis_index[tp]() : i64[] tp:V", *SUMMANDS))
    node = result.node("d")
    node.args = (*node.args, [result.node("tp_index")])
    with pytest.raises(LayoutError, match="would draw different bits: drop the axis index"):
        verify_static(result.with_(properties=result.properties | {"rng"}))


def test_a_seed_of_another_plan_leaves_the_text_as_it_is() -> None:
    """The seed is an input of the program: its text says nothing of it but in the plan."""
    captured = build(MLP)[1]
    assert shown(run(captured, MLP_SPLIT, seed=7)) == shown(run(captured, MLP_SPLIT))
    assert torch.equal(rng_state(7), torch.tensor([7, 0, 0]))


# ------------------------------------------------------------------ distributions

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "stochastic depth": lambda x: x * (0.8 + torch.rand(x.shape[0], 1, 1)).floor() / 0.8,
    "bernoulli": lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8),
    "gates": lambda x: x * torch.bernoulli(x.sigmoid()),
    "noise": lambda x: x + torch.randn_like(x) + torch.empty_like(x).uniform_(0.9, 1.1),
    "gumbel": lambda x: x * functional.gumbel_softmax(x, dim=1),
    "integers": lambda x: x[torch.randperm(x.shape[0])] * torch.randint_like(x, 1, 5),
    "choice": lambda x: x + torch.multinomial(x[..., 0].softmax(-1), 2).sum(),
    "slopes": lambda x: functional.rrelu(x, training=True),
    "two segments": lambda x: torch.cat([p.relu() for p in functional.dropout(x, 0.3).split([32, 64], -1)], -1),
}


class Drawing(nn.Module):
    """A draw between two matrices, where it is cut, and behind them, where it is not."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.draw = (draw,)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.draw[0](self.down(self.draw[0](self.up(x)))))


@pytest.mark.parametrize("name", alternate(DRAWS, 1))
def test_other_numbers_are_those_of_one_device(name: str) -> None:
    assert values(lambda: Drawing(DRAWS[name]), split={}, tp=2).ok


def test_a_shard_draws_for_its_own_elements_and_what_is_whole_for_all() -> None:
    def shapes(name: str) -> list[tuple[str, bool]]:
        result = run(build(lambda: Drawing(DRAWS[name]))[1], {})
        nodes = [n for n in result.graph.nodes if n.op == "call_function" and note(n).random]
        return [(n.target.__name__, bool(indices(n.args))) for n in nodes]

    assert shapes("stochastic depth") == [("uniform", False), ("uniform", False)]
    assert ("uniform_like", True) in shapes("gates")


def test_distributions_are_those_of_their_operators() -> None:
    """Mean and variance of a hundred thousand numbers of each kind."""

    class Kinds(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            e = torch.empty_like
            return (
                torch.rand_like(x),
                torch.randn_like(x),
                e(x).uniform_(-2, 4),
                e(x).normal_(3, 0.5),
                e(x).exponential_(2.0),
                torch.bernoulli(x.sigmoid()),
                e(x).log_normal_(0.0, 0.5),
                e(x).geometric_(0.25),
                torch.randint(2, 12, (x.shape[0], 1000)).to(x),
            )

    module, x = Kinds(), torch.zeros(100, 1000)
    captured = capture(module, {"x": x}, loss="")
    program = reference_program(captured.program)
    outputs = run_single(program, {}, {"x": x.double(), RNG_PATH: rng_state(3)}).outputs
    for mine, torchs in zip(outputs.values(), module(x), strict=True):
        spread = 6 * float(torchs.std()) / x.numel() ** 0.5
        assert abs(float(mine.mean() - torchs.double().mean())) < 2 * spread
        assert float(mine.std()) == pytest.approx(float(torchs.std()), rel=0.03)
