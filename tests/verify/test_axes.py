"""Programs over two axes: what is sound is accepted and right, what is not is rejected by the name of the axis."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
import torch

from fxpar.errors import CheckFailed, FxparError, LayoutError
from fxpar.ir.program import update
from fxpar.layout.layout import I, Layout
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import verify_static
from fxpar.verify.structure import check_structure
from tests.verify import foreign, mutate, mutate_values
from tests.verify.cases import Known, known
from tests.verify.edits import Mutant
from tests.verify.readings import judge
from tests.verify.test_mutants import accepted
from tests.verify.test_readings import conclude, siblings

HEAD = """fxpar 2
plan {{"tp": {tp}, "dp": {dp}}}
properties {properties}
symbol b = x.0 / {dp} like 3
{loss}%w = parameter["w"] : f32[24, 12] {w}
%x = input["x"] : f32[{dp}*b, 12] dp:{x} tp:R
"""


def text_of(
    lines: str, *, dp: int = 2, tp: int = 2, w: str = "dp:I tp:I", x: str = "R", loss: str = "", local: bool = False
) -> str:
    properties = "canonical collectives layouts"
    if local:
        properties += " local masks rng sequence vocabulary"
    return HEAD.format(tp=tp, dp=dp, w=w, x=x, loss=loss, properties=properties) + lines


def judged(text: str) -> str:
    """Both readings of a text that the static checks accept, compared."""
    program = parse_program(text)
    verify_static(program)
    assert print_program(program) == text
    generator = torch.Generator().manual_seed(0)
    rows = 3 * program.axes["dp"]
    state = {p.fqn: torch.randn(24, 12, generator=generator) for p in program.parameters}
    return judge(program, state, {"x": torch.randn(rows, 12, generator=generator)}).kind


NESTED = """%a = fxpar.i_to_s[dp](%w) : f32[24, 12] dp:I→S(0) tp:I
%c = fxpar.i_to_s[tp](%a) : f32[24, 12] dp:S(0) tp:I→S(0)
"""
TURNED = """%a = fxpar.i_to_s[tp](%w) : f32[24, 12] dp:I tp:I→S(0)
%c = fxpar.i_to_s[dp](%a) : f32[24, 12] tp:S(0) dp:I→S(0)
"""
RIGHT = {
    "the inner one first": NESTED
    + """%d = fxpar.s_to_i[tp](%c) : f32[24, 12] dp:S(0) tp:S(0)→I
%e = fxpar.s_to_i[dp](%d) : f32[24, 12] dp:S(0)→I tp:I
""",
    "the other way round": TURNED
    + """%d = fxpar.s_to_i[dp](%c) : f32[24, 12] dp:S(0)→I tp:S(0)
%e = fxpar.s_to_i[tp](%d) : f32[24, 12] dp:I tp:S(0)→I
""",
    "both at once": """%c = fxpar.i_to_s[dp-tp](%w) : f32[24, 12] dp:I→S(0) tp:I→S(0)
%e = fxpar.s_to_i[dp-tp](%c) : f32[24, 12] dp:S(0)→I tp:S(0)→I
""",
    "the outer one, as what it leaves": NESTED
    + """%d = fxpar.s_to_i[dp](%c) : f32[24, 12] dp:S(0)→I tp:S(0: {dp} x {block})
%e = fxpar.s_to_i[tp](%d) : f32[24, 12] dp:I tp:S(0: {dp} x {block})→I
""",
    "dimensions of their own": """%a = fxpar.i_to_s[dp](%w) : f32[24, 12] dp:I→S(0) tp:I
%c = fxpar.i_to_s[tp](%a) : f32[24, 12] dp:S(0) tp:I→S(1)
%d = fxpar.s_to_i[dp](%c) : f32[24, 12] dp:S(0)→I tp:S(1)
%e = fxpar.s_to_i[tp](%d) : f32[24, 12] dp:I tp:S(1)→I
""",
}


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("name", RIGHT)
def test_cuts_that_are_undone_from_the_inside_are_right(name: str, dp: int, tp: int) -> None:
    lines = RIGHT[name].format(dp=dp, block=24 // dp)
    assert judged(text_of(lines + "return y=%e\n", dp=dp, tp=tp, local=True)) == "same"


WRONG = {
    "gathers the outer of two nested cuts": (
        NESTED + "%d = fxpar.s_to_i[dp](%c) : f32[24, 12] dp:S(0)→I tp:S(0)\n%e = fxpar.s_to_i[tp](%d) : f32[24, 12] "
        "dp:I tp:S(0)→I\nreturn y=%e\n",
        "%d: on axis tp: converting dp leaves it S(0: 2 x 12), the note says S(0)",
    ),
    "cuts the outer of two nested cuts": (
        "%a = fxpar.i_to_s[tp](%w) : f32[24, 12] dp:I tp:I→S(0)\n%c = fxpar.i_to_s[dp](%a) : f32[24, 12] dp:I→S(0) "
        "tp:S(0)\n%e = fxpar.s_to_i[dp-tp](%c) : f32[24, 12] dp:S(0)→I tp:S(0)→I\nreturn y=%e\n",
        "%c: on axis tp: converting dp leaves it S(0), the note says S(0: 2 x 12)",
    ),
    "scatters a sum over the outer of two nested cuts": (
        "%a = fxpar.i_to_s[tp](%w) : f32[24, 12] dp:I tp:I→S(0)\n%p = fxpar.i_to_p[dp](%a) : f32[24, 12] dp:I→P "
        "tp:S(0)\n%c = fxpar.reduce_scatter[dp](%p) : f32[24, 12] dp:P→S(0) tp:S(0)\nreturn y=%c\n",
        "%c: on axis tp: converting dp leaves it S(0), the note says S(0: 2 x 12)",
    ),
    "joins nested cuts against the order of ranks": (
        TURNED + "%e = fxpar.s_to_i[dp-tp](%c) : f32[24, 12] dp:S(0)→I tp:S(0)→I\nreturn y=%e\n",
        "is not one run of blocks over dp-tp",
    ),
    "names joined axes against the mesh": (
        "%c = fxpar.i_to_s[tp-dp](%w) : f32[24, 12] dp:I→S(0) tp:I→S(0)\nreturn y=%c\n",
        "name the axes as the mesh does: dp-tp",
    ),
    "reduces over the other axis": (
        "%p = fxpar.i_to_p[dp](%w) : f32[24, 12] dp:I→P tp:I\n%r = fxpar.reduce_from[tp](%p) : f32[24, 12] dp:P "
        "tp:I\nreturn y=%r\n",
        "%r: on axis tp: takes P and finds I",
    ),
    "reduces over one axis of two": (
        "%p = fxpar.i_to_p[dp-tp](%w) : f32[24, 12] dp:I→P tp:I→P\n%r = fxpar.reduce_from[tp](%p) : f32[24, 12] "
        "dp:P tp:P→I\nreturn y=%r\n",
        "output y = %r: on axis dp: is P and must be I",
    ),
    "writes what another spelling says": (
        "%a = fxpar.i_to_s[tp](%w) : f32[24, 12] dp:I tp:I→S(1)\nreturn y=%a\n".replace(
            "dp:I tp:I→S(1)", "tp:I→S(1) dp:I"
        ),
        "is not in its one spelling",
    ),
    "sums the gradients of a bucket over the wrong group": (
        "%g = fxpar.sum_gradients[tp](%w) : (f32[24, 12] dp:I tp:R)\n%u = operator.getitem(%g, 0) : f32[24, 12] dp:I "
        "tp:R\n%s = fxpar.r_to_s[dp](%x) : f32[2*b, 12] dp:R→S(0) tp:R\n%y = aten.linear.default(%s, %u) : f32[2*b, "
        "24] dp:S(0) tp:R\nreturn y=%y\n",
        "%y: on axis dp: invariant (I) operands meet S",
    ),
    "sums over two axes what is cut on one": (
        "%a = fxpar.i_to_s[tp](%w) : f32[24, 12] dp:I tp:I→S(0)\n%u = fxpar.copy_to[dp-tp](%a) : f32[24, 12] dp:I→R "
        "tp:S(0)→R\nreturn y=%u\n",
        "%u: on axis tp: takes I and finds S(0)",
    ),
    "draws the same bits for other rows": (
        '%rng = input["fxpar.rng"] : i64[3] dp:R tp:R\n%i = fxpar.axis_index[tp]() : i64[] dp:R tp:V\n'
        "%s = fxpar.r_to_s[dp](%x) "
        ": f32[2*b, 12] dp:R→S(0) tp:R\n%d = fxpar.dropout(%s, %rng, 0.1, [%i]) : f32[2*b, 12] dp:S(0) tp:R "
        "{random=7}\nreturn y=%d\n",
        "on axis dp: the ranks hold different elements but would draw the same bits",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_an_axis_is_rejected_by_its_name(name: str) -> None:
    lines, message = WRONG[name]
    with pytest.raises((LayoutError, CheckFailed), match=re.escape(message)):
        verify_static(parse_program(text_of(lines, local=True)))


SHARDED_OPTIMIZER = """%u = fxpar.copy_to[dp](%w) : f32[24, 12] dp:I→R tp:S(0)
%y = aten.linear.default(%x, %u) : f32[2*b, 24] dp:S(0) tp:S(1)
%t = aten.t.default(%y) : f32[24, 2*b] dp:S(1) tp:S(0)
%m = aten.mm.default(%t, %x) : f32[24, 12] dp:P tp:S(0)
%flat = aten.view.default(%m, [-1]) : f32[288] dp:P tp:S(0)
%own = fxpar.reduce_scatter[dp](%flat) : f32[288] tp:S(0) dp:P→S(0)
%step = aten.mul.Tensor(%own, 0.1) : f32[288] tp:S(0) dp:S(0)
%all = fxpar.s_to_i[dp](%step) : f32[288] dp:S(0)→I tp:S(0)
%whole = fxpar.s_to_i[tp](%all) : f32[288] dp:I tp:S(0)→I
return step=%own, whole=%whole
"""


def test_a_bucket_of_shards_that_data_ranks_share_out_is_accepted_and_right() -> None:
    """ZeRO-1: what tp left of a gradient is summed and cut over dp, updated in parts, and gathered."""
    text = text_of(SHARDED_OPTIMIZER, w="dp:I tp:S(0)", x="S(0)", local=True)
    assert judged(text) == "same"
    turned = text.replace("f32[288] tp:S(0) dp:P→S(0)", "f32[288] dp:P→S(0) tp:S(0)")
    with pytest.raises(FxparError, match="converting dp leaves it"):
        verify_static(parse_program(turned))


# ---------------------------------------------------------------------- mutants


def text_on_two_axes(name: str, dp: int, tp: int, sequence_parallel: bool, until: str = "localize") -> str:
    plan = Plan(tp=tp, dp=dp, sequence_parallel=sequence_parallel)
    captured = known(name).captured
    grown = tuple(s if s.dim else type(s)(**{**vars(s), "example": s.example * dp}) for s in captured.symbols)
    program = captured.with_(plan=plan, symbols=grown)
    return print_program(PassManager(DEFAULT_PASSES).run(program, until=until))


def whole_inputs(name: str, dp: int) -> Known:
    """The known case with as many rows for each data rank, each with its own."""
    held = known(name)
    generator = torch.Generator().manual_seed(dp)

    def rows(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value[:, torch.randperm(value.shape[1], generator=generator)] for _ in range(dp)])

    return type(held)(**{**vars(held), "inputs": {path: rows(value) for path, value in held.inputs.items()}})


_BRACKET = re.compile(r"(?<=fxpar\.)(\w+)\[([a-z-]+)\]")
_PAIR = re.compile(r"dp:(\S+(?: x \d+)?\)?) tp:(\S+\)?)")


def axis_mutants(text: str, seed: int, count: int) -> Iterator[Mutant]:
    """Faults between the axes: another axis of an operator, layouts exchanged, or listed the other way round."""
    generator = random.Random(seed)
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines) if line.startswith("%") and "dp:" in line]
    for _ in range(count):
        place = generator.choice(places)
        line = lines[place]
        kind = generator.choice(["operator", "exchanged", "turned", "both"])
        new = line
        if kind in ("operator", "both"):
            new = _BRACKET.sub(lambda m: f"{m[1]}[{generator.choice(['dp', 'tp', 'dp-tp'])}]", new)
        if kind in ("exchanged", "both"):
            new = _PAIR.sub(r"dp:\2 tp:\1", new, count=generator.choice([0, 1]))
        if kind == "turned":
            new = _PAIR.sub(r"tp:\2 dp:\1", new)
        if new != line:
            changed = "\n".join([*lines[:place], new, *lines[place + 1 :]]) + "\n"
            yield Mutant(kind, f"{line[:100]} -> {new[:100]}", changed)


_AXIS = re.compile(r"(?<![A-Za-z])(dp|tp)(?![A-Za-z])")


def renamed(text: str) -> str:
    """The same program with the names of the axes exchanged: generators that know tp alone edit what dp does."""
    return _AXIS.sub(lambda m: {"dp": "tp", "tp": "dp"}[m[1]], text)


def on_data_ranks(text: str, before: str, seed: int, count: int) -> list[Mutant]:
    """Faults of the kinds of both generators, on the data axis."""
    found = mutate.mutants(renamed(text), renamed(before), seed, count)
    found += mutate_values.mutants(renamed(text), seed=seed, count=count)
    return [Mutant(f"{mutant.kind} on dp", mutant.edit, renamed(mutant.text)) for mutant in found]


ROWS = (
    ("gpt2,n_layer=1", 2, 2, True, 10),
    pytest.param("gpt2,n_layer=1", 2, 3, False, 6, marks=pytest.mark.matrix),
    *(
        pytest.param(*row, marks=pytest.mark.matrix)
        for row in (
            ("gpt2,n_layer=1", 2, 2, False, 300),
            ("gpt2,n_layer=1", 2, 3, False, 200),
            ("gpt2,n_layer=1", 3, 2, True, 150),
            ("llama,num_hidden_layers=1,num_key_value_heads=2", 2, 4, False, 150),
            ("llama,num_hidden_layers=1,num_key_value_heads=2", 2, 4, True, 200),
            ("t5,num_layers=1", 3, 2, False, 150),
        )
    ),
)


@pytest.mark.parametrize(("name", "dp", "tp", "sequence_parallel", "count"), ROWS)
def test_no_mutant_over_two_axes_escapes(name: str, dp: int, tp: int, sequence_parallel: bool, count: int) -> None:
    text, held = text_on_two_axes(name, dp, tp, sequence_parallel), whole_inputs(name, dp)
    assert judge(parse_program(text), held.state, held.inputs).kind == "same"
    before = text_on_two_axes(name, dp, tp, sequence_parallel, "assign_rng")
    found = list(axis_mutants(text, count, count)) + mutate_values.mutants(text, seed=tp, count=count)
    found += mutate.mutants(text, before, tp, count) + foreign.foreign(text, siblings(), tp, count)
    found += on_data_ranks(text, before, dp, -(-count // 2))
    counts = conclude(f"{name} {dp} x {tp}", found, held)
    assert counts["rejected"] > counts.total() / 3
    assert accepted(Mutant("none", "", text)) is not None


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("dp", "tp", "etp"), "the axes tp and etp of one layout share ranks; name each rank by one of them"),
        (("dp", "dp-cp", "tp"), "the axes dp and dp-cp of one layout share ranks"),
        (("edp", "tp-dp"), "the axes edp and tp-dp of one layout share ranks"),
        (("dp", "tp-ep-cp"), "the group 'tp-ep-cp' has no meaning: 'cp' is not an axis of the expert part"),
        (("edp", "etp"), "the layout 'edp:I etp:I' does not name the axes (dp tp)"),
    ],
)
def test_two_axes_that_share_ranks_stand_in_no_layout(axes: tuple[str, ...], message: str) -> None:
    program = parse_program(text_of("return y=%w\n"))
    update(program.node("w"), layout=Layout(tuple((axis, I) for axis in axes)))
    with pytest.raises(CheckFailed, match=re.escape(f"%w: {message}")):
        check_structure(program)


OUT_OF_ORDER = [
    (
        "tp:S(0: 12 | 12 reversed)",
        "return y=%w\n",
        "on axis tp: S(0: 12 | 12 reversed) has blocks that are not in the order of the ranks",
    ),
    (
        "tp:S(0: 2 x (4 | 8 reversed))",
        "return y=%w\n",
        "on axis tp: S(0: 2 x (4 | 8 reversed)) has blocks that are not in the order of the ranks",
    ),
    (
        "tp:I",
        "%a = fxpar.i_to_s[tp](%w) : f32[24, 12] dp:I tp:I→S(0: 12 | 12 reversed)\nreturn y=%a\n",
        "on axis tp: does not convert I to S(0: 12 | 12 reversed)",
    ),
    ("tp:S(0: 28 | -4)", "return y=%w\n", "on axis tp: S(0: 28 | -4) is not in its shortest form"),
    ("tp:S(0: 2 x (16 | -4))", "return y=%w\n", "on axis tp: S(0: 2 x (16 | -4)) is not in its shortest form"),
    ("tp:S(0: 2 x (6 | 6))", "return y=%w\n", "on axis tp: S(0: 2 x (6 | 6)) is not in its shortest form"),
]


@pytest.mark.parametrize(("w", "lines", "message"), OUT_OF_ORDER)
def test_blocks_out_of_the_ranks_order_are_placed_by_nothing(w: str, lines: str, message: str) -> None:
    with pytest.raises((LayoutError, CheckFailed), match=re.escape(message)):
        verify_static(parse_program(text_of(lines, w=f"dp:I {w}")))
