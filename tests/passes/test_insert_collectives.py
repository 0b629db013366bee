"""insert_collectives: a coercion wherever a value is wanted in another layout than it has."""

from collections.abc import Iterator

import pytest
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.errors import LayoutError, PassError
from fxpar.ir.program import Program, note, operands, output_layouts
from fxpar.layout.layout import I, P
from fxpar.ops.collectives import COERCION_OF
from fxpar.passes import insert_collectives
from fxpar.text.parsing import parse_program
from fxpar.verify.static import verify_static
from tests.passes.modules import (
    MLP,
    WIDTH,
    Behind,
    FusedAttention,
    build,
    flat,
    heads,
    run,
    shown,
    squares,
    values,
)

MLP_SPLIT = {"*up": "column", "*down": "row"}

MLP_WITH_COLLECTIVES = """\
%words_weight = parameter["words.weight"] : f32[64, 96] tp:S(0)
%layer_norm_weight = parameter["layer.norm.weight"] : f32[96] tp:I
%layer_norm_bias = parameter["layer.norm.bias"] : f32[96] tp:I
%layer_up_weight = parameter["layer.up.weight"] : f32[160, 96] tp:S(0) {role="column"}
%layer_up_bias = parameter["layer.up.bias"] : f32[160] tp:S(0) {role="column"}
%layer_down_weight = parameter["layer.down.weight"] : f32[96, 160] tp:S(1) {role="row"}
%layer_down_bias = parameter["layer.down.bias"] : f32[96] tp:I {role="row"}
%ids = input["ids"] : i64[b, s] tp:R
%embedding = aten.embedding.default(%words_weight, %ids) : f32[b, s, 96] tp:P
%embedding_reduce_from = fxpar.reduce_from[tp](%embedding) : f32[b, s, 96] tp:P→I
%layer_norm = aten.layer_norm.default(%embedding_reduce_from, [96], %layer_norm_weight, %layer_norm_bias, 1e-05, False) : f32[b, s, 96] tp:I
%layer_norm_copy_to = fxpar.copy_to[tp](%layer_norm) : f32[b, s, 96] tp:I→R
%linear = aten.linear.default(%layer_norm_copy_to, %layer_up_weight) : f32[b, s, 160] tp:S(2) {role="column"}
%linear_bias = aten.add.Tensor(%linear, %layer_up_bias) : f32[b, s, 160] tp:S(2) {role="bias"}
%gelu = aten.gelu.default(%linear_bias) : f32[b, s, 160] tp:S(2)
%linear_1 = aten.linear.default(%gelu, %layer_down_weight) : f32[b, s, 96] tp:P {role="row"}
%linear_1_reduce_from = fxpar.reduce_from[tp](%linear_1) : f32[b, s, 96] tp:P→I
%linear_1_bias = aten.add.Tensor(%linear_1_reduce_from, %layer_down_bias) : f32[b, s, 96] tp:I {role="bias"}
%dropout = aten.dropout.default(%linear_1_bias, 0.1, True) : f32[b, s, 96] tp:I {random=1341095393}
%square = aten.square.default(%dropout) : f32[b, s, 96] tp:I
%sum_1 = aten.sum.default(%square) : f32[] tp:I
return output=%sum_1
"""  # noqa: E501

FUSED_WITH_COLLECTIVES = """\
%norm_weight = parameter["norm.weight"] : f32[96] tp:I
%norm_bias = parameter["norm.bias"] : f32[96] tp:I
%qkv_weight = parameter["qkv.weight"] : f32[288, 96] tp:S(0: 3 x 96) {role="head"}
%qkv_bias = parameter["qkv.bias"] : f32[288] tp:S(0: 3 x 96) {role="head"}
%out_weight = parameter["out.weight"] : f32[96, 96] tp:S(1) {role="row"}
%out_bias = parameter["out.bias"] : f32[96] tp:I {role="row"}
%x = input["x"] : f32[b, s, 96] tp:R
%b = aten.sym_size.int(%x, 0) : b
%s = aten.sym_size.int(%x, 1) : s
%norm_weight_copy_to = fxpar.copy_to[tp](%norm_weight) : f32[96] tp:I→R
%norm_bias_copy_to = fxpar.copy_to[tp](%norm_bias) : f32[96] tp:I→R
%layer_norm = aten.layer_norm.default(%x, [96], %norm_weight_copy_to, %norm_bias_copy_to, 1e-05, False) : f32[b, s, 96] tp:R
%linear = aten.linear.default(%layer_norm, %qkv_weight) : f32[b, s, 288] tp:S(2: 3 x 96) {role="head"}
%linear_bias = aten.add.Tensor(%linear, %qkv_bias) : f32[b, s, 288] tp:S(2: 3 x 96) {role="bias"}
%split = aten.split.Tensor(%linear_bias, 96, -1) : (f32[b, s, 96] tp:S(2); f32[b, s, 96] tp:S(2); f32[b, s, 96] tp:S(2))
%getitem = operator.getitem(%split, 0) : f32[b, s, 96] tp:S(2)
%getitem_1 = operator.getitem(%split, 1) : f32[b, s, 96] tp:S(2)
%getitem_2 = operator.getitem(%split, 2) : f32[b, s, 96] tp:S(2)
%view = aten.view.default(%getitem, [%b, %s, 8, 12]) : f32[b, s, 8, 12] tp:S(2)
%transpose = aten.transpose.int(%view, 1, 2) : f32[b, 8, s, 12] tp:S(1)
%view_1 = aten.view.default(%getitem_1, [%b, %s, 8, 12]) : f32[b, s, 8, 12] tp:S(2)
%transpose_1 = aten.transpose.int(%view_1, 1, 2) : f32[b, 8, s, 12] tp:S(1)
%view_2 = aten.view.default(%getitem_2, [%b, %s, 8, 12]) : f32[b, s, 8, 12] tp:S(2)
%transpose_2 = aten.transpose.int(%view_2, 1, 2) : f32[b, 8, s, 12] tp:S(1)
%scaled_dot_product_attention = aten.scaled_dot_product_attention.default(%transpose, %transpose_1, %transpose_2, None, 0.0, True) : f32[b, 8, s, 12] tp:S(1)
%transpose_3 = aten.transpose.int(%scaled_dot_product_attention, 1, 2) : f32[b, s, 8, 12] tp:S(2)
%view_3 = aten.view.default(%transpose_3, [%b, %s, 96]) : f32[b, s, 96] tp:S(2)
%linear_1 = aten.linear.default(%view_3, %out_weight) : f32[b, s, 96] tp:P {role="row"}
%linear_1_reduce_from = fxpar.reduce_from[tp](%linear_1) : f32[b, s, 96] tp:P→I
%linear_1_bias = aten.add.Tensor(%linear_1_reduce_from, %out_bias) : f32[b, s, 96] tp:I {role="bias"}
%square = aten.square.default(%linear_1_bias) : f32[b, s, 96] tp:I
%sum_1 = aten.sum.default(%square) : f32[] tp:I
return output=%sum_1
"""  # noqa: E501


def test_golden_mlp() -> None:
    """Megatron's f in front of the first matrix and g behind the second; one more g for the words."""
    assert shown(run(build(Behind, MLP)[1], MLP_SPLIT, until="insert_collectives")) == MLP_WITH_COLLECTIVES


def test_golden_fused_attention() -> None:
    """No gradient flows into the input: the norm's are summed, two vectors, and not those of the activations."""
    result = run(build(FusedAttention)[1], {"qkv": "head", "out": "row"}, until="insert_collectives")
    assert shown(result) == FUSED_WITH_COLLECTIVES


class Block(nn.Module):
    """A norm whose output q, k, v and a gate share, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (heads(part(y), 8) for part in (self.q, self.k, self.v))
        attended = flat(functional.scaled_dot_product_attention(q, k, v))
        return squares(self.norm(y + self.out(attended * self.gate(y).sigmoid())))


BLOCK_SPLIT = {"*.[qkv]": "head", "*gate": "column", "*out": "row"}


def coercions(program: Program) -> Iterator[fx.Node]:
    return (node for node in program.graph.nodes if node.op == "call_function" and node.target in COERCION_OF)


def test_one_node_serves_all_users() -> None:
    result = run(build(Behind, Block)[1], BLOCK_SPLIT, until="insert_collectives")
    names = [node.name for node in coercions(result)]
    assert names == ["embedding_reduce_from", "layer_norm_copy_to", "linear_4_reduce_from"]
    assert len(result.node("layer_norm_copy_to").users) == 4
    assert values(Behind, Block, split=BLOCK_SPLIT).ok


def test_a_conversion_stands_before_its_first_use() -> None:
    result = run(build(Behind, Block)[1], BLOCK_SPLIT, until="insert_collectives")
    order = [node.name for node in result.graph.nodes]
    assert order.index("layer_norm_copy_to") + 1 == order.index("linear")


def test_a_partial_sum_is_reduced_directly_behind_its_producer() -> None:
    split = {"up": "row", "down": "row"}
    result = run(build(MLP)[1], split, until="insert_collectives")
    partial = [node for node in result.graph.nodes if node.op == "call_function" and is_partial(node)]
    assert len(partial) == 2
    for node in partial:
        assert node.next.target in COERCION_OF
        assert list(node.users) == [node.next]


def is_partial(node: fx.Node) -> bool:
    return any(layout.on("tp") == P for layout in output_layouts(node))


def test_every_operation_gets_what_it_needs_and_needs_are_gone() -> None:
    annotated = run(build(Behind, Block)[1], BLOCK_SPLIT, until="annotate")
    calls = [node for node in annotated.graph.nodes if node.op == "call_function"]
    wanted = {node.name: note(node).needs for node in calls if note(node).needs}
    result = run(build(Behind, Block)[1], BLOCK_SPLIT, until="insert_collectives")
    for name, needs in wanted.items():
        node = result.node(name)
        assert note(node).needs == ()
        assert tuple(output_layouts(o)[0] for o in operands(node)) == needs


def test_a_coercion_says_what_it_is_for_and_where_it_comes_from() -> None:
    result = run(build(Behind, Block)[1], BLOCK_SPLIT, until="insert_collectives")
    down, f = note(result.node("linear_4_reduce_from")), note(result.node("layer_norm_copy_to"))
    assert (down.origin, down.fqn) == ("P to I for %linear_4_bias", "layer.out")
    assert (f.origin, f.fqn) == ("I to R for %linear", "layer.q")


# ------------------------------------------------------------------ programs by hand

HEAD = """fxpar 2
plan {"tp": 2}
properties canonical layouts
symbol b = x.0 like 4
"""


def by_hand(*lines: str, loss: str = "loss") -> Program:
    """A program with the parameter w and the input x, annotated."""
    start = ["loss loss"] if loss else []
    start += ['%w = parameter["w"] : f32[6, 6] tp:I', '%c = parameter["c"] : f32[6, 6] tp:S(1)']
    start += ['%x = input["x"] : f32[b, 6] tp:R']
    return parse_program(HEAD + "\n".join([*start, *lines, ""]))


ROW = [
    "%p = aten.linear.default(%x, %c) : f32[b, 6] tp:P {needs=tp:S(1) ; tp:S(1)}",
    "%i = aten.linear.default(%x, %w) : f32[b, 6] tp:I {needs=tp:R ; tp:I}",
]


def test_a_partial_loss_becomes_invariant() -> None:
    result = insert_collectives(
        by_hand(*ROW, "%loss = aten.sum.default(%p) : f32[] tp:P {needs=tp:P}", "return loss=%loss")
    )
    loss = result.output_nodes()["loss"]
    assert (loss.name, output_layouts(loss)[0].on("tp")) == ("loss_reduce_from", I)


def test_a_replicated_loss_becomes_invariant() -> None:
    """Each rank would otherwise differentiate a loss of its own."""
    lines = ["%loss = aten.sum.default(%i) : f32[] tp:R {needs=tp:R}", "return loss=%loss"]
    result = insert_collectives(by_hand(*ROW, *lines))
    assert shown(result).splitlines()[-3:] == [
        "%loss = aten.sum.default(%i_copy_to) : f32[] tp:R",
        "%loss_r_to_i = fxpar.r_to_i[tp](%loss) : f32[] tp:R→I",
        "return loss=%loss_r_to_i",
    ]
    verify_static(result.with_(properties=result.properties | {"collectives"}))


def test_a_partial_output_is_reduced_and_a_shard_stays() -> None:
    shard = "%s = aten.linear.default(%x, %w) : f32[b, 6] tp:S(1) {needs=tp:R ; tp:S(0)}"
    result = insert_collectives(by_hand(*ROW, shard, "return p=%p, s=%s", loss=""))
    found = {name: str(output_layouts(node)[0]) for name, node in result.output_nodes().items()}
    assert found == {"p": "tp:I", "s": "tp:S(1)"}


CUT = "%s = aten.linear.default(%x, %w) : f32[b, 6] tp:S(1) {needs=tp:R ; tp:S(0)}"
# Lines of a program, and the conversions that it gets.
CONVERSIONS: dict[str, tuple[list[str], list[str]]] = {
    "one value to two layouts": (
        [
            *ROW,
            "%a = aten.linear.default(%i, %c) : f32[b, 6] tp:P {needs=tp:S(1) ; tp:S(1)}",
            "%b = aten.mul.Tensor(%i, %i) : f32[b, 6] tp:R {needs=tp:R ; tp:R}",
            "return a=%a, b=%b",
        ],
        ["x_r_to_s", "i_i_to_s", "a_reduce_from", "i_copy_to", "b_r_to_i"],
    ),
    "another cut of a dimension goes by the whole": (
        [CUT, "%t = aten.relu.default(%s) : f32[b, 6] tp:S(1: 3 x 2) {needs=tp:S(1: 3 x 2)}", "return t=%t"],
        ["w_i_to_s", "s_all_gather", "s_all_gather_r_to_s"],
    ),
    "another dimension goes by an exchange": (
        [CUT, "%t = aten.relu.default(%s) : f32[b, 6] tp:S(0) {needs=tp:S(0)}", "return t=%t"],
        ["w_i_to_s", "s_all_to_all"],
    ),
    "without a gradient I is R": (
        ["%y = aten.relu.default(%x) : f32[b, 6] tp:R {needs=tp:I}", "return y=%y"],
        [],
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(name: str) -> None:
    lines, expected = CONVERSIONS[name]
    assert [node.name for node in coercions(insert_collectives(by_hand(*lines, loss="")))] == expected


def test_what_the_table_lacks_is_refused() -> None:
    lines = [
        "%tp_index = fxpar.axis_index[tp]() : i64[] tp:V",
        "%y = aten.add.Tensor(%x, %tp_index) : f32[b, 6] tp:R {needs=tp:R ; tp:R}",
        "return y=%y",
    ]
    with pytest.raises(PassError, match="%tp_index for %y: nothing converts V to R"):
        insert_collectives(by_hand(*lines, loss=""))


def test_a_missing_reduction_is_found_by_the_type_check() -> None:
    """What the pass is for: without its node the program is rejected."""
    result = run(build(MLP)[1], MLP_SPLIT, until="insert_collectives")
    node = result.node("linear_1_reduce_from")
    node.replace_all_uses_with(operands(node)[0])
    result.graph.erase_node(node)
    with pytest.raises(LayoutError, match=r"fxpar\.reduce_from"):
        verify_static(result)
