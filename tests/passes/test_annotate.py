"""annotate: overrides find the right cut, everything else follows, and what cannot be done is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.cost.communication import collectives
from fxpar.cost.flops import split_flops
from fxpar.ir.program import Program, note, output_layouts
from fxpar.layout.layout import Layout, shard
from fxpar.manager import PassManager
from fxpar.passes import annotate, canonicalize
from fxpar.passes.annotate import keeping
from fxpar.plan.plan import Plan
from tests.passes.modules import (
    MLP,
    WIDTH,
    Behind,
    ChunkedAttention,
    FusedAttention,
    GatedMLP,
    GroupedAttention,
    InterleavedAttention,
    NormedHeads,
    SelfAttention,
    SometimesUsed,
    TransposedMLP,
    UnequalAttention,
    build,
    flat,
    heads,
    layouts,
    roles,
    run,
    shown,
    squares,
    values,
)
from tests.products import alternate

ATTENTION = {"qkv": "head", "out": "row"}
UP_DOWN = {"*up": "column", "*down": "row"}

MLP_ANNOTATED = """\
%words_weight = parameter["words.weight"] : f32[64, 96] tp:S(0) {origin="a vocabulary that can be cut is cut"}
%layer_norm_weight = parameter["layer.norm.weight"] : f32[96] tp:I {origin="nothing else is legal: at %layer_norm (layer.norm, modules.py:40) the operation needs the whole of dimension 0"}
%layer_norm_bias = parameter["layer.norm.bias"] : f32[96] tp:I {origin="nothing else is legal: at %layer_norm (layer.norm, modules.py:40) the operation needs the whole of dimension 0"}
%layer_up_weight = parameter["layer.up.weight"] : f32[160, 96] tp:S(0) {role="column", origin="plan: *up = column"}
%layer_up_bias = parameter["layer.up.bias"] : f32[160] tp:S(0) {role="column", origin="plan: *up = column"}
%layer_down_weight = parameter["layer.down.weight"] : f32[96, 160] tp:S(1) {role="row", origin="plan: *down = row"}
%layer_down_bias = parameter["layer.down.bias"] : f32[96] tp:I {role="row", origin="plan: *down = row"}
%ids = input["ids"] : i64[b, s] tp:R
%embedding = aten.embedding.default(%words_weight, %ids) : f32[b, s, 96] tp:P {needs=tp:S(0) ; tp:R, origin="follows operand weight"}
%layer_norm = aten.layer_norm.default(%embedding, [96], %layer_norm_weight, %layer_norm_bias, 1e-05, False) : f32[b, s, 96] tp:I {needs=tp:I ; tp:I ; tp:I}
%linear = aten.linear.default(%layer_norm, %layer_up_weight) : f32[b, s, 160] tp:S(2) {needs=tp:R ; tp:S(0), role="column", origin="follows operand weight"}
%linear_bias = aten.add.Tensor(%linear, %layer_up_bias) : f32[b, s, 160] tp:S(2) {needs=tp:S(2) ; tp:S(0), role="bias", origin="follows operand self"}
%gelu = aten.gelu.default(%linear_bias) : f32[b, s, 160] tp:S(2) {needs=tp:S(2), origin="follows operand self"}
%linear_1 = aten.linear.default(%gelu, %layer_down_weight) : f32[b, s, 96] tp:P {needs=tp:S(2) ; tp:S(1), role="row", origin="follows operand input"}
%linear_1_bias = aten.add.Tensor(%linear_1, %layer_down_bias) : f32[b, s, 96] tp:I {needs=tp:I ; tp:I, role="bias"}
%dropout = aten.dropout.default(%linear_1_bias, 0.1, True) : f32[b, s, 96] tp:I {needs=tp:I, random=1341095393}
%square = aten.square.default(%dropout) : f32[b, s, 96] tp:I {needs=tp:I}
%sum_1 = aten.sum.default(%square) : f32[] tp:I {needs=tp:I}
return output=%sum_1
"""  # noqa: E501

NORMED_HEADS_ANNOTATED = """\
%q_weight = parameter["q.weight"] : f32[96, 96] tp:S(0) {role="head", origin="plan: q = head"}
%out_weight = parameter["out.weight"] : f32[96, 96] tp:S(1) {role="row", origin="plan: out = row"}
%norm_weight = parameter["norm.weight"] : f32[12] tp:I {origin="nothing else is legal: at %rms_norm (norm, modules.py:138) the operation needs the whole of dimension 0"}
%x = input["x"] : f32[b, s, 96] tp:R
%b = aten.sym_size.int(%x, 0) : b
%s = aten.sym_size.int(%x, 1) : s
%linear = aten.linear.default(%x, %q_weight) : f32[b, s, 96] tp:S(2) {needs=tp:R ; tp:S(0), role="head", origin="follows operand weight"}
%view = aten.view.default(%linear, [%b, %s, 8, 12]) : f32[b, s, 8, 12] tp:S(2) {needs=tp:S(2), origin="follows operand self"}
%rms_norm = aten.rms_norm.default(%view, [12], %norm_weight, eps=1.1920928955078125e-07) : f32[b, s, 8, 12] tp:S(2) {needs=tp:S(2) ; tp:R, origin="follows operand input"}
%view_1 = aten.view.default(%rms_norm, [%b, %s, 96]) : f32[b, s, 96] tp:S(2) {needs=tp:S(2), origin="follows operand self"}
%linear_1 = aten.linear.default(%view_1, %out_weight) : f32[b, s, 96] tp:P {needs=tp:S(2) ; tp:S(1), role="row", origin="follows operand input"}
%square = aten.square.default(%linear_1) : f32[b, s, 96] tp:I {needs=tp:I}
%sum_1 = aten.sum.default(%square) : f32[] tp:I {needs=tp:I}
return output=%sum_1
"""  # noqa: E501


def test_golden_mlp() -> None:
    result = run(build(Behind, MLP)[1], UP_DOWN, until="annotate")
    assert shown(result, origins=True) == MLP_ANNOTATED


def test_golden_norm_on_heads() -> None:
    """The norm's weight is invariant and needed replicated: its gradient will be summed."""
    result = run(build(NormedHeads)[1], {"q": "head", "out": "row"}, until="annotate")
    assert shown(result, origins=True) == NORMED_HEADS_ANNOTATED


class Conv1D(nn.Module):
    """GPT-2's matrices: the input dimension first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = transformers.pytorch_utils.Conv1D(3 * WIDTH, WIDTH)  # type: ignore[no-untyped-call]
        self.out = transformers.pytorch_utils.Conv1D(WIDTH, WIDTH)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, 8) for part in self.qkv(x).split(WIDTH, -1))
        return squares(self.out(flat(functional.scaled_dot_product_attention(q, k, v))))


COLUMN, ROW, HEAD = "column", "row", "head"


def pairs(text: str) -> dict[str, str]:
    """Reads `"a=b, c=d"`."""
    return dict(pair.split("=") for pair in text.split(", "))


# Module, plan, and the layouts on tp of the parameters that it names.
CUTS: dict[str, tuple[Callable[..., nn.Module], str, str]] = {
    "linear by module": (
        MLP,
        "up=column, down=row",
        "up.weight=S(0), up.bias=S(0), down.weight=S(1), down.bias=I",
    ),
    "linear by parameter": (
        MLP,
        "up.weight=column, down.weight=row, up.bias=replicate",
        "up.weight=S(0), up.bias=I, down.weight=S(1), down.bias=I",
    ),
    "linear alone": (MLP, "up.weight=column", "up.weight=S(0), up.bias=S(0), down.weight=S(1), down.bias=I"),
    "biases by parameter": (
        MLP,
        "up.*=column, down.*=row",
        "up.weight=S(0), up.bias=S(0), down.weight=S(1), down.bias=I",
    ),
    "replicate": (MLP, "*=replicate", "up.weight=I, up.bias=I, down.weight=I, down.bias=I"),
    "transposed": (TransposedMLP, "up=column, down=row", "up=S(0), down=S(0)"),
    "fused by head": (
        FusedAttention,
        "qkv=head, out=row",
        "qkv.weight=S(0: 3 x 96), qkv.bias=S(0: 3 x 96), out.weight=S(1)",
    ),
    "fused by column": (FusedAttention, "qkv=column", "qkv.weight=S(0: 3 x 96), qkv.bias=S(0: 3 x 96)"),
    "fused by parameter": (
        FusedAttention,
        "qkv.weight=head, qkv.bias=replicate",
        "qkv.weight=S(0: 3 x 96), qkv.bias=I",
    ),
    "fused alone": (FusedAttention, "qkv.weight=head", "qkv.bias=S(0: 3 x 96), out.weight=S(1)"),
    "fused by row": (FusedAttention, "qkv=row", "qkv.weight=S(1), qkv.bias=I"),
    "interleaved": (InterleavedAttention, "qkv=head, out=row", "qkv.weight=S(0), qkv.bias=S(0)"),
    "unequal by split": (partial(UnequalAttention, False), "qkv=head, out=row", "qkv.weight=S(0: 96 | 2 x 48)"),
    "unequal by slices": (partial(UnequalAttention, True), "qkv=head, out=row", "qkv.weight=S(0: 96 | 2 x 48)"),
    "gate and up by chunk": (GatedMLP, "gate_up=column, down=row", "gate_up.weight=S(0: 2 x 160)"),
    "grouped": (GroupedAttention, "[qkv]=head, out=row", "q.weight=S(0), k.weight=S(0)"),
    "in_proj_weight": (
        partial(SelfAttention, need_weights=False),
        "*.in_proj_*=head, *.out_proj=row",
        "attend.in_proj_weight=S(0: 3 x 96), attend.in_proj_bias=S(0: 3 x 96), attend.out_proj.weight=S(1)",
    ),
    "Conv1D": (
        Conv1D,
        "qkv=head, out=row",
        "qkv.weight=S(1: 3 x 96), qkv.bias=S(0: 3 x 96), out.weight=S(0), out.bias=I",
    ),
}


@pytest.mark.parametrize("tp", [4, pytest.param(2, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", alternate(CUTS, 0))
def test_overrides_find_the_cut(name: str, tp: int) -> None:
    kind, split, expected = CUTS[name]
    cuts = layouts(run(build(kind)[1], pairs(split), tp, until="annotate"))
    assert {fqn: cuts[fqn] for fqn in pairs(expected)} == {fqn: f"tp:{cut}" for fqn, cut in pairs(expected).items()}


@pytest.mark.parametrize("name", alternate(CUTS, 1))
def test_values_stay_whatever_the_cut(name: str) -> None:
    kind, split, _ = CUTS[name]
    report = values(kind, split=pairs(split), tp=4)
    assert report.ok, report
    assert report.gradients == len(list(build(kind)[0].parameters()))


def test_roles_and_origins_name_the_plan_line() -> None:
    result = run(build(MLP)[1], {"u*": "column", "down": "row"}, until="annotate")
    assert note(result.node("up_weight")).origin == "plan: u* = column"
    assert note(result.node("down_bias")).origin == "plan: down = row"
    assert roles(result) == {
        "up_weight": "column",
        "up_bias": "column",
        "down_weight": "row",
        "down_bias": "row",
        "linear": "column",
        "linear_bias": "bias",
        "linear_1": "row",
        "linear_1_bias": "bias",
    }


# ------------------------------------------------------------------ what follows


def test_whole_parameters_make_everything_invariant_and_free() -> None:
    result = run(build(FusedAttention)[1], {"*": "replicate"})
    assert collectives(result) == []
    assert split_flops(result) == 0.0
    assert set(layouts(result).values()) == {"tp:I"}


def test_on_one_rank_there_are_no_layouts() -> None:
    result = run(build(MLP)[1], {"up": "column"}, tp=1)
    assert set(layouts(result).values()) == {""}


def kinds(result: Any) -> list[str]:
    """Collectives as `phase op`, in the order of the program."""
    return [f"{c.phase} {c.op}" for c in collectives(result)]


LOOKUP = "forward all_reduce"


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        (UP_DOWN, ["backward all_reduce", "forward all_reduce"]),
        # The other matrix is whole, and no rank takes a part of a whole matrix.
        ({"*up": "column", "*down": "replicate"}, ["backward all_reduce", "forward all_gather"]),
        # Alone on an input that is whole: each rank takes its part, whose gradient is gathered.
        ({"*up": "replicate", "*down": "row"}, ["backward all_gather", "forward all_reduce"]),
        # Nothing behind needs the whole: one number is reduced, the loss.
        ({"*up": "replicate", "*down": "column"}, ["backward all_reduce", "forward all_reduce"]),
        ({"*up": "row", "*down": "replicate"}, ["backward all_gather", "forward all_reduce"]),
    ],
)
def test_partial_plans_work(split: dict[str, str], wanted: list[str]) -> None:
    assert kinds(run(build(Behind, MLP)[1], split)) == [LOOKUP, *wanted]
    assert values(Behind, MLP, split=split).ok


@pytest.mark.parametrize(
    "split", [{}, {"*up": "column"}, {"*up.weight": "column"}, {"*down": "row"}, {"words": "vocab"}]
)
def test_what_no_line_names_is_chosen_by_cost(split: dict[str, str]) -> None:
    """The rest of Megatron's split, biases included, from any part of it or none."""
    whole = run(build(Behind, MLP)[1], UP_DOWN | {"words": "vocab"})
    result = run(build(Behind, MLP)[1], split)
    assert (layouts(result), kinds(result)) == (layouts(whole), kinds(whole))


def test_a_line_is_carried_out_where_another_split_would_be_cheaper() -> None:
    found = layouts(run(build(Behind, MLP)[1], {"*down": "column"}))
    assert (found["layer.up.weight"], found["layer.down.weight"]) == ("tp:S(0)", "tp:S(0)")


@pytest.mark.parametrize(
    "split", [{"q": HEAD}, {"k": HEAD}, {"v": HEAD}, {"q": HEAD, "k": HEAD}, {"out": ROW}, {"out": COLUMN}]
)
def test_parts_of_an_attention_alone_work(split: dict[str, str]) -> None:
    assert values(GroupedAttention, split=split).ok


def test_a_transposed_weight_is_never_gathered() -> None:
    """Its shards are few bytes, and still stay where they are: no rank holds a whole weight that the plan cuts."""
    result = run(build(TransposedMLP)[1], {"up": "column", "down": "row"})
    assert kinds(result) == ["forward all_reduce"]
    assert split_flops(result) == 1.0


class Biased(nn.Module):
    """T5's: a learned bias on the scores, the same for all sequences, broadcast before it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        bias = self.bias((steps[:, None] - steps[None]).clamp(0, 3)).permute(2, 0, 1)[None]
        mask = bias + x[:, None, None, :, 0].detach()
        q, k, v = (heads(part, 8) for part in self.qkv(x).split(WIDTH, -1))
        return squares(self.out(flat(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))))


def test_a_value_that_is_wanted_cut_is_cut_where_nothing_is_sent() -> None:
    """The weight's gradient [4, 8] is summed, not that of the scores [b, 8, s, s], and each rank takes its heads."""
    split = ATTENTION | {"bias": "replicate"}
    result = run(build(Biased)[1], split)
    assert kinds(result) == ["parameter all_reduce", "forward all_reduce"]
    assert values(Biased, split=split).ok


def test_a_table_of_heads_is_cut_by_heads() -> None:
    """Its words have no rows to be shared out that would be worth a sum of scores: nothing is sent at all."""
    result = run(build(Biased)[1], ATTENTION)
    assert layouts(result)["bias.weight"] == "tp:S(1)"
    assert kinds(result) == ["forward all_reduce"]
    assert values(Biased, split=ATTENTION).ok


class Frozen(MLP):
    """`up` does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


def test_frozen_parameters_are_split_and_cost_no_reduction() -> None:
    class AllFrozen(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.down.requires_grad_(True)

    assert kinds(run(build(Behind, Frozen)[1], UP_DOWN)) == [LOOKUP, "backward all_reduce", "forward all_reduce"]
    assert kinds(run(build(AllFrozen)[1], UP_DOWN)) == ["forward all_reduce"]
    assert values(Behind, Frozen, split=UP_DOWN).ok
    assert values(AllFrozen, split=UP_DOWN).ok


def test_annotate_changes_notes_only() -> None:
    program = build(FusedAttention)[1].program.with_(plan=Plan(tp=2, split=ATTENTION))
    before = PassManager([canonicalize]).run(program)
    after = PassManager([annotate]).run(before)
    record = after.history[-1]
    assert (record.added, record.erased) == ((), ())
    assert [(n.name, n.target, str(n.args)) for n in after.graph.nodes] == [
        (n.name, n.target, str(n.args)) for n in before.graph.nodes
    ]


def test_a_capture_in_evaluation_mode_is_annotated_alike() -> None:
    torch.manual_seed(1)
    module = MLP().eval()
    captured = capture(module, {"x": torch.randn(3, 16, WIDTH)}, Plan(tp=2))
    assert layouts(run(captured, {"up": "column"})) == layouts(run(build(MLP)[1], {"up": "column"}))


def test_layouts_that_a_module_has_are_kept() -> None:
    """Parameters that this program does not use, and cuts that it would not choose, or has none of."""
    program = build(SometimesUsed)[1].program.with_(plan=Plan(tp=2, split={"*up": "column", "spare_up": "column"}))
    cut = Layout.of({"tp": shard(0, 160)})
    known = {"up.weight": cut, "spare_up.weight": cut}
    with keeping(known):
        found = layouts(compile_program(program, [canonicalize, annotate]))
    assert {name for name, layout in found.items() if layout == "tp:S(0)"} == known.keys()


@pytest.mark.parametrize(
    ("kind", "split"), [(MLP, {"up": "column", "down": "row"}), (ChunkedAttention, {"qkv": "column"})]
)
def test_what_was_chosen_once_is_found_again(kind: Callable[..., nn.Module], split: dict[str, str]) -> None:
    program = build(kind)[1].program.with_(plan=Plan(tp=2, split=split))
    chosen = run(build(kind)[1], split, until="annotate")
    known = _layouts(chosen)
    with keeping(known):
        assert _layouts(compile_program(program, [canonicalize, annotate])) == known


def _layouts(program: Program) -> dict[str, Layout]:
    return {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
