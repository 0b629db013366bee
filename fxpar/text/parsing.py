"""The way back from the text form: a program that prints to the same text.

Enters: text as `fxpar.text.printing.print_program` wrote it, possibly edited by hand. Leaves: a `Program` with an empty
history, or one `TextError` that names the line.

The line of a node is read from left to right: its head, its type with layouts, its attributes and its comment. None
of these contains the sign that ends it (`{` and `#` for the type) outside of quotes.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.errors import TextError
from fxpar.layout.nesting import seen_by
from fxpar.layout.symbols import product
from fxpar.ops import OPERATORS, Operator
from fxpar.ops.coercions import COERCION_OF
from fxpar.plan.plan import Plan
from fxpar.program.coercions import axes_of
from fxpar.program.program import (
    Input,
    Note,
    Parameter,
    Program,
    Symbol,
    TensorType,
    ValueType,
    operands,
    output_layouts,
    output_types,
    set_note,
)
from fxpar.text.printing import NO_LOSS, VERSION, has_scalar, need_shapes
from fxpar.text.scanning import (
    IDENTIFIER,
    STRING,
    Scanner,
    check_axis,
    check_call,
    fail,
    parse_layout,
    parse_type,
    parse_value,
    placement,
    resolve,
    split,
    unquote,
)

_INTEGER = r"[0-9]{1,18}"  # fits 64 bits
_WORD = rf'({STRING}|[^\s",=]+)'

_NAME = re.compile(_WORD)
_SYMBOL = re.compile(rf"({IDENTIFIER}) = {_WORD}\.({_INTEGER})(?: / ({_INTEGER}))? like ({_INTEGER})")
_OUTPUT = re.compile(rf"{_WORD}=")
_SEPARATOR = re.compile(r",\s*")
_DEFINITION = re.compile(rf"%({IDENTIFIER}) = ")
_OWNED = re.compile(r"(input|parameter|buffer|constant)\[")
_TARGET = re.compile(rf"({IDENTIFIER}(?:\.{IDENTIFIER})+)(?:\[({IDENTIFIER}(?:-{IDENTIFIER})*)\])?\(")
_KEYWORD = re.compile(rf"({IDENTIFIER})=")
_TYPE = re.compile(r' : ([^{#"]*)')
_BRACE = re.compile(r"\s*\{")
_ATTRIBUTE = re.compile(
    rf'(needs)=([^"{{}}]*?)(?=, \w+=|}})|(role|origin)=({STRING})|(random|recompute)=({_INTEGER})'
    r"|(phase)=(backward|parameter)"
)
_COMMENT = re.compile(rf"\s*(?:#\s*(?:({STRING}|[^\s\"]\S*)(?:\s+({STRING}|[^\s\"].*))?)?)?$")
_AXIS = re.compile(rf"({IDENTIFIER}):(.*)")


def parse_program(text: str, *, where: str = "program", operators: Mapping[str, Operator] = OPERATORS) -> Program:
    """The program whose text it is, with an empty history.

    Args:
        text: as `print_program` wrote it.
        where: what to call the text in errors, for example a file's name.
        operators: what may stand behind `fxpar.`, by name.

    Raises:
        TextError: the text is malformed; `where` has the line number.
        PlanError: the plan line holds a value that a plan refuses.
    """
    reader = _Reader(operators)
    last = 1
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            last = number
            with _located(f"{where}:{number}"):
                reader.read(stripped)
    with _located(f"{where}:{last}"):
        return reader.finish()


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except TextError as error:
        raise TextError(error.reason, where=where, remedy=error.remedy) from None


class _Reader:
    """What the lines read so far have defined."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self.operators = operators
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.header: dict[str, Any] = {}
        self.symbols: list[Symbol] = []
        self.parameters: list[Parameter] = []
        self.inputs: list[Input] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.outputs: list[str] | None = None

    @property
    def axes(self) -> Mapping[str, int]:
        """Sizes of the plan's mesh axes."""
        axes: Mapping[str, int] = self.header["plan"].axes
        return axes

    def read(self, line: str) -> None:
        """Takes in the next line that is neither blank nor a comment."""
        if "version" not in self.header:
            if line != VERSION:
                fail(f"the header {line[:20]!r} is unknown", f"start the text with '{VERSION}'")
            self.header["version"] = line
            return
        if self.outputs is not None:
            fail("a line follows the return line", "end the text with the return line")
        key, _, rest = line.partition(" ")
        if key.startswith("%"):
            self._read_node(line)
        elif key == "return":
            self._read_return(rest.strip())
        elif key == "symbol":
            self._read_symbol(rest.strip())
        elif key not in ("plan", "properties", "loss"):
            fail(f"the line starts with {key[:20]!r}, which is unknown", "start it with %name =, a header or return")
        elif key in self.header or self.nodes:
            fail(f"the {key} line stands twice or below a node", f"write one {key} line above the nodes")
        elif key == "plan":
            self.header[key] = _plan(rest)
        elif key == "properties":
            self.header[key] = frozenset(rest.split())
        else:
            found = _NAME.fullmatch(rest.strip()) or fail(f"'{rest}' is no output's name", "write one name")
            self.header[key] = "" if found[1] == NO_LOSS else unquote(found[1])

    def finish(self) -> Program:
        """The program, once all lines are read."""
        for key in ("version", "plan", "properties"):
            if key not in self.header:
                fail(f"the {key} line is missing", f"start with '{VERSION}' and the lines plan and properties")
        if self.outputs is None:
            fail("the return line is missing", "end the text with 'return name=%node'")
        loss = self.header.get("loss", "")
        if loss and loss not in self.outputs:
            fail(f"the loss {loss} is no output", f"name one of {', '.join(self.outputs)}")
        try:
            module = fx.GraphModule(torch.nn.Module(), self.graph)
        except SyntaxError:  # an operator whose overload is a word of Python (aten.random.from)
            fail("torch.fx cannot write this graph as Python code", "use operators whose names are Python names")
        program = Program(
            module,
            tuple(self.parameters),
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.symbols),
            self.header["plan"],
            self.header["properties"],
            constants=self.constants,
            loss=loss,
        )
        if "loss" not in self.header and has_scalar(program):
            fail(
                "the loss line is missing, and an output is a scalar",
                f"write 'loss name', or 'loss {NO_LOSS}' for none",
            )
        return program

    def _read_symbol(self, text: str) -> None:
        found = _SYMBOL.fullmatch(text)
        if found is None:
            fail(f"'{text}' is no symbol", "write 'symbol name = input.dim like example', or input.dim / ranks")
        if any(found[1] == known.name for known in self.symbols):
            fail(f"the symbol {found[1]} is defined twice", "keep one line")
        self.symbols.append(Symbol(found[1], unquote(found[2]), int(found[3]), int(found[5]), int(found[4] or 1)))

    def _read_return(self, text: str) -> None:
        scanner = Scanner(text)
        names: list[str] = []
        values: list[Any] = []
        while text and (not names or scanner.match(_SEPARATOR)):
            found = scanner.match(_OUTPUT) or fail("an output has no name", "write 'return name=%node, …'")
            names.append(unquote(found[1]))
            values.append(parse_value(scanner, self.nodes))
        self._end(scanner)
        if len(set(names)) != len(names):
            fail("two outputs have one name", "rename one")
        self.graph.output(tuple(values))
        self.outputs = names

    def _read_node(self, line: str) -> None:
        scanner = Scanner(line)
        found = scanner.match(_DEFINITION) or fail("the line defines no node", "write '%name = operator(…) : type'")
        name = found[1]
        if "plan" not in self.header:
            fail("the plan line is missing", "write it above the first node")
        if name in self.nodes:
            fail(f"%{name} is defined twice", "rename one of the two")
        owned = scanner.match(_OWNED)
        if owned:
            if keyword.iskeyword(name) or name == "self":
                fail(f"%{name} cannot name an argument of a Python function", "rename it")
            tensor = _read_owned(scanner, owned[1])
            node = self.graph.create_node("placeholder", name, name=name)
        else:
            target, args, kwargs = self._call(scanner)
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        if node.name != name:  # torch.fx renames what shadows a builtin
            node.name = name
        kept = self._note(scanner, node)
        set_note(node, kept)
        self.nodes[name] = node
        if owned:
            self._own(tensor, name, kept.type)

    def _own(self, tensor: _Owned, node: str, kind: ValueType) -> None:
        path = tensor.path
        if not isinstance(kind, TensorType):
            fail(f"the {tensor.kind} {path} is no tensor", "write its type, for example ' : f32[64, 96]'")
        if tensor.kind == "input":
            known = [item.path for item in self.inputs]
            self.inputs.append(Input(path, node, kind, tensor.carries))
        else:
            known = [item.fqn for item in self.parameters]
            trainable = tensor.kind == "parameter" and not tensor.frozen
            self.parameters.append(Parameter(path, node, tensor.kind, kind, trainable, tensor.tied, tensor.left_out))
        if path in known:
            fail(f"the {tensor.kind} {path} is defined twice", "rename one of the two")
        if tensor.values is not None:
            self.constants[path] = _constant(tensor.values, kind)

    def _call(self, scanner: Scanner) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        found = scanner.match(_TARGET) or fail("expected an operator", "write its full name and '(', aten.mm.default(")
        name, axis = found[1], found[2]
        target = resolve(name, self.operators)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for _ in scanner.items(")"):
            key = scanner.match(_KEYWORD)
            if kwargs if key is None else key[1] in kwargs:
                fail("a keyword stands twice or before a positional argument", "write positional arguments first")
            value = parse_value(scanner, self.nodes)
            if key is None:
                args.append(value)
            else:
                kwargs[key[1]] = value
        takes_axis = isinstance(target, Operator)
        if "axis" in kwargs if takes_axis else axis is not None:
            fail("the mesh axis stands in the wrong place", "write it in brackets after an operator of fxpar")
        if axis is not None:
            for part in axis.split("-"):
                check_axis(part, self.axes)
            kwargs["axis"] = axis
        check_call(name, target, args, kwargs)
        return target, tuple(args), kwargs

    def _note(self, scanner: Scanner, node: fx.Node) -> Note:
        """Type, layouts, attributes and comment: the rest of a node's line."""
        fields: dict[str, Any] = {}
        if found := scanner.match(_TYPE):
            fields["type"], fields["layout"] = parse_type(self._without_source(node, found[1].strip()), self.axes)
        if scanner.match(_BRACE):
            for _ in scanner.items("}"):
                key, value = self._attribute(scanner, node)
                if key in fields:
                    fail(f"the attribute {key} stands twice", "keep one")
                fields[key] = value
        comment = self._end(scanner)
        fqn, source = comment[1] or "-", comment[2] or ""
        return Note(**fields, fqn="" if fqn == "-" else unquote(fqn), source=unquote(source))

    def _end(self, scanner: Scanner) -> re.Match[str]:
        ahead = scanner.text[scanner.at : scanner.at + 20]
        return scanner.match(_COMMENT) or fail(f"{ahead!r} is not expected here", "check brackets, commas and ' : '")

    def _attribute(self, scanner: Scanner, node: fx.Node) -> tuple[str, Any]:
        found = scanner.match(_ATTRIBUTE)
        if found is None:
            ahead = scanner.text[scanner.at : scanner.at + 20]
            fail(f"{ahead!r} starts no attribute", 'write needs=, role="…", origin="…", random=, recompute= or phase=')
        if found[3]:
            return found[3], unquote(found[4])
        if found[5]:
            return found[5], int(found[6])
        if found[7]:
            return found[7], found[8]
        parts, shapes = split(found[2], ";"), need_shapes(node)
        if len(parts) != len(shapes):
            fail(f"needs has {len(parts)} layouts for {len(shapes)} operands", "write one for each, separated by ';'")
        return "needs", tuple(parse_layout(p, s, self.axes) for p, s in zip(parts, shapes, strict=True))

    def _without_source(self, node: fx.Node, text: str) -> str:
        """The type text of a coercion without its `P→`, which must be what its operand is."""
        coercion = node.target in COERCION_OF
        given = operands(node) if coercion else []
        if coercion and [len(output_types(operand)) for operand in given] != [1]:
            fail("a coercion needs one tensor", "pass it one %name of a tensor")
        tokens = split(text, " ")
        for i, token in enumerate(tokens):
            if "→" not in token:
                continue
            found = _AXIS.fullmatch(token)
            if not coercion or found is None or found[1] not in axes_of(node):
                fail(f"an arrow stands in '{token}'", "write arrows only for a coercion, on its axis")
            source, _, target = found[2].partition("→")
            before = {k: v for layout in output_layouts(given[0]) for k, v in layout}.get(found[1])
            shape = output_types(given[0])[0].shape
            seen = seen_by(output_layouts(given[0])[0], shape, self.axes) if output_layouts(given[0]) else {}
            if placement(source, seen.get(found[1], shape)) != before:
                fail(
                    f"the operand %{given[0].name} is {before or 'without layout'} on {found[1]} and not {source}",
                    "write its layout before the arrow, or none",
                )
            tokens[i] = f"{found[1]}:{target}"
        return " ".join(tokens)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        fail(f"the plan names '{twice}' twice", "name it once")
    return dict(pairs)


def _plan(text: str) -> Plan:
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        fail("the plan is no JSON", 'write, for example, plan {"tp": 2}')
    known = [f.name for f in dataclasses.fields(Plan)]
    if not isinstance(values, dict) or not set(values) <= set(known):
        fail("the plan is no mapping of its options", f"choose from {', '.join(known)}")
    return Plan.from_dict(values)


@dataclass(frozen=True)
class _Owned:
    """The head of a placeholder: kind and name of an input, parameter, buffer or constant, and what it says of it."""

    kind: str
    path: str
    frozen: bool
    tied: tuple[str, ...]
    values: list[Any] | None
    carries: bool
    left_out: bool


def _read_owned(scanner: Scanner, kind: str) -> _Owned:
    path, frozen, carries, left_out = scanner.string(), False, False, False
    tied: list[str] = []
    values: list[Any] | None = None
    scanner.expect("]")
    if scanner.take("("):
        for _ in scanner.items(")"):
            if scanner.take("tied="):
                tied.append(scanner.string())
            elif scanner.take("frozen"):
                frozen = True
            elif scanner.take("gradient"):
                carries = True
            elif scanner.take("left_out"):
                left_out = True
            else:
                values = parse_value(scanner, {})
    if (frozen and kind != "parameter") or (tied and kind == "input"):
        fail(f"the {kind} {path} is frozen or tied", "mark only parameters as frozen, and tie no input")
    if left_out and (kind != "parameter" or frozen):
        fail(f"the {kind} {path} is left out of the gradients", "mark trainable parameters alone")
    if carries and kind != "input":
        fail(f"the {kind} {path} is marked as having a gradient", "mark inputs alone: parameters have one")
    if (values is not None) != (kind == "constant") or not isinstance(values, list | None):
        fail(f"the {kind} {path} has no list of values or has one too many", 'write constant["name"]([1, 2])')
    return _Owned(kind, path, frozen, tuple(tied), values, carries, left_out)


def _constant(values: list[Any], kind: TensorType) -> torch.Tensor:
    """The tensor of a constant from its flat list."""
    shape = [size for size in kind.shape if isinstance(size, int)]
    if len(shape) != len(kind.shape) or product(shape) != len(values):
        fail(f"{len(values)} values do not fill {kind}", "write one value for each element")
    allowed = (bool,) if kind.dtype is torch.bool else (int, float) if kind.is_float else (int,)
    if kind.dtype.is_complex or not all(type(value) in allowed for value in values):
        fail(f"the values are not of the type {kind}", f"write {' or '.join(a.__name__ for a in allowed)} values")
    if not kind.is_float and kind.dtype is not torch.bool:
        limits = torch.iinfo(kind.dtype)
        if not all(limits.min <= value <= limits.max for value in values):
            fail(f"a value does not fit into {kind}", f"stay within [{limits.min}, {limits.max}]")
    try:
        return torch.tensor(values, dtype=kind.dtype).reshape(shape)
    except (OverflowError, RuntimeError):
        fail(f"the values do not fit into {kind}", "write smaller numbers or sizes")
