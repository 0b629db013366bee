"""What a program says of each node of a trace: its type in the program's symbols, its place, its random identity.

Enters: a `Trace`, its inputs and then its nodes. Leaves: a `Note` of each, and the program's symbols.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import sympy
import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpar.capture.branches import FINDS, FINDS_TOO, choice_of
from fxpar.capture.places import module_of, source_of
from fxpar.capture.recording import RECOMPUTE_KEY
from fxpar.capture.size_expressions import SizeError, of_rows, written
from fxpar.capture.trace import Trace
from fxpar.errors import CaptureError, loop_of_experts
from fxpar.ir.program import DTYPE_NAMES, Note, ScalarType, TensorType, ValueType
from fxpar.ir.symbols import Counted, Symbol
from fxpar.layout.symbolic_sizes import Size, evaluate, names, product, simplify, symbol
from fxpar.signatures.pointwise import draws_bits


class _DataError(CaptureError):
    """A size that depends on values."""


class Notes:
    """Makes the notes of one program's nodes. Inputs are declared first: sizes are written in their symbols.

    Attributes:
        symbols: the program's, in the order in which they were declared.
        counted: rows that a loop over experts picks.
        substitution: what stands for each symbol of the trace: one of these, or a number.
    """

    def __init__(self, traced: Trace) -> None:
        self.symbols: list[Symbol] = []
        self.counted: list[Counted] = []
        self.substitution: dict[Any, Any] = {}
        self._prefix = traced.prefix
        self._random: Counter[str] = Counter()
        self._sizes: dict[Any, Size] = {}
        self._types: dict[TensorType, TensorType] = {}
        # Sizes of the inputs by dimension; numbers where the trace fixed them.
        users = [s.arg.name for s in traced.exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        values = [n.meta.get("val") for n in traced.exported.graph.nodes if n.name in users]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        self._groups = of_rows(shapes, (node.meta.get("val") for node in traced.exported.graph.nodes))
        self._pinned = {(dim, str(size)) for shape in shapes for dim, size in enumerate(shape)}

    def _size(self, value: Any) -> Size:
        if isinstance(value, int):
            return value
        # What stands for a symbol is what was declared so far.
        key = value.node.expr, len(self.substitution)
        if key not in self._sizes:
            self._sizes[key] = self._written(value)
        return self._sizes[key]

    def _written(self, value: Any) -> Size:
        parsed = written(value, self._groups)
        if isinstance(parsed, int):
            return parsed
        unknown = names([parsed]) - {str(s) for s in self.substitution}
        if unknown:
            raise _DataError(
                f"the size {parsed} depends on values of tensors ({', '.join(sorted(unknown))})",
                remedy="use shapes that follow from the inputs' shapes (torch.where, masked_fill)",
            )
        size = simplify(parsed.subs(self.substitution))
        images = {s.name for s in self.symbols if s.dim > 1}
        if not isinstance(size, int) and not size.is_polynomial() and names([size]) & images:
            raise SizeError(f"the size {size} of an image is no polynomial", remedy="give images of one size")
        return size

    def _type(self, value: Any) -> ValueType:
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPE_NAMES:
                raise CaptureError(f"the element type {value.dtype} is not supported", remedy="cast it")
            kind = TensorType(value.dtype, tuple(self._size(s) for s in value.shape))
            return self._types.setdefault(kind, kind)  # one object is soon found equal
        if isinstance(value, (tuple, list)):
            return tuple(self._type(v) for v in value if isinstance(v, torch.Tensor))  # type: ignore[misc]
        if isinstance(value, (int, torch.SymInt)):
            return ScalarType(self._size(value))
        return None

    def placed_type(self, node: fx.Node, place: str = "") -> ValueType:
        """The type of a node's value; errors name the place, or the author's line."""
        try:
            return self._type(node.meta.get("val"))
        except _DataError as error:
            if self._declare_picked(node):
                return self._type(node.meta.get("val"))
            where = source_of(node) or f"%{node.name}"
            if choice_of(node) is not None:
                raise loop_of_experts(where, module_of(node).removeprefix(self._prefix)) from None
            raise CaptureError(error.reason, where=place or where, remedy=error.remedy) from None
        except CaptureError as error:
            raise type(error)(
                error.reason, where=place or source_of(node) or f"%{node.name}", remedy=error.remedy
            ) from None

    def _declare_picked(self, node: fx.Node) -> bool:
        """Names how many pairs a loop picks for an expert: `recognize_experts` is to recognise it, or refuses it."""
        choice = choice_of(node) if node.target in (FINDS, FINDS_TOO) else None
        if choice is None:
            return False
        (mask,) = (value.meta["val"] for value in node.all_input_nodes)
        size, experts = node.meta["val"][0].shape[0], int(choice.all_input_nodes[0].meta["val"].shape[-1])
        pairs, taken = product([self._size(dim) for dim in mask.shape]), {s.name for s in self.symbols}
        share = simplify(sympy.floor((pairs + experts - 1) / sympy.Integer(experts)))
        name = next(n for n in (f"e{i}" for i in range(len(self.counted), 9999)) if n not in taken)
        self.substitution[symbol(str(size.node.expr))] = symbol(name)
        examples = {s.name: s.example for s in self.symbols}
        self.counted.append(Counted(name, share, max(evaluate(share, examples), 1)))
        return True

    def declare(self, path: str, value: torch.Tensor) -> None:
        """Names the symbols that first occur in this input: `b` in front, then `s`, then by number.

        Inputs whose examples agree in the same dimension share its symbol (labels and tokens have one batch and one
        sequence length, which tracing alone does not find out); calls are checked against that. Where the model takes
        one size only (tokens as long as its mask), those that agree with it are that number.
        """
        for dim, size in enumerate(value.shape):
            if isinstance(size, int):
                continue
            key = size.node.expr
            if not key.is_Symbol or symbol(str(key)) in self.substitution:
                continue
            if (dim, str(size.node.hint)) in self._pinned:
                self.substitution[symbol(str(key))] = int(size.node.hint)
                continue
            hint, group = int(size.node.hint), self._groups.get(str(key), 1)
            known = next((s for s in self.symbols if s.dim == dim and s.example * s.multiple == hint), None)
            if known is not None:
                self.substitution[symbol(str(key))] = known.size
                continue
            base = ("b", "s")[dim] if dim < 2 else f"d{dim}"
            taken = {s.name for s in self.symbols}
            name = next(n for n in (base, *(f"{base}{i}" for i in range(2, 99))) if n not in taken)
            self.symbols.append(Symbol(name, path, dim, hint // group, group, group))
            self.substitution[symbol(str(key))] = self.symbols[-1].size

    def note(self, node: fx.Node) -> Note:
        """The note of an operation.

        Raises:
            CaptureError: its type cannot be written, or it reads a tensor's value on the host.
        """
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool) and free_unbacked_symbols(value):
            raise CaptureError(
                "reads the value of a tensor on the host, which no graph of all ranks can hold",
                where=source_of(node) or f"%{node.name}",
                remedy="keep it a tensor (no item(), tolist() or float())",
            )
        fqn = module_of(node).removeprefix(self._prefix)
        fqn = "" if self._prefix and fqn == self._prefix.rstrip(".") else fqn
        return Note(
            type=self.placed_type(node),
            fqn=fqn,
            source=source_of(node),
            random=self._random_identity(node, fqn),
            recompute=node.meta.get("custom", {}).get(RECOMPUTE_KEY, 0),
        )

    def _random_identity(self, node: fx.Node, fqn: str) -> int:
        """A number from the node's module and its position there: the same under every plan."""
        if not draws_bits(node):
            return 0
        self._random[fqn] += 1
        digest = hashlib.sha256(f"{fqn}#{self._random[fqn]}".encode()).digest()
        return int.from_bytes(digest[:4], "little") or 1
