"""The training step as a program: its phases, and what stands for gradients among its inputs and outputs.

Enters: a program. Leaves: which node is of the forward; the names of gradients. A step takes a *tangent*, the gradient
of what the caller differentiates, for each output that has one, and returns the gradients of parameters and of inputs
that carry one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxpar.errors import LayoutError, PlanError, shown
from fxpar.ir.program import PRECISION_DTYPES, Input, Program, TensorType, has_note, note
from fxpar.layout.symbolic_sizes import Size
from fxpar.mesh.axes import Cuts, axis_that
from fxpar.plan.plan import Plan

# Which dimension of each input is the rows of the batch.

_AXIS = axis_that(Cuts.BATCH)


def batch_symbol(program: Program) -> str:
    """Returns the name of the symbol that is the number of rows of the inputs.

    Raises:
        PlanError: no input has a symbolic dimension for it, or two have different ones.
    """
    said = _said(program)
    dims = said or _first_dims(program)
    chosen = [(entry, dims[entry.path]) for entry in program.inputs if entry.path in dims]
    sizes = {str(e.type.shape[dim]): e for e, dim in chosen if not isinstance(e.type.shape[dim], int)}
    known = [s.name for s in program.symbols if str(s.size) in sizes]
    if len(known) == 1 and len(sizes) == 1:
        return known[0]
    listed = ", ".join(f"{entry.path} {entry.type}" for entry in program.inputs)
    reason, sizes_stay = f"inputs differ in their rows ({listed})", ""
    if not sizes:
        fixed = sorted({int(entry.type.shape[dim]) for entry, dim in chosen})
        reason = "no input has rows whose number may vary"
        if fixed:
            reason += f": the trace holds for {' and '.join(map(str, fixed))} alone"
        sizes_stay = (
            "where forward asks Python for a number of rows write x.shape[0] for len(x), b * 1.0 for float(b); a "
            "constant with an element for each row (torch.tensor([…]), a buffer) is to be an input; "
        )
    remedy = f"pass inputs whose first dimension is the batch, name it (batch_dims={{path: dim}}), or set {_AXIS}=1"
    raise PlanError(reason, where="batch_dims" if said else _AXIS, remedy=sizes_stay + remedy)


def batch_size(program: Program) -> Size:
    """Returns the number of rows of the inputs.

    Raises:
        PlanError: as `batch_symbol`.
    """
    name = batch_symbol(program)
    return next(s.size for s in program.symbols if s.name == name)


def batch_rows(program: Program, size: object) -> dict[str, int]:
    """Returns for each input, by path, the dimension that is the rows.

    Args:
        size: the number of rows.

    Raises:
        LayoutError: two dimensions of an input are.
        PlanError: the plan names a dimension that is not.
    """
    said, rows = _said(program), {}
    for entry in program.inputs:
        dims = [dim for dim, other in enumerate(entry.type.shape) if other == size]
        if entry.path in said:
            if said[entry.path] not in dims:
                reason = f"dimension {said[entry.path]} of {entry.type} is not as long as the batch"
                raise PlanError(reason, where=f"batch_dims[{entry.path!r}]", remedy="name the dimension of the rows")
            dims = [said[entry.path]]
        if len(dims) > 1:
            raise LayoutError(
                f"dimensions {' and '.join(map(str, dims))} of {entry.type} are both as long as the batch",
                where=f"input {entry.path}",
                remedy="say which is the batch (batch_dims={path: dim}), pass it with sizes that differ, or set "
                f"{_AXIS}=1",
            )
        if dims:
            rows[entry.path] = dims[0]
    return rows


def batch_dims(program: Program) -> dict[str, int]:
    """Returns the dimension that is the rows, of each input that has one; of the first where the rows are no symbol."""
    dims = _said(program) or _first_dims(program)
    sizes = {entry.type.shape[dims[entry.path]] for entry in program.inputs if entry.path in dims}
    symbolic = [size for size in sizes if not isinstance(size, int)]
    return batch_rows(program, symbolic[0]) if len(symbolic) == 1 else dims


def _first_dims(program: Program) -> dict[str, int]:
    """Returns the first dimension of each input that has one; the generator's words are no rows."""
    return {entry.path: 0 for entry in program.inputs if entry.type.shape and entry.path != RNG_PATH}


def _said(program: Program) -> dict[str, int]:
    """Returns what the plan says of this program's inputs.

    Raises:
        PlanError: it names no input, or a dimension that an input lacks.
    """
    entries = {entry.path: entry for entry in program.inputs}
    said = program.plan.batch_dims
    for path, dim in said.items():
        if path not in entries:
            remedy = f"choose from {', '.join(entries)}"
            raise PlanError("names no input", where=f"batch_dims[{shown(path)}]", remedy=remedy)
        _check(entries[path], dim)
    return {path: dim % len(entries[path].type.shape) for path, dim in said.items()}


def _check(entry: Input, dim: int) -> None:
    rank = len(entry.type.shape)
    if not -rank <= dim < rank:
        reason = f"{entry.type} has no dimension {dim}"
        raise PlanError(reason, where=f"batch_dims[{entry.path!r}]", remedy="name the dimension of the rows")


# Buffers that a forward writes: their new values are outputs of a program, by name.

_BUFFER = "fxpar.buffer."


def buffer_name(fqn: str) -> str:
    """Returns the name of the output that is the new value of a buffer."""
    return f"{_BUFFER}{fqn}"


def is_buffer(output: str) -> bool:
    """Returns whether an output of that name is the new value of a buffer."""
    return output.startswith(_BUFFER)


def buffer_of(output: str) -> str:
    """Returns the buffer whose new value an output of that name is."""
    return output.removeprefix(_BUFFER)


def written(program: Program) -> dict[str, str]:
    """Returns for each buffer that the program writes, by name, the placeholder that has its old value."""
    nodes = {p.fqn: p.node for p in program.parameters}
    return {fqn: nodes[fqn] for fqn in map(buffer_of, filter(is_buffer, program.outputs))}


# How many rows experts receive, for how many a buffer has no place, how many are dropped, and how many there would be
# without replicas: outputs of a program.

_LOAD = "fxpar.load."
_ROUTED = "fxpar.routed."
_EXCESS = "fxpar.excess."
_DROPPED = "fxpar.dropped."


def load_name(module: str, taken: Sequence[str]) -> str:
    """Returns the output that has the load of a module's experts, by another name than those that are taken."""
    name = f"{_LOAD}{module or 'experts'}"
    return name if name not in taken else f"{name}#{sum(other.startswith(name) for other in taken)}"


def is_load(output: str) -> bool:
    """Returns whether an output of that name is a load."""
    return output.startswith(_LOAD)


def excess_name(load: str) -> str:
    """Returns the output that says for how many rows of that load there is no place."""
    return f"{_EXCESS}{module_of_load(load)}"


def is_excess(output: str) -> bool:
    """Returns whether an output of that name says that."""
    return output.startswith(_EXCESS)


def dropped_name(load: str) -> str:
    """Returns the output that says how many rows were dropped that would have been of that load."""
    return f"{_DROPPED}{module_of_load(load)}"


def is_dropped(output: str) -> bool:
    """Returns whether an output of that name says that."""
    return output.startswith(_DROPPED)


def routed_name(load: str) -> str:
    """Returns the output that says what that load would be without replicas."""
    return f"{_ROUTED}{module_of_load(load)}"


def is_routed(output: str) -> bool:
    """Returns whether an output of that name says that."""
    return output.startswith(_ROUTED)


def is_counted(output: str) -> bool:
    """Returns whether an output is one of these, and none of the model's."""
    return is_load(output) or is_excess(output) or is_dropped(output) or is_routed(output)


def module_of_load(output: str) -> str:
    """Returns the module whose load, rows without a place, dropped ones, or rows before replicas, an output is."""
    return output.removeprefix(_LOAD).removeprefix(_EXCESS).removeprefix(_DROPPED).removeprefix(_ROUTED)


# Mixed precision: a program in half precision on copies of float32 parameters.

MAIN = torch.float32
_MIXED = ("bf16", "fp16")


def main_dtype(plan: Plan) -> torch.dtype | None:
    """Returns the type of the floating parameters that a module holds and saves; None where they keep their own."""
    return MAIN if is_mixed(plan) else PRECISION_DTYPES[plan.precision]


def is_mixed(plan: Plan) -> bool:
    """Returns whether a module holds main values."""
    return plan.precision in _MIXED


def is_copy(plan: Plan, kind: TensorType) -> bool:
    """Returns whether what a program takes for a parameter of this type is a copy of main values."""
    return is_mixed(plan) and kind.dtype == PRECISION_DTYPES[plan.precision]


def held_type(plan: Plan, kind: TensorType) -> TensorType:
    """Returns the type of a parameter as a module holds it: of the main values."""
    return TensorType(MAIN, kind.shape) if is_copy(plan, kind) else kind


BACKWARD, WEIGHT, PARAMETER = "backward", "weight", "parameter"
# `weight`: the part of a backward on which no gradient of an input depends, where that is cut off; `parameter`: what is
# made of gradients once a step.
PHASES = ("", BACKWARD, WEIGHT, PARAMETER)
# Of the forward, what gathers parameters once a step, in front of all microbatches.
ONCE = "once"
# Origin of a node of the backward that computes again what the forward has.
RECOMPUTE = "recompute"
# Path of the input that is the state of the random numbers, which is made for each step.
RNG_PATH = "fxpar.rng"

_TANGENT = "fxpar.tangent."
_GRADIENT = "fxpar.gradient."
_INPUT_GRADIENT = "fxpar.input_gradient."


def is_forward(node: fx.Node) -> bool:
    """Returns whether a node is neither of the backward nor of the parameter phase."""
    return not has_note(node) or note(node).phase == ""


def phase_of(node: fx.Node) -> str:
    """Returns when a node runs: in a phase, or `ONCE`."""
    noted = note(node)
    return ONCE if not noted.phase and noted.shard in ("optimizer", "gradients") else noted.phase


def tangent_path(output: str) -> str:
    """Returns the path of the input that is the gradient of an output."""
    return f"{_TANGENT}{output}"


def output_of(path: str) -> str:
    """Returns the output of whose gradient an input is; empty where it is none."""
    return path.removeprefix(_TANGENT) if path.startswith(_TANGENT) else ""


def gradient_name(fqn: str) -> str:
    """Returns the name of the output that is the gradient of a parameter."""
    return f"{_GRADIENT}{fqn}"


def input_gradient_name(path: str) -> str:
    """Returns the name of the output that is the gradient of an input."""
    return f"{_INPUT_GRADIENT}{path}"


def is_gradient(output: str) -> bool:
    """Returns whether an output of that name is a gradient."""
    return output.startswith((_GRADIENT, _INPUT_GRADIENT))


def is_input_gradient(output: str) -> bool:
    """Returns whether an output of that name is the gradient of an input."""
    return output.startswith(_INPUT_GRADIENT)


def parameter_gradients(program: Program) -> dict[str, str]:
    """Returns for each parameter that the step gives a gradient of, the name of the output."""
    names = {gradient_name(p.fqn): p.fqn for p in program.parameters}
    return {names[output]: output for output in program.outputs if output in names}


def model_outputs(program: Program) -> tuple[str, ...]:
    """Returns the outputs that are the model's."""
    return tuple(name for name in program.outputs if not is_gradient(name))
