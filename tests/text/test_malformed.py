"""Malformed text: one error that names the line, the reason and a remedy, whatever is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import FxparError, PlanError, TextError
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from tests.text.programs import MLP, PROGRAMS

DOWN = "aten.linear.default(%x, %w)"
TYPE = "f32[b, s, 64] tp:P "

MALFORMED = {
    # what: (line, text to replace, replacement, message)
    "version": (1, "fxpar 2", "fxpar 1", "the text has the form of version 1, and 2 is read; write it anew"),
    "no version": (1, "fxpar 2", "program 2", "the header 'program 2' is unknown; start the text with 'fxpar 2'"),
    "header": (3, "properties", "propertys", "'propertys', which is unknown"),
    "two headers": (3, "properties ", 'plan {"tp": 2} ', "the plan line stands twice"),
    "late header": (10, "%mlp_out", "loss loss\n%mlp_out", "the loss line stands twice or below a node"),
    "plan text": (2, '{"tp": 2', "{tp: 2", "the plan is not JSON"),
    "plan option": (2, '"tp"', '"pt"', "the plan must be a mapping of its options; choose from tp"),
    "plan kind": (2, '{"tp": 2, "split": {"*.gate": "column"}}', "[2]", "the plan must be a mapping"),
    "no plan": (6, 'plan {"tp": 2, "split": {"*.gate": "column"}}\n', "", "the plan line is missing"),
    "no properties": (11, "properties collectives layouts\n", "", "the properties line is missing"),
    "symbol": (4, "x.0 like 3", "x like 3", "is not a symbol; write 'symbol name = input.dim like example'"),
    "two symbols": (5, "symbol s", "symbol b", "the symbol b is defined twice"),
    "loss": (12, "loss loss", "loss los", "the loss los is not an output; name one of loss, logits"),
    "loss name": (6, "loss loss", "loss a b", "'a b' is not an output's name"),
    "definition": (9, "%down = ", "%down=", "the line defines no node"),
    "two nodes": (9, "%down = ", "%w = ", "%w is defined twice; rename one of the two"),
    "Python's words": (7, "%x = ", "%self = ", "%self cannot name an argument"),
    "operator": (9, "aten.linear.default", "aten.linaer.default", "the operator aten.linaer.default is unknown"),
    "overload": (9, "aten.linear.default", "aten.linear.out2", "the operator aten.linear.out2 is unknown"),
    "namespace": (9, "aten.linear.default", "nope.linear.default", "the operator nope.linear.default is unknown"),
    "attribute of an operator": (9, "aten.linear.default", "aten.linear.op", "the operator aten.linear.op is unknown"),
    "function": (9, "aten.linear.default", "operator.setitem", "the operator operator.setitem is unknown"),
    "import": (9, "aten.linear.default", "os.system", "the operator os.system is unknown"),
    "dunder": (9, "aten.linear.default", "aten.__class__.mro", "the operator aten.__class__.mro is unknown"),
    "coercion": (10, "fxpar.reduce_from", "fxpar.reduce", "the operator fxpar.reduce is unknown"),
    "no operator": (9, "aten.linear.default(", "(", "expected an operator"),
    "operand": (9, "(%x, %w)", "(%x, %v)", "%v is not defined; define it on a line above"),
    "too few": (9, "(%x, %w)", "(%x)", "aten.linear.default does not take these arguments"),
    "too many": (9, "(%x, %w)", "(%x, %w, None, 1)", "does not take these arguments"),
    "unknown keyword": (9, "(%x, %w)", "(%x, %w, axis=1)", "does not take these arguments"),
    "keyword of a function": (9, DOWN, "operator.add(%x, b=%w)", "operator.add does not take these arguments"),
    "operands of a function": (9, DOWN, "operator.add(%x)", "operator.add does not take these arguments"),
    "two keywords": (9, "(%x, %w)", "(%x, weight=%w, weight=%w)", "a keyword stands twice"),
    "keyword first": (9, "(%x, %w)", "(weight=%w, %x)", "before a positional argument"),
    "value": (9, "(%x, %w)", "(%x, w)", "expected a value before 'w\\)"),
    "number": (9, "(%x, %w)", "(%x, 1x)", "expected a value before '1x\\)"),
    "digits": (9, "(%x, %w)", f"(%x, {'9' * 5000})", "has 5000 digits"),
    "element type literal": (9, "(%x, %w)", "(%x, dtype.f31)", "dtype.f31 is unknown; choose one of dtype.f64"),
    "device": (9, "(%x, %w)", "(%x, device.nope)", "device.nope is unknown; choose one of device.cpu"),
    "text": (9, "(%x, %w)", '(%x, "\\q")', "is not a text; escape quotes"),
    "open text": (9, "(%x, %w)", '(%x, "w)', "is not expected|expected"),
    "nesting": (9, "(%x, %w)", f"(%x, {'[' * 99})", "lists are nested too deeply"),
    "brackets": (9, "(%x, %w)", "(%x, [%w)", "expected ']' before"),
    "commas": (9, "(%x, %w)", "(%x %w)", "expected '\\)' before"),
    "closing bracket": (9, "(%x, %w)", "(%x, %w))", "is not expected here; check brackets"),
    "axis": (10, "[tp]", "[dp]", "the plan has no mesh axis dp; name one of tp"),
    "axis of aten": (9, "aten.linear.default", "aten.linear.default[tp]", "the mesh axis stands in the wrong place"),
    "axis as argument": (10, "[tp](%down)", '(%down, axis="tp")', "the mesh axis stands in the wrong place"),
    "no axis": (10, "[tp]", "", "fxpar.reduce_from does not take these arguments"),
    "element type": (9, "f32[b, s, 64]", "f31[b, s, 64]", "the element type f31 is unknown; choose one of f64"),
    "shape": (9, "f32[b, s, 64]", "f32[b, s 64]", "'s 64' is not a size"),
    "negative size": (9, "f32[b, s, 64]", "f32[b, s, -64]", "has a negative size"),
    "type": (9, "f32[b, s, 64]", "[b, s, 64]", "is not a tensor type; write dtype"),
    "type brackets": (9, "f32[b, s, 64]", "f32[b, s, 64", "unbalanced brackets in 'f32"),
    "tuple brackets": (9, TYPE, "(f32[b] tp:P", "unbalanced brackets in '\\(f32"),
    "tuple of numbers": (9, TYPE, "(f32[b] tp:P; b)", "a number stands among several outputs"),
    "layouts of a tuple": (9, TYPE, "(f32[b] tp:P; f32[b])", "2 outputs have 1 layouts; write a layout for each"),
    "layout": (9, "tp:P", "tp:Q", "'Q' is not a layout of .*; write I, R, P, V or S"),
    "layout dim": (9, "tp:P", "tp:S(3)", "is not a layout of"),
    "layout run": (9, "tp:P", "tp:S(1: 3 y 4)", "'3 y 4' is not a size"),
    "layout digits": (9, "tp:P", f"tp:S({'1' * 5000})", "is not a layout of \\[b, s, 64\\]"),
    "layout without axis": (9, "tp:P", "tp:P S(1)", "is not a layout; write axis:I"),
    "layout of another axis": (9, "tp:P", "tp:P ep:I", "the plan has no mesh axis ep"),
    "two layouts of an axis": (9, "tp:P", "tp:P tp:I", "the axis tp has two layouts"),
    "source": (10, "tp:P→I", "tp:R→I", "the operand %down is P on tp and not R"),
    "source dim": (10, "tp:P→I", "tp:S(7)→I", "is not a layout of"),
    "arrow": (9, "tp:P", "tp:I→P", "an arrow stands in 'tp:I→P'; write arrows only for a coercion, on its axis"),
    "coercion of a number": (10, "(%down)", "(3)", "a coercion needs one tensor"),
    "attribute": (8, "{role=", "{rule=", "starts no attribute; write needs="),
    "two attributes": (8, '{role="row"', '{role="row", role="row"', "the attribute role stands twice"),
    "attribute brackets": (8, '{role="row"}', '{role="row"', "expected '}' at the end"),
    "needs": (9, "needs=tp:S(2: 3 x 32) ;", "needs=", "needs has 1 layouts for 2 operands"),
    "a need": (9, "needs=tp:S(2: 3 x 32) ;", "needs=tp:R tp:R ;", "the axis tp has two layouts"),
    "an empty need": (9, "needs=tp:S(2: 3 x 32) ;", "needs= ;", "a layout is missing"),
    "comment": (9, "# mlp", "mlp", "is not expected here"),
    "input": (7, 'input["x"]', "input[x]", "expected a text in quotes before 'x"),
    "input brackets": (7, 'input["x"]', 'input["x"', "expected ']' before"),
    "frozen input": (7, 'input["x"]', 'input["x"](frozen)', "the input x is frozen or tied"),
    "tied input": (7, 'input["x"]', 'input["x"](tied="y")', "the input x is frozen or tied"),
    "frozen buffer": (8, 'parameter["mlp.down.weight"]', 'buffer["w"](frozen)', "the buffer w is frozen"),
    "values": (8, '.weight"]', '.weight"]([1])', "has no list of values or has one too many"),
    "no list": (8, 'parameter["mlp.down.weight"]', 'buffer["w"](3)', "has no list of values or has one too many"),
    "no values": (8, "parameter[", "constant[", "has no list of values"),
    "type of an input": (7, "f32[b, s, 96] tp:S(2: 3 x 32)", "b", "the input x is not a tensor"),
    "untyped parameter": (8, ' : f32[64, 96] tp:S(1: 3 x 32) {role="row"}', "", "is not a tensor; write its type"),
    "two inputs": (8, 'parameter["mlp.down.weight"]', 'input["x"]', "the input x is defined twice"),
    "no return": (11, "return loss=%loss, logits=%mlp_out\n", "", "the return line is missing"),
    "text after return": (13, "logits=%mlp_out\n", "logits=%mlp_out\n%z = nope()\n", "a line follows the return line"),
    "unnamed output": (12, "logits=%mlp", "%mlp", "an output has no name"),
    "two outputs": (12, "logits=", "loss=", "two outputs have one name"),
    "returned value": (12, "loss=%loss", "loss=%los", "%los is not defined"),
    "a name that torch.fx cannot write": (
        13,
        "return",
        "%is = operator.mul(2, 3) : 6\nreturn",
        "cannot write this graph",
    ),
    "a keyword that torch.fx cannot write": (
        12,
        "sum.default(%mlp_out",
        "uniform.default(%mlp_out, from=0",
        "as Python",
    ),
    "words that torch.fx cannot write": (
        12,
        "sum.default(%mlp_out)",
        "random.from(%x, 0, 1)",
        "cannot write this graph",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_text_is_refused_with_its_line_a_reason_and_a_remedy(what: str) -> None:
    line, old, new, message = MALFORMED[what]
    assert old in MLP
    with pytest.raises(TextError, match=message) as caught:
        parse_program(MLP.replace(old, new, 1), where="a.txt")
    assert caught.value.where == f"a.txt:{line}"
    assert caught.value.reason
    assert caught.value.remedy


CONSTANTS = [
    ("[1.0, 2.0]", "f32[3]", "2 values do not fill f32"),
    ("[1.0, 2.0]", "f32[b]", "2 values do not fill f32"),
    ("[1.5, 2]", "i64[2]", "the values are not of the type i64.*; write int values"),
    ("[1, 0]", "bool[2]", "the values are not of the type bool.*; write bool values"),
    ("[True, False]", "f32[2]", "write int or float values"),
    ("[1, 256]", "u8[2]", "a value does not fit into u8.*; stay within"),
    ("[1.0, 2.0]", "c64[2]", "the values are not of the type c64"),
    ("[[1.0], [2.0]]", "f32[2]", "the values are not of the type f32"),
    (f"[{10**400}]", "f32[1]", "the values do not fit into f32"),
]


@pytest.mark.parametrize(("values", "kind", "message"), CONSTANTS)
def test_values_that_do_not_fit_a_constant_are_refused(values: str, kind: str, message: str) -> None:
    text = f'fxpar 2\nplan {{}}\nproperties\n%c = constant["c"]({values}) : {kind}\nreturn\n'
    with pytest.raises(TextError, match=message) as caught:
        parse_program(text)
    assert caught.value.where == "program:4"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_text_has_no_version(text: str) -> None:
    with pytest.raises(TextError, match="program:1: the version line is missing"):
        parse_program(text)


def test_a_plan_that_contradicts_itself_says_so_in_its_own_words() -> None:
    with pytest.raises(PlanError, match="tp must be an integer from 1 to 4096, got 0"):
        parse_program(MLP.replace('"tp": 2', '"tp": 0'))


TEXTS = [print_program(build()) for build in PROGRAMS.values()]
SIGNS = st.sampled_from([*'%=:;,.#"{}[]()<>→|!-+*/ \n\\\0', "S(", "x", "tp:", "9", "e", "_", "ß", "None", "[[", " : "])
PLACE = st.floats(0, 1, exclude_max=True)


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    """A valid text after some deletions, insertions and moves of lines and signs."""
    text = draw(st.sampled_from(TEXTS))
    for kind, place, sign in draw(st.lists(st.tuples(st.sampled_from("dlmir"), PLACE, SIGNS), min_size=1, max_size=4)):
        lines = text.split("\n")
        at, row = int(place * len(text)), int(place * len(lines))
        if kind in "lm":
            line = lines.pop(row)
            text = "\n".join([*lines, *([line] if kind == "m" else [])])
        else:
            text = text[:at] + ("" if kind == "d" else sign) + text[at + (kind != "i") :]
    return text


@settings(max_examples=250, deadline=None, database=None)
@given(damaged_texts())
def test_a_damaged_text_is_a_program_or_one_text_error(text: str) -> None:
    try:
        program = parse_program(text)
    except FxparError as error:
        found = error
    else:
        assert print_program(parse_program(print_program(program))) == print_program(program)
        return
    assert type(found) in (TextError, PlanError)
    assert found.where.startswith("program:" if isinstance(found, TextError) else "plan")
    assert found.remedy or isinstance(found, PlanError)
