"""Edits of a step: such as change a gradient, and such as do not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar.compile import compile_model
from fxpar.ir.program import Program, has_note, note, output_node, set_note
from fxpar.ir.regions import inlined
from fxpar.ir.step import is_forward, is_gradient
from fxpar.ops.collectives import COERCION_OF
from fxpar.ops.operator import Operator
from fxpar.plan.plan import Plan
from fxpar.verify.simulate_ranks import SimulationResult
from fxpar.verify.values import call_inputs, program_state, reference_run, verify_values
from tests.zoo import step_of

Edit = tuple[str, Program]


class Small(nn.Module):
    """Norm, two matrices with dropout between them, twice; tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.dropout(torch.tanh(up(norm(x))), 0.4))
        logits = nn.functional.linear(x, self.embed.weight)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Attentive(nn.Module):
    """Attention, and two matrices over flattened tokens; the head is tied to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        y, (rows, length) = self.norm(x), ids.shape
        parts = (self.query, self.key, self.value)
        q, k, v = (part(y).view(rows, length, 2, 4).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = (x + self.out(y.transpose(1, 2).reshape(rows, length, 8))).flatten(0, 1)
        logits = nn.functional.linear(x + self.down(torch.tanh(self.up(x))), self.embed.weight)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


class Trial:
    """A step under a plan, and what compares another with one device.

    Args:
        build: makes the model, of words and labels.
        rows: of the batch.
    """

    def __init__(self, build: Callable[[], nn.Module] = Small, rows: int = 4, **plan: Any) -> None:
        torch.manual_seed(3)
        model = build().double()
        batch = {"ids": torch.randint(0, 20, (rows, 6)), "labels": torch.randint(0, 20, (rows, 6))}
        compiled = compile_model(model, batch, Plan(**plan))
        self.captured, self.program = compiled.captured.program, compiled.program
        self.step = inlined(step_of(compiled.program, compiled.program.outputs))
        self.state = program_state(self.captured, model)
        self.inputs = call_inputs(compiled.captured, model, batch)
        self.reference: SimulationResult = reference_run(self.captured, self.state, self.inputs)

    def is_right(self, program: Program) -> bool:
        """Whether all ranks give the gradients of one device."""
        report = verify_values(self.captured, program, self.state, self.inputs, reference=self.reference)
        return report.ok


def _backward(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and not is_forward(node)]


def _edited(program: Program, name: str, edit: Callable[[Program, fx.Node], bool]) -> Program | None:
    made = program.copy()
    return made if edit(made, made.node(name)) else None


def mutants(program: Program) -> Iterator[Edit]:
    """Steps that are edited in their backward; most have other gradients."""
    for node in _backward(program):
        for label, edit in _EDITS.items():
            made = _edited(program, node.name, edit)
            if made is not None:
                yield f"{label} %{node.name}", made
    yield from _redirected(program)
    yield from _returned(program)


def _drop(program: Program, node: fx.Node) -> bool:
    """A collective, or an operation that keeps type and layout."""
    reads = node.all_input_nodes
    if not reads or note(reads[0]).type != note(node).type:
        return False
    first = reads[0]
    node.replace_all_uses_with(first)
    program.graph.erase_node(node)
    return True


def _double(program: Program, node: fx.Node) -> bool:
    if node.target not in COERCION_OF:
        return False
    with program.graph.inserting_after(node):
        again = program.graph.node_copy(node)
    node.replace_all_uses_with(again, lambda user: user is not again)
    again.args = (node,)
    return True


def _other_axis(program: Program, node: fx.Node) -> bool:
    axis = node.kwargs.get("axis")
    other = next((name for name in program.axes if name != axis), None)
    if not isinstance(node.target, Operator) or axis is None or other is None:
        return False
    node.kwargs = {**node.kwargs, "axis": other}
    return True


def _other_phase(program: Program, node: fx.Node) -> bool:
    set_note(node, replace(note(node), phase="parameter" if note(node).phase == "backward" else "backward"))
    return True


def _other_bits(program: Program, node: fx.Node) -> bool:
    drawn = note(node).random
    others = {note(n).random for n in program.graph.nodes if has_note(n)} - {0, drawn}
    if not drawn or not others:
        return False
    set_note(node, replace(note(node), random=min(others)))
    return True


def _other_number(program: Program, node: fx.Node) -> bool:
    found = [i for i, arg in enumerate(node.args) if type(arg) in (float, int, bool)]
    if not found:
        return False
    args = list(node.args)
    value: Any = args[found[0]]
    args[found[0]] = not value if isinstance(value, bool) else value + 1
    node.args = tuple(args)
    return True


_EDITS = {
    "drop": _drop,
    "double": _double,
    "axis": _other_axis,
    "phase": _other_phase,
    "bits": _other_bits,
    "number": _other_number,
}


def _redirected(program: Program) -> Iterator[Edit]:
    """An operand of the backward by another value of its type and layout that is there."""
    seen: dict[Any, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        for read in node.all_input_nodes if not is_forward(node) else ():
            for other in seen.get((note(read).type, note(read).layout), [])[-2:]:
                if other != read.name:
                    made = program.copy()
                    made.node(node.name).replace_input_with(made.node(read.name), made.node(other))
                    yield f"redirect %{node.name} from %{read.name} to %{other}", made
        seen.setdefault((note(node).type, note(node).layout), []).append(node.name)


def _returned(program: Program) -> Iterator[Edit]:
    """Gradients exchanged, or missing."""
    names = [name for name in program.outputs if is_gradient(name)]
    ends = program.output_nodes()
    for a, b in itertools.combinations(names, 2):
        if note(ends[a]).type == note(ends[b]).type:
            changed = {**ends, a: ends[b], b: ends[a]}
            yield f"exchange {a} and {b}", _returning(program, {name: node.name for name, node in changed.items()})
    for a in names:
        yield f"leave out {a}", _returning(program, {name: node.name for name, node in ends.items() if name != a})


def _returning(program: Program, names: dict[str, str]) -> Program:
    made = program.copy()
    output_node(made.graph).args = (tuple(made.node(node) for node in names.values()),)
    return made.with_(outputs=tuple(names))


def harmless(program: Program, generator: random.Random) -> Program:
    """Nodes in another order that their dependences allow, under other names, some computed twice; sums turned."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node in places:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].name = node.name
    waiting = [node for node in program.graph.nodes if node.op == "call_function"]
    while waiting:
        ready = [i for i, node in enumerate(waiting[:40]) if all(read in made for read in node.all_input_nodes)]
        node = waiting.pop(generator.choice(ready))
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].name = f"n{len(made)}"
        if not is_forward(node) and isinstance(node.target, torch._ops.OpOverload) and generator.random() < 0.1:
            made[node] = graph.node_copy(node, made.__getitem__)
        if node.target is torch.ops.aten.add.Tensor and not is_forward(node) and generator.random() < 0.5:
            made[node].args = tuple(reversed(made[node].args))
    ends: Any = output_node(program.graph).args[0]
    graph.output(tuple(made[node] for node in ends))
    return replace(program, graph_module=fx.GraphModule(nn.Module(), graph))
