"""Faults of what operations are given besides tensors of a layout: sizes, memory, numbers, words, types, order.

Enters: the text of a program and a seed. Leaves: edited texts. Many are faults of the model and none of its split: both
readings of the text have them (`tests.verify.readings`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tests.verify.edits import Edit, Edits, Mutant, sampled
from tests.verify.lines import Line, Source

_TENSOR = re.compile(r" : (\w+)\[([^\]]*)\](.*)$")
_NUMBER = re.compile(r"(?<![\w.%\[])-?\d+\.?\d*(?:e-?\d+)?(?![\w.\]])")
_ANY_NUMBER = re.compile(r"(?<![\w.%])-?\d+\.?\d*(?:e-?\d+)?(?![\w.])")
_OPERANDS = re.compile(r"%(\w+)")


def _tensors(source: Source) -> Iterator[tuple[Line, str, list[str], str]]:
    """Lines of one tensor with element type, sizes and the rest of the type."""
    for line in source.nodes:
        found = _TENSOR.match(line.type)
        if found is not None:
            yield line, found[1], [size for size in found[2].split(", ") if size], found[3]


def _calls(source: Source) -> Iterator[Line]:
    for line in source.nodes:
        if line.head.startswith(("aten.", "fxpar.dropout", "fxpar.attention", "fxpar.function", "operator.")):
            yield line


def _behind(source: Source, line: Line, new: Line) -> Source:
    """The new line right behind one, whose users take it instead."""
    return source.redirected(line.name, new.name, lambda user: user is not line).edited((line, [line, new]))


def _local(size: str, layout: str, dim: int, ranks: int) -> str:
    if not layout.startswith(f" tp:S({dim}") or not size.isdigit():
        return size
    return str(int(size) // ranks)


def sizes(source: Source) -> Edits:
    """The size of a dimension, as a rank or as one device reads it, is a number of some operation."""
    ranks = int(re.search(r'"tp": (\d+)', str(source))[1])  # type: ignore[index]
    for line, _, shape, layout in _tensors(source):
        for dim, size in enumerate(shape):
            for at in (dim, dim - len(shape)):
                for claim in {size, _local(size, layout, dim, ranks)}:
                    read = Line(f"{line.name}_n", f"aten.sym_size.int(%{line.name}, {at})", f" : {claim}", "")
                    for head in ("aten.mul.Tensor", "aten.div.Tensor", "aten.add.Tensor"):
                        used = replace(line, name=f"{line.name}_u", head=f"{head}(%{line.name}, %{read.name})")
                        moved = source.redirected(line.name, used.name, lambda user, me=line: user is not me)  # type: ignore[misc]
                        yield Edit(f"{head} by {read.head}", moved.edited((line, [line, read, used])))
                    yield from _placed(source, line, read)


def _placed(source: Source, line: Line, read: Line) -> Edits:
    """The size in place of each number of the operations behind."""
    behind = False
    for user in source.nodes:
        if behind and user.head.startswith("aten."):
            for found in _ANY_NUMBER.finditer(user.head):
                head = f"{user.head[: found.start()]}%{read.name}{user.head[found.end() :]}"
                yield Edit(
                    f"{read.head} in {user.name}",
                    source.edited((line, [line, read]), (user, [replace(user, head=head)])),
                )
                break
        behind |= user is line


_IN_PLACE = (
    "aten.zero_.default(%{x})",
    "aten.mul_.Tensor(%{x}, 2.0)",
    "aten.add_.Tensor(%{x}, %{x})",
    "aten.copy_.default(%{x}, %{x})",
    "aten.fill_.Scalar(%{x}, 1.5)",
    "aten.relu_.default(%{x})",
    "aten.neg.out(%{x}, out=%{x})",
    "aten.mul.out(%{x}, %{x}, out=%{x})",
    "aten.clamp_.default(%{x}, 0)",
    "aten.detach_.default(%{x})",
)


def in_place(source: Source) -> Edits:
    """A value is written to, by an operation whose result is used or not."""
    for line, *_ in _tensors(source):
        for form in _IN_PLACE:
            new = replace(line, name=f"{line.name}_w", head=form.format(x=line.name))
            yield Edit(f"{new.head}, used", _behind(source, line, new))
            yield Edit(f"{new.head}, unused", source.edited((line, [line, new])))
            yield Edit(f"{new.head}, untyped", source.edited((line, [line, replace(new, type="")])))


def memory(source: Source) -> Edits:
    """Memory that nothing has written is added to a value, or stands for it."""
    for line, dtype, shape, _ in _tensors(source):
        if not dtype.startswith(("f", "b")) or any(not size.isdigit() for size in shape):
            heads = [f"aten.empty_like.default(%{line.name})"]
        else:
            sizes_ = f"[{', '.join(shape)}]"
            heads = [
                f"aten.empty_like.default(%{line.name})",
                f"aten.new_empty.default(%{line.name}, {sizes_})",
                f"aten.empty.memory_format({sizes_}, dtype=dtype.{dtype})",
                f"aten.empty_permuted.default({sizes_}, {list(range(len(shape)))}, dtype=dtype.{dtype})",
            ]
        for head in heads:
            new = replace(line, name=f"{line.name}_e", head=head)
            yield Edit(f"{head} for it", _behind(source, line, new))
            total = replace(line, name=f"{line.name}_t", head=f"aten.add.Tensor(%{line.name}, %{new.name})")
            moved = source.redirected(line.name, total.name, lambda user, me=line: user is not me)  # type: ignore[misc]
            yield Edit(f"{head} added", moved.edited((line, [line, new, total])))


# None is so large that the rounding of a softmax, times the number, is all that is left of a gradient.
_NUMBERS = ("-1", "0", "1", "2", "7", "-0.5", "0.5", "1.5", "inf", "-inf", "nan", "1e2", "-1e-05", "True", "None")


def numbers(source: Source) -> Edits:
    """A number of an operation is another."""
    for line in _calls(source):
        for found in _ANY_NUMBER.finditer(line.head):
            value = float(found[0])
            near = (
                (str(int(value) + 1), str(int(value) - 1), str(-int(value))) if "." not in found[0] else (str(-value),)
            )
            for other in (*_NUMBERS, *near):
                if other != found[0]:
                    head = f"{line.head[: found.start()]}{other}{line.head[found.end() :]}"
                    yield Edit(f"{line.name}: {found[0]} to {other}", source.edited((line, [replace(line, head=head)])))


_WORDS: Mapping[str, tuple[str, ...]] = {
    "aten.": ("alpha=2.0", "alpha=nan", "alpha=-1", "keepdim=True", "dtype=dtype.f64", "dtype=dtype.f32", "dim=0"),
    "aten.gelu": ('approximate="tanh"', 'approximate="erf"'),
    "aten.sum": ("dtype=dtype.f64", "dtype=dtype.bf16"),
    "aten.mean": ("dtype=dtype.f64", "dtype=dtype.i64"),
    "aten.add": ("alpha=2", "alpha=inf", "alpha=nan"),
    "aten.sub": ("alpha=2", "alpha=inf"),
    "aten.cross_entropy_loss": (
        "reduction=0",
        "reduction=2",
        "reduction=3",
        "label_smoothing=0.1",
        "label_smoothing=2.0",
    ),
    "aten.clone": ("memory_format=memory_format.contiguous_format",),
    "aten._to_copy": ("device=device.meta", "dtype=dtype.f64"),
    "aten.div": ('rounding_mode="floor"',),
}
_SWITCHES = (
    ("True", "False"),
    ("False", "True"),
    ('"none"', '"tanh"'),
    ("dtype.f32", "dtype.bf16"),
    ("dtype.f32", "dtype.i64"),
)


def words(source: Source) -> Edits:
    """A keyword is added, or a switch, an element type or a word is another."""
    for line in _calls(source):
        for start, options in _WORDS.items():
            for option in options if line.head.startswith(start) else ():
                head = f"{line.head[:-1]}, {option})"
                yield Edit(f"{line.name} with {option}", source.edited((line, [replace(line, head=head)])))
        for old, new in _SWITCHES:
            for found in re.finditer(rf"(?<!\w){re.escape(old)}(?!\w)", line.head):
                head = f"{line.head[: found.start()]}{new}{line.head[found.end() :]}"
                yield Edit(f"{line.name}: {old} to {new}", source.edited((line, [replace(line, head=head)])))


def types(source: Source) -> Edits:
    """An element type is another, with or without those behind."""
    for line, dtype, _, _ in _tensors(source):
        for other in ("f32", "f64", "bf16", "f16", "i64", "bool", "c64"):
            if other != dtype:
                kind = line.type.replace(f"{dtype}[", f"{other}[", 1)
                yield Edit(f"{line.name}: {dtype} to {other}", source.edited((line, [replace(line, type=kind)])))


def dims(source: Source) -> Edits:
    """Dimensions of a view, a permutation or a reduction are exchanged, or counted from the end."""
    for line, _, shape, _ in _tensors(source):
        lists = [m for m in re.finditer(r"\[([^\[\]]*)\]", line.head) if "," in m[1]]
        for found in lists:
            items = found[1].split(", ")
            for i in range(len(items) - 1):
                swapped = [*items[:i], items[i + 1], items[i], *items[i + 2 :]]
                head = f"{line.head[: found.start()]}[{', '.join(swapped)}]{line.head[found.end() :]}"
                yield Edit(
                    f"{line.name}: {items[i]} and {items[i + 1]} exchanged",
                    source.edited((line, [replace(line, head=head)])),
                )
        for i in range(len(shape) - 1):
            other = [*shape[:i], shape[i + 1], shape[i], *shape[i + 2 :]]
            kind = line.type.replace(f"[{', '.join(shape)}]", f"[{', '.join(other)}]", 1)
            if other != shape:
                yield Edit(f"{line.name}:{kind}", source.edited((line, [replace(line, type=kind)])))


def swapped(source: Source) -> Edits:
    """Two operands are exchanged, or one is another value of the same type and layout."""
    by_type: dict[str, list[str]] = {}
    for line in source.nodes:
        names = _OPERANDS.findall(line.head)
        for i in range(len(names) - 1):
            if names[i] != names[i + 1]:
                order = iter([*names[:i], names[i + 1], names[i], *names[i + 2 :]])
                head = _OPERANDS.sub(lambda m, it=order: f"%{next(it)}", line.head)  # type: ignore[misc]
                yield Edit(
                    f"{line.name}: {names[i]} and {names[i + 1]} exchanged",
                    source.edited((line, [replace(line, head=head)])),
                )
        for name in dict.fromkeys(names):
            kind = next((o.type for o in source.nodes if o.name == name), "")
            for other in by_type.get(kind, [])[-3:]:
                if other != name:
                    head = re.sub(rf"%{name}(?!\w)", f"%{other}", line.head)
                    yield Edit(f"{line.name}: {other} for {name}", source.edited((line, [replace(line, head=head)])))
        by_type.setdefault(line.type, []).append(line.name)


def siblings(source: Source) -> Edits:
    """Another operation of the same operands."""
    table = {
        "aten.add.Tensor": ("sub.Tensor", "mul.Tensor", "maximum.default", "rsub.Tensor", "atan2.default", "eq.Tensor"),
        "aten.mul.Tensor": ("add.Tensor", "div.Tensor", "sub.Tensor", "pow.Tensor_Tensor"),
        "aten.sum.default": ("mean.default", "prod.default", "amax.default", "std.default"),
        "aten.sum.dim_IntList": ("mean.dim", "amax.default", "logsumexp.default"),
        "aten.gelu.default": ("relu.default", "silu.default", "abs.default", "round.default", "neg.default"),
        "aten.silu.default": ("gelu.default", "neg.default", "detach.default", "clone.default"),
        "aten.mm.default": ("matmul.default", "linear.default"),
        "aten.view.default": ("expand.default", "reshape.default", "new_zeros.default", "new_ones.default"),
        "aten.linear.default": ("matmul.default",),
        "aten.transpose.int": ("select.int", "movedim.int"),
        "aten.mean.dim": ("sum.dim_IntList", "var.dim"),
        "aten.rsqrt.default": ("sqrt.default", "exp.default"),
        "aten.tanh.default": ("sinh.default", "sign.default", "dropout.default"),
    }
    for line in source.nodes:
        name, bracket, rest = line.head.partition("(")
        for other in table.get(name, ()):
            yield Edit(
                f"{line.name}: {other}", source.edited((line, [replace(line, head=f"aten.{other}{bracket}{rest}")]))
            )


def owned(source: Source) -> Edits:
    """A parameter is frozen or not, tied to another name, or of another kind; a constant holds other values."""
    names = [m[1] for line in source.nodes if (m := re.match(r'parameter\["([^"]*)"\]', line.head))]
    for line in source.nodes:
        found = re.match(r'(parameter|buffer|constant)(\["[^"]*"\])(.*)$', line.head)
        if found is None:
            continue
        if found[1] == "parameter":
            others = ["(frozen)", *(f'(tied="{name}")' for name in names[:4]), '(tied="a", tied="a")', '(tied="new")']
            for detail in others:
                yield Edit(
                    f"{line.name}{detail}", source.edited((line, [replace(line, head=f"parameter{found[2]}{detail}")]))
                )
            yield Edit(f"{line.name} as buffer", source.edited((line, [replace(line, head=f"buffer{found[2]}")])))
            yield Edit(f"{line.name} as input", source.edited((line, [replace(line, head=f"input{found[2]}")])))
        if found[1] == "constant":
            for number in list(_ANY_NUMBER.finditer(found[3]))[:4]:
                start = len(line.head) - len(found[3])
                head = f"{line.head[: start + number.start()]}5{line.head[start + number.end() :]}"
                yield Edit(f"{line.name} with 5", source.edited((line, [replace(line, head=head)])))


def header(source: Source) -> Edits:
    """A line of the header is left out, a symbol is another, an output another value."""
    for text in source.lines:
        if not isinstance(text, str):
            continue
        lines = [line for line in source.lines if line is not text]
        yield Edit(f"without {text[:30]}", Source(tuple(lines)))
        if text.startswith("properties "):
            names = text.split()[1:]
            for name in names:
                rest = " ".join(["properties", *(n for n in names if n != name)])
                yield Edit(f"without property {name}", Source(tuple(rest if o is text else o for o in source.lines)))
        if text.startswith("symbol "):
            for old, new in (
                (r"like \d+", "like 7"),
                (r"like \d+", "like 1"),
                (r"\.(\d)", ".9"),
                (r"\.0", ".1"),
                (r" like", " / 2 like"),
            ):
                other = re.sub(old, new, text, count=1)
                if other != text:
                    yield Edit(other, Source(tuple(other if o is text else o for o in source.lines)))
        if text.startswith("return "):
            for line in source.nodes[-12:]:
                other = re.sub(r"%\w+", f"%{line.name}", text, count=1)
                yield Edit(other, Source(tuple(other if o is text else o for o in source.lines)))


def random_numbers(source: Source) -> Edits:
    """Probability and identity of a random node are others."""
    for line in source.nodes:
        if "random=" in line.rest:
            for identity in ("1", "0", "4294967295", "4294967296"):
                rest = re.sub(r"random=\d+", f"random={identity}", line.rest)
                yield Edit(f"{line.name}: random={identity}", source.edited((line, [replace(line, rest=rest)])))
            for p in ("-0.1", "1.5", "1.0", "0.0", "nan", "inf", "0.9", "1"):
                head = re.sub(r"0\.\d+", p, line.head, count=1)
                if head != line.head:
                    yield Edit(f"{line.name}: p={p}", source.edited((line, [replace(line, head=head)])))


def malformed(source: Source) -> Edits:
    """Cuts into no parts, empty and negative runs, long strings of digits."""
    for line in source.nodes:
        for position, (layout, shape) in enumerate(zip(line.layouts, line.shapes, strict=False)):
            if layout.startswith("S(") and position == 0:
                size = shape[int(layout[2])] if int(layout[2]) < len(shape) else "1"
                for body in (
                    f"{size} / 0",
                    "0 x 3",
                    f"-1 x -{size}",
                    f"{size} ~ 0",
                    f"{'9' * 30}",
                    f"1 x {size} / 1",
                    "",
                    f"{size} | 0",
                ):
                    yield Edit(
                        f"{line.name}: {body}", source.edited((line, [line.with_layout(f"S({layout[2]}: {body})")]))
                    )
        for size in line.shapes[0][:1] if line.shapes else ():
            for other in ("9" * 25, f"{size}**9", "0", "-1", f"{size}/2", f"b*{size}"):
                kind = line.type.replace(f"[{size}", f"[{other}", 1)
                yield Edit(f"{line.name}:{kind[:40]}", source.edited((line, [replace(line, type=kind)])))


KINDS: Mapping[str, Callable[[Source], Edits]] = {
    "sizes": sizes,
    "in place": in_place,
    "memory": memory,
    "numbers": numbers,
    "words": words,
    "element types": types,
    "dimensions": dims,
    "operands": swapped,
    "siblings": siblings,
    "owned": owned,
    "header": header,
    "random": random_numbers,
    "malformed": malformed,
}


def mutants(text: str, seed: int, count: int) -> list[Mutant]:
    """A sample of a program's mutants, the kinds in turn."""
    return sampled(KINDS, Source.of(text), seed, count)
