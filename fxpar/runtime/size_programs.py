"""Programs that are for sizes of their own: which sizes a further one has as numbers, and how many there may be.

Enters: the programs of one mode and one structure of the batch, and a batch that none of them fits. Leaves: dimensions
and sizes that its program is to have as numbers; or an error where the plan allows no further one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxpar.errors import InputError
from fxpar.ir.program import Input, Program
from fxpar.layout.symbolic_sizes import shape_text
from fxpar.runtime import batch as calls

if TYPE_CHECKING:
    from fxpar.runtime.programs import Compiled


def has_fixed(entry: Input, fixed: frozenset[tuple[int, int]]) -> bool:
    """Whether one of the sizes of an input is a number because PyTorch differentiates for that one alone.

    Args:
        fixed: as of `Captured`.
    """
    return any((dim, size) in fixed for dim, size in enumerate(entry.type.shape) if isinstance(size, int))


def fixed_sizes(known: Sequence[Compiled], batch: Any) -> frozenset[tuple[int, int]]:
    """The sizes of a batch in the dimensions that are numbers in other programs: it is not tried whether they need be.

    Args:
        known: the other programs.
    """
    shapes = {path: value.shape for path, value in calls.leaves(batch) if isinstance(value, Tensor)}
    fixed = set()
    for compiled in known:
        for entry in calls.user_inputs(compiled.program):
            for dim, size in enumerate(entry.type.shape):
                if isinstance(size, int) and (dim, size) in compiled.captured.fixed and entry.path in shapes:
                    fixed.add((dim, shapes[entry.path][dim]))
    return frozenset(fixed)


def sizes_text(program: Program) -> str:
    """The sizes that a program is for: `ids [b, 16], s >= 5`."""
    shown = [f"{entry.path} {shape_text(entry.type.shape)}" for entry in calls.user_inputs(program)]
    return ", ".join([*shown, *map(str, program.conditions)])


def check_count(known: Sequence[Compiled], batch: Any, most: int) -> None:
    """Refuses a further program where there are as many as the plan allows.

    Raises:
        InputError: names the sizes of the batch and those of the programs.
    """
    if len(known) < most:
        return
    sizes = [f"{path} {list(v.shape)}" for path, v in calls.leaves(batch) if isinstance(v, Tensor)]
    listed = "; ".join(sizes_text(compiled.program) for compiled in known)
    raise InputError(
        f"needs a program for sizes of its own ({', '.join(sizes)}), and there are {most} already: {listed}",
        where="batch",
        remedy=f"pad batches to at most {most} lengths, or raise Plan(size_programs={most})",
    )


def size_programs(known: Mapping[Any, Sequence[Compiled]]) -> tuple[str, ...]:
    """Of modes and structures with several programs, or one that is for some sizes alone: the sizes of each."""
    texts = []
    for programs in known.values():
        is_one = len(programs) == 1 and not programs[0].captured.fixed and not programs[0].program.conditions
        texts += [] if is_one else [sizes_text(compiled.program) for compiled in programs]
    return tuple(texts)
