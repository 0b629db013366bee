"""The pass manager: contracts, history, dumps and fail-closed checks.

Enters: a program and the passes to run on it. Leaves: the program after them, with one history record a pass.

A pass is a function `Program → Program` wrapped by `register_pass`, which declares what it requires, provides and
preserves. The manager runs it on a copy. Then it checks that the pass kept its contract and that the graph is sound,
and runs every verifier whose properties hold. It stops at the first failure, so a rejected program is never returned.
Behind it stands the dataflow of programs, which many passes preserve.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar.errors import CheckFailed, FxparError, InputError, PassError, shown
from fxpar.ir.grad_flow import plain
from fxpar.ir.operators import GraphOperator, in_backward
from fxpar.ir.program import PassRecord, Program, ScalarType, describe, note, operands, output_layouts
from fxpar.ir.properties import Property
from fxpar.ir.regions import inlined
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import simplify
from fxpar.ops.collectives import COERCION_OF, IN_BACKWARD, all_reduce_coalesced, sum_gradients
from fxpar.ops.token_chunks import merged
from fxpar.signatures.check_cache import Facts, Sighting, facts_of, has_same_operations, sightings
from fxpar.text.printing import print_program

# Python's cyclic garbage collector, at rest while a graph grows.


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Switches the collector off inside, and afterwards back to what it was."""
    was_enabled = gc.isenabled()
    # Passes make many objects and free few. With full collections their time grew faster than the graph.
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


PassFunction = Callable[[Program], Program]
_Nodes = dict[str, Sighting]

_PRESERVES = ("dataflow", "values", "nothing")


# Of what is wrong before the first pass.
_UNHANDLED = (
    "no pass has run yet: fxpar does not handle this operation of the model, or the text is wrong; write it with others"
)


@dataclass(frozen=True)
class Pass:
    """Holds a pass and its contract.

    Attributes:
        name: the name in histories, dumps and on the command line.
        run: the function.
        requires: properties that must hold before.
        provides: properties that hold afterwards.
        invalidates: properties that no longer hold afterwards.
        preserves: what stays equal: `dataflow` (the expression of each output), `values` (loss, outputs and gradients)
            or `nothing`.
        when: tells whether the pass is for a program; other programs skip it. Its docstring says which ones it is for.
    """

    name: str
    run: PassFunction
    requires: frozenset[str]
    provides: frozenset[str]
    invalidates: frozenset[str]
    preserves: str
    when: Callable[[Program], bool] = lambda program: True

    def __repr__(self) -> str:
        return self.name  # signatures show the passes as defaults: `help(fxpar.parallelize)`

    @property
    def condition(self) -> str:
        """Returns which programs the pass is for; empty if it is for all."""
        return (self.when.__doc__ or "").strip().split("\n")[0]

    @property
    def summary(self) -> str:
        """Returns the first line of the pass's docstring."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    def __call__(self, program: Program) -> Program:
        """Runs the function on the program itself, without a copy and without checks."""
        return self.run(program)


def register_pass(
    name: str,
    *,
    requires: Iterable[str] = (),
    provides: Iterable[str] = (),
    invalidates: Iterable[str] = (),
    preserves: str = "values",
    when: Callable[[Program], bool] = lambda program: True,
) -> Callable[[PassFunction], Pass]:
    """Returns a decorator that makes a pass of a function `Program → Program`.

    The arguments are the contract: see the attributes of `Pass`. The function's docstring says what the pass does.

    Example:
        ```python
        @fxpar.register_pass("count_nodes", preserves="dataflow")
        def count_nodes(program):
            'Prints how many nodes there are.'
            print(len(program.graph.nodes))
            return program
        ```

    Raises:
        PassError: `preserves` is an unknown word, properties are not a set, or the function has no docstring.
    """
    if not isinstance(name, str) or not name:
        raise PassError(f"needs a name, got {shown(name)}", where="register_pass", remedy="pass one")
    for properties in (requires, provides, invalidates):
        # A text is an iterable of letters.
        if isinstance(properties, str) or not isinstance(properties, Iterable):
            raise PassError(
                f"needs sets of properties, got {shown(properties)}", where=name, remedy='write {"layouts"}'
            )

    def wrap(function: PassFunction) -> Pass:
        if preserves not in _PRESERVES:
            remedy = f"write one of {', '.join(_PRESERVES)}"
            raise PassError(f"preserves={preserves!r} is unknown", where=name, remedy=remedy)
        if not callable(function):
            raise PassError(f"must be a function, got {shown(function)}", where=name, remedy="decorate a function")
        if not function.__doc__:
            raise PassError("the function has no docstring", where=name, remedy="say what the pass does")
        return Pass(name, function, frozenset(requires), frozenset(provides), frozenset(invalidates), preserves, when)

    return wrap


@dataclass(frozen=True)
class Verifier:
    """Describes a static check.

    Attributes:
        name: the name in messages.
        properties: the check applies while all of these hold.
        check: raises `CheckFailed`, `LayoutError` or `InputError`. Takes the program, and with `uses_facts` its facts.
        until: a property; while it holds, the check does not apply.
        of_dataflow: whether the answer depends on the dataflow alone. A pass that preserves it needs no new check.
        of_operations: whether it judges operations by what they are and take, not by names or order. A pass that keeps
            all operations needs no new check.
        uses_facts: whether it skips nodes of which it has judged the same facts before.
    """

    name: str
    properties: frozenset[str]
    check: Callable[..., None]
    until: str = ""
    of_dataflow: bool = False
    of_operations: bool = False
    uses_facts: bool = False

    def applies(self, program: Program) -> bool:
        """Tells whether the check applies to a program."""
        return self.properties <= program.properties and self.until not in program.properties

    def judge(self, facts: Facts) -> None:
        """Runs the check on the program of these facts."""
        if self.uses_facts:
            self.check(facts.program, facts)
        else:
            self.check(facts.program)


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order.

    Example:
        ```python
        from fxpar.passes import CANONICAL_PASSES
        from fxpar.verify.static import STATIC

        program = fxpar.PassManager(CANONICAL_PASSES, STATIC).run(captured)
        ```

    Attributes:
        passes: what to run.
        verifiers: what to check before the first pass and after each one.
        dump: folder for the texts of the first program and of the program after each pass; None for no dump.
        first: the number of the first text.
        dumps_first: whether to write the first text.
        checked: whether the first program was checked already.
        on_pass: called with each pass's record, for progress reports.
        on_program: called with the first program and with that after each pass, before it is checked.
    """

    passes: Sequence[Pass]
    verifiers: Sequence[Verifier] = ()
    dump: Path | None = None
    first: int = 0
    dumps_first: bool = True
    checked: bool = False
    on_pass: Callable[[PassRecord], None] | None = None
    on_program: Callable[[Program], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.passes, Sequence):
            remedy = "pass a list such as DEFAULT_PASSES"
            raise PassError(f"must be a list of passes, got {shown(self.passes)}", where="passes", remedy=remedy)
        for item in self.passes:
            if not isinstance(item, Pass):
                raise PassError(
                    "must be a registered pass", where=repr(item), remedy="decorate it with @fxpar.register_pass"
                )

    def run(self, program: Program, *, until: str | None = None) -> Program:
        """Returns the program after all passes, or after the pass named `until`.

        Raises:
            PassError: a pass broke its contract, or `until` names no pass.
            LayoutError, CheckFailed: a verifier rejected the program after a pass; the error's note names both.
        """
        names = [item.name for item in self.passes]
        if until is not None and until not in names:
            raise PassError("there is no such pass", where=until, remedy=f"choose from {', '.join(names)}")
        if not isinstance(program, Program):
            raise PassError(f"must be a Program, got {shown(program)}", where="program", remedy="pass a captured one")
        with without_collections():
            return self._run(program, until)

    def _run(self, program: Program, until: str | None) -> Program:
        number = self.first
        self._write(program, number if self.dumps_first else None)
        _lint(program, "capture")
        out = inlined(program)  # what holds of a region's nodes in each call holds of the region
        nodes = sightings(program.graph)
        facts = None if self.checked else self._verify(out, "capture", nodes if out is program else None)
        flows = Expressions()
        for item in self.passes:
            if not item.when(program):
                if item.name == until:
                    break
                continue
            before, known, old = program, out, nodes
            program, nodes = self._apply(item, program, old)
            number += 1  # those left out have none
            self._write(program, number)
            _lint(program, item.name)
            done = program.history[-1]
            is_changed = done.added or done.erased or done.changed or list(old) != list(nodes)
            if is_changed or not _is_same_besides(before, program):
                out = inlined(program)
                if item.preserves == "dataflow":
                    _check_dataflow(item, known, out, flows)
                seen = nodes if out is program else None
                facts = self._verify(out, item.name, seen, facts, is_kept=item.preserves == "dataflow")
            if item.name == until:
                break
        program.graph_module.recompile()
        return program

    def _apply(self, item: Pass, program: Program, before: _Nodes) -> tuple[Program, _Nodes]:
        """Returns the program after a pass, and its nodes; `before` are the nodes of the program that enters."""
        missing = item.requires - program.properties
        if missing:
            raise PassError(
                f"requires {', '.join(sorted(missing))}, which does not hold",
                where=item.name,
                remedy="run the pass that provides it before",
            )
        start = time.perf_counter()
        try:
            # A pass may fail after it has changed half of its copy: the program of the caller stays sound.
            result = item.run(program.copy())
        except FxparError as error:
            if error.where != item.name:
                error.add_note(f"raised by the pass '{item.name}'")
            raise
        seconds = time.perf_counter() - start
        if not isinstance(result, Program):
            raise PassError(f"returned a {type(result).__name__} and no Program", where=item.name)
        after = sightings(result.graph)
        _check_notes(item, after)
        record = PassRecord(
            item.name,
            seconds,
            added=tuple(sorted(after.keys() - before.keys())),
            erased=tuple(sorted(before.keys() - after.keys())),
            changed=tuple(sorted(k for k in before.keys() & after.keys() if before[k] != after[k])),
        )
        if self.on_pass is not None:
            self.on_pass(record)
        properties = (program.properties - item.invalidates) | item.provides
        return result.with_(properties=properties, history=(*program.history, record)), after

    def _verify(
        self,
        program: Program,
        after: str,
        seen: _Nodes | None,
        checked: Facts | None = None,
        *,
        is_kept: bool = False,
    ) -> Facts:
        """Checks a program without calls, except for what it has in common with the last one that was checked.

        Args:
            seen: the program's nodes, if they are known.
            checked: the facts of the last program that was checked.
            is_kept: whether that program has the same dataflow.
        """
        facts = facts_of(program, seen, checked)
        alike = is_kept and checked is not None and has_same_operations(checked, facts)
        # What these checks ask of a program depends on what is said to hold of it.
        alike = alike and checked is not None and checked.program.properties ^ program.properties <= {Property.REGIONS}
        for verifier in self.verifiers:
            same = (is_kept and verifier.of_dataflow) or (alike and verifier.of_operations)
            is_known = same and checked is not None and verifier.applies(checked.program)
            if verifier.applies(program) and not is_known:
                try:
                    verifier.judge(facts)
                except FxparError as error:
                    note = f"found by the check '{verifier.name}' after '{after}'"
                    if after == "capture" and type(error) is CheckFailed and error.remedy == error.advice:
                        unhandled = CheckFailed(error.reason, where=error.where, remedy=_UNHANDLED)
                        unhandled.add_note(note)
                        raise unhandled from error
                    error.add_note(note)
                    raise
        return facts

    def _write(self, program: Program, number: int | None) -> None:
        if self.on_program is not None:
            self.on_program(program)
        if self.dump is not None and number is not None:
            name = program.history[-1].name if program.history else "capture"
            path = self.dump / f"{number:02d}-{name}.txt"
            try:
                self.dump.mkdir(parents=True, exist_ok=True)
                path.write_text(print_program(program), encoding="utf-8")
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise InputError(reason, where=str(path), remedy="name a place that can be written") from None


def _lint(program: Program, after: str) -> None:
    try:
        program.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise PassError(f"left an unsound graph: {error}", where=after) from None


def _is_same_besides(before: Program, after: Program) -> bool:
    """Tells whether only nodes and their order changed, and no table or property that a check could read."""

    def compared(program: Program) -> tuple[object, ...]:
        tables = (program.parameters, program.inputs, program.outputs, program.all_symbols, program.plan, program.loss)
        values = tuple((name, id(value)) for name, value in program.constants.items())
        return *tables, program.conditions, program.properties, values

    return compared(before) == compared(after)


def _check_dataflow(item: Pass, before: Program, after: Program, flows: Expressions) -> None:
    """Checks that the same operations compute each output from the same values.

    Raises:
        PassError: an output is computed differently; names it, and the first operation that differs.
    """
    (before, _), (after, _) = merged(before), merged(after)
    expected, actual = flows.outputs(before), flows.outputs(after)
    odd = next((name for name in (*expected, *actual) if expected.get(name) != actual.get(name)), None)
    if odd is None:
        return
    node = flows.parting(after, before)
    at = f", from {describe(node)} on" if node is not None else ""
    raise PassError(f"preserves dataflow, and changed the output {odd}{at}", where=item.name)


def _check_notes(item: Pass, nodes: _Nodes) -> None:
    for name, (op, _, _, noted) in nodes.items():
        if noted is None and op != "output":
            raise PassError(
                f"left node %{name} without a note", where=item.name, remedy="call set_note on nodes you create"
            )
        if op in ("call_module", "call_method"):
            raise PassError(f"left the {op} node %{name}", where=item.name, remedy="call operators only")


# Dataflow: what each output is computed from, whatever nodes are called and wherever they stand. Leaves of expressions
# are parameters, inputs and literals; a number of sizes is its size. What is computed twice has one expression, in the
# backward too, where I and R are one; what draws bits has those of its identity.

aten = torch.ops.aten
# Of two tensors either may come first.
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})


class Expressions:
    """Numbers of the expressions in programs that stay as they are; they are comparable with each other alone.

    Args:
        associative: whether sums of more than two tensors are equal in whatever order they are added.
    """

    def __init__(self, associative: bool = False) -> None:
        self._associative = associative
        self._numbers: dict[Hashable, int] = {}
        self._terms: dict[int, tuple[int, ...]] = {}
        self._last: tuple[Program, dict[fx.Node, int]] | None = None  # of a pass's result, which the next one's follows

    def of(self, program: Program) -> dict[fx.Node, int]:
        """Returns the number of each node's expression."""
        if self._last is None or self._last[0] is not program:
            self._last = program, self._found(program)
        return self._last[1]

    def outputs(self, program: Program) -> dict[str, int]:
        """Returns the number of each output's expression, by name."""
        numbers = self.of(program)
        return {name: numbers[node] for name, node in program.output_nodes().items()}

    def parting(self, program: Program, before: Program) -> fx.Node | None:
        """Returns the first node whose expression occurs nowhere in another program."""
        known = set(self.of(before).values())
        return next((node for node, number in self.of(program).items() if number not in known), None)

    def _found(self, program: Program) -> dict[fx.Node, int]:
        leaves = {p.node: f"parameter {p.fqn}" for p in program.parameters}
        leaves |= {entry.node: f"input {entry.path}" for entry in program.inputs}
        numbers: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                numbers[node] = self._number(leaves[node.name])
            elif node.op == "call_function":
                key = _expression(node, numbers)
                terms = self._terms_of(node, numbers)
                numbers[node] = key if isinstance(key, int) else self._number((node.target, terms) if terms else key)
                if terms:
                    self._terms[numbers[node]] = terms
        return numbers

    def _terms_of(self, node: fx.Node, numbers: Mapping[fx.Node, int]) -> tuple[int, ...]:
        """Returns what a sum of tensors adds, where the order is not to count; nothing of anything else."""
        if not self._associative or node.target is not aten.add.Tensor or node.kwargs or len(operands(node)) != 2:
            return ()
        parts = (self._terms.get(numbers[read], (numbers[read],)) for read in operands(node))
        return tuple(sorted(term for part in parts for term in part))

    def _number(self, key: Hashable) -> int:
        try:
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # what no key can be made of is like nothing else
            return self._numbers.setdefault(object(), len(self._numbers))


def has_same_dataflow(one: Program, other: Program) -> bool:
    """Returns whether two programs have the same outputs, each computed from the same by the same operations."""
    known = Expressions()
    return known.outputs(one) == known.outputs(other)


def _expression(node: fx.Node, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Returns a key of the node's expression, or the number that it has already."""
    kind = note(node).type
    if isinstance(kind, ScalarType):
        return "number", simplify(kind.value)
    target: Any = node.target
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
        if source.target is sum_gradients:
            return numbers[operands(source)[index]]
        if source.target is all_reduce_coalesced:  # whatever else is summed with it
            axis, layout = source.kwargs["axis"], _layout(output_layouts(source)[index])
            return source.target, axis, layout, numbers[operands(source)[index]]
    if target in IN_BACKWARD:
        target = IN_BACKWARD[target]
        if target is None:
            return numbers[operands(node)[0]]
    args: Hashable
    if target in _COMMUTATIVE and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
        args = tuple(sorted(numbers[arg] for arg in node.args if isinstance(arg, fx.Node)))
    else:
        args = plain((node.args, node.kwargs), numbers.__getitem__)
    placed: Hashable = None
    if isinstance(target, GraphOperator) and (target in COERCION_OF or not operands(node)):
        placed = tuple(_layout(layout) for layout in output_layouts(node))  # what it was made for
    return target, args, note(node).random, placed


@lru_cache(maxsize=65536)
def _layout(layout: Layout) -> str:
    """Returns the layout as the backward reads it."""
    return str(Layout(tuple((axis, in_backward(placement)) for axis, placement in layout)))
