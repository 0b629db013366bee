"""Which dimension of each input is the rows of the batch.

Enters: a program. Leaves: the symbol that counts the rows, and the dimension of the rows by input; or an error where
the inputs do not say it.

The batch is the symbolic first dimension of the inputs, or what `Plan.batch_dims` says. Of every input the dimension of
that size is the rows; one without such a dimension is the same on all ranks.
"""

from __future__ import annotations

from fxpar.errors import LayoutError, PlanError, shown
from fxpar.layout.symbolic_sizes import Size
from fxpar.mesh.purpose import Cuts, axis_that
from fxpar.program.program import Input, Program

_AXIS = axis_that(Cuts.BATCH)


def batch_symbol(program: Program) -> str:
    """Name of the symbol that is the number of rows of the inputs.

    Raises:
        PlanError: no input has a symbolic dimension for it, or two have different ones.
    """
    said = _said(program)
    dims = said or {entry.path: 0 for entry in program.inputs if entry.type.shape}
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
    """The number of rows of the inputs.

    Raises:
        PlanError: as `batch_symbol`.
    """
    name = batch_symbol(program)
    return next(s.size for s in program.symbols if s.name == name)


def batch_rows(program: Program, size: object) -> dict[str, int]:
    """For each input, by path, the dimension that is the rows.

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
    """The dimension that is the rows, of each input that has one; of the first where the rows are no symbol."""
    dims = _said(program) or {entry.path: 0 for entry in program.inputs if entry.type.shape}
    sizes = {entry.type.shape[dims[entry.path]] for entry in program.inputs if entry.path in dims}
    symbolic = [size for size in sizes if not isinstance(size, int)]
    return batch_rows(program, symbolic[0]) if len(symbolic) == 1 else dims


def _said(program: Program) -> dict[str, int]:
    """What the plan says of this program's inputs.

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
