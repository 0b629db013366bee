"""Structure: the program is one functional graph whose tables agree with it.

Enters: a program. Leaves: nothing, or `CheckFailed` that names the node.
"""

from __future__ import annotations

from fxpar.errors import CheckFailed
from fxpar.operators import OPERATORS
from fxpar.program import Program, TensorType, has_note, note, output_node


def check_structure(program: Program) -> None:
    """Placeholders first and in the tables, notes everywhere, known axes, one identity a random node, a scalar loss.

    Raises:
        CheckFailed: names the first fault.
    """
    body, seen = False, {}
    holders = [*(p.node for p in program.parameters), *(i.node for i in program.inputs)]
    for node in program.graph.nodes:
        where = f"%{node.name}"
        if node.op == "output":
            continue
        if not has_note(node):
            raise CheckFailed("the node has no note", where=where)
        if node.op == "placeholder":
            if body:
                raise CheckFailed("a placeholder stands behind an operation", where=where)
            if holders.count(node.name) != 1:
                raise CheckFailed(f"the placeholder is in {holders.count(node.name)} tables", where=where)
            continue
        body = True
        axis = node.kwargs.get("axis")
        if axis is not None and OPERATORS.get(getattr(node.target, "__name__", "")) and axis not in program.axes:
            known = ", ".join(program.axes) or "none"
            raise CheckFailed(f"the axis {axis} is not in the mesh ({known})", where=where)
        identity = note(node).random
        if identity and seen.setdefault(identity, node.name) != node.name:
            raise CheckFailed(f"draws the same random bits as %{seen[identity]}", where=where)
    names = {node.name for node in program.graph.nodes}
    for name in holders:
        if name not in names:
            raise CheckFailed("a table names a placeholder that is missing", where=f"%{name}")
    _check_outputs(program)


def _check_outputs(program: Program) -> None:
    values = output_node(program.graph).args[0]
    if not isinstance(values, (tuple, list)) or len(values) != len(program.outputs):
        raise CheckFailed(f"returns other values than {', '.join(program.outputs)}", where="return")
    if program.loss:
        if program.loss not in program.outputs:
            raise CheckFailed("the loss is not returned", where=program.loss)
        kind = note(program.output_nodes()[program.loss]).type
        if not isinstance(kind, TensorType) or kind.shape or not kind.is_float:
            raise CheckFailed(f"the loss is {kind} and no floating scalar", where=program.loss)
