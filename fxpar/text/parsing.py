"""The way back from the text form: a program that prints to the same text.

Enters: text as `fxpar.text.printing.print_program` wrote it, possibly edited by hand. Leaves: a `Program` with an empty
history, or one `TextError` that names the line.

The line of a node is read from left to right: its head, its type with layouts, its attributes and its
comment. None of these contains the sign that ends it (`{` and `#` for the type) outside of quotes.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.errors import TextError
from fxpar.ir.operators import axes_of
from fxpar.ir.program import (
    Input,
    Note,
    Parameter,
    Program,
    TensorType,
    ValueType,
    module_of,
    operands,
    output_layouts,
    output_types,
    set_note,
)
from fxpar.ir.regions import Region, call_region
from fxpar.ir.symbols import RELATIONS, Condition, Counted, Symbol
from fxpar.layout.nesting import seen_by
from fxpar.layout.symbolic_sizes import parse_size, product
from fxpar.ops.collectives import COERCION_OF
from fxpar.ops.operator import Operator
from fxpar.ops.registry import OPERATORS
from fxpar.text.printing import NO_LOSS, VERSION, has_scalar, need_shapes
from fxpar.text.scanning import (
    IDENTIFIER,
    INTEGER,
    STRING,
    Scanner,
    check_axis,
    check_call,
    fail,
    parse_layout,
    parse_plan,
    parse_type,
    parse_value,
    placement,
    resolve,
    split,
    unquote,
)

# The heads of placeholders in a program's text: inputs, and what the program owns.


@dataclass(frozen=True)
class Owned:
    """The head of a placeholder: kind and name of an input, parameter, buffer or constant, and what it says of it."""

    kind: str
    path: str
    frozen: bool
    tied: tuple[str, ...]
    values: list[Any] | None
    carries: bool
    left_out: bool


def read_owned(scanner: Scanner, kind: str) -> Owned:
    """Returns the head after its opening bracket.

    Args:
        kind: input, parameter, buffer or constant.
    """
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
    return Owned(kind, path, frozen, tuple(tied), values, carries, left_out)


def constant(values: list[Any], kind: TensorType) -> torch.Tensor:
    """Returns the tensor of a constant from its flat list."""
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


# What stands after the head of a node in a program's text: its type with layouts, its attributes and its comment.

_TYPE = re.compile(r' : ([^{#"]*)')
_BRACE = re.compile(r"\s*\{")
_ATTRIBUTE = re.compile(
    rf'(needs)=([^"{{}}]*?)(?=, \w+=|}})|(role|origin|uncaptured)=({STRING})|(random|recompute|buffer)=({INTEGER})'
    rf"|(phase)=(backward|weight|parameter)|(region)=({IDENTIFIER})|(stage)=(\d{{1,4}}(?:\+\d{{1,4}})*)|(one_shot)=true"
    r"|(shard)=(optimizer|gradients|parameters)"
)
_COMMENT = re.compile(rf"\s*(?:#\s*(?:({STRING}|[^\s\"]\S*)(?:\s+({STRING}|[^\s\"].*))?)?)?$")
_AXIS = re.compile(rf"({IDENTIFIER}):(.*)")


def read_note(scanner: Scanner, node: fx.Node, axes: Mapping[str, int]) -> Note:
    """Returns type, layouts, attributes and comment: the rest of a node's line.

    Args:
        axes: sizes of the plan's mesh axes.
    """
    fields: dict[str, Any] = {}
    if match := scanner.match(_TYPE):
        fields["type"], fields["layout"] = parse_type(_without_source(node, match[1].strip(), axes), axes)
    if scanner.match(_BRACE):
        for _ in scanner.items("}"):
            key, value = _attribute(scanner, node, axes)
            if key in fields:
                fail(f"the attribute {key} stands twice", "keep one")
            fields[key] = value
    comment = read_end(scanner)
    fqn, source = comment[1] or "-", comment[2] or ""
    return Note(**fields, fqn="" if fqn == "-" else unquote(fqn), source=unquote(source))


def read_end(scanner: Scanner) -> re.Match[str]:
    """Returns the comment that ends a line, which may be empty."""
    ahead = scanner.text[scanner.at : scanner.at + 20]
    return scanner.match(_COMMENT) or fail(f"{ahead!r} is not expected here", "check brackets, commas and ' : '")


def _attribute(scanner: Scanner, node: fx.Node, axes: Mapping[str, int]) -> tuple[str, Any]:
    match = scanner.match(_ATTRIBUTE)
    if match is None:
        ahead = scanner.text[scanner.at : scanner.at + 20]
        fail(
            f"{ahead!r} starts no attribute",
            'write needs=, role="…", origin="…", random=, recompute=, buffer=, one_shot=true, phase=, region=, shard=, '
            "stage= or uncaptured=",
        )
    if match[3]:
        return match[3], unquote(match[4])
    if match[5]:
        return match[5], int(match[6])
    if match[7] or match[9]:
        return match[7] or match[9], match[8] or match[10]
    if match[11]:
        return "stages", tuple(map(int, match[12].split("+")))
    if match[13]:
        return match[13], True
    if match[14]:
        return match[14], match[15]
    parts, shapes = split(match[2], ";"), need_shapes(node)
    if len(parts) != len(shapes):
        fail(f"needs has {len(parts)} layouts for {len(shapes)} operands", "write one for each, separated by ';'")
    return "needs", tuple(parse_layout(p, s, axes) for p, s in zip(parts, shapes, strict=True))


def _without_source(node: fx.Node, text: str, axes: Mapping[str, int]) -> str:
    """Returns the type text of a coercion without its `P→`, which must be what its operand is."""
    coercion = node.target in COERCION_OF
    coerced = operands(node) if coercion else []
    if coercion and [len(output_types(operand)) for operand in coerced] != [1]:
        fail("a coercion needs one tensor", "pass it one %name of a tensor")
    tokens = split(text, " ")
    for i, token in enumerate(tokens):
        if "→" not in token:
            continue
        match = _AXIS.fullmatch(token)
        if not coercion or match is None or match[1] not in axes_of(node):
            fail(f"an arrow stands in '{token}'", "write arrows only for a coercion, on its axis")
        source, _, target = match[2].partition("→")
        before = {k: v for layout in output_layouts(coerced[0]) for k, v in layout}.get(match[1])
        shape = output_types(coerced[0])[0].shape
        seen = seen_by(output_layouts(coerced[0])[0], shape, axes) if output_layouts(coerced[0]) else {}
        if placement(source, seen.get(match[1], shape)) != before:
            fail(
                f"the operand %{coerced[0].name} is {before or 'without layout'} on {match[1]} and not {source}",
                "write its layout before the arrow, or none",
            )
        tokens[i] = f"{match[1]}:{target}"
    return " ".join(tokens)


_WORD = rf'({STRING}|[^\s",=]+)'

_NAME = re.compile(_WORD)
_SYMBOL = re.compile(
    rf"({IDENTIFIER}) = {_WORD}\.({INTEGER})(?: / ({INTEGER})(?: in groups of ({INTEGER}))?)? like ({INTEGER})"
)
_CONDITION = re.compile(r"([^<>=!]+?) (==|!=|>=|<=|>|<) ([^<>=!]+)")
_COUNTED = re.compile(rf"({IDENTIFIER}) = (.+) like ({INTEGER})")
_OUTPUT = re.compile(rf"{_WORD}=")
_SEPARATOR = re.compile(r",\s*")
_DEFINITION = re.compile(rf"%({IDENTIFIER}) = ")
_OWNED = re.compile(r"(input|parameter|buffer|constant)\[")
_TARGET = re.compile(rf"({IDENTIFIER}(?:\.{IDENTIFIER})+)(?:\[({IDENTIFIER}(?:-{IDENTIFIER})*)\])?\(")
_KEYWORD = re.compile(rf"({IDENTIFIER})=")
_OPERAND = re.compile(r"operand(?= :)")
_REGION = re.compile(rf"({IDENTIFIER})")
_GIVES = re.compile(r" gives ")
_TAKER = re.compile(rf"%({IDENTIFIER})|-")


def parse_program(text: str, *, where: str = "program", operators: Mapping[str, Operator] = OPERATORS) -> Program:
    """Returns the program whose text it is, with an empty history.

    Args:
        text: as `print_program` wrote it.
        where: what to call the text in errors, for example a file's name.
        operators: what may stand after `fxpar.`, by name.

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


def _words(node: fx.Node) -> Iterator[str]:
    """Yields what stands in a node's code as a name: the overload of `aten.random.from` is a word of Python."""
    yield node.name
    yield from node.kwargs
    yield from str(node.target).split(".")


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except TextError as error:
        raise TextError(error.reason, where=where, remedy=error.remedy) from None


@dataclass
class _Inside:
    """A region that is being read, and the graph around it."""

    name: str
    fqn: str
    outer: fx.Graph


class _Reader:
    """What the lines read so far have defined."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self.operators = operators
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.header: dict[str, Any] = {}
        self.symbols: list[Symbol] = []
        self.counted: list[Counted] = []
        self.conditions: list[Condition] = []
        self.parameters: list[Parameter] = []
        self.inputs: list[Input] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.outputs: list[str] | None = None
        self.regions: dict[str, Region] = {}
        self.inside: _Inside | None = None

    @property
    def axes(self) -> Mapping[str, int]:
        """Returns sizes of the plan's mesh axes."""
        axes: Mapping[str, int] = self.header["plan"].axes
        return axes

    def read(self, line: str) -> None:
        """Takes in the next line that is neither blank nor a comment."""
        if "version" not in self.header:
            if line != VERSION and re.fullmatch(r"fxpar \d+", line):
                reads = f"the text has the form of version {line.split()[1]}, and {VERSION.split()[1]} is read"
                fail(reads, "write it anew: operators have other names ('fxpar run … --dump FOLDER')")
            if line != VERSION:
                fail(f"the header {line[:20]!r} is unknown", f"start the text with '{VERSION}'")
            self.header["version"] = line
            return
        if self.outputs is not None:
            fail("a line follows the return line", "end the text with the return line")
        key, _, rest = line.partition(" ")
        if key.startswith("%"):
            self._read_node(line)
        elif key == "region":
            self._start_region(rest.strip())
        elif key == "result":
            self._end_region(rest.strip())
        elif self.inside is not None:
            fail(f"the line stands in the region {self.inside.name}", "end the region with 'result %node, …'")
        elif key == "return":
            self._read_return(rest.strip())
        elif key == "symbol":
            self._read_symbol(rest.strip())
        elif key == "counted":
            self._read_counted(rest.strip())
        elif key == "condition":
            self._read_condition(rest.strip())
        elif key not in ("plan", "properties", "loss"):
            fail(f"the line starts with {key[:20]!r}, which is unknown", "start it with %name =, a header or return")
        elif key in self.header or self.nodes:
            fail(f"the {key} line stands twice or below a node", f"write one {key} line above the nodes")
        elif key == "plan":
            self.header[key] = parse_plan(rest)
        elif key == "properties":
            self.header[key] = frozenset(rest.split())
        else:
            match = _NAME.fullmatch(rest.strip()) or fail(f"'{rest}' is not an output's name", "write one name")
            self.header[key] = "" if match[1] == NO_LOSS else unquote(match[1])

    def finish(self) -> Program:
        """Returns the program, once all lines are read."""
        for key in ("version", "plan", "properties"):
            if key not in self.header:
                fail(f"the {key} line is missing", f"start with '{VERSION}' and the lines plan and properties")
        if self.inside is not None:
            fail(f"the region {self.inside.name} has no result line", "end it with 'result %node, …'")
        if self.outputs is None:
            fail("the return line is missing", "end the text with 'return name=%node'")
        loss = self.header.get("loss", "")
        if loss and loss not in self.outputs:
            fail(f"the loss {loss} is not an output", f"name one of {', '.join(self.outputs)}")
        if any(keyword.iskeyword(word) for node in self.graph.nodes for word in _words(node)):
            fail("torch.fx cannot write this graph as Python code", "use operators whose names are Python names")
        program = Program(
            module_of(self.graph),
            tuple(self.parameters),
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.symbols),
            self.header["plan"],
            self.header["properties"],
            constants=self.constants,
            loss=loss,
            counted=tuple(self.counted),
            conditions=tuple(self.conditions),
        )
        if "loss" not in self.header and has_scalar(program):
            fail(
                "the loss line is missing, and an output is a scalar",
                f"write 'loss name', or 'loss {NO_LOSS}' for none",
            )
        return program

    def _read_symbol(self, text: str) -> None:
        match = _SYMBOL.fullmatch(text)
        if match is None:
            fail(f"'{text}' is not a symbol", "write 'symbol name = input.dim like example', or input.dim / ranks")
        self._check_new(match[1])
        multiple, group = int(match[4] or 1), int(match[5] or 1)
        if group < 1 or multiple % group:
            fail(f"{multiple} is not a multiple of the group {group}", "write the ranks times the group")
        self.symbols.append(Symbol(match[1], unquote(match[2]), int(match[3]), int(match[6]), multiple, group))

    def _read_counted(self, text: str) -> None:
        match = _COUNTED.fullmatch(text)
        if match is None:
            fail(f"'{text}' is not a number of rows", "write 'counted name = size like example'")
        self._check_new(match[1])
        self.counted.append(Counted(match[1], parse_size(match[2]), int(match[3])))

    def _read_condition(self, text: str) -> None:
        match = _CONDITION.fullmatch(text)
        if match is None:
            fail(f"'{text}' is not a condition", f"write 'condition size relation size' with {' '.join(RELATIONS)}")
        self.conditions.append(Condition(parse_size(match[1]), match[2], parse_size(match[3])))

    def _check_new(self, name: str) -> None:
        if name in {known.name for known in self.symbols} | {known.name for known in self.counted}:
            fail(f"the symbol {name} is defined twice", "keep one line")

    def _read_return(self, text: str) -> None:
        scanner = Scanner(text)
        names: list[str] = []
        values: list[Any] = []
        while text and (not names or scanner.match(_SEPARATOR)):
            match = scanner.match(_OUTPUT) or fail("an output has no name", "write 'return name=%node, …'")
            names.append(unquote(match[1]))
            values.append(parse_value(scanner, self.nodes))
        read_end(scanner)
        if len(set(names)) != len(names):
            fail("two outputs have one name", "rename one")
        self.graph.output(tuple(values))
        self.outputs = names

    def _start_region(self, text: str) -> None:
        scanner = Scanner(text)
        match = scanner.match(_REGION) or fail("the region has no name", "write 'region name'")
        if "plan" not in self.header or self.nodes or self.inside is not None:
            fail("a region stands above the plan, below a node or in another region", "write regions above the nodes")
        if match[1] in self.regions:
            fail(f"the region {match[1]} is defined twice", "rename one of the two")
        fqn = read_end(scanner)[1] or ""
        self.inside = _Inside(match[1], unquote(fqn), self.graph)
        self.graph = fx.Graph()

    def _end_region(self, text: str) -> None:
        if self.inside is None:
            fail("a result line stands outside of a region", "end the program with 'return name=%node'")
        scanner = Scanner(text)
        results: list[fx.Node] = []
        while not results or scanner.match(_SEPARATOR):
            value = parse_value(scanner, self.nodes)
            if not isinstance(value, fx.Node) or value.op == "placeholder" or value in results:
                fail("a result is not a node of the region, or stands twice", "write 'result %node, …'")
            results.append(value)
        read_end(scanner)
        self.graph.output(tuple(results))
        self.regions[self.inside.name] = Region(self.inside.name, self.graph, self.inside.fqn)
        self.graph, self.nodes, self.inside = self.inside.outer, {}, None

    def _read_call(self, scanner: Scanner, name: str, region: Region, args: tuple[Any, ...], random: Any) -> None:
        """Reads the rest of a line that calls a region, and the nodes that take its results."""
        takers: list[str] = []
        if scanner.match(_GIVES):
            while not takers or scanner.match(_SEPARATOR):
                match = scanner.match(_TAKER) or fail("expected who takes a result", "write %name, or - for none")
                takers.append(match[1] or "")
        if len(takers) != len(region.results):
            fail(f"takes {len(takers)} of the {len(region.results)} results of {region}", "write %name or - for each")
        if not all(isinstance(value, fx.Node) for value in args):
            fail(f"passes something other than a node to {region}", "pass one %name for each operand")
        if not isinstance(random, list) or not all(type(identity) is int for identity in random):
            fail("the identities of the draws must be a list of numbers", "write random=[…]")
        # A note is read for a node, and the call needs its note to be made.
        placeholder = self.graph.create_node("call_function", operator.getitem, name=name)
        like = read_note(scanner, placeholder, self.axes)
        self.graph.erase_node(placeholder)
        call, items = call_region(self.graph, region, args, random, name, like)
        for taker, item in zip(takers, items, strict=True):
            if not taker:
                self.graph.erase_node(item)
            elif taker in self.nodes or taker == name:
                fail(f"%{taker} is defined twice", "rename one of the two")
            else:
                item.name = taker
                self.nodes[taker] = item
        # torch.fx gives no name twice, not even that of a node that was erased.
        call.name = name
        self.nodes[name] = call

    def _read_node(self, line: str) -> None:
        scanner = Scanner(line)
        match = scanner.match(_DEFINITION) or fail("the line defines no node", "write '%name = operator(…) : type'")
        name = match[1]
        if "plan" not in self.header:
            fail("the plan line is missing", "write it above the first node")
        if name in self.nodes:
            fail(f"%{name} is defined twice", "rename one of the two")
        owned = scanner.match(_OWNED)
        if owned and self.inside is not None:
            fail(f"%{name} is an input of the program", "write 'operand' in a region")
        tensor = None
        if owned or (self.inside is not None and scanner.match(_OPERAND)):
            if keyword.iskeyword(name) or name == "self":
                fail(f"%{name} cannot name an argument of a Python function", "rename it")
            tensor = read_owned(scanner, owned[1]) if owned else None
            node = self.graph.create_node("placeholder", name, name=name)
        else:
            target, args, kwargs = self._call(scanner)
            if isinstance(target, Region):
                self._read_call(scanner, name, target, args, kwargs.get("random", []))
                return
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        if node.name != name:  # torch.fx renames what shadows a builtin
            node.name = name
        noted = read_note(scanner, node, self.axes)
        set_note(node, noted)
        self.nodes[name] = node
        if tensor is not None:
            self._own(tensor, name, noted.type)

    def _own(self, tensor: Owned, node: str, kind: ValueType) -> None:
        path = tensor.path
        if not isinstance(kind, TensorType):
            fail(f"the {tensor.kind} {path} is not a tensor", "write its type, for example ' : f32[64, 96]'")
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
            self.constants[path] = constant(tensor.values, kind)

    def _call(self, scanner: Scanner) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        match = scanner.match(_TARGET) or fail("expected an operator", "write its full name and '(', aten.mm.default(")
        name, axis = match[1], match[2]
        target = self._region(name) if name.startswith("region.") else resolve(name, self.operators)
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
        if isinstance(target, Region):
            if not set(kwargs) <= {"random"}:
                fail(f"{name} takes no {min(set(kwargs) - {'random'})}", "pass its operands, and random=[…]")
        else:
            check_call(name, target, args, kwargs)
        return target, tuple(args), kwargs

    def _region(self, name: str) -> Region:
        known = self.regions.get(name.removeprefix("region."))
        if known is None or self.inside is not None:
            fail(f"{name} is unknown here", "define the region above the nodes; regions call none")
        return known
